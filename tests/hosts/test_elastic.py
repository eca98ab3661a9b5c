"""Hosts that come, go and come back while a job runs."""

import json
import os
import signal
import time

import pytest

from tests.conftest import until
from tests.hosts import proc
from tests.hosts.job import SOON

HOSTS = ["node0", "node1", "node2"]
SILENCE = 2  # seconds, the heartbeat timeout of these jobs


@pytest.fixture
def start(job, program):
    """Start two workers on hosts that meet at an endpoint; two of three hosts are enough, once no other one comes."""

    def start(hosts, *flags, nnodes="2:3", do="goes_on_until_told"):
        # the last call is short where the third host does not come, and else longer than it may take to come
        last_call = 60 if len(hosts) == 3 else 0.5
        told = ["--nproc-per-node", 2, "--heartbeat-timeout", f"{SILENCE}s"]
        told += ["--rdzv-conf", f"last_call_timeout={last_call}"]
        for host in hosts:
            job.at_endpoint(*told, *flags, program("restarts"), do, nnodes=nnodes, hosts=[host])

    return start


@pytest.fixture
def places(job):
    """Wait until all workers of a generation have said where they are."""

    def places(generation, number):
        return [json.loads(job.sign(f"place-{generation}-{rank}")) for rank in range(number)]

    return places


def who(places):
    """Rank, node rank and size of the job, as each worker has them."""
    return [tuple(int(place[name]) for name in ("RANK", "GROUP_RANK", "WORLD_SIZE")) for place in places]


def of_size(number):
    return [(rank, rank // 2, number) for rank in range(number)]


def workers(job, host):
    """The workers that run on a host."""
    return [
        one for one in job.bed.processes(host) if "restarts.py" in one.command and "-m ddplaunch" not in one.command
    ]


def finish(job, hosts):
    """Have all workers end, and the commands on these hosts with 0."""
    job.put("finish")
    results = job.wait_each(hosts=hosts)
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(hosts, 0), results
    job.nothing_left()
    return results


@pytest.mark.parametrize(("gone", "fault"), [("node1", "power_cut"), ("node2", "crash")])
def test_a_host_that_is_lost_makes_the_others_start_again_without_it(job, start, places, gone, fault):
    start(HOSTS)
    assert who(places(0, 6)) == of_size(6)
    getattr(job.bed, fault)(gone)
    second = places(1, 4)
    assert who(second) == of_size(4)
    left = [host for host in HOSTS if host != gone]
    results = finish(job, left)
    why = "silent for 2 s" if fault == "power_cut" else "connection "
    assert f"({gone}) is lost: {why}" in results["node0"].err
    assert "ddplaunch: all workers start again on 2 nodes\n" in results["node0"].err


def test_a_host_that_is_cut_off_has_no_worker_when_the_others_begin_and_comes_back(job, start, places):
    start(HOSTS, "--grace-period", "60s", do="saves_until_told")
    places(0, 6)
    began = time.monotonic()
    job.bed.cut("node1")
    job.sign("saving-0-0")
    job.put("saved")
    job.sign("place-1-0")
    assert not workers(job, "node1")
    assert time.monotonic() - began < SILENCE + SOON
    assert who(places(1, 4)) == of_size(4)
    job.bed.join("node1")
    assert who(places(2, 6)) == of_size(6)
    assert "and other nodes may have gone on without it" in job.err("node1") or "is lost: silent" in job.err("node1")
    job.put("go")
    finish(job, HOSTS)


def test_a_host_whose_agent_does_not_run_has_no_worker_when_the_others_begin(job, start, places):
    """Its front kills them when their lease is over: the second --heartbeat-timeout counts."""
    start(HOSTS, "--heartbeat-timeout", "6s")
    places(0, 6)
    typed = [process for process in job.bed.processes("node1") if "-m ddplaunch" in process.command]
    front = min(typed, key=lambda process: process.inside)
    (agent,) = [process for process in typed if process.pid in proc.children(front.pid)]
    os.kill(agent.pid, signal.SIGSTOP)
    job.sign("place-1-0")
    assert not workers(job, "node1")
    assert who(places(1, 4)) == of_size(4)
    assert job.wait(host="node1").status == 122
    assert "did not respond for 6 s (it is stopped, as by SIGSTOP): killed, with its workers" in job.err("node1")
    finish(job, ["node0", "node2"])


def test_a_host_all_of_which_was_paused_kills_its_workers_and_comes_back(job, start, places):
    """As in a container that is frozen: neither front nor agent takes the pause for an agent that does not run."""
    start(HOSTS)
    places(0, 6)
    paused = job.bed.processes("node1")
    old = {one.pid for one in workers(job, "node1")}
    for process in paused:
        os.kill(process.pid, signal.SIGSTOP)
    places(1, 4)
    for process in reversed(paused):
        os.kill(process.pid, signal.SIGCONT)
    job.commands["node1"].send_signal(signal.SIGCONT)
    assert who(places(2, 6)) == of_size(6)
    assert old.isdisjoint(one.pid for one in workers(job, "node1"))
    finish(job, HOSTS)


@pytest.mark.parametrize("fault", ["power_cut", "crash"])
def test_the_others_wait_for_the_first_host_and_go_on_with_it(job, start, places, fault):
    start(HOSTS)
    places(0, 6)
    getattr(job.bed, fault)("node0")
    for host in HOSTS[1:]:
        until(lambda host=host: "to come back: type its command again on " in job.err(host), "what to type")
    job.bed.boot("node0")
    start(["node0"])
    assert who(places(1, 6)) == of_size(6)
    finish(job, HOSTS)


def test_a_first_host_that_is_cut_off_goes_on_alone_if_that_is_enough_and_the_others_come_back(job, start, places):
    start(HOSTS, nnodes="1:3")
    places(0, 6)
    job.bed.cut("node0")
    assert who(places(1, 2)) == of_size(2)
    for host in HOSTS[1:]:
        until(lambda host=host: "to come back: type its command again on " in job.err(host), "what to type")
    until(lambda: not workers(job, "node1") + workers(job, "node2"), "the end of their workers", SILENCE)
    job.bed.join("node0")
    until(lambda: any(job.has_sign(f"place-{number}-5") for number in range(2, 5)), "all of them", 40.0)
    finish(job, HOSTS)


def test_a_host_that_comes_back_before_it_is_missed_takes_its_place(job, program, places):
    """Its reset is heard of only by the heartbeat, and then its new agent is there already."""
    told = ["--nproc-per-node", 2, "--heartbeat-timeout", "4s", "--max-restarts", 1, program("restarts")]
    job.by_hand(*told, "goes_on_until_told")
    places(0, 6)
    job.bed.power_cut("node1")
    job.bed.boot("node1")
    job.by_hand(*told, "goes_on_until_told", hosts=["node1"])
    assert who(places(1, 6)) == of_size(6)
    finish(job, HOSTS)
