"""`ddplaunch stacks` of a job that hangs: who waits in which collective for whom, by real recorders of torch."""

import json
import os
import re
import signal
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddplaunch.cli import main
from ddplaunch.record.folders import short
from tests.conftest import until
from tests.process import hurried

pytestmark = [
    pytest.mark.usefixtures("light_torch"),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

FORKED = ("--start-method", "forkserver", "--preload", "torch")  # it is imported once
# before, gloo's collectives are not recorded, and stacks alone tell
IS_RECORDED = find_spec("torch") is None or tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)
RECORDED = {
    "rank 0 waits in all_reduce #1 (float32 [4, 4]) of group 1 (ranks 0-1)",
    "  rank 1 has not reached it: it has called none of this group; it is in torch_hangs.py:24 in step",
    "the ranks disagree about collective #1 of group 2 (pipeline, ranks 2-3): "
    "rank 2 called all_reduce (float32 [4, 4]); rank 3 called broadcast (float32 [4, 4])",
}
EXPECTED = RECORDED if IS_RECORDED else set()


def test_it_names_who_waits_for_whom_while_the_gil_is_held_and_harms_nobody(job, program, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    hangs = program("torch_hangs")
    monkeypatch.chdir(hangs.parent)
    job.start("--nproc-per-node", 4, *FORKED, "--grace-period", 1, hangs)
    job.signs("ready", 4)
    job.signs("child", 4)

    def asked(*words: str) -> str:
        assert main.main(["stacks", job.folder.name, *words]) == 0
        out: str = capsys.readouterr().out
        return out

    found = {}

    def is_stuck() -> bool:
        found.update(json.loads(asked("--json")))
        return set(found["waits"]) >= EXPECTED and "4 children of ranks 0-3" in asked()

    until(is_stuck, "the hang")
    text = asked()
    assert "rank 1: torch_hangs.py:24 in step\n" in text
    assert "ranks 0,2: all_reduce, torch_hangs.py:28 in step\n" in text
    assert "4 children of ranks 0-3: torch_hangs.py:18\n" in text
    assert "group 1" not in asked("-r", "2").partition("rank 2: ")[2]

    os.kill(job.pids()[1], signal.SIGKILL)
    result = job.wait().expect(137)
    assert ("the ranks disagree about collective #1 of group 2" in result.err) is IS_RECORDED
    assert "rank 3: broadcast, " in (job.folder / "stacks" / "0.txt").read_text()
    assert "Server" not in result.err


def test_a_job_that_stands_still_ends_with_123_and_one_in_which_a_rank_evaluates_does_not(job, program):
    still = program("torch_still")
    job.start("--nproc-per-node", 2, *FORKED, "--hang-timeout", "2s", "--grace-period", 1, still)
    result = job.wait().expect(123)
    job.signs("evaluated", 2)
    lines = result.err.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert lines[head].startswith(
        "error: the job hangs: rank 1 has not reached all_reduce #2 (float32 [4]) of group 0, in which"
        if IS_RECORDED
        else "error: the job hangs: rank 1 is in no collective, rank 0 waits in one"
    )
    assert lines[head + 2].startswith(f"  rank 1: {still}:")
    assert lines[head + 3].startswith(f"  rank 0: all_reduce, {still}:")
    assert "rank 0: all_reduce" in (job.folder / "stacks" / "0.txt").read_text()
    assert json.loads((job.folder / "summary.json").read_text())["why"] == "hung"


def test_without_the_option_the_rank_is_named_for_which_the_others_wait_but_none_that_evaluates(job, program):
    job.command = [sys.executable, hurried.__file__]
    job.start("--nproc-per-node", 2, *FORKED, "--grace-period", 1, program("torch_still"))
    job.signs("evaluated", 2)
    events = job.folder / "events.jsonl"
    until(lambda: "no worker has made progress" in events.read_text(), "the line")
    shown = job.__class__(job.home).run("ps").out
    assert f"{short(job.folder.name)}: stands still for " in shown
    assert ("\n  rank 1 has not reached all_reduce #2" in shown) is IS_RECORDED
    job.process.send_signal(signal.SIGTERM)
    lines = [line for line in job.wait().err.splitlines() if "no worker has made progress" in line]
    assert len(lines) == 1
    assert ("rank 1 has not reached all_reduce #2 (float32 [4]) of group 0" in lines[0]) is IS_RECORDED
    assert f"`ddplaunch stacks {short(job.folder.name)}` shows where they are" in lines[0]


def test_the_report_names_the_stacks_that_the_node_of_the_missing_rank_keeps(job, program):
    options = ("--simulate", "--hang-timeout", "2s", "--grace-period", 1)
    job.start("--nnodes", 2, "--nproc-per-node", 1, *options, program("torch_still"))
    result = job.wait().expect(123)
    stacks = re.search(r"^  stacks (\S+) on (\S+)$", result.err, re.MULTILINE)
    assert stacks is not None, result.err
    assert "rank 1: " in Path(stacks[1].replace("~", str(job.home), 1)).read_text()
    assert stacks[2] == "node-1"


def test_a_rank_that_does_not_move_after_a_hang_is_killed_long_before_the_grace_period_is_over(job, program):
    """No handler of Python runs while its thread is in C; one that saves in a handler keeps its time."""
    options = ("--hang-timeout", "2s", "--grace-period", 60)
    job.start("--nproc-per-node", 2, *FORKED, *options, program("torch_still"), "saves")
    until(lambda: job.events("kill_sent"), "the SIGKILL")
    assert [event["ranks"] for event in job.events("kill_sent")] == ["0"]
    (job.home / "signs" / "rank-0-has-ended").touch()
    result = job.wait().expect(123)
    assert "rank 0 was asked to end and has not moved for 5 s: SIGKILL" in result.err
    assert "2 workers ended in" in result.err
    assert "rank 0 by SIGKILL" in result.err


def test_so_is_one_that_stands_still_elsewhere_than_in_a_collective(job, program):
    options = ("--hang-timeout", "2s", "--grace-period", 60)
    job.start("--nproc-per-node", 2, *FORKED, *options, program("torch_still"), "deaf")
    assert "ranks 0-1 were asked to end and have not moved for 5 s: SIGKILL" in job.wait().expect(123).err


@pytest.mark.parametrize("nodes", [(*FORKED, "--nproc-per-node", 2), ("--simulate", "--nnodes", 2)], ids=["1", "2"])
def test_ctrl_c_while_a_rank_waits_for_one_that_does_not_come_does_not_take_the_grace_period(
    job, program, monkeypatch, capsys, nodes
):
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])
    job.start(*nodes, "--grace-period", 60, program("torch_never_comes"))
    job.signs("ready", 2)

    def is_waiting() -> bool:
        assert main.main(["stacks", job.folder.name]) == 0
        return "rank 0: init_process_group" in capsys.readouterr().out

    until(is_waiting, "the rank that waits")
    job.process.send_signal(signal.SIGINT)
    result = job.wait().expect(130)
    assert "rank 0 was asked to end and has not moved for 5 s: SIGKILL" in result.err
    assert "rank 0 was in init_process_group" in result.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("nodes", [(*FORKED, "--nproc-per-node", 2), ("--simulate", "--nnodes", 2)], ids=["1", "2"])
def test_nor_does_a_stop_of_a_job_that_stands_still(job, program, nodes, signum):
    """No rank has ended, and none can: each is in a collective, where no handler of Python runs."""
    job.command = [sys.executable, hurried.__file__]
    job.start(*nodes, "--grace-period", 60, program("torch_disagree"))
    job.signs("ready", 2)
    until(lambda: "no worker has made progress" in (job.folder / "events.jsonl").read_text(), "the line")
    job.process.send_signal(signum)
    result = job.wait().expect(128 + signum)
    killed = re.findall(r"ranks? ([0-9-]+) w\S+ asked to end and ha\S+ not moved for 5 s: SIGKILL", result.err)
    # on another node, a rank may have lost its peer before it was looked at again
    assert killed == ["0-1"] if "--simulate" not in nodes else killed, result.err
