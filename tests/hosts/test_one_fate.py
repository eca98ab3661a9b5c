"""One job, one fate: what ends it on one host ends it on all, with one status and one cause, whatever the clocks say."""

import signal
import time

import pytest

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


def test_a_failure_that_only_follows_does_not_take_the_place_of_its_cause_on_a_host_that_lags(job, start, program):
    job.bed.lag("node2", 200)
    start("4=segfault_when_told", "0=peer_lost_when_told", "3=peer_lost_when_told")
    job.put("fail-4", "fail-0", "fail-3")
    results = job.wait_each()
    assert first_named(job, results) == 4
    assert statuses(results) == [128 + signal.SIGSEGV] * 3
