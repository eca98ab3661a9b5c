"""Progress bars of several ranks on a real terminal: in place while they move, lines when they end, and nothing else."""

import time
from collections.abc import Callable

import pexpect
import pytest

from tests.conftest import PATIENCE, Job
from tests.emulator import Emulator
from tests.process.terminal import CTRL_Z, PROMPT, Shell, Terminal, typed

COLUMNS = 100


class Screen:
    """What is on the terminal's screen."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._emulator = Emulator(24, COLUMNS)

    def until(self, has: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a screen like this, and give it."""
        by = time.monotonic() + PATIENCE
        while not has(self._emulator.shown):
            assert time.monotonic() < by, self._emulator.shown
            try:
                self._emulator.feed(self._terminal.child.read_nonblocking(1 << 16, timeout=0.5))
            except pexpect.TIMEOUT:
                pass
        return self._emulator.shown

    def at_end(self) -> list[str]:
        """What the command leaves."""
        self._emulator.feed(self._terminal.sees_the_end())
        return self._emulator.shown


def go(job: Job, sign: str) -> None:
    (job.home / "signs" / sign).touch()


@pytest.mark.parametrize(
    "nodes", [("--nproc-per-node", 2), ("--nnodes", 2, "--simulate")], ids=["one node", "two nodes"]
)
def test_bars_are_shown_at_once_in_place_and_become_lines_when_they_end(job, program, nodes):
    terminal = typed(job, *nodes, program("draws"), columns=COLUMNS)
    screen = Screen(terminal)
    both = ["[0-1] 訓練 rank 0: 10%|#         | the rest of this row is long", "[0-1] batch: 10%"]
    shown = screen.until(lambda rows: rows[-2:] == both)
    assert sum("10%" in row for row in shown) == 2

    terminal.press("typed")
    go(job, "go-1")
    bars = [
        "[1] slowest 訓練 rank 1: 50%|#####     | the rest of this row is long",
        "[0] fastest 訓練 rank 0: 90%|######### | the rest of this row is long",
        "[1] slowest batch: 50%",
        "[0] fastest batch: 90%",
    ]
    shown = screen.until(lambda rows: rows[-4:] == bars and sum("line of" in row for row in rows) == 2)
    assert sorted(row for row in shown if "line of" in row) == ["[0] line of 0", "[1] line of 1"]
    assert [row for row in shown if "%" in row] == bars
    terminal.child.setwinsize(9, 30)
    narrow = ["[1] slowest 訓練 rank 1: 50%|", "[0] fastest 訓練 rank 0: 90%|", "[1] slowest batch: 50%"]
    screen.until(lambda rows: [row for row in rows if "%" in row] == narrow)

    go(job, "go-2")
    shown = screen.at_end()
    assert not any("slowest" in row or "[0-1]" in row for row in shown)
    for row in ("[1] 訓練 rank 1: 50%|#####     | the rest of this row is long", "[1] batch: 50%"):
        assert shown.count(row) == 1
    error = shown.index(next(row for row in shown if row.startswith("error: rank 1 ") and "SIGKILL" in row))
    assert not any(row.startswith("[") for row in shown[error:])
    assert terminal.child.exitstatus == 137


def test_after_ctrl_z_the_shell_has_the_screen_and_after_fg_the_bars_are_below(job, program):
    bash = Shell(job)
    bash.runs("--nproc-per-node", 2, program("draws"))
    bash.sees("[0-1] \x1b[36mbatch")
    bash.press(CTRL_Z)
    between = bash.sees("Stopped", PROMPT)
    assert "\x1b[" not in between
    bash.types("fg")
    bash.sees("[0-1] \x1b[36mbatch")
    bash.press("\x03")
    bash.sees("stopped by SIGINT", PROMPT)
    bash.leave()


def test_on_a_terminal_that_cannot_move_its_cursor_bars_are_lines_now_and_then(job, program):
    terminal = typed(job, "--nproc-per-node", 2, program("draws"), env={"TERM": "dumb"})
    assert "\x1b[A" not in terminal.sees("[1] \x1b[36mbatch\x1b[0m: 10%\r\n")
    terminal.press("\x03")
    terminal.sees_the_end()


def test_what_reads_the_lines_from_a_pipe_may_write_to_the_same_terminal(job, program):
    bash = Shell(job)
    bash.runs("--nproc-per-node", 2, program("draws"), after=" | cat")
    assert "\x1b[A" not in bash.sees("[1] \x1b[m\x1b[36mbatch\x1b[0m: 10%\x1b[m\r\n")
    bash.press("\x03")
    bash.sees("stopped by SIGINT", PROMPT)
    bash.leave()
