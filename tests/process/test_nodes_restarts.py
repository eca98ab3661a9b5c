"""Several nodes start their workers again: after a failure, after the loss of a node, and when one joins."""

import json
import os
import re
import socket
import time
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from ddplaunch.record.bad_nodes import read
from tests.conftest import until
from tests.nodes import Node, Nodes

ELASTIC = ("--rdzv-conf", "last_call_timeout=0.4")


@pytest.fixture
def elastic(nodes, program):
    """Start a node with 2 workers of a job that takes what nodes there are."""

    def elastic(nnodes: str = "2:3", *options: object, behaviour: str = "stays_until_told"):
        where = nodes.c10d(nnodes)
        return nodes.node(*where, *ELASTIC, "--nproc-per-node", 2, *options, program("restarts"), behaviour)

    return elastic


def finish(nodes) -> None:
    """Let all workers end well."""
    (nodes.home / "signs" / "go").touch()


def places(nodes, generation: int, number: int) -> list[tuple[int, ...]]:
    """RANK, GROUP_RANK, LOCAL_RANK and WORLD_SIZE of each worker of a generation, once all are there."""
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")
    found = [nodes.place(rank, generation) for rank in range(number)]
    return [tuple(int(place[name]) for name in names) for place in found]


TWO = [(0, 0, 0, 4), (1, 0, 1, 4), (2, 1, 0, 4), (3, 1, 1, 4)]
THREE = [(0, 0, 0, 6), (1, 0, 1, 6), (2, 1, 0, 6), (3, 1, 1, 6), (4, 2, 0, 6), (5, 2, 1, 6)]


def test_a_failure_on_one_node_starts_the_workers_of_all_again_with_the_same_ranks(nodes, program):
    started = nodes.static_nodes(3, "--nproc-per-node", 1, "--max-restarts", 2, program("restarts"), "fails_until", 2)
    assert nodes.statuses() == [0, 0, 0]
    for generation in range(3):
        for rank in range(3):
            place = nodes.place(rank, generation)
            assert (place["RANK"], place["GROUP_RANK"], place["WORLD_SIZE"]) == (str(rank), str(rank), "3")
            assert place["TORCHELASTIC_RESTART_COUNT"] == str(generation)
            assert place["TORCHELASTIC_MAX_RESTARTS"] == "2"
            assert place["MASTER_PORT"] == str(nodes.port), "that of the user serves every generation"
    assert started[0].err.count("error: rank 1 failed: exit status 1") == 2
    assert re.findall(r"starting all workers again.*\(restart (. of 2)\)\n", started[0].err) == ["1 of 2", "2 of 2"]
    assert all(node.err.endswith(" after 2 restarts\n") for node in started)
    assert "finished" in started[0].err
    assert [event["wait"] for event in nodes.events_of(0, "generation_failed")] == [0, 1], "the back-off"
    assert json.loads((nodes.folder_of(0) / "summary.json").read_text())["restarts"] == 2

    each = [nodes.events_of(place) for place in range(3)]
    for generation in (1, 2):
        begins = [starts(events)[generation] for events in each]
        ends = [
            event["mono"]
            for events, begin in zip(each, begins, strict=True)
            for event in events[:begin]
            if event["event"] == "worker_exited"
        ]
        assert max(ends) < min(events[begin]["mono"] for events, begin in zip(each, begins, strict=True)), "all gone"


def test_each_generation_meets_at_a_port_of_its_own_that_all_nodes_know(nodes, program):
    for _ in range(2):
        nodes.node(*nodes.c10d(2), "--max-restarts", 1, program("restarts"), "fails_until", 1)
    assert nodes.statuses() == [0, 0]
    first, second = ({nodes.place(rank, generation)["MASTER_PORT"] for rank in range(2)} for generation in range(2))
    assert len(first) == len(second) == 1
    assert first != second


def starts(events: list[dict[str, object]]) -> list[int]:
    """Where generations begin."""
    return [number for number, event in enumerate(events) if event["event"] == "generation_started"]


def test_without_restarts_a_lost_node_is_the_end_even_if_another_could_come(nodes, program):
    started = nodes.static_nodes(2, program("restarts"), "stays")
    places(nodes, 0, 2)
    os.kill(started[1].agent, SIGKILL)
    assert nodes.statuses() == [122, 122]
    [remembered] = nodes.home.glob("state*/ddplaunch/nodes.jsonl")
    [failure] = read(str(remembered), time.time())
    assert (failure.host, failure.kind, failure.in_slurm) == (os.uname().nodename, "lost", False)


def test_with_restarts_a_lost_node_can_be_replaced(nodes, program):
    args = ("--nproc-per-node", 2, "--max-restarts", 1, program("restarts"), "stays_until_told")
    started = nodes.static_nodes(2, *args)
    assert places(nodes, 0, 4) == TWO
    os.kill(started[1].agent, SIGKILL)
    assert nodes.statuses(started[1]) == [122]
    started[0].says("all workers start again on 2 nodes, once 1 more has joined")
    pids = [nodes.place(rank, 0)["pid"] for rank in range(4)]
    # those of the agent that was killed are reaped by whoever inherits them
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the first generation")
    again = nodes.node(*nodes.static(2, 1), *args)
    assert places(nodes, 1, 4) == TWO
    finish(nodes)
    assert nodes.statuses(started[0], again) == [0, 0]
    assert started[0].err.endswith(" after 1 restart\n")


# --- as many nodes as there are


def test_nodes_may_join_and_be_lost_and_nobody_counts_that_as_a_failure(nodes, elastic):
    began = time.monotonic()
    started = [elastic() for _ in range(2)]
    assert places(nodes, 0, 4) == TWO
    assert time.monotonic() - began >= 0.4, "the last call"
    started.append(elastic())
    assert places(nodes, 1, 6) == THREE
    assert f"{socket.gethostname()} joins: all workers start again with it" in started[0].err + started[1].err
    first = 0 if "joins" in started[0].err else 1
    lost = started.pop(1 - first)
    os.kill(lost.agent, SIGKILL)
    assert nodes.statuses(lost) == [122]
    assert places(nodes, 2, 4) == TWO
    assert {nodes.place(rank, 2)["TORCHELASTIC_MAX_RESTARTS"] for rank in range(4)} == {"0"}
    finish(nodes)
    assert nodes.statuses(*started) == [0, 0]
    assert "4 workers on 2 nodes finished in " in started[0].err
    assert " after " not in started[0].err.splitlines()[-1], "a node that joins or is lost is no restart"


def test_the_job_starts_once_all_have_come_and_the_ranks_of_those_who_stay_change_as_little_as_they_can(nodes, program):
    """Node 1 of three is lost: node 0 keeps its place, node 2 becomes node 1."""
    all_three = ("--rdzv-conf", "last_call_timeout=600")  # the test would not wait that long
    args = ("--nproc-per-node", 1, *all_three, program("restarts"), "stays_until_told")
    started = [nodes.node(*nodes.c10d("2:3"), "--node-rank", place, *args) for place in range(3)]
    pids = [nodes.place(rank, 0)["pid"] for rank in range(3)]
    assert len(set(pids)) == 3
    os.kill(started[1].agent, SIGKILL)
    parents = [_parent(int(nodes.place(rank, 1)["pid"])) for rank in range(2)]
    assert parents == [started[0].agent, started[2].agent]
    finish(nodes)
    assert nodes.statuses() == [0, 122, 0]


def test_a_spare_takes_the_place_of_a_lost_node_and_one_that_nobody_needed_ends_with_0(nodes, program):
    args = ("--spares", 2, "--nproc-per-node", 1, program("restarts"), "stays_until_told")
    started = [nodes.node(*nodes.c10d("2"), "--node-rank", place, *args) for place in range(2)]
    for rank in range(2):
        nodes.place(rank, 0)
    spare = nodes.node(*nodes.c10d("2"), *args)
    started[0].says("is a spare: it waits until a node is lost or leaves")
    nodes.node(*nodes.c10d("2"), *args)
    until(lambda: started[0].err.count("is a spare") == 2, "the second spare")
    os.kill(started[1].agent, SIGKILL)
    assert [_parent(int(nodes.place(rank, 1)["pid"])) for rank in range(2)] == [started[0].agent, spare.agent]
    assert {nodes.place(rank, 1)["WORLD_SIZE"] for rank in range(2)} == {"2"}
    os.kill(int(nodes.place(0, 1)["pid"]), SIGKILL)
    assert nodes.statuses() == [137, 122, 137, 0]
    assert not nodes.has_sign("place-0-2")


def test_of_nodes_that_a_command_has_started_a_spare_takes_the_place_of_the_only_other_one(job, program):
    args = ("--simulate", "--nnodes", 1, "--spares", 1, "--nproc-per-node", 1, "--chaos", "node:0@100ms")
    job.start(*args, program("restarts"), "stays_until_told")
    assert json.loads(job.sign("place-1-0"))["GROUP_RANK"] == "0"
    (job.home / "signs" / "go").touch()
    assert "ddplaunch: node-1 is node 0 from now on\n" in job.wait().expect(0).err


def test_a_job_with_spares_whose_nodes_do_not_meet_fails(nodes, program):
    nodes.node(*nodes.c10d("2"), "--spares", 1, "--rdzv-timeout", 1, program("restarts"), "stays")
    assert nodes.statuses() == [121]


def test_sigterm_to_an_agent_is_its_node_leaving_and_to_all_the_end(nodes, program):
    args = ("--nproc-per-node", 1, "--rdzv-conf", "last_call_timeout=60", program("restarts"), "stays")
    started = [nodes.node(*nodes.c10d("2:3"), "--node-rank", place, *args) for place in range(3)]
    for rank in range(3):
        nodes.place(rank, 0)
    started[1].process.send_signal(SIGTERM)
    assert nodes.statuses(started[1]) == [143]
    assert (
        started[1].err.splitlines()[-1]
        == "ddplaunch: this node has left the job (SIGTERM); the others go on if enough are left"
    )
    assert "node 1" in started[0].err and "leaves (SIGTERM): all workers start again without it" in started[0].err
    assert [nodes.place(rank, 1)["WORLD_SIZE"] for rank in range(2)] == ["2", "2"]
    started[2].process.send_signal(SIGTERM)
    started[0].says("all workers start again once 1 more has joined")
    started[0].process.send_signal(SIGTERM)
    assert nodes.statuses() == [143] * 3
    assert not nodes.has_sign("place-2-0")
    assert [event["reason"] for event in nodes.events_of(0, "node_left")] == ["its ddplaunch has ended"] * 2


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_fewer_nodes_than_the_least_are_not_enough_to_go_on(nodes, elastic):
    started = [elastic() for _ in range(2)]
    places(nodes, 0, 4)
    lost = started[1] if _leads(nodes, started[0]) else started[0]
    os.kill(lost.agent, SIGKILL)
    assert nodes.statuses() == [122, 122]


def _leads(nodes: Nodes, node: Node) -> bool:
    return _parent(int(nodes.place(0, 0)["pid"])) == node.agent


def test_nodes_that_come_late_wait_while_workers_finish(nodes, program):
    """They cannot take part any more: Ctrl-C ends only the node where it is pressed, the other ends as the job does."""
    behaviour = (*ELASTIC, program("behave"), "0=done", "1=done_when_told")
    for _ in range(2):
        nodes.node(*nodes.c10d("2:4"), *behaviour)
    nodes.signs("ready", 2)
    until(lambda: nodes.events_of(0, "swept"), "the end of the first node's worker")
    interrupted, late = (nodes.node(*nodes.c10d("2:4"), *behaviour) for _ in range(2))
    nodes.have_joined(4)
    interrupted.process.send_signal(SIGINT)
    assert nodes.statuses(interrupted) == [130]
    finish(nodes)
    assert nodes.statuses() == [0, 0, 130, 0]
    assert not late.out


def test_a_stop_while_a_lost_node_is_waited_for_ends_all(nodes, program):
    args = ("--max-restarts", 1, program("restarts"), "stays")
    started = nodes.static_nodes(3, *args)
    for rank in range(3):
        nodes.place(rank, 0)
    os.kill(started[2].agent, SIGKILL)
    started[0].says("once 1 more has joined")
    started[1].process.send_signal(SIGINT)
    assert nodes.statuses() == [130, 130, 122]
