"""How soon a job trains again that has lost a node: with one command that started all nodes; by hand, once node 0 is back."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bed import Bed, Figure, Measured, program
from nodes import free_ports

_HEARTBEAT = 4.0  # seconds
_KILLED_WITHIN = 2.0  # seconds that the coordinator adds to a lease
_LEASE = _HEARTBEAT + _KILLED_WITHIN
_STEPS = 20  # until a node is lost
_SPARE = 5.0  # seconds that a spare has before
_AWAY = 1.0  # seconds until the command of node 0 is typed again
_PATIENCE = 120.0  # seconds
_WARM = ("--start-method", "forkserver")


def survive(bed: Bed) -> Iterator[Figure]:
    """Nodes on this machine, each with a worker; one is killed, or stops, so that only its silence tells of the loss."""
    rounds = bed.rounds(6)
    elastic, replaced = ("--nnodes", "3:5"), ("--nnodes", "2", "--spares", "1")
    for name, lost, options, how, target in (
        ("node 0 of 5 killed", 0, elastic, "kill", 3.0),
        ("node 2 of 5 killed", 2, elastic, "kill", 3.0),
        ("node 0 of 5 silent: beyond its lease", 0, elastic, "stop", 3.0),
        ("the same, imports kept warm: beyond its lease", 0, (*elastic, *_WARM), "stop", 3.0),
        ("node 0 of 2 killed, a spare", 0, replaced, "kill", 3.0),
        ("a node of 2 silent, a spare: beyond its lease", 1, replaced, "stop", 3.0),
        ("the same, imports kept warm: beyond its lease", 1, (*replaced, *_WARM), "stop", 1.0),
    ):
        beyond = _LEASE if how == "stop" else 0.0
        taken = [_again(bed, lost, options, how) - beyond for _ in range(rounds)]
        yield _figure(f"{name}: steps again after", taken, target)
    yield _figure("by hand, node 0 of 3 is back", [_back(bed) for _ in range(rounds)], _LEASE + 3.0)


def _figure(name: str, taken: Sequence[float], target: float) -> Figure:
    how = f"{len(taken)} rounds; --heartbeat-timeout {_HEARTBEAT:g}s"
    return Figure(name=name, value=Measured.of(taken), unit="s", target=target, how=how)


def _again(bed: Bed, lost: int, options: Sequence[str], how: str) -> float:
    """Return the seconds from the loss of a node, of which one command started all, to the first step of the next generation."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        steps = Path(folder, "steps")
        words = [
            *bed.ddplaunch,
            "--simulate",
            *options,
            "--nproc-per-node",
            "1",
            "--heartbeat-timeout",
            f"{_HEARTBEAT:g}s",
        ]
        steps.touch()
        command = bed.start([*words, program("steps_on"), str(steps)])
        try:
            _until(lambda: len(_noted(steps)) > _STEPS)
            if "--spares" in options:  # it imports meanwhile what it will need
                time.sleep(_SPARE)
            agent, front = _agent_and_front(steps, lost, command.pid)
            gone = time.monotonic()
            for pid in [agent] if how == "kill" else reversed(_family(front)):
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            return _stepped(steps, gone, [command])
        finally:
            bed.end_left()
            command.wait()


def _back(bed: Bed) -> float:
    """Return the seconds from when the command of a node 0 that was killed is typed again to the first step with it."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        steps, port = Path(folder, "steps"), free_ports(10)
        steps.touch()
        common = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--heartbeat-timeout", f"{_HEARTBEAT:g}s", "--nnodes", "2:3"]
        words = [*bed.ddplaunch, *common, "--nproc-per-node", "1"]
        words_of = [[*words, "--node-rank", str(rank), program("steps_on"), str(steps)] for rank in range(3)]
        commands = [bed.start(argv) for argv in words_of]
        try:
            _until(lambda: len(_noted(steps)) > _STEPS)
            for pid in reversed(_family(commands[0].pid)):
                os.kill(pid, signal.SIGKILL)
            time.sleep(_AWAY)
            back = time.monotonic()
            return _stepped(steps, back, [bed.start(words_of[0]), *commands[1:]])
        finally:
            bed.end_left()
            for command in commands:
                command.wait()


def _stepped(steps: Path, since: float, commands: Sequence[subprocess.Popen[bytes]]) -> float:
    """Wait for the first step of another generation, and for the good end of these commands; return when that step was."""
    _until(lambda: _noted(steps)[-1][1] > 0)
    found = next(at for at, generation in _noted(steps) if generation > 0) - since
    Path(f"{steps}.enough").touch()
    assert [command.wait(_PATIENCE) for command in commands] == [0] * len(commands)
    return found


def _agent_and_front(steps: Path, rank: int, command: int) -> tuple[int, int]:
    """Return the agent of the simulated node on which this rank is, and the front of that node."""
    (dispatcher, *_) = _children(command)
    above = [int(Path(f"{steps}.{rank}").read_text())]
    while above[-1] != dispatcher:
        above.append(int(Path(f"/proc/{above[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return above[-3], above[-2]


def _family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for one in found:
        found += _children(one)
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _noted(steps: Path) -> list[tuple[float, int]]:
    """Return when each step was taken, and in which generation."""
    rows = (line.split() for line in steps.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [(float(at), int(generation)) for at, generation in rows]


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
