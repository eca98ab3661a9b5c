"""The command in a real terminal: its keys, the shell's job control, its closing, and what is shown on it."""

import os
import re
import signal
import time

import pytest

from tests.conftest import PATIENCE, Job, let_the_echo_die, until
from tests.emulator import Emulator
from tests.process.terminal import (
    CTRL_A,
    CTRL_BACKSLASH,
    CTRL_C,
    CTRL_D,
    CTRL_Z,
    ENTER,
    PROMPT,
    Screen,
    Shell,
    Terminal,
    agent_of,
    held,
    running,
    stat,
    stopped,
    typed,
)

KEYS = pytest.mark.parametrize(
    ("key", "name", "status"),
    [(CTRL_C, "SIGINT", 130), (CTRL_BACKSLASH, "SIGQUIT", 131)],
    ids=["ctrl-c", "ctrl-backslash"],
)


@pytest.fixture
def behave(job, program):
    """Run behave.py with 2 workers in a terminal and wait until both are ready."""

    def behave(behaviour: str, *options: object) -> Terminal:
        terminal = typed(job, "--nproc-per-node", 2, *options, program("behave"), f"all={behaviour}")
        job.signs("ready", 2)
        return terminal

    return behave


@pytest.fixture
def shell(job, program):
    """Type a job of 2 workers in a shell and wait until both are ready; give the shell and the pids of the workers."""

    def shell(behaviour: str, *options: object, after: str = "") -> tuple[Shell, list[int]]:
        shell = Shell(job)
        shell.runs("--nproc-per-node", 2, *options, program("behave"), f"all={behaviour}", after=after)
        return shell, list(map(int, job.signs("ready", 2)))

    return shell


def got(job: Job, rank: int) -> list[str]:
    """The signals that a worker has had."""
    return job.sign(f"got-{rank}").split()


# --- keys


@KEYS
def test_a_key_that_stops_reaches_every_worker_once_and_the_status_tells(job, behave, key, name, status):
    terminal = behave("polite")
    terminal.press(key)
    assert terminal.status() == status
    assert [got(job, rank) for rank in range(2)] == [[name]] * 2


@KEYS
def test_a_key_reaches_workers_through_ddplaunch_only_and_the_second_one_kills(job, behave, key, name, status):
    terminal = behave("stubborn", "--grace-period", 600)
    workers = list(map(int, job.signs("ready", 2)))
    assert {stat(pid)[4] for pid in workers} == {"0"}  # no controlling terminal: the kernel sends them nothing
    terminal.press(key)
    terminal.sees("Ctrl-C again kills" if key == CTRL_C else "stopping 2 workers, up to 10 min")
    job.signs("got", 2)
    os.kill(terminal.child.pid, signal.SIGUSR1)  # what comes after it shows that nothing came between
    for rank in range(2):
        until(lambda rank=rank: "SIGUSR1" in got(job, rank), "SIGUSR1")
        assert got(job, rank) == [name, "SIGUSR1"]
    let_the_echo_die()
    terminal.press(key)
    terminal.sees("killing the workers at once")
    assert terminal.status() == status


def test_on_a_terminal_whose_keyboard_is_not_stdin_a_wrapper_may_pass_ctrl_c_on(job, program):
    """As `uv run` does after 0.2 s. A program's signal is the first one there, too; the next Ctrl-C kills."""
    options = ("--nproc-per-node", 2, "--grace-period", 600, program("behave"), "all=stubborn")
    terminal = Terminal(job, ["sh", "-c", 'exec "$@" < /dev/null', "sh", *job.argv(*options)])
    job.signs("ready", 2)
    terminal.press(CTRL_C)
    let_the_echo_die()
    os.kill(terminal.child.pid, signal.SIGINT)
    terminal.sees("the second SIGINT counts as the first one")
    os.kill(terminal.child.pid, signal.SIGTERM)
    terminal.sees("SIGTERM counts as the same request to stop as SIGINT before it")
    let_the_echo_die()
    terminal.press(CTRL_C)
    terminal.sees("killing the workers at once")
    assert terminal.status() == 130


# --- the shell's job control


def test_ctrl_z_stops_the_workers_and_fg_lets_them_go_on_each_time(job, shell):
    bash, workers = shell("polite")
    for _ in range(3):
        bash.press(CTRL_Z)
        bash.sees("Stopped", PROMPT)
        until(lambda: stopped(workers), "the workers to stop")
        bash.types("fg")
        until(lambda: running(workers), "the workers to go on")
    bash.press(CTRL_C)
    bash.sees(PROMPT)
    assert bash.says("echo $?") == "130"
    assert [got(job, rank) for rank in range(2)] == [["SIGINT"]] * 2
    bash.leave()


def test_the_shell_hears_of_the_stop_when_the_workers_have_stopped(job, program):
    """It takes its terminal back then: a worker that still read from it would take the shell's keys."""
    process = job.start("--nproc-per-node", 2, program("behave"), "all=default", process_group=0)
    workers = list(map(int, job.signs("ready", 2)))
    with held(agent_of(process.pid)):
        process.send_signal(signal.SIGTSTP)
        time.sleep(0.2)  # nothing is to happen in this time
        assert not stopped([process.pid])
    until(lambda: stopped([process.pid]), "the front to stop")
    assert stopped(workers)
    process.send_signal(signal.SIGCONT)
    until(lambda: running(workers), "the workers to go on")
    process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143


def test_a_job_stops_also_if_a_lost_agent_never_answers(job):
    process = job.behave("all=default", process_group=0)
    with held(agent_of(process.pid)):
        process.send_signal(signal.SIGTSTP)
        until(lambda: stopped([process.pid]), "the front to stop")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143


def test_a_command_that_still_writes_when_all_have_ended_stops_too(job):
    process = job.start("--nproc-per-node", 2, "--no-python", "seq", 8000, process_group=0)
    agent = agent_of(process.pid)
    until(lambda: stat(agent)[0] == "Z", "the end of the agent")
    process.send_signal(signal.SIGTSTP)
    until(lambda: stopped([process.pid]), "the front to stop", 10)
    process.send_signal(signal.SIGCONT)
    result = job.wait()
    assert (result.status, result.out.count("\n")) == (0, 16000)


@pytest.mark.parametrize("how", ["bg", "kill -CONT %1"])
def test_a_stopped_job_goes_on_in_the_background(job, shell, how):
    bash, workers = shell("polite")
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    until(lambda: stopped(workers), "the workers to stop")
    bash.says(how)
    until(lambda: running(workers), "the workers to go on")
    bash.types("fg")
    bash.press(CTRL_C)
    bash.sees("stopped by SIGINT", PROMPT)
    bash.leave()


def test_a_job_that_is_stopped_can_be_ended(job, shell):
    bash, workers = shell("stubborn", "--grace-period", 0.3)
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    until(lambda: stopped(workers), "the workers to stop")
    stopped_at = time.monotonic()
    until(lambda: time.monotonic() - stopped_at > 5, "time to pass that would be missed")
    bash.says("kill %1")
    bash.sees("stopped by SIGTERM")
    # the time that the job was stopped for does not lengthen the grace period
    assert job.events("kill_sent")[0]["at"] - job.events("stop_sent")[0]["at"] < 5
    until(lambda: job.left() == [bash.child.pid], "the end of the job")
    bash.hang_up()  # `exit` may be refused: bash 5.2 does not always see that a stopped job has ended
    job.nothing_left(patience=PATIENCE)


def test_when_the_front_of_a_stopped_job_is_killed_everything_ends(job, shell):
    bash, workers = shell("stubborn", "--grace-period", 0.3)
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    until(lambda: stopped(workers), "the workers to stop")
    bash.says("kill -KILL %1")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), "the workers' end")
    bash.hang_up()  # `exit` may be refused: bash 5.2 does not always see that a stopped job has ended
    job.nothing_left(patience=PATIENCE)


def test_no_time_runs_while_the_job_is_stopped(job, shell):
    """The grace period, as a clock of the job: all others are in tests/unit/supervise."""
    bash, workers = shell("stubborn", "--grace-period", 3)
    bash.press(CTRL_C)
    job.signs("got", 2)
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    until(lambda: stopped(workers), "the workers to stop")
    since = time.monotonic()
    until(lambda: time.monotonic() - since > 4, "time to pass that would be missed")
    bash.types("fg")
    bash.sees(PROMPT)
    assert bash.says("echo $?") == "130"
    suspended, resumed, told, killed = (
        job.events(name)[0]["at"] for name in ("job_suspended", "job_resumed", "stop_sent", "kill_sent")
    )
    # if the pause counted, the kill would come with `fg`, if twice, 4 s later; a busy machine writes events down late
    assert 1.5 < killed - told - (resumed - suspended) < 6
    bash.leave()


def test_a_job_in_the_background_neither_stops_nor_hangs_even_with_tostop(job, shell):
    """Output to a terminal with tostop stops the front alone; fg lets it write what it held."""
    bash, _ = shell("done", after=" &")
    bash.types("wait; echo status=$?")
    bash.sees("2 workers finished", "status=0", PROMPT)
    bash.says("stty tostop")
    bash.runs("--nproc-per-node", 2, "--no-python", "echo", "hello", after=" &")
    bash.sees(PROMPT)
    until(lambda: "Stopped" in bash.says("jobs"), "the shell to see a stopped job")
    bash.types("fg")
    bash.sees("2 workers finished", PROMPT)
    bash.leave()


def test_a_job_in_the_background_does_not_take_the_keys_of_the_shell(job, program):
    """Its worker reads, and gets the end of the input instead of what is typed for the shell."""
    bash = Shell(job)
    bash.runs("--nproc-per-node", 2, program("terminal_one"), "read", after=" &")
    bash.types("wait; echo status=$?")
    bash.sees("2 workers finished", "status=0", PROMPT)
    bash.leave()


# --- the terminal is closed


def test_closing_the_terminal_ends_the_job_and_workers_may_save(job, behave):
    terminal = behave("slow")
    terminal.hang_up()
    job.signs("saving", 2)
    (job.home / "signs" / "saved").touch()
    job.nothing_left(patience=PATIENCE)
    assert not job.events("kill_sent")


def test_closing_the_shells_terminal_ends_the_job_and_workers_may_save(job, shell):
    """The job is told twice then: by the kernel and by the shell. That is nobody's impatience."""
    bash, _ = shell("slow")
    bash.hang_up()
    job.signs("saving", 2)
    until(lambda: sum("bash" in line for line in map(command, job.left())) == 0, "the shell's end")
    (job.home / "signs" / "saved").touch()
    job.nothing_left(patience=PATIENCE)
    assert not job.events("kill_sent")


def test_closing_the_terminal_ends_a_job_that_is_stopped(job, shell):
    bash, workers = shell("default")
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    until(lambda: stopped(workers), "the workers to stop")
    bash.hang_up()
    job.nothing_left(patience=PATIENCE)


def command(pid: int) -> str:
    """The command line of a process."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


# --- one worker has the terminal


def test_one_worker_has_the_terminal_and_its_size(job, program):
    terminal = typed(job, program("terminal_one"), "place", rows=33, columns=101)
    terminal.sees("rank 0: True True True 33 x 101\r\n")
    assert terminal.status() == 0


def test_a_new_size_reaches_the_worker(job, program):
    terminal = typed(job, program("terminal_one"), "resize")
    terminal.sees("ready")
    terminal.child.setwinsize(40, 90)
    terminal.child.setwinsize(50, 123)
    terminal.sees("now 123 columns")
    assert terminal.status() == 0


def test_one_worker_can_ask_with_line_editing(job, program):
    terminal = typed(job, program("terminal_one"), "ask")
    terminal.sees("name? ")
    terminal.press("orld", CTRL_A, "w", ENTER)
    terminal.sees("<world>", "name? ")
    terminal.press(CTRL_D)
    terminal.sees("<end>")
    assert terminal.status() == 0


def test_line_editing_goes_on_after_ctrl_z_and_fg(job, program):
    bash = Shell(job)
    bash.runs(program("terminal_one"), "ask")
    bash.sees("name? ")
    bash.press("orl")
    bash.sees("orl")  # ctrl-z would throw away what was typed but not yet read
    bash.press(CTRL_Z)
    bash.sees("Stopped", PROMPT)
    bash.types("fg")
    bash.sees("terminal_one.py")
    until(lambda: not bash.cooks(), "the worker's modes of the terminal")
    bash.press("d", CTRL_A, "w", ENTER)
    bash.sees("<world>", "name? ")
    bash.press(CTRL_D)
    bash.sees(PROMPT)
    bash.leave()


def test_a_worker_that_dies_while_editing_leaves_the_terminal_as_it_was(job, program):
    bash = Shell(job)
    before = bash.says("stty -a")
    bash.runs(program("terminal_one"), "edit")
    bash.sees("killed by SIGKILL", PROMPT)
    assert bash.says("stty -a") == before
    bash.leave()


@pytest.mark.parametrize(
    ("written", "rows"),
    [("no newline", ["no newline"]), ("a line\n", ["a line"]), ("", []), ("x" * 60, ["x" * 60]), ("50%\r", [])],
    ids=["open", "ended", "nothing", "as wide as the terminal", "a bar"],
)
def test_a_report_begins_on_a_line_of_its_own_whatever_the_worker_left(job, program, written, rows):
    terminal = typed(job, program("terminal_one"), "fail", written, columns=60)
    shown = Screen(terminal, 60).at_end()
    at = next(at for at, row in enumerate(shown) if "rank 0 failed" in row)
    assert shown[at].startswith("error: rank 0 failed")
    assert shown[at - len(rows) : at] == rows
    assert shown[at - len(rows) - 1].startswith("ddplaunch: ")


def test_only_a_terminal_gets_blanks_before_a_report(job, program):
    result = job.run(program("terminal_one"), "fail", "no newline")
    assert result.out == "no newline"
    assert "  \r" not in result.err
    dumb = typed(job, program("terminal_one"), "fail", "no newline", env={"TERM": "dumb"}, columns=60)
    assert " " * 60 not in dumb.sees_the_end()


# --- several workers have none


def test_several_workers_have_no_terminal_to_write_to(job, program):
    terminal = typed(job, "--nproc-per-node", 2, program("terminal_one"), "place")
    shown = terminal.sees_the_end()
    assert "rank 1: False False False None" in shown
    assert re.search(r"rank 0: \w+ False False", shown)
    assert terminal.child.exitstatus == 0


def test_rank_0_of_several_reads_what_is_typed_and_the_others_read_nothing(job, program):
    terminal = typed(job, "--nproc-per-node", 2, program("terminal_one"), "read")
    terminal.sees("rank 1 read ''")
    terminal.press("typed", ENTER, CTRL_D)
    terminal.sees(r"rank 0 read 'typed\n'")
    assert terminal.status() == 0


def test_rank_0_of_several_reads_a_pipe_and_the_others_read_nothing(job, program):
    bash = Shell(job)
    bash.types("echo piped | " + " ".join(job.argv("--nproc-per-node", 2, program("terminal_one"), "read")))
    shown = bash.sees(PROMPT)
    assert r"rank 0 read 'piped\n'" in shown
    assert "rank 1 read ''" in shown
    bash.leave()


# --- colours


@pytest.mark.parametrize(
    ("env", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)],
    ids=["terminal", "NO_COLOR", "dumb", "dumb-FORCE_COLOR"],
)
def test_prefixes_are_coloured_on_a_terminal_that_has_colours(job, program, env, coloured):
    terminal = typed(job, "--nproc-per-node", 2, program("terminal_one"), "colours", env=env)
    shown = terminal.sees_the_end()
    if coloured:
        first, second = re.findall(r"\x1b\[0;([0-9;]+)m\[[01]\] \x1b\[mplain", shown)
        assert first != second
    else:
        assert "[0] plain" in shown
        assert "[1] plain" in shown
        assert "\x1b" not in shown


@pytest.mark.parametrize(("env", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True)], ids=["none", "FORCE_COLOR"])
def test_prefixes_are_coloured_off_a_terminal_only_if_forced(job, program, env, coloured):
    result = job.run("--nproc-per-node", 2, program("terminal_one"), "colours", env=env)
    assert ("\x1b[" in result.out) is coloured


@pytest.mark.parametrize(
    ("env", "links"), [({"TERM": "xterm"}, False), ({"TERM": "xterm-kitty"}, True)], ids=["no links", "links"]
)
def test_a_failure_is_reported_in_colours_and_with_links_where_the_terminal_knows_them(job, tmp_path, env, links):
    script = tmp_path / "fails at.py"
    script.write_text("raise ValueError('boom')\n")
    shown = typed(job, "--nproc-per-node", 2, "--nnodes", 2, "--simulate", script, env=env).sees_the_end()
    assert "\x1b[1;31merror:\x1b[0m\x1b[1m rank " in shown
    assert bool(re.search(rf"\x1b\]8;;file://{tmp_path}/fails%20at\.py\x1b\\", shown)) is links
    assert "\\x1b" not in shown


def test_a_mistake_is_reported_in_colours_too(job):
    assert typed(job, "not_there.py").sees_the_end().startswith("\x1b[1;31merror:\x1b[0m not_there.py does not exist")


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_plan_has_colours_where_the_terminal_has_them_and_is_not_broken_where_it_may_be_copied(
    job, program, env, coloured
):
    words = ["plan", "-v", "--nproc-per-node", 2, "--env", "LONG=" + "x" * 100, program("terminal_one")]
    shown = typed(job, *words, env=env).sees_the_end()
    assert ("\x1b[1mcommand:\x1b[0m" in shown) is coloured
    assert ("\x1b" in shown) is coloured
    assert "=" + "x" * 100 + "\r\n" in shown


# --- the start, and a failure from which others follow

FOLLOWING = """
import os, signal, sys, time
rank, home = int(os.environ["RANK"]), os.path.dirname(__file__)
def lost(*_):
    raise RuntimeError(f"[/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:{rank}. Check")
signal.signal(signal.SIGTERM, lost)  # what ends rank 0 is known by then
open(f"{home}/ready-{rank}", "w").close()
while rank != 0 or not all(os.path.exists(f"{home}/ready-{other}") for other in (1, 2)):
    time.sleep(0.01)
raise ValueError("bad batch")
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_tracebacks_that_only_follow_are_lines_on_a_terminal_whole_in_the_logs_and_with_v(job, verbose):
    (job.home / "train.py").write_text(FOLLOWING)
    words = ["--nproc-per-node", 3, *(["-v"] if verbose else []), job.home / "train.py"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", typed(job, *words).sees_the_end())
    assert "[0] ValueError: bad batch" in shown
    assert shown.count("Traceback (most") == (3 if verbose else 1)
    logs = [log.read_text() for log in sorted(job.folder.glob("rank-[12].err"))]
    assert [log.count("Traceback (most") for log in logs] == [1, 1]
    assert ("[1-2] RuntimeError: Connection closed by peer, at " in shown) is not verbose


def test_a_row_says_that_nothing_was_printed_yet_and_goes_with_the_first_line(job):
    go = job.home / "go"
    (job.home / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('here')"
    )
    screen = Screen(typed(job, "--nproc-per-node", 2, job.home / "slow.py"), 80)
    screen.until(lambda rows: any("[0-1] running, nothing printed yet, " in row for row in rows))
    go.touch()
    left = screen.at_end()
    assert {"[0] here", "[1] here"} <= {row.strip() for row in left}
    assert not any("nothing printed" in row for row in left)


def test_a_row_says_that_torch_is_imported_while_it_is(job):
    waits = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)"
    (job.home / "torch").mkdir()
    (job.home / "torch" / "__init__.py").write_text(waits.format(f"{job.home}/imported"))
    (job.home / "torch" / "distributed.py").touch()
    script = job.home / "train.py"
    script.write_text(f"import torch.distributed\n{waits.format(f'{job.home}/end')}")
    screen = Screen(typed(job, "--start-method", "spawn", "--nproc-per-node", 2, script), 80)
    for says, then in (("importing torch, ", "imported"), ("running, nothing printed yet, ", "end")):
        screen.until(lambda rows, says=says: any(f"[0-1] {says}" in row for row in rows))
        (job.home / then).touch()
    screen.at_end()


# --- progress bars


def test_the_bar_of_one_worker_stays_a_bar(job, program):
    terminal = typed(job, program("terminal_bar"), 200)
    shown = terminal.sees_the_end()
    assert terminal.child.exitstatus == 0
    assert shown.count("\rrank 0:") > 200
    assert len(re.findall(r"\d+%\|[^\r]*\r\n", shown)) == 1  # it moves to the next line once, at its end


def test_the_bars_of_several_workers_do_not_flood_the_terminal(job, program):
    terminal = typed(job, "--nproc-per-node", 4, program("terminal_bar"), 2000)
    written = terminal.sees_the_end()
    assert terminal.child.exitstatus == 0
    assert len(written) < 1 << 16  # of some 8,000 states
    screen = Emulator()
    screen.feed(written)
    bars = [row for row in screen.shown if "%|" in row]
    assert sorted(row.partition("%")[0] for row in bars) == [f"[{rank}] rank {rank}: 100" for rank in range(4)]
