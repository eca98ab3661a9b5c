"""Somebody wants a job of several nodes to end: on whichever node that is said, it is heard on all."""

import os
import re
import time
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1

import pytest

from tests.conftest import insist, until
from tests.process.terminal import stopped


@pytest.fixture
def start(nodes, program):
    """Start behave.py with a worker on each of 3 nodes, and wait until all are ready."""

    def start(behaviour: str, *options: object):
        started = nodes.static_nodes(3, *options, program("behave"), f"all={behaviour}")
        nodes.signs("ready", 3)
        return started

    return start


@pytest.mark.parametrize(("place", "signum", "status"), [(0, SIGINT, 130), (1, SIGTERM, 143)])
def test_a_stop_signal_to_any_node_ends_all_with_its_status(nodes, start, place, signum, status):
    started = start("polite")
    started[place].process.send_signal(signum)
    assert nodes.statuses() == [status] * 3
    for rank in range(3):
        assert nodes.sign(f"got-{rank}") == signum.name
    words = "stopped by SIGINT (Ctrl-C) after" if signum == SIGINT else "stopped by SIGTERM after"
    for node in started:
        assert node.err.splitlines()[-1].startswith(f"ddplaunch: {words}"), node.err
        assert "error" not in node.err
    assert "ddplaunch: stopping the workers on 3 nodes, up to" in started[0].err


def test_a_second_ctrl_c_kills_the_workers_of_all_nodes(nodes, start):
    started = start("stubborn", "--grace-period", 60)
    started[1].process.send_signal(SIGINT)
    nodes.signs("got", 3)
    insist(started[1].process)
    assert nodes.statuses() == [130] * 3
    assert all(nodes.events_of(place, "kill_sent") for place in range(3))


def test_the_same_signal_to_every_node_is_no_second_one_and_all_workers_have_the_time_to_save(nodes, start):
    """A scheduler signals all nodes, and what node 0 makes of it may be there before the signal itself."""
    started = start("slow")
    started[0].process.send_signal(SIGTERM)
    nodes.signs("saving", 3)
    for place in (1, 2):
        started[place].process.send_signal(SIGTERM)
        until(lambda place=place: nodes.events_of(place, "signal_received"), "the signal")
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [143] * 3
    assert not any(nodes.events_of(place, "kill_sent") for place in range(3))


def test_a_signal_that_does_not_stop_reaches_the_workers_of_its_node_only(nodes, start):
    started = start("polite")
    started[1].process.send_signal(SIGUSR1)
    assert nodes.sign("got-1") == "SIGUSR1"
    assert not any(nodes.has_sign(f"got-{rank}") for rank in (0, 2))
    started[1].process.send_signal(SIGINT)
    assert nodes.statuses() == [130] * 3


def test_the_timeout_of_node_0_is_that_of_the_job(nodes, program):
    for place, seconds in enumerate(("1", "600")):
        nodes.node(*nodes.static(2, place), "--timeout", seconds, program("behave"), "all=default")
    assert nodes.statuses() == [124, 124]
    for node in nodes.started:
        assert node.err.splitlines()[-1].startswith("ddplaunch: stopped: --timeout of 1 s was reached"), node.err


def test_the_timeout_of_another_node_is_not_counted(nodes, program):
    for seconds in ("600", "0.6"):
        nodes.node(*nodes.c10d(2), "--timeout", seconds, program("behave"), "all=done_when_told")
        nodes.listens()
    nodes.signs("ready", 2)
    time.sleep(0.8)  # nothing is to happen
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0]


# --- while nodes are waited for


def test_ctrl_c_while_node_0_is_looked_for_ends_at_once(nodes, program):
    node = nodes.node(*nodes.static(2, 1), program("place"))
    node.says("looking for node 0")
    node.process.send_signal(SIGINT)
    assert nodes.statuses() == [130]


def test_a_stop_of_node_0_while_it_waits_ends_those_who_have_come(nodes, program):
    started = [nodes.node(*nodes.static(3, place), program("place")) for place in range(2)]
    started[0].says("2 of 3 nodes joined")
    started[0].process.send_signal(SIGTERM)
    assert nodes.statuses() == [143] * 2


def test_a_node_that_leaves_while_others_are_waited_for_may_come_again(nodes, program):
    started = [nodes.node(*nodes.static(3, place), program("place")) for place in range(2)]
    started[0].says("2 of 3 nodes joined")
    started[1].process.send_signal(SIGINT)
    assert nodes.statuses(started[1]) == [130]
    again = [nodes.node(*nodes.static(3, place), program("place")) for place in (1, 2)]
    assert nodes.statuses(started[0], *again) == [0, 0, 0]
    assert "has left: its ddplaunch has ended" in started[0].err


def test_a_second_ctrl_c_ends_a_node_whose_coordinator_does_not_answer(nodes, start):
    started = start("polite", "--heartbeat-timeout", "60s")
    agent = started[0].agent
    os.kill(agent, SIGSTOP)
    until(lambda: stopped([agent]), "the agent to stop")
    started[1].process.send_signal(SIGINT)
    until(lambda: nodes.events_of(1, "swept"), "the end of its workers")
    insist(started[1].process)
    assert nodes.statuses(started[1]) == [130]
    os.kill(agent, SIGKILL)
    assert nodes.statuses(started[2]) == [122]
    nodes.ends()


@pytest.mark.parametrize("place", [0, 2])
def test_an_agent_that_is_stopped_ends_all_nodes_and_no_worker_of_its_own_stays(nodes, start, place):
    started = start("polite", "--heartbeat-timeout", "1s")
    os.kill(started[place].agent, SIGSTOP)
    assert nodes.statuses() == [122] * 3
    assert "did not respond for 1.5 s (it is stopped, as by SIGSTOP): killed, with its workers" in started[place].err
    nodes.ends()


def test_a_signal_again_on_every_node_is_still_the_first_one(nodes, start):
    """As of a scheduler that sends SIGINT to all of them, and then SIGTERM."""
    started = start("slow")
    for signum in (SIGINT, SIGTERM):
        for place, node in enumerate(started):
            node.process.send_signal(signum)
            until(lambda place=place, name=signum.name: name in str(nodes.events_of(place, "signal_received")), "it")
        nodes.signs("saving", 3)
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [130] * 3
    assert not any(nodes.events_of(place, "kill_sent") for place in range(3))


def test_no_worker_is_asked_to_end_before_a_slow_node_has_looked_where_its_own_are(nodes, start):
    """Else they lose the others as peers before that, and the report shows what follows from the stop."""
    started = start("polite", "--timeout", "8s")
    slow = started[1].agent
    os.kill(slow, SIGSTOP)
    until(lambda: stopped([slow]), "it to stop")
    until(lambda: nodes.events_of(0, "node_stopping"), "the limit, and the order to stop")
    time.sleep(1.0)  # it is slow for half the time that the others wait for it
    assert not nodes.events_of(2, "stop_sent")
    os.kill(slow, SIGCONT)
    assert nodes.statuses() == [124] * 3
    for place in range(3):
        assert [event["ranks"] for event in nodes.events_of(place, "stop_sent")] == [str(place)]
    assert re.search("ranks 0-2 were in .* in wait_for_ever", started[0].err)
