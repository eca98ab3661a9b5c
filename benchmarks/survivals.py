"""How soon a job trains again that has lost a node: node 0, whose place another takes, or one whose place a spare takes."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bed import Bed, Figure, Measured, program
from nodes import free_ports

_HEARTBEAT = 4.0  # seconds
_STEPS = 20  # until a node is lost
_SPARE = 5.0  # seconds that a spare has before
_PATIENCE = 120.0  # seconds
_WARM = ("--start-method", "forkserver")


def survive(bed: Bed) -> Iterator[Figure]:
    """Nodes on this machine, each with a worker; one is killed, or stops, so that only its silence tells of the loss."""
    rounds = bed.rounds(6)
    first, replaced = ("--nnodes", "3:5"), ("--nnodes", "2", "--spares", "1")
    for name, nodes, lost, options, how, target in (
        ("node 0 of 5 killed", 5, 0, first, "kill", 3.0),
        ("node 0 of 5 silent: beyond the heartbeat", 5, 0, first, "stop", 3.0),
        ("the same, imports kept warm: beyond the heartbeat", 5, 0, (*first, *_WARM), "stop", 3.0),
        ("a node of 2 silent, a spare: beyond the heartbeat", 3, 1, replaced, "stop", 2.0),
        ("the same, imports kept warm: beyond the heartbeat", 3, 1, (*replaced, *_WARM), "stop", 1.0),
    ):
        taken = [_again(bed, nodes, lost, options, how) for _ in range(rounds)]
        beyond = _HEARTBEAT if how == "stop" else 0.0
        yield Figure(
            name=f"{name}: steps again after",
            value=Measured.of([seconds - beyond for seconds in taken]),
            unit="s",
            target=target,
            how=f"{rounds} rounds; --heartbeat-timeout {_HEARTBEAT:g}s",
        )


def _again(bed: Bed, nodes: int, lost: int, options: Sequence[str], how: str) -> float:
    """Return the seconds from the loss of a node to the first step of the next generation."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        steps, port = Path(folder, "steps"), free_ports(10)
        steps.touch()
        common = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--heartbeat-timeout", f"{_HEARTBEAT:g}s"]
        words = [*bed.ddplaunch, *common, *options, "--nproc-per-node", "1"]
        words_of = [[*words, "--node-rank", str(rank), program("steps_on"), str(steps)] for rank in range(nodes)]
        spares = int("--spares" in options)
        commands = [bed.start(argv) for argv in words_of[: nodes - spares]]
        try:
            _until(lambda: len(_noted(steps)) > _STEPS)
            if spares:  # it comes when the job has its nodes, and imports what it will need
                commands.append(bed.start(words_of[-1]))
                time.sleep(_SPARE)
            gone = time.monotonic()
            for pid in reversed(_family(commands[lost].pid)):
                os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            _until(lambda: _noted(steps)[-1][1] > 0)
            found = next(at for at, generation in _noted(steps) if generation > 0) - gone
            Path(folder, "steps.enough").touch()
            for rank, command in enumerate(commands):
                assert rank == lost or command.wait(_PATIENCE) == 0
            return found
        finally:
            bed.end_left()
            for command in commands:
                command.wait()


def _family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for one in found:
        found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def _noted(steps: Path) -> list[tuple[float, int]]:
    """Return when each step was taken, and in which generation."""
    rows = (line.split() for line in steps.read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [(float(at), int(generation)) for at, generation in rows]


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
