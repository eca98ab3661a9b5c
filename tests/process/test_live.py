"""--live on a real terminal: rows below the lines, keys, and a terminal that is as it was when it is over, whatever ended it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import Job, until
from tests.process.terminal import CTRL_C, CTRL_Z, ENTER, PROMPT, Lasting, Screen, Shell, Terminal, child

COLUMNS = 100


def go(job: Job, number: int) -> None:
    (job.home / "signs" / f"go-{number}").touch()


@pytest.fixture
def live(job, program):
    """Type tells.py with --live in a terminal; give the terminal and its screen."""

    def live(*options: object, lines: int = 0, env: dict[str, str] | None = None) -> tuple[Terminal, Screen]:
        terminal = Lasting(job, "--live", *options, program("tells"), lines, env=env, columns=COLUMNS)
        return terminal, Screen(terminal, COLUMNS)

    return live


def has_rows(rows: list[str], step: str = "step 10 of 40 (25%)") -> bool:
    return len(rows) > 1 and step in rows[-2] and rows[-1].startswith("all 2: running, step")


NODES = {
    "one node": ("--nproc-per-node", 2),
    "forked": ("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", ""),
    "two nodes": ("--nnodes", 2, "--nproc-per-node", 1, "--simulate"),
}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_rows_stand_below_the_lines_keys_are_ours_and_ctrl_c_leaves_the_terminal_as_it_was(live, nodes):
    terminal, screen = live(*nodes)
    shown = screen.until(has_rows)
    assert sorted(row for row in shown if "stdin" in row) == ["[0] stdin has ''", "[1] stdin has ''"]
    assert not terminal.cooks()
    terminal.press("h")
    screen.until(lambda rows: has_rows(rows) and any("Ctrl-C stops the job" in row for row in rows))
    terminal.press(ENTER)
    shown = screen.until(lambda rows: has_rows(rows) and any("signs.py" in row for row in rows))
    assert sum("10/40" in row for row in shown) == 2
    terminal.press(CTRL_C)
    shown = screen.at_end()
    assert "stopped by SIGINT" in shown[-1]
    assert not any(row.startswith("all 2") for row in shown)
    assert terminal.child.exitstatus == 130


def test_a_flood_stays_above_the_rows_whole_and_a_failure_is_the_last_that_is_seen(job, live):
    terminal, screen = live("--nproc-per-node", 2, lines=2000)
    screen.until(has_rows)
    go(job, 1)
    shown = screen.until(
        lambda rows: has_rows(rows, "step 20 of 40 (50%)") and sum("flooded" in row for row in rows) == 2
    )
    for rank in range(2):
        lines = [row for row in shown if row.startswith(f"[{rank}] line")]
        assert lines == [f"[{rank}] line {number} {'x' * 60}" for number in range(2000)]
    go(job, 2)
    shown = screen.at_end()
    assert terminal.child.exitstatus == 1
    error = shown.index(next(row for row in shown if row.startswith("error: rank 1 failed: ValueError: bad batch")))
    assert not any(row.startswith(("[", "all ", "1 more")) for row in shown[error:])


@pytest.mark.parametrize("output", ["rank0", "raw"])
def test_a_bar_of_a_worker_that_is_shown_without_prefix_stands_above_the_rows(job, program, output):
    nodes = ("--nnodes", 2, "--nproc-per-node", 1, "--simulate")
    terminal = Lasting(job, "--live", "--output", output, *nodes, program("bars_of"), "tqdm", columns=COLUMNS)
    screen = Screen(terminal, COLUMNS)
    screen.until(lambda rows: len(rows) > 2 and "15/30" in rows[-3] and rows[-1].startswith("all 2: running"))
    terminal.press(CTRL_C)
    screen.at_end()


def test_rows_follow_the_size_of_the_terminal(live):
    terminal, screen = live("--nproc-per-node", 2)
    screen.until(has_rows)
    front = child(terminal.child.pid)
    screen.resize(24, 20, front)
    shown = screen.until(lambda rows: rows[-1] == "all 2: running, st…")
    assert "stdin has" in shown[-3], "of the rows that were wider nothing stays"
    screen.resize(3, 40, front)
    screen.until(lambda rows: "step 10 of 40 (25%)" in rows[-1] and "stdin has" in rows[-2])
    terminal.press(CTRL_C)
    screen.at_end()


def test_rows_follow_a_job_that_another_node_takes_over(live):
    terminal, screen = live("--nnodes", "1:2", "--nproc-per-node", 1, "--simulate")
    screen.until(has_rows)
    everything = psutil.Process(terminal.child.pid).children(recursive=True)
    nodes = [each for each in everything if "ddplaunch.launcher.start.host" in each.cmdline()]
    min(nodes, key=lambda each: each.pid).kill()
    screen.until(lambda rows: rows[-1].startswith("rank 0: running"))
    terminal.press(CTRL_C)
    assert "stopped by SIGINT" in screen.at_end()[-1]


def test_rows_show_that_workers_are_being_stopped_while_another_node_takes_over(job, program):
    nodes = ("--nnodes", "2:3", "--nproc-per-node", 1, "--simulate")
    terminal = Lasting(job, "--live", *nodes, program("restarts"), "saves_until_told", columns=COLUMNS)
    screen = Screen(terminal, COLUMNS)
    job.signs("place-0", 3)
    screen.until(lambda rows: rows[-1].startswith("all 3: running"))
    everything = psutil.Process(terminal.child.pid).children(recursive=True)
    hosts = [each for each in everything if "ddplaunch.launcher.start.host" in each.cmdline()]
    first = min(hosts, key=lambda each: each.pid)
    for each in [first, *first.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it ends with those before it
            each.kill()
    screen.until(lambda rows: rows[-1].startswith("all 2: stopping"))
    (job.home / "signs" / "saved").touch()
    screen.until(lambda rows: rows[-1].startswith("all 2: running"))
    terminal.press(CTRL_C)
    assert "stopped by SIGINT" in screen.at_end()[-1]


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back(job, program):
    bash = Shell(job)
    bash.runs("--live", "--nproc-per-node", 2, program("tells"), 0)
    bash.sees("all 2: running")
    assert not bash.cooks()
    bash.press(CTRL_Z)
    between = bash.sees("Stopped", PROMPT)
    assert "all 2" not in between
    assert "icanon" in bash.says("stty -a | tr ';' '\\n' | grep -o ' icanon'")
    bash.types("fg")
    bash.sees("all 2: running")
    until(lambda: not bash.cooks(), "the keyboard")
    bash.press("h")
    bash.sees("Ctrl-C stops the job")
    bash.press(CTRL_C)
    bash.sees("stopped by SIGINT", PROMPT)
    bash.leave()


def test_a_command_that_is_killed_leaves_the_terminal_as_it_was(live):
    terminal, screen = live("--nproc-per-node", 2)
    screen.until(has_rows)
    assert not terminal.cooks()
    os.kill(child(terminal.child.pid), signal.SIGKILL)
    screen.at_end()
    assert terminal.child.exitstatus == 128 + signal.SIGKILL


def test_without_the_process_that_makes_the_rows_the_job_goes_on_and_the_keyboard_is_given_back(live):
    terminal, screen = live("--nproc-per-node", 2)
    screen.until(has_rows)
    front = child(terminal.child.pid)
    viewer = max(map(int, Path(f"/proc/{front}/task/{front}/children").read_text().split()))
    os.kill(viewer, signal.SIGKILL)
    shown = screen.until(lambda rows: rows[-1].startswith("ddplaunch: --live has ended"))
    assert not any(row.startswith("all 2") for row in shown)
    assert terminal.cooks()
    terminal.press(CTRL_C)
    screen.at_end()
    assert terminal.child.exitstatus == 130


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}], ids=["dumb", "not interactive"])
def test_where_nothing_may_move_there_are_no_rows_and_the_keyboard_is_the_workers(live, env):
    terminal, _ = live("--nproc-per-node", 2, env={**env, "DDPLAUNCH_LIVE": "1"})
    terminal.press("typed\n")
    terminal.child.send("\x04")
    terminal.sees("stdin has 'typed\\n'")
    assert terminal.cooks()
    terminal.press(CTRL_C)
    assert "all 2" not in terminal.sees_the_end()


def test_without_a_terminal_nothing_changes(job, program):
    job.start("--live", "--nproc-per-node", 2, program("tells"), 0)
    go(job, 1)
    go(job, 2)
    result = job.wait().expect(1)
    assert "all 2" not in result.err
    assert "\x1b[" not in result.err
