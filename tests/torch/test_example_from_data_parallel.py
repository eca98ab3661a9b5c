"""The example that leads from DataParallel to DDP, through the real command."""

from pathlib import Path

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits, plain

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "from_data_parallel.py"
SAME = "same outputs, same gradient, same checkpoints"


def test_unequal_shares_need_weights_and_outputs_and_checkpoints_are_the_same(job: Job) -> None:
    result = launched(job, "--output", "rank0", "--nproc-per-node", 3, EXAMPLE)
    assert result.status == 0, result.err
    calls, shares, whole, means, weighted, names, last = result.out.splitlines()
    assert calls == "DataParallel: fewer than two GPUs, so it calls the module and no more"
    assert shares.startswith("shares 5 5 3, outputs differ by ")
    right = whole.removeprefix("DataParallel").strip()
    assert weighted.endswith(f"{right}, gradient off by 0.0%")
    assert right not in means
    assert names == "names in a checkpoint: module.0.weight from a wrapper, 0.weight from its .module"
    assert last == f"DataParallel and DDP on 3 workers: {SAME}"


@pytest.mark.slow
def test_a_worker_without_an_image_takes_part(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 3, EXAMPLE, "--batch-size", 2)
    assert result.status == 0, result.err
    assert "shares 1 1 0, " in result.out
    assert SAME in result.out


@pytest.mark.slow
def test_plain_python_is_a_job_of_one(tmp_path: Path) -> None:
    assert SAME in plain(EXAMPLE.name, tmp_path, "--batch-size", 4)
