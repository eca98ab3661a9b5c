"""The example on accumulated gradients and on loading checkpoints, through the real command."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest

from tests.conftest import Job
from tests.torch.example import EXAMPLES, launched, module, needs_torch_and_digits

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


def test_a_batch_that_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    example = module(EXAMPLE.name)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, "--pieces", "5"])
    try:
        with pytest.raises(SystemExit, match="--batch-size 64 cannot be cut into 5 equal pieces for each worker"):
            example.main()
    finally:
        example.dist.destroy_process_group()


@pytest.mark.parametrize(
    ("every", "one", "words"),
    [
        ([100, 100], [100, 90], "a rank that does not load has held more than half"),
        ([100, 10], [100, 0], "the measurement is wrong"),
        ([100, 100], [0, 0], "the measurement is wrong"),
    ],
)
def test_a_peak_that_cannot_be_is_an_error(every: Sequence[float], one: Sequence[float], words: str) -> None:
    check_peaks = module(EXAMPLE.name).check_peaks
    check_peaks(100, [100, 100], [100, 2])
    check_peaks(100, [100], [100])
    with pytest.raises(RuntimeError, match=words):
        check_peaks(100, every, one)
