"""Ctrl-C at whatever moment after our first line: the status says so, and there is no traceback."""

import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

from tests.conftest import Job

# an audit event is raised for each import, open, fork and the like: the command interrupts itself at one of them
AT_AN_EVENT = """
import os, runpy, signal, sys

own, file, wanted = os.getpid(), sys.argv.pop(1), int(sys.argv.pop(1))
early, late = [], []

def hook(event, arguments):
    if os.getpid() != own:
        return
    if not late and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        early.append(arguments[0] if event == "import" else event)
        return
    late.append(event)
    if len(late) == wanted:
        os.kill(own, signal.SIGINT)

def exit(status, exit=os._exit):
    if os.getpid() == own:
        with open(file, "w") as report:
            print(late.index("os.fork"), *early, file=report)
    exit(status)

os._exit = exit
sys.addaudithook(hook)
runpy.run_module("ddplaunch", run_name="__main__", alter_sys=True)
"""
MOMENTS = 12
OURS = ["ddplaunch", "ddplaunch.system.interrupt", "ddplaunch.system"]  # as they are asked for


def interrupted(job: Job, at: int, *program: str) -> tuple[int, str]:
    """Run the command so that it interrupts itself at this event after its first line; give the status and stderr."""
    for name in ("state", "tmp"):
        (job.home / name).mkdir(exist_ok=True)
    argv = [sys.executable, "-c", AT_AN_EVENT, str(job.home / "events"), str(at), "--no-python", *program]
    with Popen(argv, env=job.env, cwd=job.home, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, err


def test_ctrl_c_at_any_moment_of_the_start_shows_no_traceback(job: Job) -> None:
    status, err = interrupted(job, 0, "true")
    assert status == 0, err
    fork, *early = Path(job.home / "events").read_text().split()
    # what Python's own handler could interrupt: no more than what it takes to get there
    assert [name for name in early if name.startswith("ddplaunch")] == OURS
    found = {at: interrupted(job, at, "sleep", "600") for at in range(1, int(fork) + 3, int(fork) // MOMENTS)}
    for at, (status, err) in found.items():
        assert status in (130, -signal.SIGINT), (at, err)
        assert "Traceback" not in err, at
