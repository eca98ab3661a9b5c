"""A job over ssh that may lose hosts goes on without the first one, and is still asked and stopped where it was typed."""

import json
import os
import signal
import time

import pytest

from tests.conftest import until
from tests.hosts import over_ssh
from tests.hosts.over_ssh import HOSTS, LOGIN, NODES

SILENCE = 2  # seconds, the heartbeat timeout of these jobs


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(HOSTS)


@pytest.fixture
def start(job, program):
    """Start two workers on each of so many nodes, all but one of which are enough, and wait until all are there."""

    def start(number, *flags):
        told = ["--nnodes", f"{number - 1}:{number}", "--nproc-per-node", 2, "--heartbeat-timeout", f"{SILENCE}s"]
        nodes = ",".join(NODES[:number])
        over_ssh.start(job, *told, *flags, program("restarts"), "goes_on_until_told", nodes=nodes)
        job.signs("place-0", 2 * number)

    return start


@pytest.fixture
def ask(job):
    """Type a verb where the job was typed, and give what comes of it."""
    return lambda *words: job.bed.run(LOGIN, job.argv(*words), env=job.env, cwd=job.home)


def goes_on(job, number, since):
    """Wait until so many workers run again, without the first node; give how long that took."""

    def places():
        return [json.loads(place) for place in job.signs("place-1", number)]

    found = places()
    took = time.monotonic() - since
    print(f"{took:.1f} s until all workers run again")
    first = found[0]["MASTER_ADDR"]
    assert {place["MASTER_ADDR"] for place in found} == {first}
    assert (
        first in {"node1", "node2", *map(job.bed.address, ("node1", "node2"))} if number > 2 else first == "127.0.0.1"
    )
    assert {place["WORLD_SIZE"] for place in found} == {str(number)}
    return took


@pytest.mark.parametrize("number", [3, 2], ids=["3 hosts", "2 hosts"])
@pytest.mark.parametrize("fault", ["power_cut", "cut", "crash"])
def test_a_job_goes_on_without_the_first_host(job, start, ask, fault, number):
    start(number)
    began = time.monotonic()
    getattr(job.bed, fault)("node0")
    assert goes_on(job, 2 * number - 2, began) > SILENCE, "its workers may live so long"
    if fault == "cut":
        assert not over_ssh.workers(job.bed, "node0", "restarts.py")
        job.seconds_until_quiet("node0", since=began)
    (status,) = json.loads(ask("ps", "--json").stdout)
    assert {node["host"] for node in status["nodes"]} == set(NODES[1:number])
    assert "has ended with status 130" in ask("stop").stderr
    result = job.wait(host=LOGIN)
    print(result.err)
    assert result.status == 130
    assert "ddplaunch: node 0 (node0) is lost: " in result.err
    assert "error: " not in result.err
    job.nothing_left()


def test_a_first_host_that_is_cut_off_from_the_command_leaves_the_job_to_the_others(job, start):
    start(3)
    os.kill(over_ssh.client(job.bed, LOGIN, "node0"), signal.SIGKILL)
    goes_on(job, 4, time.monotonic())
    job.put("finish")
    result = job.wait(host=LOGIN)
    assert result.status == 0
    assert "ddplaunch: node 0 (node0) is lost: ssh ended with status 137" in result.err
    job.nothing_left()


def test_a_job_waits_for_no_lease_of_a_host_whose_agent_was_killed(job, start):
    start(3, "--heartbeat-timeout", "20s")
    _, agent = over_ssh.relay_and_agent(job.bed, "node0")
    began = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    assert goes_on(job, 4, began) < 20
    job.put("finish")
    assert job.wait(host=LOGIN).status == 0
    job.nothing_left()


@pytest.mark.parametrize("stopped", ["front", "agent"])
def test_of_two_hosts_the_second_goes_on_when_the_workers_of_the_first_were_killed(job, start, stopped):
    """One of front and agent does that when their lease is over, if the other one does not run."""
    start(2, "--heartbeat-timeout", "6s")
    front, agent = over_ssh.relay_and_agent(job.bed, "node0")
    began = time.monotonic()
    os.kill(front if stopped == "front" else agent, signal.SIGSTOP)
    goes_on(job, 2, began)
    assert not over_ssh.workers(job.bed, "node0", "restarts.py")
    job.put("finish")
    result = job.wait(host=LOGIN)
    assert result.status == 0
    said = "did not respond for 6 s (it is stopped, as by SIGSTOP)" if stopped == "agent" else "is lost: silent for 6 s"
    assert said in result.err
    job.seconds_until_quiet("node0", since=began)  # a front that is stopped is given time, as it has no workers
    job.nothing_left()


@pytest.mark.parametrize("first", ["the second ends", "the job ends"])
def test_of_two_hosts_that_lose_each_other_the_first_goes_on_alone(job, start, first):
    """The command reaches both."""
    start(2)
    lost = job.bed.address("node1")
    nowhere = ["ip", "neigh", "replace", lost, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
    assert job.bed.run("node0", nowhere).returncode == 0
    try:
        until(lambda: "silent for 2 s" in job.err(LOGIN) and job.signs("place-1", 2), "the loss")
        if first == "the second ends":
            job.seconds_until_quiet("node1", since=time.monotonic())
        job.put("finish")
        result = job.wait(host=LOGIN)
        assert result.status == 0
        assert result.err.count("all workers start again") == 1
        assert result.err.splitlines()[-1].startswith("ddplaunch: 2 workers finished")
    finally:
        job.bed.run("node0", ["ip", "neigh", "del", lost, "dev", "eth0"])
    job.nothing_left()
