"""The example of tensors in queues, through the real command."""

import importlib.util
import re

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "numpy")), reason="needs torch and numpy"
)

EXAMPLE = EXAMPLES / "queues.py"
MOVED = re.compile(r"^put moves the tensor to shared memory: (0x\w+) -> (0x\w+), a copy$", re.MULTILINE)
BACK = re.compile(r"^what comes back lies at (0x\w+), no copy; the other process wrote 7 to it$", re.MULTILINE)
ROW = re.compile(r"^(\w+) +(\w+) +[\d.,]+ MB/s +[\d,]+ us each +([\d.]+) MB", re.MULTILINE)


def test_buffers_that_are_sent_back_are_copied_once_and_others_every_time(job: Job) -> None:
    result = launched(job, EXAMPLE, "--megabytes", 1, "--count", 10)
    assert result.status == 0, result.err
    moved, back = MOVED.search(result.out), BACK.search(result.out)
    assert moved and back, result.out
    assert moved[1] != moved[2] == back[1]
    copied = [("pickled", "10.0"), ("new", "10.0"), ("reused", "4.0")]
    assert ROW.findall(result.out)[:6] == [(queue, *row) for queue in ("SimpleQueue", "Queue") for row in copied]
    assert re.search(r"^from a sender that has ended: (FileNotFound|Connection\w*)Error: ", result.out, re.MULTILINE)
    assert "from a sender that waits until then: a tensor" in result.out


@pytest.mark.slow
def test_numbers_that_arrive_wrong_end_the_job(job: Job) -> None:
    program = job.home / "wrong.py"
    source = EXAMPLE.read_text()
    assert "tensor.fill_(number)" in source
    program.write_text(source.replace("tensor.fill_(number)", "tensor.fill_(number + number // 3)"))
    result = launched(job, program, "--megabytes", 0.1, "--count", 6)
    assert result.status == 1
    assert "tensor 3 arrived as 4 ... 4" in result.err
