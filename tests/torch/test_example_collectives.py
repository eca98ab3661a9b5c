"""The example of all collectives, through the real command."""

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, plain

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

EXAMPLE = EXAMPLES / "collectives.py"
TABLE = """\
broadcast      rank 0  00 01 02 -> 00 01 02
               rank 1  10 11 12 -> 00 01 02
               rank 2  20 21 22 -> 00 01 02
reduce         rank 0  00 01 02 -> 30 33 36
               rank 1  10 11 12 -> ?
               rank 2  20 21 22 -> ?
all_reduce     rank 0  00 01 02 -> 30 33 36
               rank 1  10 11 12 -> 30 33 36
               rank 2  20 21 22 -> 30 33 36
gather         rank 0  00 01 02 -> 00 01 02 10 11 12 20 21 22
               rank 1  10 11 12 -> -
               rank 2  20 21 22 -> -
all_gather     rank 0  00 01 02 -> 00 01 02 10 11 12 20 21 22
               rank 1  10 11 12 -> 00 01 02 10 11 12 20 21 22
               rank 2  20 21 22 -> 00 01 02 10 11 12 20 21 22
scatter        rank 0  00 01 02 -> 00
               rank 1  - -> 01
               rank 2  - -> 02
reduce_scatter rank 0  00 01 02 -> 30
               rank 1  10 11 12 -> 33
               rank 2  20 21 22 -> 36
all_to_all     rank 0  00 01 02 -> 00 10 20
               rank 1  10 11 12 -> 01 11 21
               rank 2  20 21 22 -> 02 12 22
"""
COLLECTIVES = [row.split()[0] for row in TABLE.splitlines()[::3]]
LACKING = {(2, 4): "gloo has no reduce_scatter, all_to_all", (2, 9): "gloo has no all_to_all"}  # of those tried


def test_three_ranks_hold_what_a_pencil_gives(job: Job) -> None:
    result = launched(job, "--output", "rank0", "--nproc-per-node", 3, EXAMPLE, "--late", 0.1)
    assert result.status == 0, result.err
    promised = [
        f"{line.split('->')[0]}-> ?" if line.endswith("(undefined)") else line
        for line in result.out.replace("[0] ", "").splitlines()
    ]
    major, minor = version("torch").split(".")[:2]
    lacks = LACKING.get((int(major), int(minor)), "")
    lacking = lacks.partition(" no ")[2].split(", ") if lacks else []
    rows = [row for number, row in enumerate(TABLE.splitlines()) if COLLECTIVES[number // 3] not in lacking]
    said = [lacks] if lacks else []
    done = f"{9 - len(lacking)} collectives over gloo: the right result on all 3 ranks"
    assert promised == [*rows, *said, done]


@pytest.mark.slow
def test_plain_python_is_a_job_of_one(tmp_path: Path) -> None:
    out = plain(EXAMPLE.name, tmp_path)
    assert out.endswith("9 collectives over gloo: the right result on all 1 ranks\n")
