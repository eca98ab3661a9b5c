"""Hosts that come, go and come back while a job runs."""

import json
import time

import pytest

from tests.conftest import until
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


def test_the_lost_side_ends_its_workers_while_the_others_go_on(job, start, places):
    start(HOSTS)
    places(0, 6)
    began = time.monotonic()
    job.bed.cut("node1")
    assert job.seconds_until_quiet("node1", since=began) < SILENCE + SOON
    assert job.wait(host="node1").status == 122
    assert who(places(1, 4)) == of_size(4)
    job.bed.join("node1")
    start(["node1"])
    assert who(places(2, 6)) == of_size(6)
    finish(job, HOSTS)


def test_the_first_host_may_be_lost_too_and_another_answers_for_the_job(job, start, places):
    start(HOSTS)
    places(0, 6)
    job.bed.power_cut("node0")
    assert who(places(1, 4)) == of_size(4)
    ((successor, follower),) = [order for order in (HOSTS[1:], HOSTS[:0:-1]) if "takes over from" in job.err(order[0])]
    ps = {host: job.bed.run(host, job.argv("ps"), env=job.env, cwd=job.home) for host in (successor, follower)}
    assert "running, 4 workers on 2 nodes" in ps[successor].stdout
    assert f"runs on {successor}" in ps[follower].stdout
    job.bed.boot("node0")
    start(["node0"])
    assert who(places(2, 6)) == of_size(6)
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


def test_of_two_hosts_the_other_one_goes_on_once_the_first_is_back(job, start, places):
    """Nobody else can say that the first one is not going on alone."""
    last_call = ("--rdzv-conf", "last_call_timeout=60")
    start(HOSTS[:2], *last_call, nnodes="1:2")
    places(0, 4)
    job.bed.power_cut("node0")
    until(lambda: "takes over from" in job.err("node1") + job.err("node0"), "node 1 to take over")
    job.bed.boot("node0")
    start(["node0"], *last_call, nnodes="1:2")
    assert who(places(2, 4)) == of_size(4)
    finish(job, HOSTS[:2])
