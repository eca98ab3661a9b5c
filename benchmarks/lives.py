"""What it costs to be watched: --live with --metrics-file beside a training, and --live alone beside ranks that do nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bed import Bed, Figure, Rounds, program

_TRAINS = 20  # seconds
_QUIET = 256  # workers
_START = 20.0  # seconds in which all of them start
_WATCHED = 30.0  # seconds
_PATIENCE = 120.0  # seconds
_TRAINING = ("--nproc-per-node", "4", program("trains_on"), os.devnull, "600")
_WAITING = ("--start-method", "forkserver", "--preload", "", "--nproc-per-node", str(_QUIET), program("sleeps"))
_TICK = os.sysconf("SC_CLK_TCK")


def live(bed: Bed) -> Iterator[Figure]:
    """Four workers train, with and without; then 256 sleep."""
    watched = ["--live", "--metrics-file", str(bed.folder / "job.prom")]
    rounds = bed.rounds(9)
    taken = Rounds(rounds, lambda: _steps(bed, ["--no-sample"]), lambda: _steps(bed, watched))
    plain, with_live = taken.medians()
    yield Figure(
        name="training, 4 workers: slower with --live, samples and --metrics-file",
        value=taken.of(lambda plain, with_live: (plain / with_live - 1) * 100),
        unit="%",
        target=1,
        how=f"{plain:.0f} and {with_live:.0f} steps/s; {rounds} rounds of {_TRAINS} s",
    )
    bare, all_of_it = (_taken(bed, [*options, *_TRAINING]) for options in (["--no-sample"], watched))
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


def _steps(bed: Bed, options: Sequence[str]) -> float:
    file = bed.folder / "steps"
    command = [*bed.ddplaunch, *options, "--nproc-per-node", "4", program("trains_on"), str(file), str(_TRAINS)]
    assert _on_terminal(bed, command).wait(_PATIENCE) == 0
    return float(file.read_text())


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


def _cpu_seconds(front: int) -> float:
    """Return the CPU that a command, its agent and their helpers have taken so far, without the workers'."""
    ours = [front]
    for pid in ours:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ours += (int(child) for child in children if b"RANK=" not in Path(f"/proc/{child}/environ").read_bytes())
        if pid != front:
            break  # below the agent are its own children alone, and those of the fork server are workers
    return (
        sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in ours)
        / _TICK
    )


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
