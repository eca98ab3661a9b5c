"""`--health-check`: in a step of ddplaunch any fit node may be node 0; in one of the user, node 0 itself coordinates."""

import pytest

from tests.slurm.job import SlurmJob
from tests.slurm.places import PLACE, places
from tests.slurm.started import one_cluster

__all__ = ["one_cluster"]

CHECK = "--health-check 'test $(hostname) != node1 || { echo GPU 2 is off the bus; exit 4; }'"
ERROR = f"node1 is not fit for the job: {CHECK.replace(chr(39), '')}: exit status 4: GPU 2 is off the bus\n"
NODES = "--nodelist=node1,node2"


@pytest.mark.parametrize("flags", ["--nnodes 1:2", "--spares 1"])
def test_another_node_is_node_0_if_the_first_one_is_not_fit(job: SlurmJob, flags: str) -> None:
    result = job.salloc(f"{job.ddplaunch} {flags} --nproc-per-node 1 {CHECK} {PLACE}; echo $?", NODES)
    assert result.out == "0\n", result.err
    assert [(place["WORLD_SIZE"], place["SLURMD_NODENAME"]) for place in places(job)] == [("1", "node2")]
    assert f"ddplaunch: node 0 (node1) does not take part: {ERROR}" in result.err


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("", 121, f"error: node 0 (node1) does not take part: {ERROR}"),
        ("srun --ntasks-per-node=1 ", 122, f"error: {ERROR}"),
    ],
    ids=["a step of its own", "a step of the user"],
)
def test_a_job_that_needs_the_node_ends_at_once(job: SlurmJob, command: str, status: int, words: str) -> None:
    result = job.salloc(f"{command}{job.ddplaunch} --nproc-per-node 1 {CHECK} {PLACE}; echo $?", NODES)
    assert (result.out, result.err.count(words)) == (f"{status}\n", 1), result.err
    assert not places(job)
