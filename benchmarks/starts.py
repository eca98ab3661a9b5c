"""How long it takes until workers run and the command has returned, when they have little or nothing to do."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bed import Bed, Beside, Figure, Measured, Rounds, program

_USED_BEFORE = 21  # runs; from then on each start also removes the oldest run
_HANGS = 40.0  # seconds; ten steps take half of that at most
_OURS = ("forkserver", "fresh processes")
_MOST_FAILED = 20  # runs of one of the other ways
_AT_MOST = {4: 0.45, 8: 0.22}  # of torchrun's time to the last line, by the number of workers


def hello(bed: Bed) -> Iterator[Figure]:
    """Two workers say hello, without torch."""
    script = program("hello")
    ours = [*bed.ddplaunch, "--nproc-per-node", "2", script]
    for _ in range(_USED_BEFORE):
        bed.seconds(ours)
    rounds, few = bed.rounds(30), bed.rounds(5)
    loop = [*bed.shell_loop(2, [*bed.python, script])]
    taken = Rounds(rounds, lambda: bed.seconds(loop), lambda: bed.seconds(ours))
    theirs = Rounds(
        few,
        lambda: bed.seconds([*bed.torchrun, "--standalone", "--nproc-per-node", "2", script]),
        lambda: bed.seconds(ours),
    )
    by_hand, mine = taken.medians()
    how = f"{mine * 1e3:.0f} ms, the loop {by_hand * 1e3:.0f} ms; {rounds} rounds"
    above = taken.of(lambda loop, mine: (mine - loop) * 1e3)
    yield Figure(name="hello, 2 workers: above the shell loop", value=above, unit="ms", target=150, how=how)
    theirs_at_all, mine = theirs.medians()
    yield Figure(
        name="hello, 2 workers: times faster than torchrun",
        value=theirs.of(lambda theirs, mine: theirs / mine),
        unit="x",
        target=12,
        more_is_better=True,
        how=f"torchrun {theirs_at_all * 1e3:.0f} ms; {few} rounds",
        beside=Beside("hello world, 2 workers", mine, theirs_at_all, "s"),
    )


def torch_import(bed: Bed) -> Iterator[Figure]:
    """Four workers import torch."""
    script = program("imports_torch")
    rounds = bed.rounds(5)
    bed.seconds([*bed.python, script])  # from here on its files are in memory
    taken = Rounds(
        rounds,
        lambda: bed.seconds(bed.shell_loop(4, [*bed.python, script])),
        lambda: bed.seconds([*bed.ddplaunch, "--nproc-per-node", "4", script]),
    )
    theirs = bed.seconds([*bed.torchrun, "--standalone", "--nproc-per-node", "4", script])
    loop, mine = taken.medians()
    how = f"{mine:.2f} s, the loop {loop:.2f} s, {rounds} rounds; torchrun {theirs:.2f} s"
    ratio = taken.of(lambda loop, mine: mine / loop)
    yield Figure(name="import torch, 4 workers: to the shell loop", value=ratio, unit="x", target=1.05, how=how)


def steps(bed: Bed) -> Iterator[Figure]:
    """1, 2, 4 and 8 workers train for ten steps: what every job does before it does anything else."""
    for workers in (1, 2, 4, 8):
        yield from _steps(bed, workers)


def _steps(bed: Bed, workers: int) -> Iterator[Figure]:
    command = ["--nproc-per-node", str(workers)]
    by_hand = [*bed.python]
    ways: dict[str, Callable[[list[str]], list[str] | None]] = {
        "forkserver": lambda script: [*bed.ddplaunch, "--start-method", "forkserver", *command, *script],
        "fresh processes": lambda script: [*bed.ddplaunch, "--start-method", "spawn", *command, *script],
        "torchrun": lambda script: [*bed.torchrun, "--standalone", *command, *script],
        "the loop": lambda script: bed.training_loop(workers, [*by_hand, *script]),
        "mpirun": lambda script: bed.mpirun(workers, [*by_hand, *script]),
    }
    known = {name: way for name, way in ways.items() if way([]) is not None}
    # a round of 8 workers takes a minute on two cores, most of it the others' ways
    rounds = bed.rounds(3)
    marks: dict[str, list[list[float]]] = {name: [] for name in known}  # first step, tenth step, end
    failed = dict.fromkeys(known, 0)
    for _ in range(rounds):
        for name, way in known.items():
            while (mark := _marks(bed, way)) is None:
                failed[name] += 1
                assert failed[name] <= (0 if name in _OURS else _MOST_FAILED), f"{name} fails"
            marks[name].append(mark)
    without = "".join(
        f"; without {number} runs of {name} that failed or hung" for name, number in failed.items() if number
    )
    for at, what in enumerate(("first DDP step", "tenth DDP step", "ten DDP steps and out")):
        taken = Rounds(rounds, *(iter([row[at] for row in marks[name]]).__next__ for name in known))
        seconds = dict(zip(known, taken.medians(), strict=True))
        took = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        label = f"import torch, train ten steps, end: {workers} workers"
        is_shown = at == 2 and workers in _AT_MOST
        yield Figure(
            name=f"{what}, {workers} worker{'s' * (workers > 1)}: to torchrun",
            value=taken.of(lambda *row: row[0] / row[2]),
            unit="x",
            target=_AT_MOST.get(workers) if at == 2 else None,
            how=f"{took}; {rounds} rounds{without}",
            beside=Beside(label, seconds["forkserver"], seconds["torchrun"], "s") if is_shown else None,
        )


def _marks(bed: Bed, way: Callable[[list[str]], Sequence[str] | None]) -> list[float] | None:
    """Seconds until the last worker has made its first and its tenth step, and until the command has returned.

    None if the job has failed, or not ended in a minute: torch at times aborts or hangs when a group ends.
    """
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        argv = way([program("steps"), folder])
        assert argv is not None
        began = time.monotonic()
        command = bed.start(argv)
        try:
            ended = command.wait(_HANGS)
        except subprocess.TimeoutExpired:
            ended = None
        took = time.monotonic() - began
        if ended != 0:
            bed.end_left()
            command.wait()
            return None
        steps = [[float(at) for at in path.read_text().split()] for path in Path(folder).iterdir()]
        return [max(step) - began for step in zip(*steps, strict=True)] + [took]


def kept_warm(bed: Bed) -> Iterator[Figure]:
    """Four workers train again and again, forked from the interpreter that the first run has left."""
    command = [*bed.ddplaunch, "--keep-warm", "5", "--nproc-per-node", "4"]
    rounds, failed = bed.rounds(9), 0
    took: list[float] = []  # milliseconds
    try:
        while len(took) <= rounds:
            if (mark := _marks(bed, lambda script: [*command, *script])) is not None:
                took.append(mark[0] * 1e3)
                continue
            failed += 1
            assert failed <= _MOST_FAILED, "--keep-warm fails"
            took.clear()  # what was kept has ended with that run
    finally:
        bed.end_left()
    cold, *warm = took
    yield Figure(
        name="first DDP step, 4 workers, a run after the first with --keep-warm",
        value=Measured.of(warm),
        unit="ms",
        target=500,
        how=f"the first run {cold / 1e3:.2f} s; {rounds} rounds"
        + (f"; without {failed} that failed" if failed else ""),
    )


def many(bed: Bed) -> Iterator[Figure]:
    """256 and 1,024 workers that do nothing."""
    for workers, rounds in ((256, bed.rounds(5)), (1024, bed.rounds(3))):
        yield from _many(bed, workers, rounds)


def _many(bed: Bed, workers: int, rounds: int) -> Iterator[Figure]:
    tiny, ours = [*bed.python, program("nothing")], [*bed.ddplaunch, "--nproc-per-node", str(workers)]
    forked = [*ours, "--start-method", "forkserver", "--preload", "", tiny[-1]]
    taken = Rounds(
        rounds,
        lambda: bed.seconds(bed.shell_loop(workers, tiny)),
        lambda: bed.seconds([*ours, tiny[-1]]),
        lambda: bed.seconds(forked),
    )
    loop, *mine = taken.medians()
    for at, (which, target) in enumerate((("workers", 1.5), ("forked workers", 1.0)), start=1):
        yield Figure(
            name=f"nothing, {workers:,} {which}: to the shell loop",
            value=taken.of(lambda *row, at=at: row[at] / row[0]),
            unit="x",
            target=target,
            how=f"{mine[at - 1]:.2f} s, the loop {loop:.2f} s; {rounds} rounds",
        )
    taken = Rounds(
        rounds,
        lambda: bed.seconds(bed.shell_loop(workers, ["/bin/true"])),
        lambda: bed.seconds([*ours, "--no-python", "/bin/true"]),
    )
    each = taken.of(lambda loop, mine: (mine - loop) / workers * 1e3)
    yield Figure(name=f"/bin/true, {workers:,} workers: a worker", value=each, unit="ms", how=f"{rounds} rounds")
