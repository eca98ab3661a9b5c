"""`ddplaunch attach`: pdb in a worker of a running job, which goes on when it is left, in whatever way."""

import json
import os
import re
import signal
import subprocess

import pytest

from ddplaunch.record.folders import short
from ddplaunch.record.window.requests import Attach, RequestRefused, Run
from ddplaunch.system.process.child import ATTACH_SIGNAL
from ddplaunch.tools.runs import client, find
from tests.conftest import PATIENCE, until
from tests.process.terminal import CTRL_C, CTRL_D, ENTER, Terminal, stopped, typed
from tests.process.test_debug import PDB, enter


@pytest.fixture
def runs(job, program):
    """Start a job whose ranks behave so; give its name."""

    def runs(*ways: str) -> str:
        job.start("--nproc-per-node", len(ways), program("attached"), *ways)
        job.signs("ready", len(ways))
        return str(job.folder.name)

    return runs


@pytest.fixture
def attach(job):
    """Attach to a rank."""
    return lambda run, rank: typed(job, "attach", "-r", rank, run, env={"NO_COLOR": "1"})


def finish(job, counted: int = 1) -> str:
    """Let the ranks count no further; the job ends well. Give what it has said."""
    (job.home / "signs" / "enough").touch()
    result = job.wait().expect(0)
    assert f"[{counted}] counted True" in result.out
    job.nothing_left()
    return str(result.err)


def detached(job, run: str, rank: int, attach) -> Terminal:
    """Attach once more, which is possible as soon as the rank is held no longer."""
    found: list[Terminal] = []

    def is_there() -> bool:
        found.append(attach(run, rank))
        return bool(found[-1].child.expect_exact([PDB, "already"]) == 0)

    until(is_there, "a prompt")
    return found[-1]


def runs_to_breakpoint(terminal: Terminal, job, sign: str) -> None:
    """Have the rank run with a breakpoint whose condition is false for ever."""
    enter(terminal, f"break attached:29, put({sign!r})")
    terminal.press("c", ENTER)
    job.sign(sign)


def test_the_rank_is_held_where_it_is_and_steps(job, runs, attach):
    run = runs("count", "count")
    terminal = attach(run, 1)
    terminal.sees("rank 1 is held", PDB)
    where = enter(terminal, "where")
    assert "count(0)" in where
    assert "bootstrap" not in where
    assert enter(terminal, "p __import__('signs').RANK") == "1"
    shown = {each["run_id"]: each for each in json.loads(job.__class__(job.home).run("ps", "--json").out)}
    assert [each["state"] for each in shown[run]["workers"]] == ["running", "debugged"]
    second = attach(run, 1)
    assert second.sees_the_end() == f"error: run {short(run)}: rank 1 has a debugger already\r\n"
    terminal.press("p nonsense", CTRL_C)
    terminal.sees(PDB)
    enter(terminal, "break count")
    assert "Deleted breakpoint 1" in enter(terminal, "clear 1")
    for command in ("next", "next", "step"):
        assert "attached.py" in enter(terminal, command)
    terminal.press("c", ENTER)
    terminal.sees("ddplaunch: rank 1 goes on")
    assert terminal.status() == 0
    finish(job)


def test_the_rank_goes_on_however_the_debugger_is_left(job, runs, attach):
    run = runs("count", "count")
    terminal = attach(run, 1)
    terminal.sees(PDB)
    terminal.press(CTRL_D)
    assert terminal.status() == 0
    terminal = detached(job, run, 1, attach)
    terminal.hang_up()
    terminal.child.wait()
    terminal = detached(job, run, 1, attach)
    os.kill(terminal.child.pid, signal.SIGKILL)
    terminal.child.wait()
    terminal = detached(job, run, 1, attach)
    runs_to_breakpoint(terminal, job, "first")
    terminal.press(CTRL_C)
    terminal.sees("rank 1 goes on")
    assert terminal.status() == 0
    terminal = detached(job, run, 1, attach)
    assert enter(terminal, "break") == ""
    enter(terminal, "!__import__('signal').signal(13, 0)")  # SIGPIPE, which Python ignores, kills
    runs_to_breakpoint(terminal, job, "second")
    os.kill(terminal.child.pid, signal.SIGKILL)
    terminal.child.wait()
    terminal = detached(job, run, 1, attach)
    terminal.press("next", ENTER)
    terminal.sees(PDB)
    terminal.press("q", ENTER)
    assert terminal.status() == 0
    finish(job)


def test_a_process_that_is_forked_meanwhile_is_not_debugged_and_holds_nothing(job, runs, attach):
    run = runs("count", "count")
    terminal = attach(run, 1)
    terminal.sees(PDB)
    enter(terminal, "break put")  # which the child calls
    (job.home / "signs" / "fork-1").touch()
    terminal.press("c", ENTER)
    job.sign("forked")
    terminal.press(CTRL_C)
    terminal.sees("rank 1 goes on")
    assert terminal.status() == 0
    terminal = detached(job, run, 1, attach)
    terminal.press(CTRL_D)
    assert terminal.status() == 0
    finish(job)


def test_a_stop_of_the_job_ends_the_debugger_too(job, runs, attach):
    run = runs("count", "count")
    terminal = attach(run, 0)
    terminal.sees(PDB)
    job.process.send_signal(signal.SIGTERM)
    terminal.sees("rank 0 is held no more")
    assert terminal.status() == 0
    assert job.wait().status == 143


def test_who_cannot_be_attached_to_is_named(job, runs, attach):
    run = runs("own", "held")
    assert "rank 0 handles signal 58 (SIGRTMAX-6) itself" in attach(run, 0).sees_the_end()
    assert not job.has_sign("own")
    assert f"there is no rank 9 in {short(run)}: it has ranks 0-1" in attach(run, 9).sees_the_end()
    assert "no run nosuch" in attach("nosuch", 0).sees_the_end()
    shown = attach(run, 1).sees_the_end()
    assert "rank 1 runs no Python just now" in shown
    assert "attached.py" in shown
    os.kill(job.pids()[0], signal.SIGSTOP)
    until(lambda: stopped([job.pids()[0]]), "the rank to stop")
    assert "rank 0 is stopped" in attach(run, 0).sees_the_end()
    result = job.__class__(job.home).run("attach", "-r", 0, run).expect(2)
    assert "needs a terminal" in result.err
    job.process.send_signal(signal.SIGTERM)
    job.wait()


def test_a_rank_of_another_node_is_debugged_from_here_and_ranks_are_completed(job, program, attach):
    options = ("--nnodes", 2, "--simulate", "--nproc-per-node", 1, "--timeout", "1h")
    job.start(*options, program("attached"), "count", "count")
    job.signs("ready", 2)
    run = str(job.folder.name)
    terminal = attach(run, 1)
    terminal.sees("rank 1 is held", PDB)
    assert enter(terminal, "p __import__('signs').RANK") == "1"
    long = enter(terminal, "p 'x' * 3_000_000")
    assert long.count("x") >= 3_000_000
    assert attach(run, 1).sees_the_end() == f"error: run {short(run)}: rank 1 has a debugger already\r\n"
    terminal.press("c", ENTER)
    terminal.sees("ddplaunch: rank 1 goes on")
    assert terminal.status() == 0
    terminal = detached(job, run, 1, attach)
    os.kill(terminal.child.pid, signal.SIGKILL)
    terminal.child.wait()
    terminal = detached(job, run, 1, attach)
    terminal.press(CTRL_D)
    assert terminal.status() == 0

    def are_completed() -> bool:
        asked = {"_DDPLAUNCH_COMPLETE": "fish_complete", "COMP_WORDS": f"ddplaunch attach {run} -r ", "COMP_CWORD": ""}
        done = subprocess.run(job.argv(), env={**job.env, **asked}, capture_output=True, text=True, check=False)
        return re.findall(r"(\d)\tpid \d+ on (node-\d), ", done.stdout) == [("0", "node-0"), ("1", "node-1")]

    until(are_completed, "the ranks of both nodes")
    said = finish(job)
    assert said.count("node-1) holds a worker in a debugger: --timeout waits until it is left") == 1
    assert "nobody debugs this job" not in said


def test_nodes_that_share_no_secret_open_no_debugger_for_each_other(nodes, program):
    flags = (program("attached"), "count", "count")
    for number in range(2):
        nodes.node(*nodes.static(2, number), *flags)
    nodes.signs("ready", 2)
    [run] = until(
        lambda: [run for run in find.running(nodes.env) if run.run and run.run.folder.startswith(str(nodes.home))],
        "the run",
    )
    with run.socket_path.connect() as sock:
        sock.settimeout(PATIENCE)
        replies = client.replies_of(sock, Attach(1), PATIENCE)
        refused = next(reply for reply in replies if not isinstance(reply, Run))
    assert isinstance(refused, RequestRefused)
    assert "the nodes of this job have no token" in refused.reason
    (nodes.home / "signs" / "enough").touch()
    assert nodes.statuses() == [0, 0]


def test_a_rank_that_ends_is_not_killed_by_the_signal_of_a_debugger(job, runs):
    runs("count", "late")
    job.sign("ending")
    os.kill(job.pids()[1], ATTACH_SIGNAL)
    finish(job, counted=0)


def test_a_program_that_is_no_python_cannot_be_attached_to(job, attach):
    job.start("--nproc-per-node", 1, "--no-python", "sh", "-c", "touch $DDP_TEST_DIR/ready-0; sleep 600")
    job.signs("ready", 1)
    assert "rank 0 is no Python" in attach(job.folder.name, 0).sees_the_end()
    job.process.send_signal(signal.SIGTERM)
    job.wait()
