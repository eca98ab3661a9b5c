"""A rank of a gloo group ends: whoever was waiting for it fails too, often sooner, and is never taken for the cause."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch.example import AFTER_EXCEPTION

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

# torch is imported once
TWO = ("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "torch.distributed")
RAISED = "rank 1 failed: ValueError: rank 1 has seen a NaN"


@pytest.fixture
def fail(job, program, monkeypatch):
    """Run torch_fail.py with 2 workers, prove that nothing is left, and give the result and its report."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def fail(how: str, *options: object):
        result = job.run(*TWO, *options, program("torch_fail"), how)
        job.nothing_left()
        return result, result.err.rpartition("error: ")[2]

    return fail


def line_of(program: Path, source: str) -> int:
    return 1 + next(number for number, line in enumerate(program.read_text().splitlines()) if source in line)


def test_a_rank_that_raised_and_is_slow_to_end_is_blamed_with_its_line_for_the_victim_that_died_before_it(
    fail, job, program
):
    result, report = fail("raises_and_stays")
    assert [(end["rank"], end["stopped_with"]) for end in job.events("worker_exited")] == [(0, None), (1, 15)]
    assert result.status in AFTER_EXCEPTION
    assert report.startswith(f"{RAISED}   (stopped while it was exiting, ")
    line = line_of(program("torch_fail"), "raise ValueError")
    assert (
        f'torch_fail.py:{line} in raises_and_stays\n    raise ValueError(f"rank {{RANK}} has seen a NaN")\n' in report
    )
    assert "rank 0 then lost contact with it" in report
    assert "Connection closed" not in report


def test_an_abort_in_a_thread_of_gloo_has_the_line_of_the_main_thread_and_leads_to_a_check(fail, program):
    result, report = fail("sends_more")
    assert result.status == 134
    assert report.startswith("rank 0 failed: killed by SIGABRT   (")
    assert "Received data size doesn't match expected size." in report
    assert "\n  stack of the main thread, innermost frame first:\n" in report
    assert f"torch_fail.py:{line_of(program('torch_fail'), 'dist.all_reduce(total)')} in step\n" in report
    assert re.search(r"hint: .*`ddplaunch check --world-size 2 \S*torch_fail\.py", report)


def test_a_rank_that_is_killed_is_blamed_and_the_file_that_they_met_at_is_removed(fail, job):
    result, report = fail("is_killed", "--init-method", f"file:{job.home / 'meet'}")
    assert result.status == 137
    assert report.startswith("rank 1 failed: killed by SIGKILL   (after ")
    assert not list(job.home.glob("meet*"))


def test_of_a_rank_that_ended_well_too_early_the_victim_and_that_end_are_told(fail):
    result, report = fail("is_done")
    assert result.status in AFTER_EXCEPTION
    assert re.match(r"rank 0 failed: RuntimeError: .*Connection (closed|reset) by peer", report)
    assert re.search(r"^  rank 1 (finished|had exited) with status 0", report, re.MULTILINE)
    assert "\nhint: a worker ended while others still needed it: " in report


def test_the_processes_of_data_loaders_are_gone_with_their_workers(job, program):
    """Those of the rank that failed, too."""
    result = job.run(*TWO, program("torch_loaders"))
    # multiprocessing's own; a Python that SIGTERM ends leaves it anywhere
    for folder in (job.home / "tmp").glob("pymp-*"):
        shutil.rmtree(folder)
    job.nothing_left()
    assert result.status in AFTER_EXCEPTION
    assert "rank 1 failed: ValueError: boom among data loaders" in result.err
