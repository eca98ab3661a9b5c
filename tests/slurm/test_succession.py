"""Node 0 of an elastic job in Slurm is lost, and the job goes on: the command follows the node that takes over."""

import os
from signal import SIGKILL

from tests.slurm.job import SlurmJob
from tests.slurm.started import BEHAVE, agent, one_cluster, ready

__all__ = ["one_cluster"]

FLAGS = "--nnodes 2:3 --nproc-per-node 1 --heartbeat-timeout 2"


def test_the_command_follows_the_node_that_takes_over_and_gives_the_status_of_the_job(job: SlurmJob) -> None:
    running = job.sbatch(f"{job.ddplaunch} {FLAGS} {BEHAVE} all=done_when_told", "--nodes=3")
    ready(job, running, 3)
    os.kill(agent(job, "node1"), SIGKILL)
    job.signs("restart-1", 2)
    (job.home / "signs" / "go").touch()
    assert running.wait() == "COMPLETED", running.output()
    assert running.output().count("finished in") == 1, running.output()
    job.nothing_left(10)
