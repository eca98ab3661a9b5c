"""The example on accumulated gradients and on loading checkpoints, through the real command."""

import re
import sys

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits

pytestmark = [
    needs_torch_and_digits,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its peak memory"),
]

EXAMPLE = EXAMPLES / "memory_and_accumulation.py"


def test_pieces_give_the_weights_of_whole_batches_and_one_rank_loads_for_all(job: Job) -> None:
    result = launched(job, "--output", "rank0", "--nproc-per-node", 2, EXAMPLE, "--layers", 1, "--loaders", 1)
    assert result.status == 0, result.err
    exchanges = re.findall(r"^  (.+?) +(\d+) exchanges", result.out, re.MULTILINE)
    assert exchanges == [("whole batches", "28"), ("4 pieces", "112"), ("4 pieces, no_sync", "28")]
    peaks = re.findall(r"^  (every rank loads|one loads, broadcasts) +(\d+) +(\d+)$", result.out, re.MULTILINE)
    assert [name for name, *_ in peaks] == ["every rank loads", "one loads, broadcasts"]
    assert result.out.splitlines()[-1] == "same weights in all ways on 2 ranks"
