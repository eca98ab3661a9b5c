"""A job in Slurm is looked into, and stopped, from another step on its first node."""

import json
import re

import pytest

from tests.slurm.job import SlurmJob
from tests.slurm.started import BEHAVE, EACH, NODES, RANKS, batch, one_cluster, ready

__all__ = ["one_cluster"]


@pytest.mark.parametrize("way", ["a step of its own", "a task for each rank"])
def test_all_its_ranks_are_shown_and_stopped_as_by_ctrl_c(job: SlurmJob, way: str) -> None:
    running = batch(job, way, BEHAVE, tells=True, flags=f"--run-id {job.mark}")
    ready(job, running)
    on_the_first = ("--overlap", "--jobid", running.id, "--nodes=1", "--ntasks=1", *job.argv())
    shown = json.loads(job.srun(*on_the_first, "ps", "--json").out)
    [run] = [run for run in shown if run["run_id"] == job.mark]
    assert [worker["rank"] for worker in run["workers"]] == list(range(RANKS))
    assert len({worker["host"] for worker in run["workers"]}) == NODES
    assert {worker["state"] for worker in run["workers"]} == {"running"}
    assert run["nnodes"] == (NODES if way == "a step of its own" else NODES * EACH)
    stopped = job.srun(*on_the_first, "stop", job.mark)
    assert stopped.status == 0, stopped
    status = re.search(r"has ended with status (\d+)", stopped.err)
    assert status is not None, stopped
    running.wait()
    assert f"the status is {status[1]}" in running.output()
    assert status[1] in ("130", "143")  # a script may have SIGINT ignored
    job.nothing_left(10)
