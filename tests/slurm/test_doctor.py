"""The doctor examines all nodes of an allocation, from its shell and in a step."""

import json
import re

import pytest

from tests.slurm.job import SlurmJob
from tests.slurm.started import NODES, one_cluster

__all__ = ["one_cluster"]


@pytest.mark.parametrize("way", ["", "srun --ntasks-per-node=1 "], ids=["a step for each node", "one step of all"])
def test_all_nodes_of_an_allocation_are_examined(job: SlurmJob, way: str) -> None:
    command = f"{way}{job.ddplaunch} doctor --json --only limits --write-hosts {job.home}/good.txt"
    result = job.salloc(command, f"--nodes={NODES}")
    report = json.loads(result.out)
    assert len({one["host"] for one in report["nodes"]}) == NODES
    facts = {one["id"]: one["facts"] for one in report["checks"]}
    assert facts["nodes"] == f"{NODES} of {NODES} nodes answered to the end"
    assert re.search(r"/s and .* for a round trip, in \d pair", facts["network"])
    assert [one for one in report["findings"] if one["severity"] == "broken"] == []
    assert (job.home / "good.txt").read_text().split() == [one["host"] for one in report["nodes"]]
    job.nothing_left(10)


def test_the_nodes_of_all_components_of_a_heterogeneous_job_are_examined(job: SlurmJob) -> None:
    command = f"{job.ddplaunch} doctor --json --only limits --write-hosts {job.home}/good.txt"
    report = json.loads(job.salloc(command, "--nodes=1", ":", "--nodes=2").expect(0).out)
    assert {one["id"]: one["facts"] for one in report["checks"]}["nodes"] == "3 of 3 nodes answered to the end"
    assert (job.home / "good.txt").read_text().split() == [f"node{number}" for number in (1, 2, 3)]
    job.nothing_left(10)


def test_settings_are_noted_and_variables_of_a_job_that_has_ended_break_the_next(job: SlurmJob) -> None:
    doctor = f"{job.ddplaunch} doctor --only slurm --cluster local -v"
    mine = job.sbatch(f"{doctor}; echo status $?; SLURM_JOB_ID=99 {doctor}; echo status $?", "--nodes=1", "--ntasks=1")
    assert mine.wait() == "COMPLETED"
    said = " ".join(mine.output().split())
    assert "ProctrackType proctrack/pgid" in said
    assert "note: workers have 10 s to save when Slurm ends a job" in said
    broken = "broken: the Slurm job of this shell, 99, does not run"
    assert said.index("status 0") < said.index(broken) < said.index("status 1")
