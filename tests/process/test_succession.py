"""Node 0 of an elastic job is lost or leaves, and the next node takes over: real agents and workers, over loopback."""

import json
import os
import subprocess
import time
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import psutil
import pytest

from tests.conftest import events_in, until
from tests.nodes import ENOUGH, Node, Nodes
from tests.process.terminal import Lasting, Screen
from tests.process.test_run_folder import check

COLUMNS = 120
SILENCE = 2  # seconds, the heartbeat timeout of these jobs


@pytest.fixture
def node_of(nodes: Nodes, program):
    """Start a worker on one node of an elastic job, as if no other node were on this host."""

    def node_of(
        rank: int, nnodes: str, *options: object, last_call: float = 60, behaviour: str = "stays_until_told"
    ) -> Node:
        where = (*nodes.c10d(nnodes), "--rdzv-conf", f"last_call_timeout={last_call},is_host={int(rank == 0)}")
        told = ("--node-rank", rank, "--nproc-per-node", 1, "--heartbeat-timeout", f"{SILENCE}s")
        env = {"XDG_STATE_HOME": str(state_of(nodes, rank))}
        return nodes.node(*where, *told, *options, program("restarts"), behaviour, env=env)

    return node_of


@pytest.fixture
def start(nodes: Nodes, node_of):
    """Start all nodes, and wait until their workers are there."""

    def start(number: int, nnodes: str, *options: object, **behaviour: str) -> list[Node]:
        started = [node_of(rank, nnodes, *options, **behaviour) for rank in range(number)]
        assert generation(nodes, 0, number) == started
        return started

    return start


def state_of(nodes: Nodes, rank: int) -> Path:
    return nodes.home / f"state-{rank}"


def summary(nodes: Nodes, rank: int) -> dict[str, Any]:
    """How the job ended, as the node that began with this rank has it."""
    (file,) = state_of(nodes, rank).glob("ddplaunch/runs/*/node-*/summary.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def generation(nodes: Nodes, number: int, size: int) -> list[Node]:
    """Return on which node each rank of a generation is, once all workers are there."""
    found = [json.loads(nodes.sign(f"place-{number}-{rank}", ENOUGH)) for rank in range(size)]
    assert {place["WORLD_SIZE"] for place in found} == {str(size)}
    by_agent = {node.agent: node for node in nodes.started if not node.has_ended}
    return [by_agent[_parent(int(place["pid"]))] for place in found]


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def kill(*lost: Node) -> None:
    """Kill the agents of these nodes at once."""
    for pid in [node.agent for node in lost]:
        os.kill(pid, SIGKILL)


def signal_all(signum: int, *some: Node) -> None:
    """Send a signal to the commands and agents of these nodes, and not to their workers."""
    for node in some:
        for pid in (node.agent, node.process.pid):
            os.kill(pid, signum)


def finish(nodes: Nodes, *left: Node) -> None:
    """Let the workers end well, on these nodes."""
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(*left) == [0] * len(left)


def test_the_next_node_takes_over_from_one_that_is_killed_and_answers_for_the_job(nodes, start):
    first, second, third = start(3, "2:3")
    kill(first)
    assert nodes.statuses(first) == [122]
    assert generation(nodes, 1, 2) == [second, third]
    host = os.uname().nodename
    over = f"ddplaunch: {host} takes over from node 0 ({host}), which is lost: connection "
    assert 0 < second.err.index("Looking for the node that takes over") < second.err.index(over)
    assert "takes over from" not in third.err
    assert f"ddplaunch: {host} has taken over\n" in third.err
    assert "has taken over" not in second.err

    run_id = next(state_of(nodes, 1).glob("ddplaunch/runs/*")).name
    second_env = {**nodes.env, "XDG_STATE_HOME": str(state_of(nodes, 1))}
    shown = subprocess.run([*nodes.command, "ps", "--json"], env=second_env, capture_output=True, check=True).stdout
    (answer,) = [run for run in json.loads(shown) if run["run_id"] == run_id]
    assert [worker["rank"] for worker in answer["workers"]] == [0, 1]
    finish(nodes, second, third)
    assert "2 workers on 2 nodes finished in " in second.err
    whole = summary(nodes, 1)
    assert (whole["status"], whole["why"], whole["restarts"]) == (0, "finished", 1)
    (folder,) = state_of(nodes, 1).glob("ddplaunch/runs/*/node-*")
    (event,) = events_in(folder, "took_over")
    check(event)


def test_it_takes_over_as_well_if_the_command_that_was_typed_is_killed(nodes, start):
    first, second, third = start(3, "2:3")
    os.kill(first.process.pid, SIGKILL)
    assert generation(nodes, 1, 2) == [second, third]
    assert f"node 0 ({os.uname().nodename}) is lost: its ddplaunch has ended" in second.err
    finish(nodes, second, third)


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        (kill, "connection closed", 122),
        (lambda node: os.kill(node.process.pid, SIGKILL), "its ddplaunch has ended", -9),
        (lambda node: os.kill(node.process.pid, SIGTERM), "it leaves (SIGTERM)", 143),
    ],
    ids=["agent", "command", "leaves"],
)
def test_before_anything_has_begun_the_others_wait_for_node_0_to_be_started_again(nodes, node_of, end, how, status):
    first = node_of(0, "3:4", last_call=1)
    nodes.answers()
    second = node_of(1, "3:4")
    first.says("2 of 3 nodes joined")
    end(first)
    second.says(f"node 0 is lost: {how}. Looking for it again")
    third, again = node_of(2, "3:4"), node_of(0, "3:4", last_call=1)
    assert generation(nodes, 0, 3) == [again, second, third]
    finish(nodes, again, second, third)
    assert nodes.statuses(first) == [status]


def test_who_takes_over_knows_that_a_node_has_left_which_node_0_alone_had_seen(nodes, start):
    first, second, third, fourth = start(4, "1:4")
    os.kill(third.process.pid, SIGTERM)
    assert nodes.statuses(third) == [143]
    kill(first)
    places = nodes.home / "signs"
    # at work again, it has read what came, so that the kernel does not reset its connections as it is killed
    until(
        lambda: [at for at in places.glob("place-*-1") if json.loads(at.read_text())["WORLD_SIZE"] == "2"],
        "both",
        ENOUGH,
    )
    kill(fourth)
    finish(nodes, second)


def test_one_after_the_other_may_be_killed(nodes, start):
    first, second, third = start(3, "1:3")
    kill(first)
    assert generation(nodes, 1, 2) == [second, third]
    kill(second)
    assert generation(nodes, 2, 1) == [third]
    finish(nodes, third)


def test_two_may_be_killed_at_once(nodes, start):
    first, second, third, fourth = start(4, "1:4")
    kill(first, second)
    assert generation(nodes, 1, 2) == [third, fourth]
    finish(nodes, third, fourth)


def test_a_node_whose_workers_have_ended_by_then_reports_first_that_it_takes_over(nodes, start):
    first, second, third = start(3, "1:3")
    signal_all(SIGSTOP, second)  # which is to take over
    kill(first)
    worker = Path(f"/proc/{nodes.place(2, 0)['pid']}")
    until(lambda: not worker.exists(), "the worker to end")
    kill(second)
    second.process.send_signal(SIGCONT)
    assert generation(nodes, 1, 1) == [third]
    finish(nodes, third)
    assert 0 < third.err.index("takes over from node 0") < third.err.index("all workers start again on 1 node")


@pytest.mark.parametrize("signum", [SIGTERM, SIGHUP])
def test_sigterm_or_a_closed_terminal_of_node_0_is_that_node_leaving(nodes, start, signum):
    first, second, third = start(3, "2:3")
    first.process.send_signal(signum)
    assert nodes.statuses(first) == [128 + signum]
    assert f"leaves ({signum.name}): another node takes over" in first.err
    second.says(f"takes over from node 0 ({os.uname().nodename}), which leaves ({signum.name})\n")
    left = f"ddplaunch: this node has left the job ({signum.name}); the others go on if enough are left\n"
    assert first.err.endswith(left)
    assert generation(nodes, 1, 2) == [second, third]
    finish(nodes, second, third)


def test_a_node_0_that_is_started_again_before_the_last_one_has_saved_finds_who_takes_over(nodes, start, program):
    first, second, third = start(3, "2:3", behaviour="saves_until_told")
    first.process.send_signal(SIGTERM)
    for rank in range(3):
        nodes.sign(f"saving-0-{rank}")
    again = nodes.node(*nodes.c10d("2:3"), "--nproc-per-node", 1, program("restarts"), "stays_until_told")

    def connected() -> list[Any]:
        return [
            one for one in psutil.Process(again.agent).net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED
        ]

    until(connected, "the connection to the node that leaves")
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses(first) == [143]
    assert generation(nodes, 1, 3) == [second, third, again]
    finish(nodes, second, third, again)


def test_once_node_0_has_left_the_others_wait_for_another_node_if_they_are_too_few(nodes, start, node_of):
    first, second = start(2, "2", "--spares", 1)
    first.process.send_signal(SIGTERM)
    assert nodes.statuses(first) == [143]
    second.says("takes over")
    again = node_of(0, "2", "--spares", 1)
    assert generation(nodes, 1, 2) == [second, again]
    finish(nodes, second, again)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_sigterm_to_all_nodes_is_the_end(nodes, start, order):
    """As from `kubectl delete job`, which reaches one after the other."""
    started = start(3, "1:3")
    for rank in order:
        started[rank].process.send_signal(SIGTERM)
        time.sleep(0.2)
    assert nodes.statuses() == [143] * 3
    assert not nodes.has_sign("place-1-0")


def test_a_node_0_that_was_silent_finds_that_the_others_have_gone_on(nodes, start):
    first, second, third = start(3, "1:3")
    signal_all(SIGSTOP, first)
    assert generation(nodes, 1, 2) == [second, third]
    assert f"silent for {SILENCE} s" in second.err
    signal_all(SIGCONT, first)
    assert nodes.statuses(first) == [122]
    assert "1 node of the last generation here, and 2 not known to have ended" in first.err
    assert not os.path.exists(f"/proc/{json.loads(nodes.sign('place-0-0'))['pid']}")
    assert summary(nodes, 0)["why"] == "node_lost"
    finish(nodes, second, third)


def test_a_node_that_leaves_meanwhile_leaves(nodes, start):
    first, second, third, fourth = start(4, "1:4", behaviour="saves_until_told")
    fourth.process.send_signal(SIGTERM)
    nodes.sign("saving-0-3")
    kill(first)
    second.says("takes over")
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses(first, fourth) == [122, 143]
    assert generation(nodes, 1, 2) == [second, third]
    finish(nodes, second, third)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_is_stopped_is_not_started_again_when_node_0_is_lost_meanwhile(nodes, start, rank):
    """As by who presses Ctrl-C, and kills node 0 since its workers take their time to save."""
    started = start(3, "1:3", behaviour="saves_until_told")
    started[rank].process.send_signal(SIGINT)
    nodes.signs("saving-0", 3)
    kill(started[0])
    started[2].says("Looking for the node that takes over")
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [122, 130, 130]
    for node in started[1:]:
        assert node.err.splitlines()[-1].startswith("ddplaunch: stopped by SIGINT (Ctrl-C) after ")
    assert not nodes.has_sign("place-1-0")


def test_a_failure_is_not_forgotten_when_node_0_is_lost_while_the_others_save(nodes, start):
    first, second, third = start(3, "1:3", behaviour="fails_while_others_save")
    (nodes.home / "signs" / "fail").touch()
    for rank in (0, 2):
        nodes.sign(f"saving-0-{rank}")
    kill(first)
    third.says("Looking for the node that takes over")
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [122, 3, 3]
    assert "error: rank 1 failed: exit status 3" in second.err


@pytest.mark.parametrize("rank", [1, 2])
def test_ctrl_c_while_the_nodes_look_for_each_other_ends_the_node_where_it_is_pressed(nodes, start, rank):
    """Of three, two are stopped: the third can neither follow nor go on. The two go on when they are awake."""
    started = start(3, "1:3")
    awake, asleep = started[rank], [node for node in started if node is not started[rank]]
    signal_all(SIGSTOP, *asleep)
    awake.says("takes over" if rank == 1 else "Looking for the node that takes over")
    awake.process.send_signal(SIGINT)
    assert nodes.statuses(awake) == [130]
    signal_all(SIGCONT, *asleep)
    assert generation(nodes, 1, 2) == asleep
    finish(nodes, *asleep)


def test_ctrl_c_ends_a_job_of_another_coordinator_on_all_nodes(nodes, start):
    first, second, third = start(3, "2:3")
    kill(first)
    generation(nodes, 1, 2)
    third.process.send_signal(SIGINT)
    assert nodes.statuses(first, second, third) == [122, 130, 130]


def test_a_spare_takes_the_place_of_node_0(nodes, start, node_of):
    first, second = start(2, "2", "--spares", 1)
    spare = node_of(2, "2", "--spares", 1)
    first.says("is a spare")
    spare.says("this node is a spare: it waits until a node is lost or leaves")
    kill(first)
    assert generation(nodes, 1, 2) == [second, spare]
    finish(nodes, second, spare)


def test_a_spare_is_no_node_whose_workers_are_stopped(nodes, start, node_of):
    first, second = start(2, "2", "--spares", 1)
    spare = node_of(2, "2", "--spares", 1)
    spare.says("this node is a spare")
    second.process.send_signal(SIGINT)
    assert nodes.statuses(first, second, spare) == [130, 130, 0]
    assert "stopping the workers on 2 nodes, up to" in first.err


def test_restarts_that_were_spent_before_are_spent(nodes, start):
    first, second, third = start(3, "2:3", "--max-restarts", 1, behaviour="fails_when_told")
    (nodes.home / "signs" / "fail-0").touch()
    assert generation(nodes, 1, 3) == [first, second, third]
    kill(first)
    assert generation(nodes, 2, 2) == [second, third]
    (nodes.home / "signs" / "fail-2").touch()
    assert nodes.statuses(second, third) == [3, 3]
    assert "  1 of 1 restart used\n" in second.err
    assert summary(nodes, 1)["restarts"] == 2, "the loss of a node is none of those that --max-restarts allows"


def test_the_time_of_the_job_runs_on(nodes, start):
    first, second, third = start(3, "2:3", "--timeout", "6s")
    kill(first)
    assert nodes.statuses(second, third) == [124, 124]
    assert "--timeout of 6 s was reached" in second.err


def test_a_node_0_that_is_started_again_joins_the_job_and_so_do_nodes_that_come_to_it(nodes, start, node_of):
    first, second, third = start(3, "2:3")
    kill(first)
    assert generation(nodes, 1, 2) == [second, third]
    assert nodes.statuses(first) == [122]
    again = node_of(0, "2:3")
    again.says(f"the job goes on: {os.uname().nodename} has taken over. Joining it")
    assert generation(nodes, 2, 3) == [second, third, again]
    kill(third)
    assert generation(nodes, 3, 2) == [second, again]
    late = node_of(2, "2:3")
    assert generation(nodes, 4, 3) == [second, again, late]
    finish(nodes, second, again, late)


def test_a_node_0_that_is_started_again_joins_also_where_its_port_is_that_of_the_workers_now(nodes, program):
    def node(rank: int) -> Node:
        env = {"XDG_STATE_HOME": str(state_of(nodes, rank))}
        soon = ("--rdzv-conf", "last_call_timeout=60", "--nproc-per-node", 1)
        started: Node = nodes.node(*nodes.static("2:3", rank), *soon, program("restarts"), "stays_until_told", env=env)
        return started

    first, second, third = map(node, range(3))
    assert generation(nodes, 0, 3) == [first, second, third]
    kill(first)
    assert generation(nodes, 1, 2) == [second, third]
    again = node(0)
    assert generation(nodes, 2, 3) == [second, third, again]
    finish(nodes, second, third, again)


def test_a_node_0_that_is_started_again_with_live_shows_no_rows_once_it_has_joined(nodes, start, program):
    first, second, third = start(3, "2:3")
    kill(first)
    assert generation(nodes, 1, 2) == [second, third]
    where = (*nodes.c10d("2:3"), "--rdzv-conf", "is_host=1", "--node-rank", 0)
    again = Lasting(
        nodes, "--live", *where, "--nproc-per-node", 1, program("restarts"), "stays_until_told", columns=COLUMNS
    )
    screen = Screen(again, COLUMNS)
    nodes.sign("place-2-2", ENOUGH)
    assert not any("waits for its nodes" in row for row in screen.until(lambda _: again.cooks()))
    finish(nodes, second, third)
    assert "finished" in screen.at_end()[-1]


def test_a_node_0_that_has_begun_before_it_is_found_is_named_and_neither_ends(nodes, start, node_of):
    first, second = start(2, "1:2", behaviour="goes_on_until_told")
    kill(first)
    assert generation(nodes, 1, 1) == [second]
    again = node_of(0, "1:2", last_call=0.1, behaviour="goes_on_until_told")
    second.says("warning: where node 0 was, another ddplaunch has begun this job too")
    again.says("goes on with this job too: stop the workers of one of both")
    (nodes.home / "signs" / "finish").touch()
    assert nodes.statuses(second, again) == [0, 0]
