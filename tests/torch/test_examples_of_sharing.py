"""The examples in which processes of one worker share tensors, through the real command."""

import os
import re

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, needs_torch_and_digits

pytestmark = needs_torch_and_digits


# --- hogwild.py


FEW = ("--processes", 2, "--steps", 200, "--seconds", 0.5)
ROW = re.compile(r"^ +2 +1 +([\d,]+) \(([\d.]+)%\) +2 +[\d,]+ \([\d.]+%(, cut off)?\) +([\d.]+)$", re.MULTILINE)


def test_two_processes_train_one_network_with_one_thread_each_and_with_two(job: Job) -> None:
    result = launched(job, "--threads", 2, EXAMPLES / "hogwild.py", *FEW).expect(0)
    row = ROW.search(result.out)
    assert row is not None, result.out
    assert float(row[2]) >= 80
    assert re.search(r"^ +2 x 1 +#+ [\d,]+$", result.out, re.MULTILINE), "the bars"


# --- shared_regression.py


WAYS = re.compile(r"^(\w+): 4 tensors, (\d+) open files, (\d+) names in /dev/shm$", re.MULTILINE)
LINE = re.compile(r"^  y = ([\d.]+) x \+ ([\d.]+), mean squared error ([\d.]+), noise 0.25$", re.MULTILINE)


def test_four_processes_learn_one_line_in_both_ways_of_sharing_and_leave_no_memory_behind(job: Job) -> None:
    before = set(os.listdir("/dev/shm"))
    result = launched(job, EXAMPLES / "shared_regression.py").expect(0)
    assert WAYS.findall(result.out) == [("file_descriptor", "4", "0"), ("file_system", "0", "4")]
    for slope, offset, error in LINE.findall(result.out):
        assert float(slope) == pytest.approx(2, abs=0.1)
        assert float(offset) == pytest.approx(3, abs=0.1)
        assert float(error) == pytest.approx(0.25, rel=0.1)
    made = {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} - before
    ours = re.findall(r'"pid": (\d+)', (job.folder / "events.jsonl").read_text())
    assert not [name for name in made if name.split("_")[1] in ours]


# --- queues.py


MOVED = re.compile(r"^put moves the tensor to shared memory: (0x\w+) -> (0x\w+), a copy$", re.MULTILINE)
BACK = re.compile(r"^what comes back lies at (0x\w+), no copy; the other process wrote 7 to it$", re.MULTILINE)
SENT = re.compile(r"^(\w+) +(\w+) +[\d.,]+ MB/s +[\d,]+ us each +([\d.]+) MB", re.MULTILINE)


def test_buffers_that_are_sent_back_are_copied_once_and_others_every_time(job: Job) -> None:
    result = launched(job, EXAMPLES / "queues.py", "--megabytes", 1, "--count", 10).expect(0)
    moved, back = MOVED.search(result.out), BACK.search(result.out)
    assert moved and back, result.out
    assert moved[1] != moved[2] == back[1]
    copied = [("pickled", "10.0"), ("new", "10.0"), ("reused", "4.0")]
    assert SENT.findall(result.out)[:6] == [(queue, *row) for queue in ("SimpleQueue", "Queue") for row in copied]
    assert re.search(r"^from a sender that has ended: (FileNotFound|Connection\w*)Error: ", result.out, re.MULTILINE)
    assert re.search(r"^from a sender that waits until then: a tensor, .* its sum is 1000$", result.out, re.MULTILINE)
