"""Node 0 of an elastic job in Slurm is lost, and the job goes on: the command follows the node that takes over."""

import json
import os
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP

import pytest

from tests.conftest import until
from tests.slurm.job import Batch, SlurmJob
from tests.slurm.started import BEHAVE, TASK, agent, front, one_cluster, ready

__all__ = ["one_cluster"]

FLAGS = "--nnodes 2:3 --nproc-per-node 1 --heartbeat-timeout 2"
# what stands before `ddplaunch`
WAYS = {"a step of its own": "", "a task for each node": "srun --kill-on-bad-exit=0"}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def taken_over(job: SlurmJob, way: str, behaviour: str, flags: str = "") -> Batch:
    """A job of three nodes that goes on without node 0, whose agent was killed."""
    command = f"{WAYS[way]} {job.ddplaunch} {FLAGS} {flags} {BEHAVE} all={behaviour}"
    running = job.sbatch(f"trap : TERM\n{command}\necho the status is $?", "--nodes=3", "--ntasks-per-node=1")
    ready(job, running, 3)
    os.kill(agent(job, "node1"), SIGKILL)
    try:
        job.signs("restart-1", 2)
    except AssertionError as error:
        error.add_note(running.output())
        raise
    return running


@pytest.mark.parametrize(("way", "status"), [("a step of its own", 0), ("a task for each node", 122)])
def test_the_others_go_on_and_finish(job: SlurmJob, way: str, status: int) -> None:
    """The command gives the status of the job, srun the highest of its tasks."""
    running = taken_over(job, way, "done_when_told")
    (job.home / "signs" / "go").touch()
    assert running.wait() == "COMPLETED"
    output = running.output()
    assert output.count("node2 takes over from node 0 (node1), which is lost: connection closed") == 1, output
    assert output.count("2 workers on 2 nodes finished in") == 1, output
    assert f"the status is {status}\n" in output
    job.nothing_left(10)


def test_a_host_without_power_is_followed_by_the_next(job: SlurmJob) -> None:
    command = job.start_salloc(
        f"{job.ddplaunch} {FLAGS} {BEHAVE} all=done_when_told; echo $?", "--nodes=3", "--no-kill"
    )
    job.signs("ready", 3)
    job.cluster.bed.power_cut("node1")
    job.signs("restart-1", 2)
    (job.home / "signs" / "go").touch()
    until(lambda: job.out(command), "the end of the command")
    assert job.out(command) == "0\n", job.err(command)
    assert job.err(command).count("2 workers on 2 nodes finished in") == 1
    job.cluster.bed.boot("node1")
    job.wait(command=command)


def test_a_signal_of_the_user_reaches_the_node_that_has_taken_over(job: SlurmJob) -> None:
    running = taken_over(job, "a step of its own", "polite")
    os.kill(front(job, "node1"), SIGINT)
    running.wait()
    assert "the status is 130\n" in running.output()
    assert job.sign("got-0") == "SIGINT"
    job.nothing_left(10)


def test_a_node_that_took_over_too_early_yields_and_speaks_for_the_job_no_more(job: SlurmJob) -> None:
    """The next node was busy when node 0 was lost, and takes over from the one after it, which has not begun."""
    tells = f"--notify 'cat >> {job.home}/told'"
    running = job.sbatch(f"{job.ddplaunch} --nnodes 1:3 {tells} {BEHAVE} all=done_when_told", "--nodes=3")
    ready(job, running, 3)
    busy = agent(job, "node2"), front(job, "node2", TASK)
    for pid in busy:
        os.kill(pid, SIGSTOP)
    os.kill(agent(job, "node1"), SIGKILL)
    until(lambda: "node3 takes over" in running.output(), "the one after the next to take over")
    for pid in busy:
        os.kill(pid, SIGCONT)
    job.signs("restart-1", 2)
    (job.home / "signs" / "go").touch()
    assert running.wait() == "COMPLETED"
    output = running.output()
    assert "node2 takes over" in output
    assert output.count("2 workers on 2 nodes finished in") == 1, output
    told = [json.loads(line)["event"] for line in (job.home / "told").read_text().splitlines()]
    assert (told.count("job_started"), told.count("job_ended")) == (1, 1), told


@EVERY_WAY
def test_a_job_that_was_taken_over_goes_back_into_the_queue_after_a_notice(job: SlurmJob, way: str) -> None:
    running = taken_over(job, way, "default", "--requeue-on USR1")
    running.cancel("--signal=USR1")
    running.wait("PENDING")
    words = f"ddplaunch: job {running.id} is requeued after SIGUSR1 (requeue 1 of at most 10)"
    assert (running.output().count(words), running.restarts()) == (1, 1), running.output()
    running.cancel()
