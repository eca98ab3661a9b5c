"""How Slurm ends jobs, where it tracks processes by cgroups and where by their parents: each worker is told once, and saves.

With proctrack/cgroup Slurm signals what it has started itself, and kills all else when the script has ended; with
proctrack/linuxproc it signals all that descends from what it has started, the workers past ddplaunch too.
"""

import time
from collections.abc import Iterator

import pytest

from ddplaunch.launcher.node.workers import LISTED_BY_CLUSTER_WITHIN
from tests.conftest import PROGRAMS, until
from tests.slurm.cluster import Cluster, no_cgroups
from tests.slurm.job import Batch, SlurmJob
from tests.slurm.started import SAVES

LEAVES = PROGRAMS / "leaves.py"
NODES = pytest.mark.parametrize("nodes", [1, 3])


@pytest.fixture(scope="module", params=["cgroup", "linuxproc"])
def one_cluster(can_be_made: None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each kind."""
    by_cgroups = request.param == "cgroup"
    if by_cgroups and (reason := no_cgroups()):
        pytest.skip(reason)
    made = Cluster(cgroups=by_cgroups)
    yield made
    made.close()


def ready(job: SlurmJob, number: int, folder: str = "") -> None:
    """Wait until so many workers are ready, and old enough that a list of all processes has held them."""
    job.signs(f"{folder}ready", number)
    last = max(path.stat().st_mtime for path in (job.home / "signs").glob(f"{folder}ready-*"))
    until(lambda: time.time() - last > LISTED_BY_CLUSTER_WITHIN, "the workers' age")


def started(job: SlurmJob, script: str, nodes: int, *options: str) -> Batch:
    """A job of two workers on each node, which run."""
    line = script.format(f"{job.ddplaunch} --nproc-per-node 2")
    running = job.sbatch(line, f"--nodes={nodes}", *options)
    ready(job, 2 * nodes)
    return running


def told(job: SlurmJob, name: str, nodes: int) -> list[list[str]]:
    """What each worker has put up under a name."""
    paths = [job.home / "signs" / f"{name}-{rank}" for rank in range(2 * nodes)]
    return [path.read_text().split() if path.exists() else ["missing"] for path in paths]


def all_saved(job: SlurmJob, nodes: int, *signals: str) -> None:
    """Prove that each worker has had these signals, and was given the time to save."""
    assert told(job, "saved", nodes) == [[]] * 2 * nodes
    assert told(job, "got", nodes) == [list(signals)] * 2 * nodes


@pytest.mark.parametrize(
    ("script", "nodes"),
    [
        ("{}", 1),
        ("{}", 3),
        ("exec {}", 3),
        ("srun {}", 3),
        ("{} --nnodes 1", 3),
        # one node, where the script is beside the workers as it is on the first of three
        *(pytest.param(script, 1, marks=pytest.mark.slow) for script in ("exec {}", "srun {}", "{} --nnodes 1")),
    ],
)
def test_each_worker_of_a_cancelled_job_is_told_once_and_saves(job: SlurmJob, script: str, nodes: int) -> None:
    workers_on = 1 if "--nnodes 1" in script else nodes
    line = script.format(f"{job.ddplaunch} --nproc-per-node 2") + f" {SAVES}"
    running = job.sbatch(line, f"--nodes={nodes}")
    ready(job, 2 * workers_on)
    running.cancel()
    assert running.wait() == "CANCELLED"
    job.nothing_left(10)
    all_saved(job, workers_on, "SIGTERM")


@NODES
def test_a_job_goes_back_after_a_notice_to_its_steps(job: SlurmJob, nodes: int) -> None:
    running = started(job, f"{{}} --requeue-on USR1 {LEAVES}", nodes)
    running.cancel("--signal=USR1")
    running.wait("PENDING")
    assert running.restarts() == 1
    all_saved(job, nodes, "SIGUSR1")
    running.cancel()
    job.nothing_left(10)


@NODES
def test_a_job_goes_back_when_its_time_is_up(job: SlurmJob, nodes: int) -> None:
    running = started(job, f"{{}} --requeue-on TERM {LEAVES}", nodes, "--time=1")
    job.cluster.pass_time(95)
    running.wait("PENDING")
    assert running.restarts() == 1
    assert told(job, "saved", nodes) == [[]] * 2 * nodes
    # slurmd sends SIGTERM at the time limit and as it then ends the job, 50 ms later; proctrack/linuxproc, to the workers
    assert {name for names in told(job, "got", nodes) for name in names} == {"SIGTERM"}
    running.cancel()
    job.nothing_left(10)


def test_an_element_of_an_array_is_told_alone(job: SlurmJob) -> None:
    own = "export DDP_TEST_DIR=$DDP_TEST_DIR/$SLURM_ARRAY_TASK_ID; mkdir -p $DDP_TEST_DIR"
    array = job.sbatch(f"{own}\n{job.ddplaunch} --nproc-per-node 1 {SAVES}", "--array=0-1")
    for index in (0, 1):
        ready(job, 1, f"{index}/")
    array.element(1).cancel()
    assert array.element(1).wait() == "CANCELLED"
    assert (job.sign("1/got-0"), job.has_sign("0/got-0"), array.element(0).state()) == ("SIGTERM", False, "RUNNING")
    array.cancel()
    assert array.element(0).wait() == "CANCELLED"
    job.nothing_left(10)
    assert (job.sign("0/got-0"), job.has_sign("0/saved-0"), job.has_sign("1/saved-0")) == ("SIGTERM", True, True)
