"""What a job costs in Slurm: its start as a step of its own, and its end when one worker crashes.

The Slurm is the tests' own: a controller and three nodes on this machine, which share its cores. It needs root and Slurm's
packages; without, there are no figures. Clocks of the nodes have nothing to do with each other, so times are those of files,
which the kernel notes to some 4 ms.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bed import REPOSITORY, Bed, Figure, program

if TYPE_CHECKING:
    from tests.slurm.job import SlurmJob

_NODES, _EACH = 3, 2
_RANKS = _NODES * _EACH
# what people write who have no launcher
_HAND_WRITTEN = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=node1 MASTER_PORT=29500 "
    'OMP_NUM_THREADS=1 exec "$@"'
)


def start(bed: Bed) -> Iterator[Figure]:
    """From the command in a batch script to the first line of the last of 3 x 2 workers, and to its return; by srun alone too."""
    worker = [*bed.python, program("begins"), "."]
    srun = ["srun", f"--ntasks={_RANKS}", f"--ntasks-per-node={_EACH}", "sh", "-c", _HAND_WRITTEN, "sh", *worker]
    with _job() as job:
        if job is None:
            return
        rounds = bed.rounds(12)
        folders = _measured(job, rounds, srun=srun, ours=[*_ours(bed), *worker[1:]])
    first, back = ({name: _best(folders, name, until) for name in ("srun", "ours")} for until in ("line-*", "returned"))
    for what, took, target in (("the last worker begins", first, 150), ("the command is back", back, None)):
        how = f"{took['ours'] * 1e3:.0f} ms, srun alone {took['srun'] * 1e3:.0f} ms; best of {rounds}"
        added = (took["ours"] - took["srun"]) * 1e3
        yield Figure(name=f"Slurm, 3 x 2: {what} later by", value=added, unit="ms", target=target, how=how)


def crash(bed: Bed) -> Iterator[Figure]:
    """From the crash of the last of 3 x 2 workers, while the others wait, to the end of the step on all nodes."""
    with _job() as job:
        if job is None:
            return
        rounds = bed.rounds(6)
        folders = _measured(job, rounds, ours=[*_ours(bed), program("waits"), ".", "crash"])
    took = _best(folders, "ours", "returned", since="crashed")
    yield Figure(name="Slurm, 3 x 2: crash on one node, step over after", value=took * 1e3, unit="ms", target=500)


@contextmanager
def _job() -> Iterator[SlurmJob | None]:
    """A home in a Slurm of our own; None where there can be no Slurm."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.slurm.cluster import Cluster
    from tests.slurm.conftest import missing
    from tests.slurm.job import SlurmJob

    if reason := missing():
        print(f"skipped: {reason}", file=sys.stderr)
        yield None
        return
    cluster = Cluster()
    try:
        yield SlurmJob(cluster.bed.home, cluster=cluster)
    finally:
        cluster.close()


def _ours(bed: Bed) -> list[str]:
    return [*bed.ddplaunch, "--nproc-per-node", str(_EACH)]


def _measured(job: SlurmJob, rounds: int, **commands: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Run the commands in turn in a batch script on three nodes; give the times of the files in the folder of each run."""
    lines = [f"cd {shlex.quote(str(job.home))}"]
    for number in range(rounds):
        for name, words in commands.items():
            lines += [
                f"mkdir {name}-{number}",
                f"cd {name}-{number}",
                "touch began",
                shlex.join(words),
                "touch returned",
                "cd ..",
            ]
    batch = job.sbatch("\n".join(lines), f"--nodes={_NODES}", f"--ntasks-per-node={_EACH}")
    last = job.home / f"{list(commands)[-1]}-{rounds - 1}" / "returned"
    until = time.monotonic() + 300
    while not last.exists() and time.monotonic() < until:
        time.sleep(0.2)  # to ask Slurm takes 20 ms of the cores that are measured, each time
    batch.wait()
    found = {name: [_times(job.home / f"{name}-{number}") for number in range(rounds)] for name in commands}
    assert all("returned" in times for some in found.values() for times in some), batch.output()
    return found


def _times(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in folder.iterdir()}


def _best(folders: dict[str, list[dict[str, float]]], name: str, until: str, *, since: str = "began") -> float:
    """The least time between two kinds of files."""
    return min(
        max(at for file, at in times.items() if Path(file).match(until)) - times[since] for times in folders[name]
    )
