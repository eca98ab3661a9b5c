"""The example with a network on two devices, through the real command; without GPUs both are the CPU."""

import re
from pathlib import Path

import pytest

from tests.conftest import Job
from tests.torch.example import AFTER_EXCEPTION, EXAMPLES, launched, needs_torch_and_digits, plain

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "model_parallel.py"
SAME = re.compile(r"weights off by \S+ from those of one process with the uncut network")


def test_two_workers_train_the_weights_of_one_process(job: Job) -> None:
    result = launched(job, "--nproc-per-node", 2, EXAMPLE, "--epochs", 4, "--target", 80)
    assert result.status == 0, result.err
    assert SAME.search(result.out)
    where = re.findall(r"rank (\d) of 2: gloo, lower half on cpu, upper half on cpu", result.out)
    assert sorted(where) == ["0", "1"]


@pytest.mark.slow
def test_a_worker_that_is_told_something_else_is_found(job: Job) -> None:
    program = job.home / "unequal.py"
    program.write_text(
        "import os, runpy, sys\n"
        "sys.argv = ['', '--epochs', '1', '--learning-rate', '0.05' if os.environ['RANK'] == '0' else '0.06']\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    result = launched(job, "--nproc-per-node", 2, program)
    assert result.status in AFTER_EXCEPTION
    assert re.search(r"RuntimeError: rank \d: a weight is off by \S+ from that of one process", result.err)


@pytest.mark.slow
def test_too_little_training_is_an_error(job: Job) -> None:
    result = launched(job, EXAMPLE, "--epochs", 1)
    assert result.status in AFTER_EXCEPTION
    assert re.search(r"accuracy [0-9.]+% is below the target of 90%", result.err)


@pytest.mark.slow
def test_plain_python_is_a_job_of_one(tmp_path: Path) -> None:
    assert SAME.search(plain(EXAMPLE.name, tmp_path, "--epochs", 4, "--target", 0))
