"""CPUs in Slurm, where it binds tasks: workers stay on those that were granted, and count their threads by them."""

import json
import os
from collections.abc import Iterator

import pytest

from tests.conftest import PROGRAMS
from tests.slurm.cluster import Cluster
from tests.slurm.job import SlurmJob

PLACE = PROGRAMS / "place.py"
CPUS = os.cpu_count() or 1
NODES = f"node[1-3] CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=4000 Gres=gpu:4"


@pytest.fixture(scope="module")
def one_cluster(can_be_made: None) -> Iterator[Cluster]:
    """A cluster whose nodes have the CPUs of this machine, and no more; a job gets those that no other has."""
    if CPUS < 2 or os.sched_getaffinity(0) != set(range(CPUS)):
        pytest.skip("Slurm binds to CPUs by their numbers, which are not all ours, or to nothing where there is one")
    made = Cluster(settings={"TaskPlugin": "task/affinity", "NodeName": NODES})
    yield made
    made.close()


def cpus(job: SlurmJob) -> list[tuple[list[int], str]]:
    """The CPUs of each worker, by rank, and how many threads it is told to have."""
    files = sorted((job.home / "signs").glob("place-*"), key=lambda path: int(path.name.removeprefix("place-")))
    told = [json.loads(file.read_text()) for file in files]
    return [(one["cpus"], one["variables"]["OMP_NUM_THREADS"]) for one in told]


@pytest.mark.parametrize(
    "command",
    [
        "{} --nproc-per-node 1",
        "srun {} --nproc-per-node 1",
        "srun {} --cpu-bind cores",
        "{} --nproc-per-node 1 --cpu-bind cores",
    ],
)
def test_a_job_with_a_part_of_each_node_stays_on_it(job: SlurmJob, command: str) -> None:
    """The first CPU of each node belongs to another job."""
    other = job.sbatch("srun sh -c 'touch $DDP_TEST_DIR/held-$SLURM_PROCID; exec sleep 600'", "--nodes=2", "--ntasks=2")
    job.signs("held", 2)
    part = (f"--cpus-per-task={CPUS - 1}", "--nodes=2", "--ntasks-per-node=1")
    mine = job.sbatch(f"{command.format(job.ddplaunch)} {PLACE}", *part)
    assert mine.wait() == "COMPLETED", mine.output()
    other.cancel()
    other.wait("CANCELLED")
    assert cpus(job) == [(list(range(1, CPUS)), f"{CPUS - 1}")] * 2


@pytest.mark.parametrize("bound", [True, False])
def test_tasks_of_one_node_that_slurm_binds_or_not_have_their_share_of_it(job: SlurmJob, bound: bool) -> None:
    bind = "--cpu-bind=cores" if bound else "--cpu-bind=none"
    options = ("--nodes=1", "--ntasks=2", f"--cpus-per-task={CPUS // 2}")
    done = job.sbatch(f"srun --cpus-per-task={CPUS // 2} {bind} {job.ddplaunch} --cpu-bind cores {PLACE}", *options)
    assert done.wait() == "COMPLETED", done.output()
    (first, threads), (second, _) = cpus(job)
    assert threads == f"{CPUS // 2}"
    assert sorted(first + second) == list(range(2 * (CPUS // 2)))
