"""What `ddplaunch ps --all` lists: every run that has a folder, newest first, and how it ended, whatever lies there."""

import fcntl
import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from ddplaunch.record import run_socket
from ddplaunch.system.errors import LaunchError
from ddplaunch.tools.runs import past


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a user of whom nothing runs here."""
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(tmp_path / "none"))
    return {"XDG_STATE_HOME": str(tmp_path)}


def left(tmp_path: Path, name: str, began: float, program: str, summary: object, host: str = "") -> Path:
    """The folder of a run that began at this time, in seconds since 1970."""
    folder = tmp_path / "ddplaunch/runs" / name
    folder.mkdir(parents=True)
    row = {"v": 1, "event": "job_started", "at": began, "mono": 1.0, "program": program, "host": host}
    (folder / "events.jsonl").write_text(json.dumps(row) + "\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


FAILURE = {"rank": 3, "host": socket.gethostname(), "how": "exit status 1", "error": "KeyError: 'x'"}


def listed(env: dict[str, str], named: str | None = None) -> list[list[str]]:
    """The rows: name, script, how it ended."""
    found = json.loads(past.show(env, named, as_json=True))
    return [[run["run_id"], run["script"], run["how"]] for run in found]


def test_runs_are_listed_newest_first_with_how_they_ended(tmp_path, env):
    left(tmp_path, "a", 100.0, "old.py", {"status": 0, "seconds": 5.0})
    left(tmp_path, "b", 300.0, "new.py", {"status": 1, "why": "failed", "first_failure": FAILURE})
    left(tmp_path, "c", 200.0, "new.py", {"status": 143, "why": "signalled"})
    left(tmp_path, "d", 150.0, "new.py", {"status": 124, "why": "timed_out"})
    left(tmp_path, "e", 50.0, "killed.py", None)
    left(tmp_path, "f", 60.0, "lost.py", {"status": 137, "why": "front_lost"})
    assert listed(env) == [
        ["b", "new.py", "status 1: rank 3 failed: KeyError: 'x'"],
        ["c", "new.py", "status 143: SIGTERM"],
        ["d", "new.py", "status 124: timed out"],
        ["a", "old.py", "finished"],
        ["f", "lost.py", "status 137: ddplaunch was killed"],
        ["e", "killed.py", "was killed, or its record ends early"],
    ]
    assert [row[0] for row in listed(env, "new.py")] == ["b", "c", "d"]
    table = past.show(env, None, as_json=False)
    assert [line.split()[0] for line in table.splitlines()] == ["run", "b", "c", "d", "a", "f", "e"]


def test_a_run_that_goes_on_is_not_said_to_have_ended(tmp_path, env):
    for name, host in (("far", "gpu07"), ("near", socket.gethostname())):
        left(tmp_path, name, 100.0, "train.py", None, host)
    with (
        (tmp_path / "ddplaunch/runs/far/events.jsonl").open() as far,
        (tmp_path / "ddplaunch/runs/near/events.jsonl").open() as near,
    ):
        fcntl.flock(far, fcntl.LOCK_EX)
        fcntl.flock(near, fcntl.LOCK_EX)
        assert listed(env) == [["far", "train.py", "runs on gpu07"], ["near", "train.py", "does not answer"]]


@pytest.mark.parametrize(
    "summary",
    [
        [], "text", {"status": "1"}, {"status": 1, "seconds": "x", "first_failure": 3, "why": [2]}, {"status": 0},
        {"status": 10**30, "why": "signalled"}, {"status": -5}, {"status": True}, {"status": float("nan")},
        {"status": 0, "seconds": float("inf")}, {"status": 0, "seconds": float("nan")}, {"status": 0, "seconds": 1e300},
        {"status": 1, "first_failure": {"rank": 10**400 // 10**90, "error": "x" * 1_000_000}},
    ],
)  # fmt: skip
def test_whatever_stands_in_a_summary_the_run_is_listed(tmp_path, env, summary):
    left(tmp_path, "run\x1b[2J", 1e300, "x\ny\x1b[31m", summary)
    text = past.show(env, None, as_json=False)
    assert len(text.splitlines()) == 2
    assert text.replace("\n", "").isprintable()
    assert not {"NaN", "Infinity"} & {*re.findall(r"\w+", past.show(env, None, as_json=True))}  # which are no JSON


def test_the_error_of_a_first_failure_is_cut(tmp_path, env):
    left(tmp_path, "a", 100.0, "train.py", {"status": 1, "first_failure": {"rank": 3, "error": "x" * 1_000_000}})
    [[_, _, how]] = listed(env)
    assert how.startswith("status 1: rank 3 failed: xxx")
    assert len(how) < 400


def test_a_folder_that_no_run_has_left_is_no_run(tmp_path, env):
    (tmp_path / "data").mkdir()
    with pytest.raises(LaunchError, match="there is no run"):
        past.show(env, str(tmp_path / "data"), as_json=False)


def test_a_run_is_named_by_its_folder_and_by_no_empty_name(tmp_path, env):
    kept = left(tmp_path, "a", 100.0, "train.py", {"status": 0})
    left(tmp_path, "b", 100.0, "train.py", {"status": 0})
    elsewhere = shutil.copytree(kept, tmp_path / "logs/c")  # as --log-dir has it
    assert listed(env, f"{kept}/") == [["a", "train.py", "finished"]]
    assert listed(env, str(elsewhere)) == [["c", "train.py", "finished"]]
    with pytest.raises(LaunchError, match="the argument is empty"):
        past.show(env, "", as_json=False)


def test_a_file_among_the_runs_is_no_run(tmp_path, env):
    left(tmp_path, "a", 100.0, "train.py", {"status": 0})
    (tmp_path / "ddplaunch/runs/notes").touch()
    assert listed(env) == [["a", "train.py", "finished"]]


def test_what_there_is_not_is_an_error_or_a_sentence(tmp_path, env):
    assert past.show(env, None, as_json=False) == "you have no runs here"
    assert past.show(env, None, as_json=True) == "[]"
    with pytest.raises(LaunchError, match="there is no run other here"):
        past.show(env, "other", as_json=False)
