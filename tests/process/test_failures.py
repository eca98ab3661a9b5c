"""A worker fails: the others are ended, all they left too, and the status tells what happened."""

import shutil
import subprocess

import pytest

from tests.conftest import PROGRAMS

BEHAVE = "behave"


@pytest.fixture
def run(job, program):
    """Run behave.py with 3 workers, then prove that nothing is left."""

    def run(*behaviours: str, options: tuple[str, ...] = (), workers: int = 3):
        result = job.run("--nproc-per-node", workers, *options, program(BEHAVE), *behaviours)
        job.nothing_left()
        return result

    return run


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        ("exit3", 3, "rank 1 failed: exit status 3"),
        ("raises", 1, "rank 1 failed: ValueError: boom of rank 1"),
        ("segfault", 139, "rank 1 failed: killed by SIGSEGV"),
        ("killed", 137, "rank 1 failed: killed by SIGKILL"),
    ],
)
def test_a_failing_worker_ends_the_job_with_its_own_status(run, behaviour, status, words):
    result = run(f"1={behaviour}").expect(status)
    assert words in result.err
    assert "the other 2 workers were stopped by SIGTERM" in result.err


def test_a_worker_that_ignores_the_stop_is_killed_when_the_grace_period_is_over(run, job):
    result = run("1=exit3", "0=stubborn", options=("--grace-period", "0.3")).expect(3)
    assert job.events("kill_sent")
    assert "rank 0 by SIGKILL" in result.err


def test_a_worker_that_saves_before_it_ends_is_waited_for(job, program):
    job.start("--nproc-per-node", 2, program(BEHAVE), "0=slow", "1=exit3")
    job.sign("saving-0")
    (job.home / "signs" / "saved").touch()
    assert job.wait().status == 3
    assert not job.events("kill_sent")


@pytest.mark.parametrize("kind", ["plain_child", "setsid_child", "daemon"])
def test_grandchildren_of_a_stopped_worker_are_gone(run, kind):
    assert run(f"0={kind}", "1=exit3").status == 3


@pytest.mark.parametrize("kind", ["stubborn_child", "stubborn_setsid_child"])
def test_grandchildren_that_ignore_the_stop_are_killed(run, kind):
    assert run(f"0={kind}", "1=exit3", options=("--grace-period", "0.3")).status == 3


def test_grandchildren_of_the_crashed_worker_itself_are_gone(run):
    assert run("1=crash_with_children", options=("--grace-period", "0.3")).status == 3


def test_a_daemon_left_by_a_worker_that_ended_well_does_not_outlive_the_job(run):
    assert run("all=done", "0=daemon_then_done").status == 0


def test_of_two_workers_that_die_a_millisecond_apart_the_first_is_blamed(run):
    for _ in range(5):
        result = run("all=die_in_turn").expect(41)
        assert "rank 1 failed" in result.err


def test_a_worker_that_has_raised_and_does_not_end_holds_the_job_for_seconds_only(run):
    result = run("all=default", "1=raises_slowly").expect(1)
    assert "ddplaunch: rank 1 has raised ValueError and does not end: " in result.err
    assert "error: rank 1 failed: ValueError: boom of rank 1" in result.err


def test_workers_get_the_stop_once(job, program):
    job.start("--nproc-per-node", 3, program(BEHAVE), "all=polite", "1=exit3")
    assert job.wait().status == 3
    assert (job.home / "signs" / "got-0").read_text() == "SIGTERM"


def test_a_clean_end_is_0_and_silent_about_failures(run):
    result = run("all=done").expect(0)
    assert "error" not in result.err
    assert "3 workers finished" in result.err


ABORTS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=[99], daemon=True).start()
library = ctypes.CDLL(os.environ["ABORTS"])
WORDS = b"terminate called after throwing an instance of 'c10::DistBackendError'\\n"
NOISE = b"frame #1: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x10f (0x7fb5d10a9a0f in libtorch_cuda.so)\\n" * 200
def step():
    os.environ["RANK"] == "1" and library.abort_elsewhere(WORDS + NOISE), time.sleep(99)  # the thread may be the faster one
step()
"""


def test_the_line_of_an_abort_that_began_in_a_thread_of_compiled_code_is_that_of_the_main_thread(job, tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the program that aborts in a thread of its own needs a C compiler, and there is no gcc here")
    library, script = tmp_path / "aborts.so", tmp_path / "train.py"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, PROGRAMS / "aborts.c"], check=True)
    script.write_text(ABORTS)
    job.start("--nproc-per-node", 2, script, env={"ABORTS": str(library)})
    report = job.wait().expect(134).err.partition("error: ")[2]
    assert "terminate called after throwing an instance of 'c10::DistBackendError'\n" in report
    assert "stack of the main thread, innermost frame first:\n" in report
    assert "train.py:8 in step\n" in report
    job.nothing_left()
