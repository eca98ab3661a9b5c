"""`--debug-on-error`: the first rank that fails has the terminal, at the frame where it failed; the others are held."""

import importlib.util
import os
import signal
import time

import pytest

from tests.conftest import until
from tests.process.terminal import CTRL_C, CTRL_D, ENTER, Terminal, typed
from tests.process.test_debug import PDB, enter


@pytest.fixture
def debug(job, program):
    """Let ranks fail in these ways."""

    def debug(*ways: str, options: tuple[object, ...] = (), **env: str) -> Terminal:
        arguments = ("--nproc-per-node", len(ways), *options, program("debug_fails"), *ways)
        return typed(job, "--debug-on-error", *arguments, env={"NO_COLOR": "1", **env})

    return debug


def test_the_debugger_is_where_the_first_rank_failed_and_holds_the_others_until_it_is_left(job, debug):
    for limit in (3, 30):  # on a busy machine the job may need more for its start alone
        terminal = debug("wait", "raise", "later", options=("--timeout", limit, "--hang-timeout", 1))
        if terminal.child.expect_exact([PDB, "--timeout of"]) == 0:
            break
        terminal.sees_the_end()
    assert "ValueError: boom of rank 1" in terminal.child.before
    since = time.monotonic()
    assert enter(terminal, "p value") == "42"
    (job.home / "signs" / "fail").touch()
    terminal.sees("rank 2 failed, too (ValueError: boom of rank 2), and is held while rank 1 is in the debugger")
    terminal.press("p nonsense", CTRL_C)  # throws the line away
    terminal.sees(PDB)
    terminal.press("up", ENTER)
    terminal.sees("fail(41 + RANK)", PDB)
    until(lambda: time.monotonic() - since > limit + 0.5, "more time to pass than the job may take, and be still")
    assert enter(terminal, "p os.isatty(0), os.isatty(1), os.isatty(2)") == "(True, True, True)"
    terminal.press(CTRL_D)
    shown = terminal.sees("error: rank 1 failed: ValueError: boom of rank 1", "ranks 1-2 failed with the same error")
    assert "only in its log" not in shown
    assert terminal.status() == 1
    assert "only in its log" in (job.folder / "rank-2.out").read_text()


def test_a_rank_that_chooses_to_exit_or_dies_by_a_signal_or_fails_in_a_thread_has_no_debugger(job, debug):
    terminal = debug("wait", "exit")
    shown = terminal.sees_the_end()
    assert "boom of rank 1" in shown  # in its thread
    assert PDB not in shown
    assert terminal.child.exitstatus == 3
    terminal = debug("wait", "kill")
    assert PDB not in terminal.sees_the_end()
    assert terminal.child.exitstatus == 128 + signal.SIGSEGV


def test_sigterm_ends_the_debugger_and_all_ranks(job, debug):
    terminal = debug("raise", "wait")
    terminal.sees(PDB)
    os.kill(terminal.child.pid, signal.SIGTERM)
    assert terminal.status() == 143
    assert terminal.cooks()


def test_a_rank_that_dies_meanwhile_ends_the_others_but_not_the_debugger(job, debug):
    terminal = debug("raise", "wait", options=("--grace-period", 0.2))
    terminal.sees(PDB)
    os.kill(job.pids()[1], signal.SIGKILL)
    terminal.sees("rank 1 failed (killed by SIGKILL); rank 0 stays in the debugger\r\n")
    assert enter(terminal, "p value") == "41"
    terminal.press("q", ENTER)
    terminal.sees("error: rank 0 failed: ValueError")
    assert terminal.status() == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
def test_pythonbreakpoint_chooses_ipythons_debugger(job, debug):
    terminal = debug("raise", "wait", PYTHONBREAKPOINT="IPython.core.debugger.set_trace", IPYTHONDIR=str(job.home))
    terminal.sees("ipdb>")
    terminal.press("p value + 1000", ENTER)
    terminal.sees("1041", "ipdb>")
    terminal.press("q", ENTER)
    assert terminal.status() == 1


def test_without_a_terminal_it_says_what_to_do(job, program):
    result = job.run("--debug-on-error", "--nproc-per-node", 2, program("debug_fails"), "raise", "wait").expect(2)
    assert result.err == (
        "error: --debug-on-error needs a terminal for its worker, but stdin or stdout is none\n\n"
        "hint: run it in a terminal\n"
    )


def test_pythonbreakpoint_chooses_another_debugger(job, debug):
    (job.home / "own_debugger.py").write_text("def post_mortem(frames):\n    input(f'{frames.tb_lineno} own> ')\n")
    terminal = debug("raise", PYTHONBREAKPOINT="own_debugger.set_trace", PYTHONPATH=str(job.home))
    terminal.sees("own> ")
    terminal.press(ENTER)
    assert terminal.status() == 1
