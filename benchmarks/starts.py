"""How long it takes until workers run and the command has returned, when they have little or nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

from bed import Bed, Figure, best, program

_USED_BEFORE = 21  # runs; from then on each start also removes the oldest run


def hello(bed: Bed) -> Iterator[Figure]:
    """Two workers say hello, without torch."""
    script = program("hello")
    ours = [*bed.ddplaunch, "--nproc-per-node", "2", script]
    for _ in range(_USED_BEFORE):
        bed.seconds(ours)
    rounds, few = bed.rounds(30), bed.rounds(4)
    loop, mine = best(rounds, lambda: bed.seconds(bed.shell_loop(2, [*bed.python, script])), lambda: bed.seconds(ours))
    (theirs,) = best(few, lambda: bed.seconds([*bed.torchrun, "--standalone", "--nproc-per-node", "2", script]))
    how = f"{mine * 1e3:.0f} ms, the loop {loop * 1e3:.0f} ms; best of {rounds}"
    yield Figure(
        name="hello, 2 workers: above the shell loop", value=(mine - loop) * 1e3, unit="ms", target=60, how=how
    )
    yield Figure(
        name="hello, 2 workers: times faster than torchrun",
        value=theirs / mine,
        unit="x",
        target=15,
        more_is_better=True,
        how=f"torchrun {theirs * 1e3:.0f} ms, best of {few}",
    )


def torch_import(bed: Bed) -> Iterator[Figure]:
    """Four workers import torch."""
    script = program("imports_torch")
    rounds = bed.rounds(5)
    bed.seconds([*bed.python, script])  # from here on its files are in memory
    loop, mine = best(
        rounds,
        lambda: bed.seconds(bed.shell_loop(4, [*bed.python, script])),
        lambda: bed.seconds([*bed.ddplaunch, "--nproc-per-node", "4", script]),
    )
    theirs = bed.seconds([*bed.torchrun, "--standalone", "--nproc-per-node", "4", script])
    how = f"{mine:.2f} s, the loop {loop:.2f} s, best of {rounds}; torchrun {theirs:.2f} s"
    yield Figure(name="import torch, 4 workers: to the shell loop", value=mine / loop, unit="x", target=1.05, how=how)


def steps(bed: Bed) -> Iterator[Figure]:
    """Workers train for five steps: what every job does before it does anything else."""
    yield _steps(bed, 4, target=0.45)
    yield _steps(bed, 8, target=0.22)


def _steps(bed: Bed, workers: int, *, target: float) -> Figure:
    command = ["--nproc-per-node", str(workers), program("steps")]
    rounds = bed.rounds(3)
    loop, forked, fresh, theirs = best(
        rounds,
        lambda: bed.seconds(bed.training_loop(workers, [*bed.python, program("steps")])),
        lambda: bed.seconds([*bed.ddplaunch, "--start-method", "forkserver", *command]),
        lambda: bed.seconds([*bed.ddplaunch, "--start-method", "spawn", *command]),
        lambda: bed.seconds([*bed.torchrun, "--standalone", *command]),
    )
    took = f"{forked:.1f} s, the loop {loop:.1f} s, fresh processes {fresh:.1f} s, torchrun {theirs:.1f} s"
    return Figure(
        name=f"5 DDP steps, {workers} workers: to torchrun",
        value=forked / theirs,
        unit="x",
        target=target,
        how=f"{took}; best of {rounds}",
    )


def many(bed: Bed) -> Iterator[Figure]:
    """256 workers that do nothing."""
    tiny = [*bed.python, program("nothing")]
    rounds = bed.rounds(5)
    loop, mine = best(
        rounds,
        lambda: bed.seconds(bed.shell_loop(256, tiny)),
        lambda: bed.seconds([*bed.ddplaunch, "--nproc-per-node", "256", tiny[-1]]),
    )
    how = f"{mine:.2f} s, the loop {loop:.2f} s; best of {rounds}"
    yield Figure(name="nothing, 256 workers: to the shell loop", value=mine / loop, unit="x", target=1.5, how=how)
    loop, mine = best(
        rounds,
        lambda: bed.seconds(bed.shell_loop(256, ["/bin/true"])),
        lambda: bed.seconds([*bed.ddplaunch, "--nproc-per-node", "256", "--no-python", "/bin/true"]),
    )
    how = f"{mine:.2f} s, the loop {loop:.2f} s; best of {rounds}"
    yield Figure(name="/bin/true, 256 workers: a worker", value=(mine - loop) / 256 * 1e3, unit="ms", how=how)
