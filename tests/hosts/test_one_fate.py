"""One job, one fate: what ends it on one host ends it on all, with one status and one cause, whatever the clocks say."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import send_again, until
from tests.hosts.job import SOON

HOSTS = ["node0", "node1", "node2"]


@pytest.fixture(scope="module")
def three_hosts(make_bed):
    return make_bed(clocks=True)


@pytest.fixture
def start(job, program):
    """Start two workers of behave.py on each host, and wait until all six are ready."""

    def start(*behaviours, ready=6, **options):
        flags = options.pop("flags", ())
        job.by_hand("--nproc-per-node", 2, *flags, program("behave"), *behaviours, **options)
        job.signs("ready", ready)

    return start


def statuses(results):
    return [results[host].status for host in HOSTS]


def test_a_crash_on_one_host_ends_all_hosts_at_once_and_all_name_it(job, start):
    start("3=raises_when_told")
    began = time.monotonic()
    job.put("fail-3")
    took = job.seconds_until_quiet(since=began)
    results = job.wait_each()
    assert took < SOON
    assert statuses(results) == [1, 1, 1]
    for host in HOSTS:
        assert "error: rank 3 on node1 failed: ValueError: boom of rank 3   (exit status 1, after " in results[host].err
        assert job.summary_of(host)["status"] == 1
    report = results["node0"].err
    assert "behave.py:" in report
    assert "the other 5 workers were stopped by SIGTERM" in report
    job.nothing_left()


def test_workers_that_do_not_stop_are_killed_on_all_hosts_after_one_grace_period(job, start):
    start("0=raises_when_told", "1=stubborn", "3=stubborn_setsid_child", "5=stubborn", flags=("--grace-period", "0.5s"))
    job.sign("child-3")
    began = time.monotonic()
    job.put("fail-0")
    took = job.seconds_until_quiet(since=began)
    results = job.wait_each()
    assert 0.5 <= took < 0.5 + SOON
    assert statuses(results) == [1, 1, 1]
    assert "ranks 1,5 by SIGKILL after 0.5 s" in results["node0"].err
    job.nothing_left()


# --- which failure was the first


def first_named(job, results):
    """The rank that all hosts name."""
    (line,) = {line for host in HOSTS for line in results[host].err.splitlines() if line.startswith("error: ")}
    return int(line.removeprefix("error: rank ").split()[0])


@pytest.mark.parametrize(("first", "ahead"), [(2, 600), (4, -600)])
def test_of_two_failures_the_earlier_is_named_though_its_worker_ends_later(job, start, first, ahead):
    """Workers record an exception when it is raised. It is the other failure that the coordinator hears of first."""
    job.bed.set_clock("node1", ahead)
    second = 6 - first
    start(f"{first}=raises_slowly_when_told", f"{second}=raises_when_told")
    job.bed.set_clock("node2", ahead)
    job.put(f"fail-{first}")
    job.sign("raised")
    time.sleep(0.3)  # what the second one is later
    job.put(f"fail-{second}")
    results = job.wait_each()
    assert first_named(job, results) == first
    assert statuses(results) == [1, 1, 1]
    job.nothing_left()


@pytest.mark.parametrize(("first", "lagging"), [(2, "node1"), (4, "node1")])
def test_of_two_failures_the_earlier_is_named_whichever_the_coordinator_hears_of_first(job, start, first, lagging):
    """A host that lags hears late that it should stop, and is heard of late."""
    bed, second = job.bed, 6 - first
    bed.set_clock("node1", -600)
    bed.lag(lagging, 200)
    start(f"{first}=raises_when_told", f"{second}=raises_when_told")
    job.put(f"fail-{first}")
    job.sign(f"fails-{first}")
    time.sleep(0.1)  # what the second one is later
    job.put(f"fail-{second}")
    results = job.wait_each()
    assert first_named(job, results) == first
    assert statuses(results) == [1, 1, 1]
    lines = {host: [event["rank"] for event in job.events_of(host, "worker_raised", "worker_exited")] for host in HOSTS}
    assert {rank for ranks in lines.values() for rank in ranks} == set(range(6))
    job.nothing_left()


def test_a_failure_that_only_follows_does_not_take_the_place_of_its_cause_on_a_host_that_lags(job, start, program):
    job.bed.lag("node2", 200)
    start("4=segfault_when_told", "0=peer_lost_when_told", "3=peer_lost_when_told")
    job.put("fail-4", "fail-0", "fail-3")
    results = job.wait_each()
    assert first_named(job, results) == 4
    assert statuses(results) == [128 + signal.SIGSEGV] * 3
    job.nothing_left()


# --- whoever says stop


@pytest.mark.parametrize(
    ("host", "signum", "name"),
    [("node0", signal.SIGTERM, "TERM"), ("node1", signal.SIGINT, "INT")],
)
def test_a_signal_to_the_command_on_one_host_reaches_the_workers_of_all_once(job, start, host, signum, name):
    start("all=polite")
    began = time.monotonic()
    job.commands[host].send_signal(signum)
    took = job.seconds_until_quiet(since=began)
    results = job.wait_each()
    assert took < SOON
    assert statuses(results) == [128 + signum] * 3
    assert job.signs("got", 6) == [f"SIG{name}"] * 6
    for each in HOSTS:
        assert f"ddplaunch: stopped by SIG{name}" in results[each].err
        assert "error" not in results[each].err
    job.nothing_left()


def test_a_second_signal_on_one_host_kills_on_all(job, start):
    start("all=stubborn")
    command = job.commands["node1"]
    command.send_signal(signal.SIGINT)
    job.signs("got", 6)
    began = time.monotonic()
    send_again(command, signal.SIGINT)
    took = job.seconds_until_quiet(since=began)
    assert took < SOON
    assert statuses(job.wait_each()) == [130, 130, 130]
    job.nothing_left()


def test_a_signal_while_nodes_are_waited_for_ends_those_that_are_there(job, program):
    job.by_hand(program("behave"), hosts=["node0", "node1"])
    bed = job.bed
    until(lambda: " nodes joined" in job.err("node0"), "node 0 to say whom it waits for")
    assert "ddplaunch: 2 of 3 nodes joined (node0, node1); on node 2 run: ddplaunch " in job.err("node0")
    began = time.monotonic()
    job.commands["node0"].send_signal(signal.SIGINT)
    results = job.wait_each()
    assert time.monotonic() - began < SOON
    assert {result.status for result in results.values()} == {130}
    assert bed.alive == HOSTS
    job.nothing_left()


# --- who can be spoken to


@pytest.mark.parametrize("by", ["name", "address"])
def test_only_node_0_listens_and_only_where_it_must(job, start, by):
    bed = job.bed
    address = bed.address("node0")
    start("all=done_when_told", address=address if by == "address" else "node0")
    (listener,) = bed.listeners("node0")
    assert listener.port == 29501
    # a name may stand for any of a host's addresses, a number says which one is meant
    assert listener.address == (address if by == "address" else "::")
    assert bed.listeners("node1") == bed.listeners("node2") == []
    job.put("go")
    results = job.wait_each()
    assert statuses(results) == [0, 0, 0]
    assert [bed.listeners(host) for host in HOSTS] == [[], [], []]
    job.nothing_left()
