"""Node 0 of an elastic job in Slurm is lost: another node becomes node 0, for the command that has started all knows the job."""

import json
import os
from signal import SIGINT, SIGKILL

from tests.conftest import until
from tests.slurm.job import Batch, SlurmJob
from tests.slurm.started import BEHAVE, agent, front, one_cluster, ready

__all__ = ["one_cluster"]

FLAGS = "--nnodes 2:3 --nproc-per-node 1 --heartbeat-timeout 2"


def going_on(job: SlurmJob, behaviour: str, flags: str = "") -> Batch:
    """A job of three nodes that goes on without node 0, whose agent was killed."""
    command = f"{job.ddplaunch} {FLAGS} {flags} {BEHAVE} all={behaviour}"
    running = job.sbatch(f"trap : TERM\n{command}\necho the status is $?", "--nodes=3", "--ntasks-per-node=1")
    ready(job, running, 3)
    os.kill(agent(job, "node1"), SIGKILL)
    try:
        job.signs("restart-1", 2)
    except AssertionError as error:
        error.add_note(running.output())
        raise
    return running


def test_the_others_go_on_and_finish(job: SlurmJob) -> None:
    running = going_on(job, "done_when_told")
    (job.home / "signs" / "go").touch()
    assert running.wait() == "COMPLETED"
    output = running.output()
    # "closed", or "reset" if something of the coordinator was on its way
    assert output.count("node 0 (node1) is lost: connection ") == 1, output
    assert output.count("2 workers on 2 nodes finished in") == 1, output
    assert "the status is 0\n" in output
    job.nothing_left(10)


def test_a_host_without_power_is_gone_on_without(job: SlurmJob) -> None:
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


def test_a_signal_of_the_user_reaches_those_who_go_on(job: SlurmJob) -> None:
    running = going_on(job, "polite")
    os.kill(front(job, "node1"), SIGINT)
    running.wait()
    assert "the status is 130\n" in running.output()
    assert job.sign("got-0") == "SIGINT"
    job.nothing_left(10)


def test_a_job_that_has_lost_node_0_goes_back_into_the_queue_after_a_notice(job: SlurmJob) -> None:
    running = going_on(job, "default", "--requeue-on USR1")
    running.cancel("--signal=USR1")
    running.wait("PENDING")
    words = f"ddplaunch: job {running.id} is requeued after SIGUSR1 (requeue 1 of at most 10)"
    assert (running.output().count(words), running.restarts()) == (1, 1), running.output()
    running.cancel()


def test_the_last_node_meets_itself_and_not_the_host_of_the_command(job: SlurmJob) -> None:
    command = job.start_salloc(
        f"{job.ddplaunch} --nnodes 1:2 --nproc-per-node 2 --heartbeat-timeout 2 {BEHAVE} all=done_when_told",
        "--nodes=2",
    )
    job.signs("ready", 4)
    os.kill(agent(job, "node1"), SIGKILL)
    job.signs("restart-1", 2)
    (job.home / "signs" / "go").touch()
    assert job.wait(command=command).status == 0
    (run,) = job.home.glob("**/runs/*/events.jsonl")
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    began = [row["master_addr"] for row in rows if row["event"] == "generation_started"]
    assert len(began) == 2
    assert began[1] == "127.0.0.1"
