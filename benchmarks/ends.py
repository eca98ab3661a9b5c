"""How long after the crash of one worker all others are gone and the command has returned."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bed import Bed, Beside, Figure, Rounds, program

_GRACE = 1.0  # seconds


def crash(bed: Bed) -> Iterator[Figure]:
    """One of 8 workers crashes while the others wait."""
    ours = [*bed.ddplaunch, "--nproc-per-node", "8"]
    rounds, few = bed.rounds(9), bed.rounds(3)
    mine = Rounds(rounds, lambda: _after_crash(bed, ours, status=3)).of(_milliseconds)
    theirs = Rounds(few, lambda: _after_crash(bed, [*bed.torchrun, "--standalone", *ours[-2:]], status=1))
    how = f"{rounds} rounds; torchrun {theirs.of(_milliseconds):.0f} ms, {few} rounds"
    beside = Beside("one of 8 workers crashes: all are gone", mine / 1e3, theirs.medians()[0], "s")
    yield Figure(name="crash, 8 workers: others gone after", value=mine, unit="ms", target=25, how=how, beside=beside)
    patient = [*ours, "--grace-period", str(_GRACE)]
    killed = Rounds(few, lambda: _after_crash(bed, patient, "stubborn", status=3) - _GRACE).of(_milliseconds)
    slow = [*bed.torchrun, "--standalone", *ours[-2:], "--shutdown-timeout", str(int(_GRACE))]
    theirs_slow = _after_crash(bed, slow, "stubborn", status=1)
    how = f"{_GRACE:g} s of grace; {few} rounds; torchrun --shutdown-timeout {_GRACE:g}: {theirs_slow:.1f} s"
    name = "crash, others ignore SIGTERM: beyond the grace period"
    beside = Beside("the same, the others ignore SIGTERM", killed / 1e3 + _GRACE, theirs_slow, "s")
    yield Figure(name=name, value=killed, unit="ms", target=50, how=how, beside=beside)


def raising(bed: Bed) -> Iterator[Figure]:
    """One of 4 workers in a process group raises while the others wait for it in a collective."""
    rounds = bed.rounds(7)
    alone = bed.training_loop(1, [*bed.python, program("raises")])
    taken = Rounds(
        rounds,
        partial(_after_raise, bed, [*bed.ddplaunch, "--nproc-per-node", "4", program("raises")]),
        partial(_after_raise, bed, [*bed.torchrun, "--standalone", "--nproc-per-node", "4", program("raises")]),
        partial(_after_raise, bed, alone, status=0),  # that of the loop
    )
    ours, theirs, python = taken.medians()
    how = f"{ours:.2f} s, torchrun {theirs:.2f} s, Python alone {python:.2f} s; {rounds} rounds"
    yield Figure(
        name="a worker of 4 raises: until the prompt, to torchrun",
        value=taken.of(lambda ours, theirs, _: ours / theirs),
        unit="",
        how=how,
        beside=Beside("one of 4 workers in a process group raises: back at the prompt", ours, theirs, "s"),
    )


def restart(bed: Bed) -> Iterator[Figure]:
    """One of 4 workers that have imported torch crashes, and all start again."""
    rounds = bed.rounds(5)
    ways = {way: [*bed.ddplaunch, "--start-method", way, "--max-restarts", "1"] for way in ("forkserver", "spawn")}
    taken = Rounds(
        rounds,
        *(partial(_restarted, bed, command) for command in ways.values()),
        lambda: _restarted(bed, [*bed.torchrun, "--standalone", "--max-restarts", "1"]),
    )
    forked, fresh, theirs = taken.medians()
    how = f"fresh processes {fresh * 1e3:.0f} ms, torchrun {theirs * 1e3:.0f} ms; {rounds} rounds"
    yield Figure(
        name="restart, 4 workers: crash to first line of all",
        value=taken.of(lambda forked, *_: forked * 1e3),
        unit="ms",
        target=300,
        how=how,
        beside=Beside("a crash, and all 4 workers run again", forked, theirs, "s"),
    )


def _restarted(bed: Bed, launcher: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        bed.seconds([*launcher, "--nproc-per-node", "4", program("restarts"), folder])
        again = (float(path.read_text()) for path in Path(folder).glob("again-*"))
        return max(again) - float(Path(folder, "crashed").read_text())


def _after_raise(bed: Bed, command: Sequence[str], status: int = 1) -> float:
    """Return the seconds from the exception until the command has returned."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        ended = bed.start([*command, folder]).wait()
        now = time.monotonic()
        assert ended == status, f"{command[0]} ended with {ended}, not {status}"
        return now - float(Path(folder, "raised").read_text())


def _milliseconds(seconds: float) -> float:
    return seconds * 1e3


def _after_crash(bed: Bed, launcher: Sequence[str], *words: str, status: int) -> float:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        command = bed.start([*launcher, program("waits"), folder, "crash", *words])
        ended = command.wait()
        now = time.monotonic()
        left = bed.left()
        assert ended == status, f"{launcher[0]} ended with {ended}, not {status}"
        assert not left, f"{launcher[0]} left processes: {left}"
        return now - float(Path(folder, "crashed").read_text())
