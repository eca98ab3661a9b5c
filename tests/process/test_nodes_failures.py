"""Something breaks on one of several nodes: all nodes end, with one status and one report."""

import os
import signal
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from tests.conftest import PATIENCE, until
from tests.process.terminal import stopped


@pytest.fixture
def run(nodes, program):
    """Run behave.py with 2 workers on each of 3 nodes, prove that nothing is left, and give the results."""

    def run(*behaviours: str, options: tuple[object, ...] = ()):
        nodes.static_nodes(3, "--nproc-per-node", 2, *options, program("behave"), *behaviours)
        results = nodes.ends()
        nodes.nothing_left()
        return results

    return run


@pytest.fixture
def start(nodes, program):
    """Start behave.py with a worker that waits on each of 3 nodes, and wait until all are ready."""

    def start(*options: object, behaviours: tuple[str, ...] = ()):
        started = nodes.static_nodes(3, *options, program("behave"), *behaviours)
        nodes.signs("ready", 3)
        return started

    return start


def test_a_failing_worker_ends_all_nodes_with_its_status_and_its_name(nodes, run, program):
    """Node 0 has the report, the others its first line, and the summaries of all tell the same end."""
    results = run("2=raises")
    assert [result.status for result in results] == [1] * 3
    for result in results:
        assert "error: rank 2 failed: ValueError: boom of rank 2" in result.err
        assert result.err.count("error: ") == 1
    first, *others = results
    assert f"\n  {program('behave')}:" in first.err
    assert "the other 5 workers were stopped by SIGTERM" in first.err
    assert "/node-1/rank-2.err" in first.err
    report = first.err[first.err.index("error: ") :]
    for other in others:
        assert other.err.endswith(report.splitlines()[0] + "\n")
    for place in range(3):
        (end,) = nodes.events_of(place, "job_ended")
        assert (end["status"], end["why"]) == (1, "failed")
    assert nodes.events_of(0, "node_stopping")[0]["node_rank"] == 1


def error_file(nodes, rank):
    """Where the only worker of a node writes its exception."""
    (event,) = nodes.events_of(rank, "worker_started")
    environ = Path(f"/proc/{event['pid']}/environ").read_bytes().split(b"\0")
    (path,) = [entry for entry in environ if entry.startswith(b"TORCHELASTIC_ERROR_FILE=")]
    return Path(path.partition(b"=")[2].decode())


def test_the_first_failure_has_its_time_from_its_own_node(nodes, program):
    """The agent that saw it first could not tell of it at once."""
    started = nodes.static_nodes(3, program("behave"), "all=raises_when_told")
    nodes.signs("ready", 3)
    late = started[1].agent
    os.kill(late, SIGSTOP)
    until(lambda: stopped([late]), "it to stop")
    for rank in (1, 0):
        (nodes.home / "signs" / f"fail-{rank}").touch()
        until(error_file(nodes, rank).exists, "its exception")
    until(lambda: nodes.events_of(2, "stop_sent"), "the coordinator's word")
    os.kill(late, SIGCONT)
    assert nodes.statuses() == [1, 1, 1]
    for node in started:
        assert "error: rank 1 failed: ValueError: boom of rank 1" in node.err


def test_a_worker_that_cannot_be_started_on_one_node_ends_all(nodes, program):
    broken = nodes.home / "broken"
    broken.write_bytes(b"\x00\x01 no program\n")
    broken.chmod(0o755)
    for place, argv in enumerate(([program("behave")], ["--no-python", broken])):
        nodes.node(*nodes.static(2, place), *argv)
    assert nodes.statuses() == [126, 126]
    for node in nodes.started:
        assert "error: rank 1 on " in node.err
        assert "broken" in node.err


def test_what_workers_of_all_nodes_leave_behind_is_gone(run):
    behaviours = ("0=daemon", "1=stubborn", "3=stubborn_setsid_child", "4=stubborn_child", "5=exit3")
    results = run(*behaviours, options=("--grace-period", "0.3"))
    assert [result.status for result in results] == [3] * 3
    assert "rank 1 by SIGKILL after 0.3 s" in results[0].err


# --- a node is lost


@pytest.mark.parametrize("place", [0, 1])
def test_when_an_agent_is_killed_all_nodes_end_at_once(nodes, start, place):
    started = start(behaviours=("all=setsid_child", f"{place}=stubborn_setsid_child"))
    os.kill(started[place].agent, SIGKILL)
    assert nodes.statuses() == [122, 122, 122]
    for number, node in enumerate(started):
        if number == place:
            words = "error: ddplaunch's agent"
        elif place == 0:
            words = "error: the coordinator (node 0) was lost: connection "
        else:
            words = f"error: node {place} ("
        assert words in node.err
        assert node.err.count("error: ") == 1


@pytest.mark.parametrize("place", [0, 1])
def test_when_the_front_of_a_node_is_killed_all_nodes_end_at_once(nodes, start, place):
    started = start()
    started[place].process.kill()
    expected = [122, 122, 122]
    expected[place] = -SIGKILL
    assert [result.status for result in nodes.ends()] == expected
    nodes.nothing_left(patience=PATIENCE)
    (stopping,) = nodes.events_of(0, "node_stopping")
    assert (stopping["node_rank"], stopping["why"]) == (place, "front_lost")
    hint = "to go on without a node that was lost, `--nnodes MIN:MAX` or `--spares`"
    assert (
        f"error: the ddplaunch of node 0 ({os.uname().nodename}) was killed\n\nhint: {hint}\n" in started[2].err
        or place
    )


def test_a_node_that_falls_silent_is_given_up_and_ends_its_own_workers_when_it_wakes(nodes, start):
    started = start("--heartbeat-timeout", "1s")
    silent = (started[1].process.pid, started[1].agent)
    for pid in silent:
        os.kill(pid, SIGSTOP)
    assert nodes.statuses(started[0], started[2]) == [122, 122]
    for node in (started[0], started[2]):
        assert "error: node 1 (" in node.err
        assert "was lost: silent for 1 s" in node.err
    assert "hint: if it is only slow, `--heartbeat-timeout 60s`" in started[0].err
    for pid in silent:
        os.kill(pid, SIGCONT)
    assert nodes.statuses(started[1]) == [122]
    assert "the coordinator (node 0) " in started[1].err  # was lost, or goes on without this node


def test_nodes_whose_coordinator_falls_silent_end_themselves(nodes, start):
    started = start("--heartbeat-timeout", "1s")
    silent = (started[0].process.pid, started[0].agent)
    for pid in silent:
        os.kill(pid, SIGSTOP)
    assert nodes.statuses(started[1], started[2]) == [122, 122]
    for node in started[1:]:
        assert "error: the coordinator (node 0) was lost: silent for 1 s" in node.err
    for pid in silent:
        os.kill(pid, SIGCONT)
    assert nodes.statuses(started[0]) == [122]


def test_a_pause_of_the_coordinator_makes_no_other_node_look_dead(nodes, program):
    started = nodes.static_nodes(2, "--heartbeat-timeout", "4s", program("behave"), "all=done_when_told")
    nodes.signs("ready", 2)
    agent = started[0].agent
    os.kill(agent, SIGSTOP)
    signal.sigtimedwait([], 1.5)
    os.kill(agent, SIGCONT)
    signal.sigtimedwait([], 1.0)
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0]


def test_a_node_that_is_lost_while_all_stop_does_not_hide_the_failure(nodes, program):
    behaviours = ["0=exit3", "all=slow"]
    started = nodes.static_nodes(3, program("behave"), *behaviours)
    for rank in (1, 2):
        nodes.sign(f"saving-{rank}")
    os.kill(started[2].agent, SIGKILL)
    assert nodes.statuses(started[2]) == [122]
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses(*started[:2]) == [3, 3]
    nodes.nothing_left()
    for node in started[:2]:
        assert "error: rank 0 failed: exit status 3" in node.err
