"""What launchers do differently, where the figure is no time: statuses, what is left, what is said, what is torn."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bed import Bed, Figure, program

_WORKERS = 4
_PRINTED = 10_000  # lines of each worker, as in differs.py
_PATIENCE = 60.0  # seconds
_LEFT_AFTER = 5.0  # seconds after which what still runs is taken for left


def differences(bed: Bed) -> Iterator[Figure]:
    """Do the same to both, and count."""
    both = (bed.ddplaunch, [*bed.torchrun, "--standalone"])
    mine, theirs = (_run(bed, launcher, "7")[0] for launcher in both)
    yield Figure(name="a worker ends with 7: exit status", value=mine, unit="", how=f"torchrun {theirs}")
    mine, theirs = (_blamed(_run(bed, launcher, "both")[1]) for launcher in both)
    how = f"torchrun {theirs}; rank {_WORKERS - 1} ends first, rank 0 20 ms later"
    yield Figure(name="two workers end: rank that is blamed", value=mine, unit="", how=how)
    mine, theirs = (_own_lines(_run(bed, launcher, "raise")[1]) for launcher in both)
    yield Figure(name="a worker raises: lines besides its traceback", value=mine, unit="", how=f"torchrun {theirs}")
    mine, theirs = (_left(bed, launcher, "child") for launcher in both)
    how = f"torchrun {theirs}; {_LEFT_AFTER:g} s after a worker with a child in a session of its own has failed"
    yield Figure(name="processes left by a failed job", value=mine, unit="", target=0, how=how)
    for signum in (signal.SIGKILL, signal.SIGUSR1):
        mine, theirs = (_left(bed, launcher, "wait", signum) for launcher in both)
        how = f"torchrun {theirs}; after {_LEFT_AFTER:g} s, of {_WORKERS}"
        yield Figure(
            name=f"{signum.name} for the launcher: workers that run without it", value=mine, unit="", target=0, how=how
        )
    mine, theirs = (_threads(_run(bed, ["env", "-u", "OMP_NUM_THREADS", *launcher], "threads")[1]) for launcher in both)
    yield Figure(name=f"OMP_NUM_THREADS of {_WORKERS} workers", value=mine, unit="", how=f"torchrun {theirs}")
    mine, theirs = (_torn(_run(bed, launcher, "print")[1]) for launcher in both)
    how = f"torchrun {theirs}, of {_WORKERS * _PRINTED:,} lines that are printed in words, to a file"
    yield Figure(name="torn lines", value=mine, unit="", target=0, how=how)


def _run(bed: Bed, launcher: Sequence[str], what: str) -> tuple[int, str]:
    """Run a job; give its status and all that it wrote."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder, Path(folder, "output").open("w+b") as output:
        signs = Path(folder, "signs")
        signs.mkdir()
        argv = [*launcher, "--nproc-per-node", str(_WORKERS), program("differs"), what, str(signs)]
        command = bed.start(argv, stdout=output, stderr=output)
        command.wait()
        output.seek(0)
        return command.returncode, output.read().decode(errors="replace")


def _blamed(text: str) -> int:
    """The rank that ddplaunch or torchrun names as the cause."""
    found = re.search(r"^error: rank (\d+) ", text, re.MULTILINE) or re.search(
        r"Root Cause.*?rank +: (\d+)", text, re.DOTALL
    )
    return int(found[1]) if found else -1


def _own_lines(text: str) -> int:
    traceback = re.compile(r"(\[\w+\]:? )*(Traceback|  File|    |ValueError)")
    return sum(not traceback.match(line) for line in text.splitlines())


def _threads(text: str) -> int:
    found = re.search(r"^(?:\[\d\] )?(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else -1


def _torn(text: str) -> int:
    whole = re.compile(r"(\[\d\] )?rank \d line \d+")
    return sum(not whole.fullmatch(line) for line in text.splitlines() if "ddplaunch:" not in line)


def _left(bed: Bed, launcher: Sequence[str], what: str, signum: int | None = None) -> int:
    """How many processes run on when the launcher has ended, or after a signal that it should outlive."""
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        command = bed.start([*launcher, "--nproc-per-node", str(_WORKERS), program("differs"), what, folder])
        _ready(folder)
        if signum is not None:
            command.send_signal(signum)
        by = time.monotonic() + _LEFT_AFTER
        while time.monotonic() < by and (command.poll() is None or bed.left()):
            time.sleep(0.05)
        left = len(bed.left()) if command.poll() is not None else 0
        if command.poll() is None:
            command.terminate()
            command.wait()
        bed.end_left()
        return left


def _ready(folder: str) -> None:
    by = time.monotonic() + _PATIENCE
    while len(list(Path(folder).iterdir())) < _WORKERS:
        assert time.monotonic() < by, "the workers do not start"
        time.sleep(0.01)
    time.sleep(0.5)  # the launcher is to be at rest
