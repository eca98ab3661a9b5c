"""What thousands of logs cost: one listing of their folder, not one for each. What is continued beside them is still found."""

import os
import time
from pathlib import Path

import pytest

from ddplaunch.record.log_reader import LogReader, ends_of, logs_of, segments_of

RANKS = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(RANKS):
        for stream in ("out", "err"):
            (tmp_path / f"rank-{rank}.{stream}").write_text(f"{rank} {stream}\n")
    os.utime(tmp_path, (1000, 1000))
    return tmp_path


def test_thousands_of_logs_are_read_with_one_listing(folder):
    began = time.process_time()
    number = 0
    for log in logs_of(str(folder)):
        reader = LogReader(log)
        number += sum(1 for _ in reader.lines())
        reader.close()
    assert number == 2 * RANKS
    ends = dict(ends_of(logs_of(str(folder)), 1000))
    assert len(ends) == RANKS
    assert ends[7] == "--- out ---\n7 out\n\n--- err ---\n7 err"
    assert time.process_time() - began < 4


def test_a_segment_that_comes_after_the_listing_is_found(tmp_path):
    log = str(tmp_path / "rank-0.out")
    Path(log).touch()
    os.utime(tmp_path, (1000, 1000))
    assert segments_of(log) == ()
    for number in (1, 2):
        Path(f"{log}.tail-{number}").touch()
        assert max(segments_of(log)) == number
    Path(f"{log}.tail-x").touch()
    assert sorted(segments_of(log)) == [1, 2]
    assert segments_of(str(tmp_path / "nowhere" / "log")) == ()


def test_what_a_reader_has_listed_says_nothing_of_another_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.out").touch()
    (tmp_path / "a" / "rank-0.out.tail-3").touch()
    assert (segments_of(f"{tmp_path}/a/rank-0.out"), segments_of(f"{tmp_path}/b/rank-0.out")) == ([3], ())
