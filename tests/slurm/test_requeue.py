"""Jobs that go back into the queue after a notice: once, and only if nobody cancelled them and no worker failed."""

import os
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1

import pytest

from tests.conftest import PROGRAMS, until
from tests.slurm.job import Batch, SlurmJob
from tests.slurm.started import BEHAVE, EVERY_WAY, NODES, RANKS, TASK, batch, front, one_cluster, ready

__all__ = ["one_cluster"]

LEAVES, NEVER = PROGRAMS / "leaves.py", PROGRAMS / "makes_no_step.py"
ONE_NODE = "the script itself"


def leaving(
    job: SlurmJob, way: str, *args: str, flags: str = "--requeue-on USR1", options: tuple[str, ...] = ()
) -> Batch:
    """A job whose workers run, in one of the ways; where the script itself is the command, on one node with two workers."""
    if way == ONE_NODE:
        running = job.sbatch(f"exec {job.ddplaunch} --nproc-per-node 2 {flags} {LEAVES} {' '.join(args)}", *options)
        ready(job, running, 2)
    else:
        running = batch(job, way, LEAVES, *args, flags=flags, options=options)
        ready(job, running)
    return running


def signs(job: SlurmJob, name: str, number: int) -> list[str]:
    """What the workers have put up under a name."""
    paths = [job.home / "signs" / f"{name}-{rank}" for rank in range(number)]
    return [path.read_text().strip() if path.exists() else "missing" for path in paths]


def about_the_queue(running: Batch) -> list[str]:
    """What the job has said of the queue, before its next start truncates the file."""
    return [line for line in running.output().splitlines() if line.startswith(f"ddplaunch: job {running.id} ")]


def goes_back(job: SlurmJob, running: Batch, number: int = RANKS, notice: str = "SIGUSR1") -> None:
    """Prove that the job comes back once, after each worker had the signal once and saved, and that it then completes."""
    running.wait("PENDING")
    words = f"ddplaunch: job {running.id} is requeued after {notice} (requeue 1 of at most 10)"
    assert about_the_queue(running) == [words], running.output()
    assert signs(job, "saved", number) == [""] * number, running.output()
    assert signs(job, "got", number) == [notice] * number
    assert "Kill task failed" not in running.output()
    running.skip_hold()
    running.wait("COMPLETED")
    assert signs(job, "again", number) == ["1"] * number
    assert running.restarts() == 1


@EVERY_WAY
def test_a_job_goes_back_once_and_completes(job: SlurmJob, way: str) -> None:
    running = leaving(job, way)
    running.cancel("--signal=USR1")
    goes_back(job, running)
    job.nothing_left(10)


@pytest.mark.parametrize("way", ["a step of its own", ONE_NODE])
def test_a_job_goes_back_once_a_controller_that_was_away_is_there_again(job: SlurmJob, way: str) -> None:
    running = leaving(job, way, flags="--requeue-on USR1 --grace-period 1s")
    number = 2 if way == ONE_NODE else RANKS
    path = Path(running.about()["StdOut"])
    job.cluster.stop_controller()
    os.kill(front(job, "node1"), SIGUSR1)
    words = "Slurm has not replied yet (scontrol: slurm_load_jobs error: Unable to contact slurm controller (connect failure)): "
    until(lambda: words in path.read_text(), "the wait to be told")
    assert signs(job, "saved", number) == [""] * number
    job.cluster.start_controller()
    running.wait("PENDING")
    assert path.read_text().count("Slurm has not replied yet") == 1, path.read_text()
    assert about_the_queue(running) == [
        f"ddplaunch: job {running.id} is requeued after SIGUSR1 (requeue 1 of at most 10)"
    ]
    running.cancel()


def test_a_job_goes_back_before_its_time_is_up(job: SlurmJob) -> None:
    running = leaving(job, ONE_NODE, options=("--time=3", "--signal=B:USR1@60"))
    job.cluster.pass_time(125)
    goes_back(job, running, 2)


def test_a_job_goes_back_when_its_time_is_up(job: SlurmJob) -> None:
    running = leaving(job, ONE_NODE, flags="--requeue-on USR1,TERM", options=("--time=1",))
    job.cluster.pass_time(95)
    running.wait("PENDING")
    assert "ddplaunch: out of walltime: stopped by SIGTERM" in running.output()
    goes_back(job, running, 2, notice="SIGTERM")


def test_a_job_whose_script_slurm_has_ended_already_goes_back_too(job: SlurmJob) -> None:
    """A shell ends by SIGTERM at once, and the command in it by SIGKILL, while the agents' step has time yet."""
    running = leaving(job, "a step of its own", flags="--requeue-on TERM", options=("--time=1",))
    job.cluster.pass_time(95)
    running.wait("PENDING")
    assert (running.restarts(), signs(job, "saved", RANKS)) == (1, [""] * RANKS)
    running.cancel()


def test_a_notice_before_any_worker_has_begun_sends_the_job_back(job: SlurmJob) -> None:
    """Its step waits for a node that another one has taken."""
    held = f"{job.home}/signs/held"
    hold = f"srun --nodes=1 --exclusive sh -c 'touch {held}; sleep 60' &\nuntil [ -e {held} ]; do sleep 0.05; done\n"
    running = job.sbatch(f"trap : TERM\n{hold}{job.ddplaunch} --requeue-on TERM {LEAVES}\nwait", "--nodes=3")
    asked = lambda: any(p.name == "srun" and TASK in p.command for p in job.cluster.bed.processes("node1"))  # noqa: E731
    until(asked, "the step to be asked for")
    os.kill(front(job, "node1"), SIGTERM)
    running.wait("PENDING")
    assert running.restarts() == 1
    assert about_the_queue(running) == [
        f"ddplaunch: job {running.id} is requeued after SIGTERM (requeue 1 of at most 10)"
    ]
    running.cancel()


def test_of_an_array_the_element_alone_goes_back(job: SlurmJob) -> None:
    """Of two the last has the id of the array itself, which `scontrol requeue` takes for all of it."""
    own = "mkdir -p $DDP_TEST_DIR/$SLURM_ARRAY_TASK_ID; export DDP_TEST_DIR=$DDP_TEST_DIR/$SLURM_ARRAY_TASK_ID"
    array = job.sbatch(f"{own}\nexec {job.ddplaunch} --requeue-on USR1 {LEAVES}", "--array=0-1")
    other, last = array.element(0), array.element(1)
    for index in (0, 1):
        job.sign(f"{index}/ready-0")
    assert last.about()["JobId"] == array.id
    last.cancel("--batch", "--signal=USR1")
    last.wait("PENDING")
    assert about_the_queue(last)[0].startswith(f"ddplaunch: job {last.id} is requeued")
    assert (other.state(), other.restarts(), last.restarts()) == ("RUNNING", 0, 1)
    array.cancel()
    assert [element.wait() for element in (other, last)] == ["CANCELLED"] * 2


def test_a_worker_that_fails_after_the_notice_fails_the_job(job: SlurmJob) -> None:
    running = leaving(job, "a step of its own", "1=fails")
    running.cancel("--signal=USR1")
    assert (running.wait(), running.exit_code(), running.restarts()) == ("FAILED", 1, 0)
    assert about_the_queue(running) == []
    assert "rank 1 on node1 failed: RuntimeError: the checkpoint cannot be written" in running.output()


def test_a_job_that_is_stopped_by_its_stop_file_is_over(job: SlurmJob) -> None:
    path = job.home / "stop"
    running = leaving(job, "a step of its own", flags=f"--requeue-on TERM,USR1 --stop-file {path}")
    path.touch()
    assert (running.wait(), running.exit_code(), running.restarts()) == ("FAILED", 143, 0)
    assert about_the_queue(running) == []
    assert "ddplaunch: stopped by SIGTERM after" in running.output()


def test_a_command_that_is_killed_is_no_notice(job: SlurmJob) -> None:
    goes_on = f"until [ -e {job.home}/signs/go ]; do sleep 0.1; done"
    running = job.sbatch(
        f"{job.ddplaunch} --nproc-per-node 2 --requeue-on TERM {LEAVES}\n{goes_on}", f"--nodes={NODES}"
    )
    ready(job, running)
    os.kill(front(job, "node1"), SIGKILL)
    until(lambda: "was killed" in running.output(), "the end of the step to be told")
    (job.home / "signs" / "go").touch()
    assert (running.wait(), running.restarts(), about_the_queue(running)) == ("COMPLETED", 0, [])
    assert signs(job, "saved", RANKS) == [""] * RANKS
    job.nothing_left(10)


def test_workers_that_the_notice_itself_ends_have_left(job: SlurmJob) -> None:
    running = leaving(job, "a task for each node", *(f"{rank}=dies" for rank in range(RANKS)))
    running.cancel("--signal=USR1")
    running.wait("PENDING")
    assert len(about_the_queue(running)) == 1
    assert f"{RANKS} workers on {NODES} nodes left after SIGUSR1" in running.output()
    running.cancel()


@pytest.mark.parametrize("way", ["a task for each node", "a step of its own"])
def test_a_job_that_somebody_cancels_does_not_come_back(job: SlurmJob, way: str) -> None:
    running = leaving(job, way, flags="--requeue-on TERM")
    running.cancel()
    assert (running.wait(), running.restarts()) == ("CANCELLED", 0)
    assert signs(job, "saved", RANKS) == [""] * RANKS
    job.nothing_left(10)


def test_a_preempted_job_that_leaves_within_the_grace_time_goes_back_once(job: SlurmJob) -> None:
    running = leaving(
        job, "a task for each rank", flags="--requeue-on TERM", options=("--partition=graced", "--exclusive")
    )
    high = job.sbatch("true", "--partition=high", "--exclusive", "--nodes=3")
    goes_back(job, running, notice="SIGTERM")
    assert high.wait() == "COMPLETED"


def test_a_preempted_job_without_grace_time_goes_back_by_slurm_alone(job: SlurmJob) -> None:
    running = leaving(job, ONE_NODE, flags="--requeue-on TERM", options=("--partition=low", "--exclusive"))
    high = job.sbatch("true", "--partition=high", "--exclusive", "--nodes=3")
    running.wait("PENDING")
    assert about_the_queue(running) == [f"ddplaunch: job {running.id} is requeued by Slurm itself"]
    assert high.wait() == "COMPLETED"
    running.skip_hold()
    running.wait("COMPLETED")
    assert running.restarts() == 1


def test_a_job_goes_back_no_more_often_than_it_may(job: SlurmJob) -> None:
    running = leaving(job, ONE_NODE, flags="--requeue-on USR1 --max-requeues 0")
    running.cancel("--batch", "--signal=USR1")
    assert (running.wait(), running.exit_code(), running.restarts()) == ("FAILED", 138, 0)
    assert about_the_queue(running) == [
        f"ddplaunch: job {running.id} has been requeued 0 times, and is not requeued after SIGUSR1 (--max-requeues 0)"
    ]


@pytest.mark.parametrize("way", ["a step of its own", ONE_NODE])
def test_starts_without_a_new_step_are_counted_over_requeues(job: SlurmJob, way: str) -> None:
    flags = "--requeue-on USR1 --max-no-progress 2"
    if way == ONE_NODE:
        running, number = job.sbatch(f"exec {job.ddplaunch} --nproc-per-node 2 {flags} {NEVER}"), 2
    else:
        running, number = batch(job, way, NEVER, flags=flags), RANKS
    for restarted in range(2):
        job.signs(f"ready{restarted}", number)
        running.cancel("--signal=USR1", *(("--batch",) if way == ONE_NODE else ()))
        if not restarted:
            running.skip_hold()
    assert (running.wait(), running.exit_code(), running.restarts()) == ("FAILED", 120, 1), running.output()
    assert "not queued again: 2 generations in a row made no step" in running.output()


def test_where_scontrol_is_missing_the_script_can_send_the_job_back(job: SlurmJob) -> None:
    by_hand = "[ $? -ne 138 ] || scontrol requeue $SLURM_JOB_ID"
    running = job.sbatch(
        f"trap : USR1\nPATH=/nowhere {job.ddplaunch} --nproc-per-node 2 --requeue-on USR1 {LEAVES}\n{by_hand}\nsleep 60"
    )
    ready(job, running, 2)
    os.kill(front(job, "node1"), SIGUSR1)
    running.wait("PENDING")
    assert about_the_queue(running) == [
        f"ddplaunch: job {running.id} should be requeued after SIGUSR1, but scontrol is not on PATH; put this "
        f"after the command in the batch script: {by_hand}"
    ]
    running.cancel()


# --- what the report says of an end by Slurm


def test_a_job_whose_time_is_up_says_so(job: SlurmJob) -> None:
    running = batch(job, "a step of its own", BEHAVE, "all=polite", options=("--time=1",))
    ready(job, running)
    job.cluster.pass_time(95)
    assert running.wait() == "TIMEOUT"
    assert "ddplaunch: out of walltime: stopped by SIGTERM" in running.output()
