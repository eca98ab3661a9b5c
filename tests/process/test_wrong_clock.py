"""A job on a node whose clock is wrong removes nothing of other jobs, and says how wrong the clock is."""

import signal

import pytest

from tests.runs import run_of

AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + {} * 86400\n"


@pytest.mark.parametrize(("days", "which"), [(60, "ahead of"), (-60, "behind")])
def test_a_job_with_a_wrong_clock_removes_no_runs_and_says_so(job, tmp_path, days, which):
    runs = job.home / "state" / "ddplaunch" / "runs"
    for name, age in (("yesterday", 1.5), ("old", 40)):
        run_of(runs, name, days=age)
    (tmp_path / "sitecustomize.py").write_text(AHEAD.format(days))
    job.behave("all=default", env={"PYTHONPATH": str(tmp_path)})
    line = next(line for line in job.process.stderr if b"old runs" in line).decode()
    assert f"no old runs are removed: the clock of this node is 60 d {which} that of their disk" in line
    assert "--keep-runs 0" in line
    job.process.send_signal(signal.SIGTERM)
    job.wait().expect(143)
    assert {"yesterday", "old"} <= {path.name for path in runs.iterdir()}
