"""`ddplaunch top` in a real terminal: what its keys do to the job, and how it leaves the terminal."""

from __future__ import annotations

import os
import signal

import pytest

from ddplaunch.record.folders import short
from tests.conftest import Job, until
from tests.process.terminal import CTRL_C, CTRL_Z, ENTER, PROMPT, Shell, Terminal, typed

LEFT = "\x1b[?1049l"  # the ordinary screen is shown again


@pytest.fixture
def top(job) -> Terminal:
    """`ddplaunch top` of a job of two workers, once it shows them."""
    job.behave(options=("--run-id", job.mark))
    terminal = Terminal(job, job.argv("top", job.mark), {"XDG_STATE_HOME": job.env["XDG_STATE_HOME"]}, columns=100)
    terminal.sees("\x1b[?1049h", ", 2 workers", "rank", "running", "running", "q leave")
    return terminal


def ends(job: Job, status: int) -> None:
    assert job.wait().status == status
    job.nothing_left()


def test_a_verb_runs_on_the_ordinary_screen_and_a_question_is_asked_before_the_job_is_stopped(job, top):
    top.press("\x1b[B", "s")
    top.sees(LEFT, "behave.py:", "[Enter] goes back")
    top.press(ENTER)
    top.sees("\x1b[?1049h", "q leave")
    top.press("l")
    top.sees(LEFT, "logs of", "[Enter] goes back")
    top.press(ENTER)
    top.sees("q leave")
    top.press("k")
    top.sees("as Ctrl-C does? y or n")
    top.press("n")
    top.sees("q leave")
    top.press("k", "y")
    top.sees(LEFT, "has ended with status 130")
    assert top.status() == 0
    ends(job, 130)


@pytest.mark.parametrize("way", ["q", CTRL_C, signal.SIGTERM])
def test_it_leaves_the_terminal_as_it_was_and_the_job_alone(job, top, way):
    assert not top.cooks()
    if isinstance(way, str):
        top.press(way)
    else:
        top.child.kill(way)
    top.sees(LEFT)
    assert top.status() == (143 if way is signal.SIGTERM else 0)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    ends(job, 143)


def test_ctrl_z_gives_the_terminal_back_until_fg(job):
    job.behave(options=("--run-id", job.mark))
    shell = Shell(job)
    shell.runs("top", job.mark)
    shell.sees("q leave")
    shell.press(CTRL_Z)
    shell.sees(LEFT, PROMPT)
    shell.types("fg")
    shell.sees("\x1b[?1049h", "q leave")
    shell.press("q")
    shell.sees(LEFT, PROMPT)
    shell.leave()
    job.process.send_signal(signal.SIGTERM)
    ends(job, 143)


def test_a_job_that_fails_is_named_with_its_first_failure_on_the_ordinary_screen(job):
    (job.home / "fails.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n    sys.stdin = open(sys.argv[1])\n    sys.stdin.read()\n"
        "    raise ValueError('bad batch')\nimport time\ntime.sleep(600)"
    )
    go = job.home / "go"
    os.mkfifo(go)
    job.start("--nproc-per-node", 2, job.home / "fails.py", go)
    until(lambda: list((job.home / "state").rglob("socket")), "the socket of the run")
    terminal = typed(job, "top", "fails")
    terminal.sees("q leave")
    os.close(os.open(go, os.O_WRONLY))
    terminal.sees(LEFT, f"{short(job.folder.name)} has ended with status 1", "rank 1 failed: ValueError: bad batch")
    assert terminal.status() == 0
    ends(job, 1)


def test_without_a_terminal_it_says_what_shows_the_same(job):
    job.start("top")
    result = job.wait().expect(2)
    assert "hint: `ddplaunch ps` shows the same once" in result.err
