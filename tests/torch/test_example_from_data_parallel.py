"""The example that leads from DataParallel to DDP, through the real command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, module, needs_torch_and_digits, plain

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


@pytest.mark.parametrize(
    ("off", "words"),
    [
        ("outputs", "the outputs of DDP are not those of DataParallel"),
        ("gradient", "the weighted gradient of DDP is not that of DataParallel"),
        ("neither", "the shares are unequal, and yet the mean of the means is right"),
    ],
)
def test_what_differs_is_an_error(off: str, words: str) -> None:
    import torch

    example = module(EXAMPLE.name)

    def step(**changed: Any) -> Any:
        return example.Step(
            **{"outputs": torch.zeros(3, 10), "loss": 2.3, "gradient": torch.ones(7, dtype=torch.float64), **changed}
        )

    other = {"outputs": torch.full((3, 10), 1e-9), "gradient": torch.full((7,), 1 + 1e-9, dtype=torch.float64)}
    weighted = step(**{off: other[off]}) if off in other else step()
    with pytest.raises(RuntimeError, match=words):
        example.compare(step(), step(), weighted, [2, 1])
