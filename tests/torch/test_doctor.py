"""The doctor's job of two workers, with the torch that is installed."""

from pathlib import Path

from tests.conftest import Job


def test_two_workers_meet_and_all_reduce_is_measured(job: Job):
    result = job.run("doctor", "--only", "all-reduce", "-v")
    job.nothing_left()
    # a machine that runs all tests may need longer than the doctor gives: that is slow, and no more
    assert result.status == 0, result.out
    assert "all-reduce  passed  gloo " in result.out or "did not end in 7.5 s" in result.out


def test_a_torch_that_cannot_be_imported_breaks_a_job_and_says_why(job: Job, tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    )
    result = job.run("doctor", "--only", "all-reduce", env={"PYTHONPATH": str(tmp_path)})
    assert result.status == 1
    assert "broken: a job of two workers fails on this machine" in result.out
    assert "libcudart.so.13" in result.out


def test_an_import_that_hangs_is_slow_and_ends_in_time(job: Job, tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time\ntime.sleep(600)\n")
    result = job.run("doctor", "--only", "all-reduce", env={"PYTHONPATH": str(tmp_path)})
    job.nothing_left()
    assert (result.status, result.err) == (0, "")
    assert "slow: a job of two workers did not end in 7.5 s while it imports torch" in " ".join(result.out.split())
