"""A job that is paused as a whole goes on, whatever paused it; a node that is paused alone is lost."""

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ddplaunch.system.process.clock import BEAT
from tests.conftest import Job, until
from tests.nodes import Nodes
from tests.process.terminal import stat, stopped

HEARTBEAT_TIMEOUT = 1.0
SLACK = 0.5  # seconds that a busy machine may take to write an event down


@contextmanager
def frozen_by_signals(pids: list[int]) -> Iterator[None]:
    """As `scontrol suspend` does without cgroups, or `kill -STOP`."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: stopped(pids), "all to stop")
    yield
    for pid in pids:
        with suppress(ProcessLookupError):  # what was lost meanwhile may have ended
            os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen_by_cgroup(pids: list[int]) -> Iterator[None]:
    """As `docker pause` does: no process gets a signal, or is told of anything."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    folder = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    own = next(line.partition("::")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if "::" in line)
    if folder is None or not os.access(folder / own[1:], os.W_OK):
        pytest.skip("needs root and a writable cgroup v2")
    home = folder / own[1:]
    group = home / f"ddplaunch-{uuid.uuid4().hex}"
    group.mkdir()
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(f"{pid}")
        (group / "cgroup.freeze").write_text("1")
        until(lambda: "frozen 1" in (group / "cgroup.events").read_text(), "all to freeze")
        yield
    finally:
        (group / "cgroup.freeze").write_text("0")
        for pid in pids:
            (home / "cgroup.procs").write_text(f"{pid}")
        group.rmdir()


def everything(job: Job) -> list[int]:
    """All processes of a job, parents first, so that none is told that another one is paused."""
    return sorted(job.left())


def let_pass(seconds: float) -> None:
    """Wait for time to pass that must not count."""
    since = time.monotonic()
    until(lambda: time.monotonic() - since > seconds, "time to pass that must not count")


@pytest.mark.parametrize("paused", [frozen_by_signals, frozen_by_cgroup])
def test_a_job_that_is_paused_as_a_whole_finds_all_nodes_again(job, program, paused):
    options = ("--nnodes", 3, "--nproc-per-node", 1, "--simulate", "--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT}s")
    job.start(*options, program("behave"), "all=done_when_told")
    job.signs("ready", 3)
    with paused(everything(job)):
        let_pass(3 * HEARTBEAT_TIMEOUT)
    let_pass(1.5 * HEARTBEAT_TIMEOUT)
    (job.home / "signs" / "go").touch()
    result = job.wait().expect(0)
    assert "lost" not in result.err


def test_no_time_limit_runs_while_everything_is_paused(job):
    """The grace period, as a timer of the loop, which has them all."""
    process = job.behave("all=stubborn", options=("--grace-period", "3s"), workers=1)
    process.send_signal(signal.SIGTERM)
    job.sign("got-0")
    with frozen_by_signals(everything(job)):
        let_pass(4)
    assert job.wait().status == 143
    at = {event["event"]: event["mono"] for event in job.events()}
    assert at["kill_sent"] - at["stop_sent"] > 3 + 4 - BEAT - SLACK
    # one that comes before the agent sleeps is no time either, but might be a slow disk, and is not called a pause
    assert any(event["seconds"] > 3 for event in job.events("paused"))


def test_a_node_that_is_paused_alone_is_lost_and_says_later_why(nodes: Nodes, program):
    options = ("--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT}s", program("behave"), "all=default")
    first, second = nodes.static_nodes(2, *options)
    workers = list(map(int, nodes.signs("ready", 2)))
    paused = [second.process.pid, second.agent, *(pid for pid in workers if int(stat(pid)[1]) == second.agent)]
    with frozen_by_signals(paused):
        nodes.ends(first)
        let_pass(3 * HEARTBEAT_TIMEOUT)
    assert nodes.statuses() == [122, 122]
    assert "error: node 1 (" in first.err
    assert f"was lost: silent for {HEARTBEAT_TIMEOUT:g} s" in first.err
    assert "error: this node was paused for" in second.err
    assert "was lost" not in second.err
