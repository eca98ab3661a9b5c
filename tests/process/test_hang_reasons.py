"""The report of a hang says why, where a thread or a child of a rank has said so; `stacks` says the same meanwhile."""

import pytest

OF_A_THREAD = """
import queue, threading
batches = queue.Queue()
def prefetch():
    raise OSError("shard 17 is gone")
threading.Thread(target=prefetch, daemon=True).start()
batches.get()
"""
OF_A_CHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
time.sleep(99)
"""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (OF_A_THREAD, "ranks 0-1 printed OSError: shard 17 is gone   (train.py:5 in prefetch)"),
        (OF_A_CHILD, "2 children of ranks 0-1 (python) have ended: killed by SIGKILL"),
    ],
    ids=["a thread", "a child"],
)
def test_the_report_of_a_hang_begins_with_what_has_died_in_a_rank(job, tmp_path, program, reason):
    script = tmp_path / "train.py"
    script.write_text(program)
    job.start("--nproc-per-node", 2, "--hang-timeout", "2s", "--grace-period", 1, "train.py", cwd=tmp_path)
    report = job.wait().expect(123).err.partition("error: ")[2]
    assert report.startswith(f"the job hangs: {reason}   (no worker had moved for 2 s)\n")
    assert "if it was only slow" not in report
    job.nothing_left()
