"""The example of a line whose parameters several processes share, through the real command."""

import importlib.util
import os
import re

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

EXAMPLE = EXAMPLES / "shared_regression.py"
WAYS = re.compile(r"^(\w+): 4 tensors, (\d+) open files, (\d+) names in /dev/shm$", re.MULTILINE)
LINE = re.compile(r"^  y = ([\d.]+) x \+ ([\d.]+), mean squared error ([\d.]+), noise 0.25$", re.MULTILINE)


def test_four_processes_learn_one_line_in_both_ways_of_sharing_and_leave_no_memory_behind(job: Job) -> None:
    before = set(os.listdir("/dev/shm"))
    result = launched(job, EXAMPLE)
    assert result.status == 0, result.err
    assert WAYS.findall(result.out) == [("file_descriptor", "4", "0"), ("file_system", "0", "4")]
    for slope, offset, error in LINE.findall(result.out):
        assert float(slope) == pytest.approx(2, abs=0.1)
        assert float(offset) == pytest.approx(3, abs=0.1)
        assert float(error) == pytest.approx(0.25, rel=0.1)
    made = {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} - before
    ours = re.findall(r'"pid": (\d+)', (job.folder / "events.jsonl").read_text())
    assert not [name for name in made if name.split("_")[1] in ours]


@pytest.mark.slow
def test_a_line_that_is_not_learned_ends_the_job(job: Job) -> None:
    words = ("--processes", 1, "--epochs", 1, "--strategies", "own")
    program = job.home / "slow.py"
    program.write_text(EXAMPLE.read_text().replace("RATE = 0.1", "RATE = 0.001"))
    result = launched(job, "--sharing-strategy", "file_system", program, *words)
    assert result.status == 1
    assert WAYS.findall(result.out) == [("file_system", "0", "4")]
    assert re.search(r"mean squared error [\d.]+ is not within 10% of the noise's variance, 0.25", result.err)
