"""Progress bars of several ranks on a real terminal: in place while they move, lines when they end, and nothing else."""

from importlib.util import find_spec

import pytest

from tests.conftest import Job
from tests.process.terminal import CTRL_Z, ENTER, PROMPT, Screen, Shell, typed, watched

COLUMNS = 100


def go(job: Job, sign: str) -> None:
    (job.home / "signs" / sign).touch()


@pytest.mark.parametrize(
    "nodes", [("--nproc-per-node", 2), ("--nnodes", 2, "--simulate")], ids=["one node", "two nodes"]
)
def test_bars_are_shown_at_once_in_place_and_become_lines_when_they_end(job, program, nodes):
    terminal = typed(job, *nodes, program("draws"), columns=COLUMNS)
    screen = Screen(terminal, COLUMNS)
    both = ["[0-1] 訓練 rank 0: 10%|#         | the rest of this row is long", "[0-1] batch: 10%"]
    shown = screen.until(lambda rows: rows[-2:] == both)
    assert sum("10%" in row for row in shown) == 2

    terminal.press("typed")
    go(job, "go-1")
    bars = [
        "[1] 訓練 rank 1: 50%|#####     | the rest of this row is long slowest",
        "[0] 訓練 rank 0: 90%|######### | the rest of this row is long fastest",
        "[1] batch: 50% slowest",
        "[0] batch: 90% fastest",
    ]
    shown = screen.until(lambda rows: rows[-4:] == bars and sum("line of" in row for row in rows) == 2)
    assert sorted(row for row in shown if "line of" in row) == ["[0] line of 0", "[1] line of 1"]
    assert [row for row in shown if "%" in row] == bars
    terminal.child.setwinsize(9, 30)
    narrow = ["[1] 訓練 rank 1: 50%| slowest", "[0] 訓練 rank 0: 90%| fastest", "[1] batch: 50% slowest"]
    screen.until(lambda rows: rows[-3:] == narrow)

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


def test_a_prompt_of_one_rank_is_shown_below_the_lines_of_the_others_and_takes_the_answer(job, program):
    terminal = typed(job, "--nproc-per-node", 2, program("asks"), columns=COLUMNS)
    screen = Screen(terminal, COLUMNS)
    screen.until(lambda rows: rows[-1] == "[0] name?")
    go(job, "go")
    screen.until(lambda rows: rows[-2:] == ["[1] meanwhile", "[0] name?"])
    terminal.press("Ann", ENTER)
    shown = screen.at_end()
    at = shown.index("[0] name? Ann")
    assert shown[at + 1] == "[0] hello Ann"
    assert sum("name?" in row for row in shown) == 1
    assert shown.count("[1] meanwhile") == 1


# --- of other people's packages

PACKAGES = [
    pytest.param("rich", marks=pytest.mark.skipif(find_spec("rich") is None, reason="needs rich")),
    pytest.param("tqdm", marks=pytest.mark.skipif(find_spec("tqdm") is None, reason="needs tqdm")),
]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("nodes", [("--nproc-per-node", 2), ("--nnodes", 2, "--simulate")], ids=["node", "nodes"])
def test_bars_of_packages_move_in_place_and_fill_the_terminal(job, program, package, nodes):
    shown, log = watched(job, *nodes, program("bars_of"), package)
    assert not any("slowest" in row for row in shown)
    assert b"30/30" in log


def test_bars_move_beside_collapsed_lines_too(job, program):
    watched(job, "--nproc-per-node", 2, "--output", "collapse", program("bars_of"), "rich")


def test_the_bars_of_rank_0_alone_come_as_it_draws_them(job, program):
    terminal = typed(job, "--nproc-per-node", 2, "--output", "rank0", program("bars_of"), "rich")
    terminal.sees("15/30", "\x1b[2K\x1b[1A")
    go(job, "go")
    terminal.sees("\x1b[?25h")
    assert terminal.status() == 0


def test_raw_output_is_what_a_worker_writes_to_a_pipe(job, program):
    terminal = typed(job, "--nproc-per-node", 2, "--output", "raw", program("bars_of"), "rich")
    job.signs("half", 2)
    go(job, "go")
    assert "\x1b" not in terminal.sees_the_end()


def test_a_pipe_is_no_terminal_to_the_workers(job, program):
    bash = Shell(job)
    bash.runs("--nproc-per-node", 2, program("bars_of"), "rich", after=" 2>&1 | cat")
    job.signs("half", 2)
    go(job, "go")
    assert "\x1b[?25l" not in bash.sees("workers finished", PROMPT)
    bash.leave()
