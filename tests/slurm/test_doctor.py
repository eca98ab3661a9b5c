"""The doctor examines all nodes of an allocation, from its shell and in a step."""

import json
import re

import pytest

from tests.slurm.job import SlurmJob
from tests.slurm.started import NODES, one_cluster

__all__ = ["one_cluster"]


@pytest.mark.parametrize("way", ["", "srun --ntasks-per-node=1 "], ids=["a step for each node", "one step of all"])
def test_all_nodes_of_an_allocation_are_examined(job: SlurmJob, way: str) -> None:
    command = f"{way}{job.ddplaunch} doctor --json --only limits"
    result = job.salloc(command, f"--nodes={NODES}")
    report = json.loads(result.out)
    assert len({one["host"] for one in report["nodes"]}) == NODES
    facts = {one["id"]: one["facts"] for one in report["checks"]}
    assert facts["nodes"] == f"{NODES} of {NODES} nodes answered to the end"
    assert re.search(r"/s and .* for a round trip, in \d pair", facts["network"])
    assert [one for one in report["findings"] if one["severity"] == "broken"] == []
    job.nothing_left(10)
