"""How fast workers train on CPUs by the number of their threads: our rule, one thread as torchrun has it, one for each core."""

from __future__ import annotations

import os
from collections.abc import Iterator

from bed import Bed, Figure, Rounds, program


def threads(bed: Bed) -> Iterator[Figure]:
    """1, 2, 4 and 8 workers share the cores and train a real network."""
    for workers in (1, 2, 4, 8):
        yield _threads(bed, workers)


def _threads(bed: Bed, workers: int) -> Figure:
    cores = os.cpu_count() or 1
    rounds = bed.rounds(3)
    taken = Rounds(
        rounds,
        lambda: _samples(bed, workers),
        lambda: _samples(bed, workers, "--threads", "1"),
        lambda: _samples(bed, workers, "--threads", str(cores)),
    )
    ours, one, unbounded = taken.medians()
    return Figure(
        name=f"training, {workers} worker{'s' * (workers > 1)}: to the better of one thread and one for each core",
        value=taken.of(lambda ours, one, unbounded: ours / max(one, unbounded)),
        unit="x",
        target=0.97,  # equal, but for what two equal runs differ by
        more_is_better=True,
        how=f"{ours:.0f} samples/s, 1 thread {one:.0f}, {cores} threads {unbounded:.0f}; {rounds} rounds",
    )


def _samples(bed: Bed, workers: int, *words: str) -> float:
    file = bed.folder / "samples"
    env = {name: value for name, value in bed.env.items() if name != "OMP_NUM_THREADS"}
    bed.seconds([*bed.ddplaunch, *words, "--nproc-per-node", str(workers), program("trains"), str(file)], env=env)
    return float(file.read_text())
