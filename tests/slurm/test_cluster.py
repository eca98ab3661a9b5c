"""The Slurm that the other tests here stand on: that it does what Slurm does, quickly, and that all of it goes."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import until
from tests.slurm.cluster import GPUS, NODES, Cluster
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


def test_a_step_runs_on_each_node(job: SlurmJob) -> None:
    result = job.srun("--nodes=3", "hostname")
    assert (result.status, sorted(result.out.split()), result.err) == (0, [*NODES], "")
    assert job.srun("--nodes=2", "sh", "-c", "exit $((3 + SLURM_PROCID))").status == 4


def test_a_batch_script_gives_its_output_and_its_status(job: SlurmJob) -> None:
    batch = job.sbatch("hostname; echo $SLURM_JOB_ID >&2; exit 3")
    assert batch.wait() == "FAILED"
    assert (batch.exit_code(), batch.output()) == (3, f"node1\n{batch.id}\n")


def test_the_shell_of_an_allocation_runs_where_it_was_asked_for(job: SlurmJob) -> None:
    result = job.salloc("hostname; echo ${SLURM_PROCID-none}; srun hostname; exit 5", "--nodes=2")
    assert (result.status, result.out.split()[:2], sorted(result.out.split()[2:])) == (5, ["ctl", "none"], [*NODES[:2]])


def test_elements_of_an_array_are_jobs_of_their_own(job: SlurmJob) -> None:
    array = job.sbatch("exit $SLURM_ARRAY_TASK_ID", "--array=0-1")
    assert [array.element(index).wait() for index in (0, 1)] == ["COMPLETED", "FAILED"]
    assert array.element(1).exit_code() == 1


def test_ddplaunch_runs_in_a_step(job: SlurmJob) -> None:
    (job.home / "where.py").write_text("import os, socket\nprint(socket.gethostname(), os.environ['RANK'])\n")
    result = job.srun("--nodes=2", *job.argv("--nproc-per-node", "1", "where.py"))
    assert result.status == 0, result
    assert sorted(result.out.splitlines()) == ["[0] node1 0", "[1] node2 1"], result


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


def test_jobs_on_one_node_have_different_gpus(job: SlurmJob) -> None:
    visible = "srun sh -c 'echo $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    first = staying(job, "--gpus-per-node=2", nodes=1)
    second = job.sbatch(visible, "--nodes=1", "--gpus-per-node=2")
    second.wait("COMPLETED")
    assert second.output() == "0 2,3\n"
    first.cancel()
    first.wait("CANCELLED")
    each = job.srun("--nodes=1", f"--ntasks={GPUS}", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert sorted(each.out.split()) == ["0", "1", "2", "3"]


# --- signals and ends


def test_a_cancelled_job_is_gone(job: SlurmJob) -> None:
    batch = staying(job)
    batch.cancel()
    assert batch.wait() == "CANCELLED"
    assert batch.exit_code() == 128 + signal.SIGTERM


USR1 = """
trap 'echo to the script' USR1
srun sh -c 'trap "echo to the task" USR1; touch "$DDP_TEST_DIR/up--$SLURM_PROCID"; while :; do sleep 0.05; done' &
wait
wait
"""


@pytest.mark.parametrize(("option", "who"), [("--signal=USR1", "the task"), ("--batch --signal=USR1", "the script")])
def test_a_signal_can_be_sent_to_tasks_or_to_the_script(job: SlurmJob, option: str, who: str) -> None:
    batch = job.sbatch(USR1)
    wait_up(job, 1)
    batch.cancel(*option.split())
    until(lambda: "to the" in batch.output(), f"{who} to get the signal")
    # the shell may add that its sleep was ended by it
    assert [line for line in batch.output().splitlines() if line.startswith("to")] == [f"to {who}"]
    batch.cancel()
    batch.wait("CANCELLED")


def test_a_signal_comes_before_the_time_limit_and_time_can_be_made_to_pass(job: SlurmJob) -> None:
    # Slurm sends the signal up to half a minute sooner than it was asked to, and not again to a task that was not there yet
    batch = job.sbatch(USR1, "--time=3", "--signal=USR1@60")
    wait_up(job, 1)
    job.cluster.pass_time(120)
    until(lambda: "to the task" in batch.output(), "the signal")
    assert batch.state() == "RUNNING"
    job.cluster.pass_time(90)
    assert batch.wait() == "TIMEOUT"


# --- back into the queue


def test_a_requeued_job_starts_again_without_being_held(job: SlurmJob) -> None:
    batch = staying(job)
    batch.requeue_now()
    wait_up(job, restarts="1")
    assert (batch.state(), batch.restarts()) == ("RUNNING", 1)
    batch.requeue()
    batch.wait("PENDING")
    job.cluster.pass_time(130)
    wait_up(job, restarts="2")
    batch.cancel()
    batch.wait("CANCELLED")


def test_a_job_is_preempted_and_comes_back(job: SlurmJob) -> None:
    low = staying(job, "--partition=low", "--exclusive")
    high = job.sbatch("true", "--partition=high", "--exclusive", "--nodes=3")
    assert high.wait() == "COMPLETED"
    low.skip_hold()
    wait_up(job, restarts="1")
    low.cancel()
    low.wait("CANCELLED")


def test_a_job_may_end_in_its_grace_and_does_not_come_back(job: SlurmJob) -> None:
    graced = staying(job, "--partition=graced", "--exclusive")
    high = job.sbatch("true", "--partition=high", "--exclusive", "--nodes=3")
    assert high.wait() == "COMPLETED"
    assert (graced.wait(), graced.exit_code(), graced.restarts()) == ("FAILED", 128 + signal.SIGTERM, 0)


# --- nodes


def test_a_node_that_is_down_ends_its_jobs_and_is_back_when_it_answers(job: SlurmJob) -> None:
    batch = staying(job, "--no-requeue")
    job.cluster.down("node2")
    assert batch.wait() == "NODE_FAIL"
    job.nothing_left()
    job.cluster.wait_nodes("idle")


def test_a_drained_node_gets_no_job(job: SlurmJob) -> None:
    job.cluster.drain("node1")
    job.cluster.wait_nodes("drained", "node1")
    assert job.srun("hostname").out == "node2\n"
    job.cluster.resume("node1")
    job.cluster.wait_nodes("idle")


def test_a_job_lives_on_without_slurmd(job: SlurmJob) -> None:
    batch = job.sbatch(
        "touch $DDP_TEST_DIR/up--0; while ! [ -e $DDP_TEST_DIR/go ]; do sleep 0.05; done", "--nodelist=node3"
    )
    wait_up(job, 1)
    job.cluster.kill_slurmd("node3")
    assert batch.state() == "RUNNING"
    job.cluster.start_slurmd("node3")
    (job.home / "signs" / "go").touch()
    assert batch.wait() == "COMPLETED"


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
