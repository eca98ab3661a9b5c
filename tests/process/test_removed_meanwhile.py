"""The files of ddplaunch itself are gone, or are those of another version, while a job runs: an upgrade, a lost file server."""

import shutil
import signal
from pathlib import Path

import ddplaunch
from tests.conftest import until

PROGRAM = """
import signal, sys
from signs import RANK, put, wait

def save(signum, frame):
    sys.stdout.write("saving\\n" * (1 << 17))  # more than a pipe holds: the agent has come by since it stopped this worker
    sys.stdout.flush()
    put("saved")
    sys.exit(0)

if RANK == 0:
    signal.signal(signal.SIGTERM, save)
put(f"runs-{RANK}")
wait("removed")
with open("/proc/self/environ") as file:
    environ = dict(line.partition("=")[::2] for line in file.read().split(chr(0)))
with open(environ["DDPLAUNCH_NOTIFY"], "w") as pipe:
    pipe.write("j")  # as torch's first process group has it done
wait("enough" if RANK else "never")
sys.exit(3)
"""


def test_a_job_goes_on_without_what_is_no_longer_found_saves_when_it_fails_and_ends_with_its_status(
    job, program, tmp_path
):
    installed = tmp_path / "installed"
    # what first looks at the workers is gone already: without --hang-timeout that would be a minute and a half after the start
    package = Path(ddplaunch.__file__).parent
    shutil.copytree(package, installed / "ddplaunch", ignore=shutil.ignore_patterns("inspection*", "*.pyc.*"))
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    printed = tmp_path / "printed"
    with printed.open("wb") as stderr:
        job.start(
            *(
                "--nproc-per-node",
                2,
                "--straggler-check",
                "1s",
                "--hang-timeout",
                "1s",
                "--max-restarts",
                1,
                "--no-sample",
                script,
            ),
            env={"PYTHONPATH": f"{installed}:{program('signs').parent}"},
            stderr=stderr,
        )
        job.signs("runs", 2)
        for folder in (installed / "ddplaunch").iterdir():
            if folder.is_dir() and folder.name != "worker":  # which a restarted worker runs
                shutil.rmtree(folder)
        (job.home / "signs" / "removed").touch()
        for without in ("stragglers are no longer looked for", "a job in which nothing moves is no longer noticed"):
            until(lambda text=without: f"warning: {text}: ModuleNotFoundError: " in printed.read_text(), without)
        (job.home / "signs" / "enough").touch()
        ended = job.wait()
        assert job.has_sign("saved"), printed.read_text()
    assert ended.status == 3
    text = printed.read_text()
    assert f"error: rank 1 (pid {job.pids()[1]} on " in text
    assert text.count(") ended with status 3\n") == 2
    assert text.count("ModuleNotFoundError: No module named 'ddplaunch.launcher.tell.causes'\n") == 2
    assert "ddplaunch: starting all workers again (restart 1 of 1)\n" in text
    assert (text.count("warning: "), text.count("warning: stacks are missing: ModuleNotFoundError: ")) == (4, 1)
    assert "Traceback" not in text


STOPPED = """
import signal, sys
from signs import RANK, put, wait

def save(signum, frame):
    put(f"saved-{RANK}", signum)
    sys.exit(0)

signal.signal(signal.SIGINT, save)
put(f"runs-{RANK}")
wait("never")
"""


def test_workers_may_save_where_what_would_tell_of_their_end_is_gone(job, program, tmp_path):
    package, installed = Path(ddplaunch.__file__).parent, tmp_path / "installed"
    gone = shutil.ignore_patterns("interrupts*", "*.pyc.*")
    shutil.copytree(package, installed / "ddplaunch", ignore=gone)
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    started = job.start(*("--nproc-per-node", 2, script), env={"PYTHONPATH": f"{installed}:{program('signs').parent}"})
    job.signs("runs", 2)
    started.send_signal(signal.SIGINT)
    ended = job.wait()
    assert [job.sign(f"saved-{rank}", patience=1.0) for rank in range(2)] == [str(int(signal.SIGINT))] * 2
    assert (ended.status, "Traceback" in ended.err) == (130, False), ended.err


TIMED_OUT = """
import signal, sys
from signs import put, wait

def save(signum, frame):
    put("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
wait("never")
"""


def test_at_the_timeout_workers_may_save_where_what_takes_their_stacks_is_gone(job, program, tmp_path):
    package, installed = Path(ddplaunch.__file__).parent, tmp_path / "installed"
    shutil.copytree(package, installed / "ddplaunch", ignore=shutil.ignore_patterns("inspection*", "*.pyc.*"))
    script = tmp_path / "script.py"
    script.write_text(TIMED_OUT)
    ended = job.run(  # which on a busy machine gives the script time to begin
        *("--timeout", "5s", script), env={"PYTHONPATH": f"{installed}:{program('signs').parent}"}
    )
    assert (ended.status, job.has_sign("saved"), "Traceback" in ended.err) == (124, True, False), ended.err
    assert ended.err.count("warning: stacks are missing: ModuleNotFoundError: ") == 1
