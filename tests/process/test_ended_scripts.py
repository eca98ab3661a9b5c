"""A worker whose script has ended and whose process goes on is named, with what Python waits for there."""

import sys

import pytest

from tests.conftest import until
from tests.process import hurried

GOES_ON = """
import atexit, os, sys, threading, time
from pathlib import Path
def may_end():
    while not Path(os.environ["MAY_END"]).exists(): time.sleep(0.01)  # in one line: it may be seen anywhere in the loop
kind = sys.argv[1]
if kind == "thread":
    threading.Thread(target=may_end).start()
elif kind == "exits":
    threading.Thread(target=may_end).start()
    sys.exit(0)
elif kind == "atexit":
    atexit.register(may_end)
"""
WAITS = "still runs, 2 s after the end of the script: Python waits for a thread: train.py:5 in may_end"
RUNS = WAITS.replace("waits for a thread", "runs a function that was registered for its exit")


@pytest.mark.parametrize(("kind", "said"), [("thread", WAITS), ("exits", WAITS), ("atexit", RUNS)])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_does_not_end_after_its_script_is_named_once(job, tmp_path, kind, said, method):
    job.command = [sys.executable, hurried.__file__]
    (tmp_path / "train.py").write_text(GOES_ON)
    may_end = tmp_path / "may-end"
    job.start(
        *("--nproc-per-node", 1, "--start-method", method, "train.py", kind),
        cwd=tmp_path,
        env={"MAY_END": str(may_end)},
    )
    until(lambda: job.events("notice"), "the line")
    may_end.touch()
    assert job.wait().expect(0).err.count(f"ddplaunch: rank 0 {said}") == 1
    job.nothing_left()


def test_a_worker_that_ends_with_its_script_is_not_named(job, tmp_path):
    (tmp_path / "train.py").write_text("")
    job.run("--nproc-per-node", 2, tmp_path / "train.py").expect(0)
    assert not job.events("notice")
    job.nothing_left()
