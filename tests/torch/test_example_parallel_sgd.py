"""The example of training on separate parts of the data and averaging the weights, through the real command."""

import re

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "parallel_sgd.py"
FINAL = re.compile(r"accuracy ([\d.]+)% on 360 held-back images; one process gives the same weights, bit for bit")


def test_two_workers_learn_in_two_rounds_what_one_process_learns(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 2, EXAMPLE, "--rounds", 2, "--epochs", 2, "--target", 80)
    assert result.status == 0, result.err
    assert re.findall(r"round (\d): alone [\d.]+%, [\d.]+%; averaged", result.out) == ["1", "2"]
    final = FINAL.search(result.out)
    assert final is not None, result.out
    assert float(final[1]) >= 80


@pytest.mark.slow
def test_too_few_rounds_for_the_target_end_the_job(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 2, EXAMPLE, "--rounds", 1, "--epochs", 1)
    assert result.status == 1
    assert FINAL.search(result.out), "the weights are equal all the same"
    assert re.search(r"accuracy [\d.]+% is below the target of 97%", result.err)
