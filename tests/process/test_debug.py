"""`--debug`: one worker has the terminal and its user decides when it ends; the others print to their logs."""

import os
import signal
import time

import pytest

from tests.conftest import PATIENCE, until
from tests.process.terminal import (
    CTRL_C,
    CTRL_D,
    CTRL_Z,
    ENTER,
    PROMPT,
    TAB,
    UP,
    Shell,
    Terminal,
    running,
    stopped,
    typed,
)

PDB = "(Pdb) "


@pytest.fixture
def debug(job, program):
    """Debug a rank of debug_target.py and wait for the prompt."""

    def debug(
        how: str = "breakpoint",
        others: str = "wait",
        *,
        workers: int = 2,
        options: tuple[object, ...] = (),
        columns: int = 80,
    ) -> Terminal:
        arguments = ("--nproc-per-node", workers, *options, program("debug_target"), how, 1, others)
        terminal = typed(job, "--debug", 1, *arguments, env={"NO_COLOR": "1"}, columns=columns)
        job.signs("ready", workers)
        if how != "run":
            terminal.sees(PDB)
        return terminal

    return debug


def enter(terminal: Terminal, command: str) -> str:
    """Return pdb a command; give its answer."""
    terminal.press(command, ENTER)
    terminal.sees("\r\n")
    # readline may not have turned the echo of the terminal off yet: then the command is shown twice
    return terminal.sees(PDB).strip().removeprefix(f"{command}\r\n")


def leave(terminal: Terminal, job) -> int:
    """Go on to the end; give the status of the job."""
    terminal.press("c", ENTER)
    status = terminal.status()
    job.nothing_left()
    return status


# --- the debugger


def test_breakpoint_gives_a_prompt_in_that_rank(job, debug):
    terminal = debug(others="done")
    answer = enter(terminal, "n")
    if "step = 1" in answer:  # from Python 3.13 on the prompt comes before the breakpoint's line has ended
        answer = enter(terminal, "n")
    assert "step = 2" in answer
    assert enter(terminal, "p RANK") == "1"
    terminal.press("c", ENTER)
    terminal.sees("done in rank 1", "2 workers finished")
    assert terminal.status() == 0


def test_lines_are_edited_remembered_and_completed(job, debug):
    terminal = debug(others="done")
    terminal.press("p sec", TAB)
    terminal.sees("p secret_word")
    terminal.press(ENTER)
    terminal.sees("'secret of rank 1'", PDB)
    terminal.press(UP)
    terminal.sees("p secret_word")
    terminal.press(ENTER)
    terminal.sees("'secret of rank 1'", PDB)
    assert leave(terminal, job) == 0


def test_the_debugged_worker_has_the_whole_terminal(job, debug):
    terminal = debug(others="done", columns=123)
    assert enter(terminal, "p [os.isatty(fd) for fd in (0, 1, 2)]") == "[True, True, True]"
    assert enter(terminal, "p os.get_terminal_size().columns") == "123"
    assert leave(terminal, job) == 0


def test_without_a_rank_it_is_rank_0(job, program):
    terminal = typed(job, "--nproc-per-node", 2, "--debug", program("debug_target"), "breakpoint", 0, "done")
    terminal.sees(PDB)
    assert enter(terminal, "p RANK") == "0"
    assert leave(terminal, job) == 0


def test_the_others_print_to_their_logs_only(job, debug):
    terminal = debug(others="done")
    assert "hello from rank 0" not in enter(terminal, "p 1")
    terminal.press("c", ENTER)
    assert "hello from rank 0" not in terminal.sees_the_end()
    assert (job.folder / "rank-0.out").read_text() == "hello from rank 0\n"


def test_a_script_runs_under_the_pdb_module(job):
    """The exception that ends it brings the debugger back: post mortem."""
    script = job.home / "fails.py"
    script.write_text("import os\nvalue = 41 + int(os.environ['RANK'])\nraise ValueError('boom')\n")
    pdb = ("-m", "pdb", "-c", "continue", script)
    terminal = typed(job, "--nproc-per-node", 2, "--debug", 1, *pdb, env={"NO_COLOR": "1"})
    terminal.sees("Uncaught exception. Entering post mortem debugging", PDB)
    assert enter(terminal, "p value") == "42"
    terminal.press("!os._exit(0)", ENTER)  # `q` would start the script again
    terminal.sees_the_end()


# --- Ctrl-C


def test_ctrl_c_at_the_prompt_throws_the_line_away(job, debug):
    terminal = debug()
    terminal.press("p nonsense")
    terminal.sees("p nonsense")
    terminal.press(CTRL_C)
    terminal.sees(PDB)
    assert enter(terminal, "p RANK") == "1"
    assert not job.has_sign("interrupted")
    terminal.press("q", ENTER)
    assert terminal.status() == 1


def test_ctrl_c_while_the_program_runs_raises_keyboard_interrupt_in_that_worker_and_then_stops_the_job(job, debug):
    terminal = debug("run", options=("--grace-period", "500ms"))  # the other rank goes on
    job.sign("running")
    terminal.press(CTRL_C)
    assert "stopping" not in terminal.sees("KeyboardInterrupt")
    assert "failed" not in terminal.sees("stopped by SIGINT")
    assert terminal.status() == 130
    assert job.has_sign("interrupted")  # the other rank, then


def test_ctrl_c_brings_the_debugger_back_as_often_as_it_is_pressed(job, debug):
    terminal = debug("trace", "done")
    for _ in range(3):
        (job.home / "signs" / "running").unlink(missing_ok=True)
        terminal.press("c", ENTER)
        job.sign("running")
        terminal.press(CTRL_C)
        terminal.sees("Program interrupted", PDB)
    (job.home / "signs" / "enough").touch()
    assert leave(terminal, job) == 0


# --- the end


@pytest.mark.parametrize("keys", ["q" + ENTER, CTRL_D], ids=["q", "ctrl-d"])
def test_quitting_the_debugger_ends_the_job_with_the_status_of_that_worker(job, debug, keys):
    terminal = debug()
    terminal.press(keys)
    assert terminal.status() == 1


def test_a_failure_elsewhere_is_told_and_leaves_the_debugger(job, debug):
    terminal = debug("breakpoint", "stubborn_fail", workers=3, options=("--grace-period", 0.2))
    job.sign("stubborn")
    others = [pid for rank, pid in job.pids().items() if rank != 1]
    (job.home / "signs" / "fail").touch()
    terminal.sees(" \rddplaunch: rank 0 failed (ValueError); rank 1 stays in the debugger\r\n")  # below the prompt
    until(lambda: job.events("kill_sent"), "the end of the grace period")  # of the others
    until(lambda: all(ended(pid) for pid in others), "the end of the others")
    assert enter(terminal, "p RANK") == "1"
    terminal.press("c", ENTER)
    terminal.sees("done in rank 1", "rank 0 failed: ValueError: boom of rank 0")
    assert terminal.status() == 1


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be buried."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_timeout_waits_for_the_debugger(job, debug):
    terminal = debug(options=("--timeout", 0.5))
    since = time.monotonic()
    until(lambda: time.monotonic() - since > 1, "more time to pass than the job may take")
    assert enter(terminal, "p RANK") == "1"
    terminal.press("c", ENTER)
    terminal.sees("--timeout of 0.5 s was reached")
    assert terminal.status() == 124


@pytest.mark.parametrize("how", ["breakpoint", "stubborn"])
def test_sigterm_to_ddplaunch_ends_everything(job, debug, how):
    """A debugged worker that ignores it is killed after the grace period like any other."""
    terminal = debug(how, options=("--grace-period", 0.3))
    os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.status() == 143


@pytest.mark.parametrize("how", ["breakpoint", "stubborn"])
def test_closing_the_terminal_ends_everything(job, debug, how):
    debug(how, options=("--grace-period", 0.3)).hang_up()
    job.nothing_left(patience=PATIENCE)


def test_when_the_front_is_killed_the_debugged_worker_ends_too(job, debug):
    terminal = debug("stubborn", options=("--grace-period", 0.3))
    os.kill(terminal.child.pid, signal.SIGKILL)
    terminal.child.wait()
    job.nothing_left(patience=PATIENCE)


def test_the_debugger_is_stopped_and_continued_with_its_line(job, program):
    bash = Shell(job)
    bash.runs("--nproc-per-node", 2, "--debug", 1, program("debug_target"), "breakpoint", 1, "done")
    bash.sees(PDB)
    bash.press("p secret")
    bash.sees("p secret")
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    worker = job.pids()[1]
    until(lambda: stopped([worker]), "the worker to stop")
    bash.types("fg")
    until(lambda: running([worker]), "the worker to go on")
    until(lambda: not bash.cooks(), "the debugger's modes of the terminal")
    bash.press("_word", ENTER)
    bash.sees("'secret of rank 1'", PDB)
    bash.press("c", ENTER)
    bash.sees("done in rank 1", "2 workers finished", PROMPT)
    bash.leave()


# --- several nodes


def test_the_node_of_the_rank_has_the_terminal_and_the_others_need_none(nodes, program):
    target = (program("debug_target"), "breakpoint", 0, "done")
    terminal = typed(nodes, *nodes.static(2, 0), "--debug", 0, *target)
    nodes.node(*nodes.static(2, 1), "--debug", 0, *target)
    terminal.sees(PDB)
    assert enter(terminal, "p RANK") == "0"
    terminal.press("c", ENTER)
    assert terminal.status() == 0
    assert nodes.statuses() == [0]
    lacks = nodes.node(*nodes.static(2, 1), "--debug", 1, *target)
    assert lacks.process.wait() == 2
    assert "hint: run it in a terminal, on each node whose ranks it is for" in lacks.err
