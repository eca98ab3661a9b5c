"""How soon a job trains again that has lost a node: one that the command starts again without, or node 0 that is typed again."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import Popen

from bed import Bed, Figure, Measured, program
from nodes import free_ports

_HEARTBEAT = 4.0  # seconds
_LEASE = _HEARTBEAT + 2.0  # seconds until the workers of a node that is silent have certainly been killed
_STEPS = 20  # until a node is lost
_SPARE = 5.0  # seconds that a spare has before
_PATIENCE = 120.0  # seconds
_WARM = ("--start-method", "forkserver")
_ELASTIC, _SPARED = ("--nnodes", "2:3"), ("--nnodes", "2", "--spares", "1")


def survive(bed: Bed) -> Iterator[Figure]:
    """Nodes on this machine, each with a worker; one is killed, or stops, so that only its silence tells of the loss."""
    rounds = bed.rounds(6)
    for name, lost, options, how, target in (
        ("node 0 of 3 killed", 0, _ELASTIC, signal.SIGKILL, 3.0),
        ("node 2 of 3 killed", 2, _ELASTIC, signal.SIGKILL, 3.0),
        ("node 0 of 3 silent: beyond its lease", 0, _ELASTIC, signal.SIGSTOP, 3.0),
        ("a node of 2 silent, a spare: beyond its lease", 1, _SPARED, signal.SIGSTOP, 3.0),
        ("the same, imports kept warm: beyond its lease", 1, (*_SPARED, *_WARM), signal.SIGSTOP, 1.0),
    ):
        beyond = _LEASE if how is signal.SIGSTOP else 0.0
        taken = [_of_one_command(bed, lost, options, how) - beyond for _ in range(rounds)]
        yield _figure(f"{name}: steps again after", taken, target)
    taken = [_by_hand(bed) - _LEASE for _ in range(rounds)]
    yield _figure("by hand, node 0 of 3 killed: steps after it is typed again, beyond a lease", taken, 3.0)


def _figure(name: str, taken: Sequence[float], target: float) -> Figure:
    how = f"{len(taken)} rounds; --heartbeat-timeout {_HEARTBEAT:g}s"
    return Figure(name=name, value=Measured.of(taken), unit="s", target=target, how=how)


def _of_one_command(bed: Bed, lost: int, options: Sequence[str], how: signal.Signals) -> float:
    """Return the seconds from the loss of the node of this rank to the first step without it; one command has started all."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        steps = Path(folder, "steps")
        steps.touch()
        command = bed.start([*_words(bed, options), "--simulate", program("steps_on"), str(steps)])
        try:
            _until(lambda: len(_noted(steps)) > _STEPS)
            if "--spares" in options:  # it imports what it will need
                time.sleep(_SPARE)
            gone = time.monotonic()
            worker = int(Path(f"{steps}.{lost}").read_text())
            for pid in reversed(_family(_node_of(command.pid, worker))):
                os.kill(pid, how)
            return _until_again(steps, [command]) - gone
        finally:
            bed.end_left()
            command.wait()


def _by_hand(bed: Bed) -> float:
    """Return the seconds from when the command of a node 0 that was killed is typed again to the next step."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        steps, endpoint = Path(folder, "steps"), f"127.0.0.1:{free_ports(10)}"
        steps.touch()
        words = [*_words(bed, _ELASTIC), "--rdzv-endpoint", endpoint, "--rdzv-conf", "last_call_timeout=0"]
        words_of = [[*words, "--node-rank", str(rank), program("steps_on"), str(steps)] for rank in range(3)]
        commands = [bed.start(argv) for argv in words_of]
        try:
            _until(lambda: len(_noted(steps)) > _STEPS)
            for pid in reversed(_family(commands[0].pid)):
                os.kill(pid, signal.SIGKILL)
            commands[0].wait()
            back = time.monotonic()
            commands[0] = bed.start(words_of[0])
            return _until_again(steps, commands) - back
        finally:
            bed.end_left()
            for command in commands:
                command.wait()


def _words(bed: Bed, options: Sequence[str]) -> list[str]:
    return [*bed.ddplaunch, "--heartbeat-timeout", f"{_HEARTBEAT:g}s", "--nproc-per-node", "1", *options]


def _until_again(steps: Path, commands: Sequence[Popen[bytes]]) -> float:
    """Return when the first step of another generation was taken, and see that the job can end after it."""
    _until(lambda: _noted(steps)[-1][1] > 0)
    again = next(at for at, generation in _noted(steps) if generation > 0)
    Path(f"{steps}.enough").touch()
    for command in commands:
        assert command.wait(_PATIENCE) == 0
    return again


def _node_of(command: int, worker: int) -> int:
    """Return the process of a simulated node below which this worker runs."""
    (coordinator,) = _children(command)
    return next(node for node in _children(coordinator) if worker in _family(node))


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
