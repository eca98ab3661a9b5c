"""What it costs to be watched: --live with --metrics-file beside a training, and --live alone beside ranks that do nothing."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean

from bed import Bed, Figure, Measured, program

_PAIRS = 16  # of a round: for a second ddplaunch runs, for a second it is stopped
_PHASE = 1.0  # seconds, in which --live asks once, and the sampler looks once
_QUIET = 256  # workers
_START = 20.0  # seconds in which all of them start
_WATCHED = 30.0  # seconds
_PATIENCE = 120.0  # seconds
_WAITING = ("--start-method", "forkserver", "--preload", "", "--nproc-per-node", str(_QUIET), program("sleeps"))
_TICK = os.sysconf("SC_CLK_TCK")


def live(bed: Bed) -> Iterator[Figure]:
    """Four workers train, with and without; then 256 sleep."""
    watched = ["--live", "--metrics-file", str(bed.folder / "job.prom")]
    rounds = bed.rounds(9)
    pairs = _steps_in_turns(bed, watched, rounds * _PAIRS)
    running, stopped = (mean(rates) for rates in zip(*pairs, strict=True))
    slower = [(without / with_ - 1) * 100 for with_, without in _rounds(pairs)]
    yield Figure(
        name="training, 4 workers: slower with --live, samples and --metrics-file",
        value=Measured.of(slower),
        unit="%",
        target=1,
        how=f"{running:.1f} steps/s, {stopped:.1f} while ddplaunch is stopped; {rounds} rounds of {_PAIRS} x {2 * _PHASE:g} s",
    )
    bare, all_of_it = (_taken(bed, _training(options, os.devnull, 600)) for options in (["--no-sample"], watched))
    yield Figure(
        name="training, 4 workers: CPU that ddplaunch takes more for these",
        value=all_of_it - bare,
        unit="%",
        how=f"of a core, in {_WATCHED:g} s: {all_of_it:.2f}% with them, {bare:.2f}% without",
    )
    yield Figure(
        name=f"{_QUIET} workers that wait: CPU of ddplaunch with --live",
        value=_taken(bed, ["--live", *_WAITING]),
        unit="%",
        target=2,
        how=f"of a core, in {_WATCHED:g} s: front, agent, what writes the files, what makes the rows",
    )


def _training(options: Sequence[str], file: str, seconds: float) -> list[str]:
    return [*options, "--nproc-per-node", "4", program("trains_on"), file, str(seconds)]


def _steps_in_turns(bed: Bed, options: Sequence[str], pairs: int) -> list[tuple[float, float]]:
    """Return the steps a second of one training while ddplaunch runs and while all its processes are stopped, in turns.

    Two trainings differ by more than what is sought, since their memory lies elsewhere; so does one from minute to minute.
    """
    file = bed.folder / "steps"
    seconds = _START + 2 * pairs * _PHASE + 1
    command = _on_terminal(bed, [*bed.ddplaunch, *_training(options, str(file), seconds)])
    time.sleep(_START)
    ours, turns = _ours(command.pid), [time.monotonic()]
    for _ in range(pairs):
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            time.sleep(_PHASE)
            for pid in ours if signum == signal.SIGCONT else reversed(ours):  # the agent looks after the front
                os.kill(pid, signum)
            turns.append(time.monotonic())
    assert command.wait(_PATIENCE) == 0
    ends: list[float] = json.loads(file.read_text())

    def steps(at: float) -> float:
        """Return how many steps were made by then, the part of the one that was being made too."""
        done = bisect(ends, at)
        assert 0 < done < len(ends), "this machine is too busy: the training had not begun"
        return done + (at - ends[done - 1]) / (ends[done] - ends[done - 1])

    rates = [(steps(end) - steps(begin)) / (end - begin) for begin, end in pairwise(turns)]
    return list(zip(rates[::2], rates[1::2], strict=True))


def _rounds(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of each round's pairs."""
    return [
        (mean(with_ for with_, _ in some), mean(without for _, without in some))
        for some in (pairs[first : first + _PAIRS] for first in range(0, len(pairs), _PAIRS))
    ]


def _taken(bed: Bed, words: Sequence[str]) -> float:
    """Return the percent of a core that all processes of ddplaunch take beside these workers."""
    command = _on_terminal(bed, [*bed.ddplaunch, *words])
    try:
        time.sleep(_START)
        before, began = _cpu_seconds(command.pid), time.monotonic()
        time.sleep(_WATCHED)
        return 100 * (_cpu_seconds(command.pid) - before) / (time.monotonic() - began)
    finally:
        command.terminate()
        command.wait()


def _ours(front: int) -> list[int]:
    """Return a command, its agent and their helpers, without the workers."""
    ours = [front]
    for pid in ours:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ours += (int(child) for child in children if b"RANK=" not in Path(f"/proc/{child}/environ").read_bytes())
        if pid != front:
            break  # below the agent are its own children alone, and those of the fork server are workers
    return ours


def _cpu_seconds(front: int) -> float:
    """Return the CPU that they have taken so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in _ours(front))
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / _TICK


def _on_terminal(bed: Bed, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command on a terminal that is read all the time."""
    ours, theirs = pty.openpty()
    started = bed.start(argv, stdin=theirs, stdout=theirs, stderr=theirs, env={**bed.env, "TERM": "xterm"})
    os.close(theirs)

    def read() -> None:
        with suppress(OSError):  # its end
            while os.read(ours, 1 << 16):
                pass
        os.close(ours)

    threading.Thread(target=read, daemon=True).start()
    return started
