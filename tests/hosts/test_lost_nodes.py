"""A host that is lost ends the job everywhere, also on the lost side; one that is only slow does not."""

import os
import signal
import time

import pytest

from ddplaunch.reach.channel.peer import sends_again_each_second
from ddplaunch.reach.silence import SHORTEST_LIMIT, SHORTEST_LIMIT_WITH_GAPS
from tests.hosts import proc
from tests.hosts.job import SOON

SILENCE = 2  # seconds, the heartbeat timeout of these jobs
LONG_SILENCE = 30  # of those where a loss has to be noticed without it
HOSTS = ["node0", "node1", "node2"]


@pytest.fixture
def start(job, program):
    """Start two workers of behave.py on each host, and wait until all six are ready."""

    def start(*behaviours, silence=SILENCE):
        limit = ("--heartbeat-timeout", f"{silence}s") if silence else ()
        job.by_hand("--nproc-per-node", 2, *limit, program("behave"), *behaviours)
        job.signs("ready", 6)

    return start


def lost(host, number):
    return f"error: node {number} ({host}) was lost: "


def ends_in_time(job, hosts, began, within=SILENCE + SOON):
    """Wait until the workers on these hosts, and then the commands, have ended, in time and with 122."""
    took = job.seconds_until_quiet(*hosts, since=began)
    print(f"quiet {took:.2f} s after the fault: {', '.join(hosts)}")
    results = job.wait_each(hosts=hosts)
    assert took < within
    assert {host: result.status for host, result in results.items()} == dict.fromkeys(hosts, 122)
    return results


# --- a member


def test_a_member_that_falls_silent_is_lost_after_the_heartbeat_timeout(job, start):
    start()
    began = time.monotonic()
    job.bed.cut("node2")
    results = ends_in_time(job, ["node0", "node1"], began)
    for host in ("node0", "node1"):
        assert lost("node2", 2) + "silent for 2 s\n" in results[host].err
        assert (job.summary_of(host)["status"], job.summary_of(host)["why"]) == (122, "node_lost")
    assert "\n  4 other workers of the job were stopped\n" in results["node0"].err
    assert "hint: if it is only slow, `--heartbeat-timeout 60s`; to go on without" in results["node0"].err
    assert "its own network" not in results["node0"].err
    (left,) = job.events_of("node0", "node_left")
    assert (left["host"], left["node_rank"], left["reason"]) == ("node2", 2, "silent for 2 s")
    # it has no way to know, so it has ended its workers itself
    (alone,) = ends_in_time(job, ["node2"], began).values()
    assert "error: the coordinator (node 0) was lost: silent for 2 s\n" in alone.err
    assert (job.summary_of("node2")["status"], job.summary_of("node2")["why"]) == (122, "lost")


def test_a_member_that_crashes_is_lost_at_once(job, start):
    start(silence=LONG_SILENCE)
    began = time.monotonic()
    job.bed.crash("node2")
    results = ends_in_time(job, ["node0", "node1"], began, within=SOON)
    for host in ("node0", "node1"):
        assert lost("node2", 2) + "connection " in results[host].err


# --- the coordinator


def test_each_host_ends_its_own_workers_when_the_coordinator_falls_silent(job, start):
    start()
    began = time.monotonic()
    job.bed.cut("node0")
    results = ends_in_time(job, ["node1", "node2"], began)
    for host in ("node1", "node2"):
        assert "error: the coordinator (node 0) was lost: silent for 2 s\n" in results[host].err
        assert (job.summary_of(host)["status"], job.summary_of(host)["why"]) == (122, "lost")
    (alone,) = ends_in_time(job, ["node0"], began).values()
    assert "was lost: silent for 2 s\n" in alone.err
    assert "then node " in alone.err
    assert "\n  node 0 (node0), which says so, has lost all others: its own network may have been cut\n" in alone.err


def test_each_host_ends_its_own_workers_at_once_when_the_coordinator_crashes(job, start):
    start(silence=LONG_SILENCE)
    began = time.monotonic()
    job.bed.crash("node0")
    results = ends_in_time(job, ["node1", "node2"], began, within=SOON)
    for host in ("node1", "node2"):
        assert "error: the coordinator (node 0) was lost: connection " in results[host].err


# --- without --heartbeat-timeout


def host_limit():
    """How long a host may be silent on this kernel."""
    return SHORTEST_LIMIT if sends_again_each_second() else SHORTEST_LIMIT_WITH_GAPS


def test_both_sides_miss_a_silent_host_earlier_than_a_silent_agent(job, start):
    start(silence=None)
    time.sleep(1.5)  # some heartbeats
    began = time.monotonic()
    job.bed.cut("node2")
    limit = host_limit()
    alone = ends_in_time(job, ["node2"], began)["node2"]
    results = ends_in_time(job, ["node0", "node1"], began)
    assert f"error: the coordinator (node 0) was lost: silent for {limit:g} s\n" in alone.err
    assert lost("node2", 2) + f"silent for {limit:g} s\n" in results["node0"].err


def test_an_agent_whose_kernel_answers_for_it_may_be_silent_for_longer(job, start):
    start("all=done_when_told", silence=None)
    running = job.bed.processes("node2")
    workers = {process.pid for process in running if "bootstrap.py" in process.command}
    (agent,) = (process.pid for process in running if workers <= {*proc.children(process.pid)})
    os.kill(agent, signal.SIGSTOP)
    time.sleep(host_limit() + 1.5)
    os.kill(agent, signal.SIGCONT)
    time.sleep(1.5)
    job.put("go")
    assert {result.status for result in job.wait_each().values()} == {0}
    assert not job.events_of("node0", "node_left")


# --- hosts that are only slow


def test_a_job_runs_undisturbed_with_lost_and_delayed_packets(job, start):
    """From the first packet to the last, 5 of 100 each way between node 1 and all others."""
    job.bed.lag("node1", 200, loss_percent=5)
    start("all=done_when_told", silence=5)
    time.sleep(6)  # longer than the heartbeat timeout
    job.put("go")
    results = job.wait_each()
    assert {result.status for result in results.values()} == {0}
    assert "lost" not in results["node0"].err
    assert not job.events_of("node0", "node_left")


@pytest.mark.parametrize(("host", "seconds", "silence"), [("node0", 1, 3), ("node1", 4, 6)])
def test_a_host_may_be_cut_off_for_less_than_the_heartbeat_timeout(job, start, host, seconds, silence):
    if seconds > silence / 2 and not sends_again_each_second():
        pytest.skip("this kernel waits ever longer before it sends again")
    start("all=done_when_told", silence=silence)
    time.sleep(1.5)  # some heartbeats
    job.bed.cut(host)
    time.sleep(seconds)
    job.bed.join(host)
    time.sleep(silence + 1 - seconds)  # a host that counted as lost from the cut on would be found out by then
    job.put("go")
    results = job.wait_each()
    assert {result.status for result in results.values()} == {0}
    assert not job.events_of("node0", "node_left")


def test_a_delay_longer_than_the_heartbeat_timeout_is_the_end(job, start):
    start()
    began = time.monotonic()
    job.bed.lag("node1", 1000 * (SILENCE + 0.5))
    results = ends_in_time(job, HOSTS, began)
    assert lost("node1", 1) + "silent for 2 s\n" in results["node2"].err


def test_a_failure_on_a_host_while_another_is_cut_off_is_told_with_what_was_lost(job, start):
    start("2=raises_when_told")
    began = time.monotonic()
    job.bed.cut("node2")
    job.put("fail-2")
    results = {host: job.wait(host=host) for host in ("node0", "node1")}
    assert time.monotonic() - began < SILENCE + SOON
    assert {result.status for result in results.values()} == {1}
    for result in results.values():
        assert "error: rank 2 on node1 failed: ValueError: boom of rank 2" in result.err
    assert job.wait(host="node2").status == 122
