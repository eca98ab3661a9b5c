"""How fast workers train on CPUs by the number of their threads: our rule, one thread as torchrun has it, one for each core."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from bed import Bed, Figure, Rounds, program


def threads(bed: Bed) -> Iterator[Figure]:
    """1, 2, 4 and 8 workers share the cores and train a real network."""
    for workers in (1, 2, 4, 8):
        yield _threads(bed, workers)


def _threads(bed: Bed, workers: int) -> Figure:
    cores = os.cpu_count() or 1
    rounds = bed.rounds(9)
    rows = _samples(bed, workers, rounds)
    taken = Rounds(rounds, *(iter([row[way] for row in rows]).__next__ for way in range(3)))
    ours, one, unbounded = taken.medians()
    return Figure(
        name=f"training, {workers} worker{'s' * (workers > 1)}: to the better of one thread and one for each core",
        value=taken.of(lambda ours, one, unbounded: ours / max(one, unbounded)),
        unit="x",
        target=0.97,  # equal, but for what two equal runs differ by
        more_is_better=True,
        how=f"{ours:.0f} samples/s, 1 thread {one:.0f}, {cores} threads {unbounded:.0f}; {rounds} rounds",
    )


def _samples(bed: Bed, workers: int, rounds: int) -> list[list[float]]:
    """Samples a second in each round: with our number of threads, with one, with one for each core."""
    file = bed.folder / "samples"
    env = {name: value for name, value in bed.env.items() if name != "OMP_NUM_THREADS"}
    command = [*bed.ddplaunch, "--start-method", "forkserver", "--nproc-per-node", str(workers)]
    bed.seconds([*command, program("trains"), str(file), str(rounds)], env=env)
    rows: list[list[float]] = json.loads(file.read_text())
    return rows
