"""Node 0 of an elastic job is lost or leaves, and the others wait until its command is typed again: over loopback."""

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from socket import gethostname
from typing import Any

import psutil
import pytest

from ddplaunch.system.process.tree import look
from tests.conftest import events_in, until
from tests.nodes import ENOUGH, Node, Nodes
from tests.process.relay import Relay

SILENCE = 2  # seconds, the heartbeat timeout of these jobs
TYPE_AGAIN = "for it to come back: type its command again on localhost, with `--node-rank 0`"


@pytest.fixture
def node_of(nodes: Nodes, program):
    """Start a worker on one node of an elastic job, as if no other node were on this host."""

    def node_of(
        rank: int,
        nnodes: str,
        *options: object,
        last_call: float = 60,
        behaviour: str = "stays_until_told",
        where: str = "localhost",
    ) -> Node:
        meets = (*nodes.c10d(nnodes, where), "--rdzv-conf", f"last_call_timeout={last_call},is_host={int(rank == 0)}")
        told = ("--node-rank", rank, "--nproc-per-node", 1, "--heartbeat-timeout", f"{SILENCE}s")
        env = {"XDG_STATE_HOME": str(state_of(nodes, rank))}
        return nodes.node(*meets, *told, *options, program("restarts"), behaviour, env=env)

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


def worker_of(nodes: Nodes, number: int, rank: int) -> Path:
    """The folder in /proc of this rank in this generation."""
    return Path(f"/proc/{nodes.place(rank, number)['pid']}")


def lives(worker: Path) -> bool:
    """Whether this process does anything yet; as a zombie, it waits for somebody to look."""
    process = look(int(worker.name))
    return process is not None and process.state not in "ZX"


def kill(*lost: Node) -> None:
    """Kill the agents of these nodes at once."""
    for pid in [node.agent for node in lost]:
        os.kill(pid, SIGKILL)


def signal_node(signum: int, node: Node) -> None:
    """Send a signal to all processes of a node: its command, its agent, its workers."""
    of_agent = psutil.Process(node.agent)
    for one in (psutil.Process(node.process.pid), of_agent, *of_agent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # an agent that goes on may have ended it by then
            one.send_signal(signum)


def finish(nodes: Nodes, *left: Node) -> None:
    """Let the workers end well, on these nodes."""
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(*left) == [0] * len(left)


# --- node 0 is lost, and comes back


def test_a_node_0_that_is_killed_is_waited_for_and_the_job_goes_on_with_it(nodes, start, node_of):
    first, second, third = start(3, "2:3")
    kill(first)
    assert nodes.statuses(first) == [122]
    for node in (second, third):
        node.says("ddplaunch: node 0 (localhost) is lost: connection ")
        node.says(f"; waiting up to 10 min {TYPE_AGAIN}\n")
    again = node_of(0, "2:3")
    assert generation(nodes, 1, 3) == [again, second, third]
    assert "ddplaunch: node 0 (localhost) is reached again\n" in second.err
    finish(nodes, again, second, third)
    assert "3 workers on 3 nodes finished in " in again.err
    assert len({run.name for rank in range(3) for run in state_of(nodes, rank).glob("ddplaunch/runs/*")}) == 1
    (folder,) = state_of(nodes, 1).glob("ddplaunch/runs/*/node-*")
    assert [event["text"].split(":")[0] for event in events_in(folder, "notice")] == [
        "node 0 (localhost) is lost",
        "node 0 (localhost) is reached again",
    ]


def test_a_node_0_that_is_back_begins_with_fewer_nodes_only_when_no_lease_can_last(nodes, start, node_of):
    _, second, _ = started = start(3, "1:3")
    kill(*started[::2])
    second.says(TYPE_AGAIN)
    began = time.monotonic()
    again = node_of(0, "1:3", last_call=0.1)
    assert generation(nodes, 1, 2) == [again, second]
    assert time.monotonic() - began > SILENCE + 2
    finish(nodes, again, second)


def test_it_may_be_lost_again_and_again(nodes, start, node_of):
    first, second = start(2, "1:2")
    for number in (1, 2):
        kill(first)
        second.says(TYPE_AGAIN)
        first = node_of(0, "1:2")
        assert generation(nodes, number, 2) == [first, second]
    finish(nodes, first, second)


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        (lambda node: os.kill(node.process.pid, SIGKILL), "is lost: its ddplaunch has ended", -9),
        (lambda node: os.kill(node.process.pid, SIGTERM), "leaves (SIGTERM)", 143),
        (lambda node: os.kill(node.process.pid, SIGHUP), "leaves (SIGHUP)", 129),
    ],
    ids=["the command is killed", "SIGTERM", "a closed terminal"],
)
def test_a_node_0_that_leaves_is_waited_for_as_well(nodes, start, node_of, end, how, status):
    first, second, third = start(3, "2:3")
    end(first)
    for node in (second, third):
        node.says(f"ddplaunch: node 0 (localhost) {how}; waiting up to 10 min {TYPE_AGAIN}\n")
    assert nodes.statuses(first) == [status]
    if status == 143:
        assert first.err.splitlines()[-2:] == [
            f"ddplaunch: node 0 ({gethostname()}) leaves (SIGTERM): the others wait until node 0 is started again",
            "ddplaunch: this node has left the job (SIGTERM)",
        ]
    again = node_of(0, "2:3")
    assert generation(nodes, 1, 3) == [again, second, third]
    finish(nodes, again, second, third)


def test_a_node_0_whose_command_is_killed_is_waited_for_once_its_workers_have_saved(nodes, start, node_of):
    first, second = start(2, "1:2", behaviour="saves_until_told")
    worker = worker_of(nodes, 0, 0)
    os.kill(first.process.pid, SIGKILL)
    nodes.sign("saving-0-0")
    nodes.sign("saving-0-1")
    assert "to come back" not in second.err
    (nodes.home / "signs" / "saved").touch()
    second.says(f"node 0 (localhost) is lost: its ddplaunch has ended; waiting up to 10 min {TYPE_AGAIN}")
    assert not lives(worker)
    again = node_of(0, "1:2")
    assert generation(nodes, 1, 2) == [again, second]
    finish(nodes, again, second)


@pytest.mark.parametrize(
    ("end", "how", "status"),
    [
        (kill, "is lost: connection ", 122),
        (lambda node: os.kill(node.process.pid, SIGKILL), "is lost: its ddplaunch has ended", -9),
        (lambda node: os.kill(node.process.pid, SIGTERM), "leaves (SIGTERM)", 143),
    ],
    ids=["agent", "command", "leaves"],
)
def test_before_anything_has_begun_the_others_wait_for_node_0_as_well(nodes, node_of, end, how, status):
    first = node_of(0, "3:4", last_call=1)
    nodes.answers()
    second = node_of(1, "3:4")
    first.says("2 of 3 nodes joined")
    end(first)
    second.says(f"node 0 (localhost) {how}")
    second.says(f"; waiting up to 10 min {TYPE_AGAIN}")
    third, again = node_of(2, "3:4"), node_of(0, "3:4", last_call=1)
    assert generation(nodes, 0, 3) == [again, second, third]
    finish(nodes, again, second, third)
    assert nodes.statuses(first) == [status]


def test_a_spare_waits_for_node_0_too(nodes, start, node_of):
    first, second = start(2, "2", "--spares", 1)
    spare = node_of(2, "2", "--spares", 1)
    first.says("is a spare")
    kill(first)
    for node in (second, spare):
        node.says(TYPE_AGAIN)
    again = node_of(0, "2", "--spares", 1, "--run-id", f"again-{nodes.port}")
    again.says("joined; starting in ")
    assert generation(nodes, 1, 2) == [again, second]
    assert f"ddplaunch: {gethostname()} is a spare: it waits until a node is lost or leaves\n" in again.err
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses(again, second, spare) == [0, 0, 0]
    assert "is node 0 from now on" not in again.err
    assert "not its own" not in again.err
    assert len({run.name for rank in range(3) for run in state_of(nodes, rank).glob("ddplaunch/runs/*")}) == 1


def test_nodes_that_have_waited_are_shown_beside_a_node_0_that_is_back(nodes, start, node_of):
    first, second = start(2, "2:3", last_call=0.1)
    kill(first)
    second.says(TYPE_AGAIN)
    again = node_of(0, "2:3", "--run-id", f"again-{nodes.port}")  # waits for a third one
    again.says("joined; starting ")
    env = {**nodes.env, "XDG_STATE_HOME": str(state_of(nodes, 0))}
    command = [*nodes.command, "ps", f"again-{nodes.port}"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert shown.count("waiting\n") == 2
    third = node_of(2, "2:3")
    assert generation(nodes, 1, 3) == [again, second, third]
    finish(nodes, again, second, third)


def test_a_spare_is_no_node_whose_workers_are_stopped(nodes, start, node_of):
    first, second = start(2, "2", "--spares", 1)
    spare = node_of(2, "2", "--spares", 1)
    first.says("is a spare")
    second.process.send_signal(SIGINT)
    assert nodes.statuses(first, second, spare) == [130, 130, 0]
    assert "stopping the workers on 2 nodes, up to" in first.err


def test_workers_may_save_until_the_lease_is_over(nodes, start, node_of):
    first, second = start(2, "1:2", behaviour="saves_until_told")
    worker = worker_of(nodes, 0, 1)
    kill(first)
    nodes.sign("saving-0-1")
    until(lambda: not worker.exists(), "the worker to be killed", SILENCE + 2)
    second.says("ddplaunch: the workers of this node are killed: other nodes may go on without it\n")
    again = node_of(0, "1:2")
    assert generation(nodes, 1, 2) == [again, second]
    finish(nodes, again, second)


# --- in vain, and who does not wait


def test_a_node_0_that_does_not_come_back_ends_the_others(nodes, start):
    first, second = start(2, "1:2", "--rdzv-timeout", "4s")
    kill(first)
    second.says(f"waiting up to 4 s {TYPE_AGAIN}\n")
    assert nodes.statuses() == [122, 122]
    assert "error: node 0 (localhost) is lost: connection " in second.err
    assert f", and node 0 was not reached again within 4 s at localhost, ports {nodes.port} to " in second.err
    assert f"(127.0.0.1:{nodes.port}: connection refused)\n\nhint: type the commands of all nodes again. " in second.err
    assert summary(nodes, 1)["why"] == "lost"


@pytest.mark.parametrize("behaviour", ["stays_until_told", "saves_until_told"])
def test_ctrl_c_while_node_0_is_waited_for_ends_the_node_at_once(nodes, start, behaviour):
    first, second = start(2, "1:2", behaviour=behaviour)
    kill(first)
    second.says(TYPE_AGAIN)
    if behaviour == "stays_until_told":
        worker = worker_of(nodes, 0, 1)
        until(lambda: not worker.exists(), "the end of the worker")
    began = time.monotonic()
    second.process.send_signal(SIGINT)
    assert nodes.statuses() == [122, 130]
    assert time.monotonic() - began < SILENCE + 2
    assert second.err.splitlines()[-1].startswith("ddplaunch: stopped by SIGINT (Ctrl-C)")


def test_a_node_that_waits_is_shown_where_it_is_and_can_be_stopped(nodes, start):
    first, second = start(2, "1:2", "--run-id", f"waits-{nodes.port}")
    kill(first)
    second.says(TYPE_AGAIN)
    env = {**nodes.env, "XDG_STATE_HOME": str(state_of(nodes, 1))}

    def verb(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*nodes.command, *words], env=env, capture_output=True, text=True, check=False)

    assert f"waits-{nodes.port}: waits for node 0, for " in verb("ps").stdout
    said = verb("stop", f"waits-{nodes.port}").stderr
    assert f"waits-{nodes.port} waits for node 0. Stopping this node, and no other that waits for it\n" in said
    assert f"ddplaunch: this node of waits-{nodes.port} has ended with status 130, " in said
    assert nodes.statuses() == [122, 130]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_is_stopped_waits_for_nobody_and_ends_as_if_it_had_been(nodes, start, rank):
    """As by who presses Ctrl-C, and kills node 0 since its workers take their time to save."""
    started = start(3, "1:3", behaviour="saves_until_told")
    started[rank].process.send_signal(SIGINT)
    nodes.signs("saving-0", 3)
    kill(started[0])
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [122, 130, 130]
    assert "error: the coordinator (node 0) was lost: connection " in started[2].err


def test_after_a_failure_without_restarts_nobody_is_waited_for(nodes, start):
    first, second, third = start(3, "1:3", behaviour="fails_while_others_save")
    (nodes.home / "signs" / "fail").touch()
    for rank in (0, 2):
        nodes.sign(f"saving-0-{rank}")
    kill(first)
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses() == [122, 122, 122]
    assert not any("to come back" in node.err for node in (second, third))


def test_after_a_failure_with_a_restart_left_node_0_is_waited_for(nodes, start, node_of):
    first, second, third = start(3, "1:3", "--max-restarts", 1, behaviour="fails_while_others_save")
    (nodes.home / "signs" / "fail").touch()
    for rank in (0, 2):
        nodes.sign(f"saving-0-{rank}")
    kill(first)
    (nodes.home / "signs" / "saved").touch()
    (nodes.home / "signs" / "fail").unlink()
    third.says(TYPE_AGAIN)
    again = node_of(0, "1:3", "--max-restarts", 1)
    assert generation(nodes, 1, 3) == [again, second, third]
    again.process.send_signal(SIGINT)
    assert nodes.statuses() == [122, 130, 130, 130]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_sigterm_to_all_nodes_is_the_end(nodes, start, order):
    """As from `kubectl delete job`, which reaches one after the other."""
    started = start(3, "1:3")
    for rank in order:
        started[rank].process.send_signal(SIGTERM)
        time.sleep(0.2)
    assert nodes.statuses() == [143] * 3
    assert not nodes.has_sign("place-1-0")


def test_a_node_that_leaves_while_node_0_is_lost_leaves(nodes, start):
    first, second, third = start(3, "1:3", behaviour="saves_until_told")
    third.process.send_signal(SIGTERM)
    nodes.sign("saving-0-2")
    kill(first)
    second.says(TYPE_AGAIN)
    (nodes.home / "signs" / "saved").touch()
    assert nodes.statuses(first, third) == [122, 143]
    second.process.send_signal(SIGINT)
    assert nodes.statuses(second) == [130]


# --- a node that the others cannot reach


def test_a_node_that_is_paused_for_longer_than_its_lease_kills_its_workers_and_comes_back(nodes, start):
    first, second, third = start(3, "1:3", behaviour="saves_until_told")
    worker = worker_of(nodes, 0, 2)
    signal_node(SIGSTOP, third)
    first.says(f"node 2 ({os.uname().nodename}) is lost: silent for {SILENCE} s")
    (nodes.home / "signs" / "saved").touch()
    assert generation(nodes, 1, 2) == [first, second]
    (nodes.home / "signs" / "saved").unlink()
    signal_node(SIGCONT, third)
    until(lambda: not worker.exists(), "its worker to be killed", 1.0)
    third.says("ddplaunch: this node was paused for ")
    third.says("and other nodes may have gone on without it; looking for node 0 (localhost) for up to 10 min\n")
    for rank in range(2):
        nodes.sign(f"saving-1-{rank}")  # since it is back
    (nodes.home / "signs" / "saved").touch()
    assert generation(nodes, 2, 3) == [first, second, third]
    finish(nodes, first, second, third)


def test_a_node_whose_agent_alone_is_stopped_has_no_worker_when_the_others_begin(nodes, start):
    first, second, third = start(3, "2:3", "--heartbeat-timeout", "5s", behaviour="saves_until_told")
    worker = worker_of(nodes, 0, 2)
    os.kill(third.agent, SIGSTOP)
    nodes.sign("saving-0-0")
    (nodes.home / "signs" / "saved").touch()
    nodes.sign("place-1-0", ENOUGH)
    assert not lives(worker)
    assert nodes.statuses(third) == [122]
    assert "did not respond for 5 s (it is stopped, as by SIGSTOP): killed, with its workers" in third.err
    finish(nodes, first, second)


@pytest.mark.parametrize("is_typed_again", [False, True])
def test_a_node_0_whose_agent_is_stopped_has_no_worker_when_another_node_0_begins(
    nodes, start, node_of, is_typed_again
):
    told = ("--heartbeat-timeout", "5s")
    first, second = start(2, "1:2", *told)
    worker = worker_of(nodes, 0, 0)
    os.kill(first.agent, SIGSTOP)
    again = node_of(0, "1:2", *told) if is_typed_again else None
    second.says(TYPE_AGAIN)
    again = again or node_of(0, "1:2", *told)
    nodes.sign("place-1-0", ENOUGH)
    assert not lives(worker)
    assert nodes.statuses(first) == [122]
    finish(nodes, again, second)


def test_a_node_0_that_is_paused_finds_the_others_again(nodes, start):
    first, second, third = start(3, "1:3")
    signal_node(SIGSTOP, first)
    second.says(f"node 0 (localhost) is lost: silent for {SILENCE} s")
    signal_node(SIGCONT, first)
    (place,) = [  # perhaps one comes before the other
        until(
            lambda: [
                place
                for at in (nodes.home / "signs").glob("place-*-0")
                if (place := json.loads(at.read_text()))["WORLD_SIZE"] == "3" and "place-0-0" not in at.name
            ],
            "all three",
            ENOUGH,
        )[-1]
    ]
    assert place["GROUP_RANK"] == "0"
    finish(nodes, first, second, third)


@pytest.mark.parametrize("ways", ["both", "there", "back", "reset", "close"])
def test_a_node_that_is_cut_off_has_no_worker_when_the_others_begin(nodes, node_of, ways):
    # longer than it would take to end what an agent leaves
    told = ("--grace-period", "60s", "--heartbeat-timeout", "5s")
    with Relay(range(nodes.port, nodes.port + 8)) as relay:
        started = [
            node_of(0, "2:3", *told, behaviour="saves_until_told", where="127.0.0.1"),
            node_of(1, "2:3", *told, behaviour="saves_until_told", where="127.0.0.1"),
            node_of(2, "2:3", *told, behaviour="ignores_the_stop", where=relay.address),
        ]
        first, second, third = started
        assert generation(nodes, 0, 3) == started
        worker = worker_of(nodes, 0, 2)
        relay.cut(ways)
        nodes.sign("saving-0-0")
        (nodes.home / "signs" / "saved").touch()  # those that are saving end, and the next are not stopped
        nodes.sign("place-1-0", ENOUGH)
        assert not lives(worker)
        assert generation(nodes, 1, 2) == [first, second]
        relay.join()
        assert generation(nodes, 2, 3) == [first, second, third]
        finish(nodes, *started)


@pytest.mark.parametrize(
    ("nnodes", "silence"), [("2:3", "60s"), ("3", "5s")], ids=["--heartbeat-timeout 60s", "--nnodes 3"]
)
def test_a_lease_is_as_long_as_node_0_has_it_whatever_was_typed_elsewhere(nodes, node_of, nnodes, silence):
    told = ("--grace-period", "60s", "--heartbeat-timeout")
    with Relay(range(nodes.port, nodes.port + 8)) as relay:
        started = [
            node_of(0, "2:3", *told, "5s", behaviour="saves_until_told", where="127.0.0.1"),
            node_of(1, "2:3", *told, "5s", behaviour="saves_until_told", where="127.0.0.1"),
            node_of(2, nnodes, *told, silence, behaviour="ignores_the_stop", where=relay.address),
        ]
        assert generation(nodes, 0, 3) == started
        worker = worker_of(nodes, 0, 2)
        relay.cut("both")
        nodes.sign("saving-0-0")
        (nodes.home / "signs" / "saved").touch()  # those that are saving end, and the next are not stopped
        assert generation(nodes, 1, 2) == started[:2]
        assert not lives(worker)
        kill(*(node for node in started[2:] if not node.has_ended))  # of a fixed size, it does not wait
        finish(nodes, *started[:2])
