"""Where the output of a job in Slurm goes: what it is shown on decides, not the terminals that srun makes."""

import os
import pty
from signal import SIGKILL

import pytest
from pexpect import fdpexpect

from tests.conftest import PATIENCE
from tests.slurm.job import SlurmJob
from tests.slurm.places import done
from tests.slurm.started import agent, one_cluster

__all__ = ["one_cluster"]

SAYS = "import os, sys\nprint('terminals', os.isatty(1), os.isatty(2))\nprint('said', file=sys.stderr)\n"
# it hangs although another thread reads a little now and then: in a terminal that could be what a person types
HANGS = """
import threading, time

def look():
    while True:
        open("/proc/uptime").read()
        time.sleep(0.1)

print("waiting", flush=True)
threading.Thread(target=look).start()
threading.Event().wait()
"""
TELLS = """
import os, sys, time
from pathlib import Path
import ddplaunch

rank = os.environ["RANK"]
print("told by", rank, flush=True)
step = 700_000 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while not Path("enough").exists():
    step += 1
    ddplaunch.progress(step, 1_000_000)
    print(f"\\rbar {step}/1000000", end="", file=sys.stderr, flush=True)
    time.sleep(0.05)
print("told enough by", rank, flush=True)
"""


@pytest.mark.parametrize("before", ["", "srun --unbuffered "])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_file_of_a_batch_job_of_one_node_is_no_terminal(job: SlurmJob, before: str, workers: int) -> None:
    (job.home / "says.py").write_text(SAYS)
    running = job.sbatch(f"{before}{job.ddplaunch} --nproc-per-node {workers} says.py", "--nodes=1")
    output = done(running)
    assert "\x1b" not in output
    assert output.count("terminals False False\n") == workers
    logs = sorted(path.name for path in (job.home / "state").rglob("rank-*"))
    assert logs == [f"rank-{rank}.{stream}" for rank in range(workers) for stream in ("err", "out")]


def test_a_single_worker_of_a_batch_job_that_hangs_is_found(job: SlurmJob) -> None:
    (job.home / "hangs.py").write_text(HANGS)
    failed = job.sbatch(f"{job.ddplaunch} --nproc-per-node 1 --hang-timeout 3 hangs.py", "--nodes=1")
    assert failed.wait() == "FAILED"
    assert "waiting\n" in failed.output()
    assert "hangs.py" in failed.output().partition("waiting\n")[2]


def test_the_terminal_of_salloc_gives_the_step_its_colours(job: SlurmJob) -> None:
    (job.home / "says.py").write_text(SAYS)
    ours, theirs = pty.openpty()
    command = job.start_salloc(
        f"{job.ddplaunch} --nproc-per-node 1 says.py",
        "--nodes=2",
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(theirs)
    terminal = fdpexpect.fdspawn(ours, timeout=PATIENCE)
    terminal.expect_exact("\x1b[")
    terminal.expect_exact("terminals False False")
    assert command.wait(PATIENCE) == 0
    os.close(ours)
    job.nothing_left(10)


@pytest.mark.parametrize(
    ("nnodes", "output", "shown"), [("2", "prefix", "1"), ("2", "rank0", "0"), ("1:2", "prefix", "0")]
)
def test_rows_of_live_stand_below_what_the_step_writes_where_node_0_is_another_host(
    job: SlurmJob, nnodes: str, output: str, shown: str
) -> None:
    """With 1:2 node 0 is lost, and the rows go on without it."""
    (job.home / "tells.py").write_text(TELLS)
    ours, theirs = pty.openpty()
    command = job.start_salloc(
        f"{job.ddplaunch} --live --nnodes {nnodes} --output {output} --nproc-per-node 1 tells.py",
        "--nodes=2",
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(theirs)
    terminal = fdpexpect.fdspawn(ours, timeout=PATIENCE)
    terminal.expect_exact(f"told by {shown}")
    terminal.expect(r"bar \d+/")
    terminal.expect(r"step \d+ of 1,000,000")
    if nnodes == "1:2":
        os.kill(agent(job, "node1"), SIGKILL)
        terminal.expect(r"step 700,\d+ of 1,000,000")
    (job.home / "enough").touch()
    terminal.expect_exact(f"told enough by {shown}")
    assert command.wait(PATIENCE) == 0
    os.close(ours)
    job.nothing_left(10)
