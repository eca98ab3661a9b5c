"""The ways in which people start a job in Slurm, and a cluster that signals tasks as those do that use cgroups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.cluster import CTL, Cluster
from tests.slurm.job import Batch, SlurmJob

NODES, EACH = 2, 2  # of the cluster's three nodes: what a third one adds is told by tests/hosts and test_ended.py
RANKS = NODES * EACH
BEHAVE = PROGRAMS / "behave.py"
SAVES = PROGRAMS / "saves.py"

# what stands before and after `ddplaunch` in a batch script, and the tasks for each node that are asked for
WAYS = {
    "a task for each node": ("srun", f"--nproc-per-node {EACH}", 1),
    "a task for each rank": ("srun", "", EACH),
    "a step of its own": ("", f"--nproc-per-node {EACH}", 4),
}
TASK = " -m ddplaunch.launcher.start.task"  # how a task of the step that ddplaunch starts looks
WORKER = "/worker/bootstrap.py "  # how a worker looks
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def batch(
    job: SlurmJob,
    way: str,
    program: Path,
    *args: str,
    flags: str = "",
    options: tuple[str, ...] = (),
    tells: bool = False,
) -> Batch:
    """Submit a script that starts 2 workers on each of 2 nodes in one of these ways; its status is the command's.

    tells: it prints the status instead, which Slurm does not note of a job that it ends, whose script it signals too.
    """
    before, after, tasks = WAYS[way]
    line = f"{before} {job.ddplaunch} {after} {flags} {program} {' '.join(args)}"
    if tells:
        line = f"trap : TERM\n{line}\necho the status is $?"
    return job.sbatch(line, f"--nodes={NODES}", f"--ntasks-per-node={tasks}", *options)


def ready(job: SlurmJob, batch: Batch, number: int = RANKS) -> None:
    """Wait until all workers run."""
    try:
        job.signs("ready", number)
    except AssertionError as error:
        error.add_note(batch.output())
        raise


def front(job: SlurmJob, host: str = CTL, has: str = " -m ddplaunch ") -> int:
    """The pid of the command that the user typed on a host, or with another `has` of a task there: the parent of one like it."""
    found = [p.pid for p in job.cluster.bed.processes(host) if p.name.startswith("python") and has in p.command]
    return next(pid for pid in map(parent, found) if pid in found)


def agent(job: SlurmJob, host: str) -> int:
    """The pid of the agent of a task on a host: the parent of its workers."""
    return next(parent(p.pid) for p in job.cluster.bed.processes(host) if WORKER in p.command)


def parent(pid: int) -> int:
    """The pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def one_cluster(can_be_made: None) -> Iterator[Cluster]:
    """A cluster that signals the processes which Slurm started itself and no others, as one with proctrack/cgroup does.

    With proctrack/linuxproc signals go to all that descends from these too: workers get them past ddplaunch.
    """
    made = Cluster(settings={"ProctrackType": "proctrack/pgid"})
    yield made
    made.close()
