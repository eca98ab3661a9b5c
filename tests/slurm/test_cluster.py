"""The Slurm that the other tests here stand on: that it does what Slurm does, quickly, and that all of it goes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import until
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.job import Batch, SlurmJob
from tests.unit.environments import captured

# a step that shows that it is there, and stays
STAYS = """srun sh -c 'touch "$DDP_TEST_DIR/up-$SLURM_RESTART_COUNT-$SLURM_PROCID"; exec sleep 600'"""


def staying(job: SlurmJob, *options: str, nodes: int = 3) -> Batch:
    """A job that runs on so many nodes until somebody ends it."""
    batch = job.sbatch(STAYS, f"--nodes={nodes}", *options)
    wait_up(job, nodes)
    return batch


def wait_up(job: SlurmJob, nodes: int = 3, restarts: str = "") -> None:
    """Wait until all tasks run: a job is RUNNING before that."""
    for rank in range(nodes):
        job.sign(f"up-{restarts}-{rank}")


# --- what runs where


def test_each_test_finds_idle_nodes_and_an_empty_queue(cluster: Cluster) -> None:
    assert cluster.node_states() == dict.fromkeys(NODES, "idle")
    assert cluster.left() == {}


# --- what Slurm tells a process


VARY = (
    "PID",
    "PRIO_PROCESS",  # `nice make test`
    "PORT",
    "HOST",
    "IPADDR",
    "SUBMIT_DIR",
    "_NAME",
    "JOBID",
    "JOB_ID",
    "STEPID",
    "STEP_ID",
    "WORKING_CLUSTER",
)


def told(env: dict[str, str]) -> dict[str, str]:
    """What Slurm has put there, but for values that another run would not have."""
    ours = {name: value for name, value in env.items() if name.startswith(("SLURM", "CUDA_VISIBLE"))}
    return {name: "" if name.endswith(VARY) else value for name, value in ours.items()}


def test_processes_are_told_what_they_were_told_when_we_captured_it(job: SlurmJob) -> None:
    if "22.05" not in (version := job.cluster.run(["sinfo", "--version"]).stdout):
        pytest.skip(f"captured with Slurm 22.05, and this is {version}")
    dump, shape = "env -0 >", ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=2", "--gres=gpu:4")
    job.sbatch(f"{dump} batch; srun sh -c '{dump} node-$SLURM_PROCID'", *shape).wait("COMPLETED")
    job.sbatch(f"srun sh -c '{dump} rank-$SLURM_PROCID'", "--nodes=3", "--ntasks-per-node=4", "--gpus-per-node=4").wait(
        "COMPLETED"
    )
    job.salloc(f"{dump} salloc", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2")
    for name in ("batch", "node-0", "node-1", "rank-0", "rank-5", "salloc"):
        lines = (job.home / name).read_text().rstrip("\0").split("\0")
        assert told(dict(line.split("=", 1) for line in lines)) == told(captured(f"slurm-{name}")), name


# --- nodes


def test_whatever_a_test_leaves_is_healed(job: SlurmJob) -> None:
    cluster = job.cluster
    staying(job)
    job.sbatch("true", "--hold")
    cluster.kill_slurmd("node1")
    cluster.bed.power_cut("node2")
    cluster.bed.cut("node3")
    cluster.drain("node3")
    cluster.heal()
    assert cluster.node_states() == dict.fromkeys(NODES, "idle")
    assert sorted(job.srun("--nodes=3", "hostname").out.split()) == [*NODES]


def test_what_a_job_leaves_is_found(job: SlurmJob) -> None:
    job.srun("sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &")
    with pytest.raises(AssertionError, match=r"node1.*sleep 600"):
        job.nothing_left()
    job.srun("sh", "-c", "env -i setsid sleep 601 >/dev/null 2>&1 &")
    job.cluster.run(["pkill", "-x", "-f", "sleep 600"], "node1")
    until(lambda: not job.left(), "what is marked to be gone")
    with pytest.raises(AssertionError, match=r"node1.*sleep 601"):
        job.cluster.nothing_left(0.1)
    job.cluster.run(["pkill", "-x", "-f", "sleep 601"], "node1")
    held = job.sbatch("true", "--hold")
    with pytest.raises(AssertionError, match=f"{held.id} PENDING"):
        job.cluster.nothing_left(0.1)
    held.cancel()


# --- and what is left of it all


def things() -> tuple[set[str], list[str], dict[Path, list[str]]]:
    """What a cluster may leave on the machine or change there: mounts, network interfaces, files."""
    mounts = set(Path("/proc/self/mountinfo").read_text().splitlines())
    folders = [
        Path(p) for p in ("/etc/slurm", "/etc/munge", "/run", "/var/spool", "/var/log", "/var/lib/munge", "/dev")
    ]
    listed = {
        folder: sorted(os.listdir(folder))
        for folder in [*folders, *Path("/sys/fs/cgroup").glob("*")]
        if folder.is_dir()
    }
    # other processes may make clusters at the same time
    beds = Path(tempfile.gettempdir()).glob(f"ddplaunch-bed-{os.getpid()}-*")
    listed[Path(tempfile.gettempdir())] = sorted(path.name for path in beds)
    return mounts, sorted(os.listdir("/sys/class/net")), listed


@pytest.fixture
def nothing_new() -> Iterator[None]:
    """Nothing is on the machine after the test that was not there before."""
    before = things()
    yield
    for new, old in zip(things()[:2], before[:2], strict=True):
        assert new == old
    for folder, names in things()[2].items():
        new = set(names) - set(before[2][folder])
        assert not {name for name in new if any(word in name for word in ("slurm", "munge", "gpu", "ddplaunch-bed"))}


@pytest.mark.usefixtures("nothing_new")
def test_nothing_of_a_cluster_is_left_on_the_machine(tmp_path: Path) -> None:
    cluster = Cluster()
    try:
        staying(SlurmJob(tmp_path, cluster=cluster))
        pids = [process.pid for host in cluster.bed.hosts for process in cluster.bed.daemons(host)]
        pids += [process.pid for host in cluster.bed.hosts for process in cluster.bed.processes(host)]
    finally:
        cluster.close()
    assert len(pids) > 3 * 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


KILLED = """
from pathlib import Path
from tests.slurm.cluster import Cluster
from tests.slurm.job import SlurmJob
cluster = Cluster()
job = SlurmJob(cluster.bed.home, cluster=cluster)
job.sbatch("srun sh -c 'touch $DDP_TEST_DIR/up-$SLURM_PROCID; exec sleep 600'", "--nodes=3")
job.signs("up", 3)
bed = cluster.bed
print(bed.home.parent, *(p.pid for host in bed.hosts for p in bed.daemons(host) + bed.processes(host)), flush=True)
input()
"""


@pytest.mark.usefixtures("nothing_new")
def test_nothing_of_a_cluster_outlives_its_maker() -> None:
    root, pipe = Path(__file__).parents[2], subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=root, stdin=pipe, stdout=pipe) as maker:
        assert maker.stdout is not None
        folder, *pids = maker.stdout.readline().decode().split()
        assert len(pids) > 3 * 4
        maker.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the processes to be gone")
    until(lambda: not Path(folder).exists(), "the files to be gone")
