"""The example of training one shared network without locks, through the real command."""

import re

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "hogwild.py"
FEW = ("--processes", 2, "--steps", 200, "--seconds", 0.5)
ROW = re.compile(r"^ +2 +1 +([\d,]+) \(([\d.]+)%\) +2 +[\d,]+ \([\d.]+%(, cut off)?\) +([\d.]+)$", re.MULTILINE)


def test_two_processes_train_one_network_with_one_thread_each_and_with_two(job: Job) -> None:
    result = launched(job, "--threads", 2, EXAMPLE, *FEW, "--target", 80)
    assert result.status == 0, result.err
    row = ROW.search(result.out)
    assert row is not None, result.out
    assert float(row[2]) >= 80
    assert re.search(r"^ +2 x 1 +#+ [\d,]+$", result.out, re.MULTILINE), "the bars"


@pytest.mark.slow
def test_too_little_accuracy_ends_the_job(job: Job) -> None:
    result = launched(job, "--threads", 1, EXAMPLE, "--processes", 1, "--steps", 1)
    assert result.status == 1
    assert re.search(r"accuracy [\d.]+% is below the target of 90%", result.err)
