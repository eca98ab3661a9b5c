"""A rank of a gloo group ends: whoever was waiting for it fails too, often sooner, and is never taken for the cause."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.example import AFTER_EXCEPTION

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

RAISED = "rank 1 failed: ValueError: rank 1 has seen a NaN"


@pytest.fixture
def fail(job, program, monkeypatch):
    """Run torch_fail.py with 2 workers, prove that nothing is left, and give the result and its report."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def fail(how: str, who: int | str = 1, *options: object):
        result = job.run("--nproc-per-node", 2, *options, program("torch_fail"), how, who)
        job.nothing_left()
        return result, result.err.rpartition("error: ")[2]

    return fail


def line_of(program: Path, source: str) -> int:
    return 1 + next(number for number, line in enumerate(program.read_text().splitlines()) if source in line)


def test_the_rank_that_raised_is_blamed_with_its_own_line(fail, program):
    result, report = fail("raises")
    assert result.status in AFTER_EXCEPTION
    assert report.startswith(f"{RAISED}   (")
    line = line_of(program("torch_fail"), "raise ValueError")
    assert f'torch_fail.py:{line} in raises\n    raise ValueError(f"rank {{RANK}} has seen a NaN")\n' in report
    assert "Connection closed" not in report


def test_a_rank_that_raised_and_is_slow_to_end_is_blamed_for_the_victim_that_died_before_it(fail, job):
    result, report = fail("raises_and_stays")
    assert [(end["rank"], end["stopped_with"]) for end in job.events("worker_exited")] == [(0, None), (1, 15)]
    assert result.status in AFTER_EXCEPTION
    assert report.startswith(f"{RAISED}   (stopped while it was exiting, ")
    assert "rank 0 then lost contact with it" in report


@pytest.mark.parametrize(("how", "status"), [("exits", 3), ("exits_at_once", 5)])
def test_a_rank_that_exits_is_blamed(fail, how, status):
    result, report = fail(how)
    assert result.status == status
    assert report.startswith(f"rank 1 failed: exit status {status}   (after ")


def test_a_rank_that_is_killed_is_blamed_and_the_file_that_they_met_at_is_removed(fail, job):
    result, report = fail("is_killed", 1, "--init-method", f"file:{job.home / 'meet'}")
    assert result.status == 137
    assert report.startswith("rank 1 failed: killed by SIGKILL   (after ")
    assert not list(job.home.glob("meet*"))


def test_of_a_rank_that_ended_well_too_early_the_victim_and_that_end_are_told(fail):
    result, report = fail("is_done")
    assert result.status in AFTER_EXCEPTION
    assert re.match(r"rank 0 failed: RuntimeError: .*Connection (closed|reset) by peer", report)
    assert re.search(r"^  rank 1 (finished|had exited) with status 0", report, re.MULTILINE)
    assert "\nhint: a worker ended while others still needed it: " in report


def test_an_exception_that_all_ranks_raise_is_shown_once(fail):
    result, report = fail("raises_with_the_others", "all")
    assert result.status in AFTER_EXCEPTION
    assert re.match(r"rank ([01]) failed: ValueError: rank \1 has seen a NaN   \(", report)
    assert len(re.findall(r"rank \d has seen a NaN", report)) == 1
    assert re.search(r"^  ranks (0 and 1|1 and 0) failed alike$", report, re.MULTILINE)


def test_after_a_restart_the_workers_meet_again_on_a_port_of_their_own(fail, job):
    result, _ = fail("raises_at_first", 1, "--max-restarts", 1)
    assert result.status == 0, result.err
    assert f"error: {RAISED}" in result.err
    assert job.signs("total", 2) == ["11.0 in generation 1"] * 2
    assert len(set(job.ports())) == 2


def test_the_processes_of_data_loaders_are_gone_with_their_workers(job, program):
    """Those of the rank that failed, too."""
    result = job.run("--nproc-per-node", 2, program("torch_loaders"))
    for folder in (job.home / "tmp").glob(
        "pymp-*"
    ):  # multiprocessing's own; a Python that SIGTERM ends leaves it anywhere
        shutil.rmtree(folder)
    job.nothing_left()
    assert result.status in AFTER_EXCEPTION
    assert "rank 1 failed: ValueError: boom among data loaders" in result.err
