"""Which run is meant by what was typed, and how those that could be meant are told apart."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record import folders, run_socket
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.requests import Run
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.choice import Typed, best_matches, several
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.find import Known, heading, newest_first
from tests.unit.builders import spec

NOW = time.time()
HERE = RunReplies(
    SocketPath("/runs/x", "socket"), Run("x", "vm", 1, "", "x.py", "running", 1.0, 1, 1, 0, 0, 0, "1"), (), ""
)


def run(name: str, script: str = "train.py", ago: float = 60.0, *, runs: bool = False, folder: str = "") -> Known:
    return Known(run_id=name, script=script, began=NOW - ago, folder=folder, replies=HERE if runs else None)


K7QX = run("20261123-194501-k7qx", ago=4 * 86400 + 9, runs=True)
M3ZD = run("20261123-201502-m3zd", "/home/me/eval.py", ago=3 * 86400 + 9, runs=True)
OLD = run("20261101-194501-k7qy", ago=9e5)
NAMED = run("baseline", "train.py", ago=9e6)
RUNS = (K7QX, M3ZD, OLD, NAMED)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("k7qx", [K7QX]),
        ("K7QX", [K7QX]),
        ("k7", [K7QX, OLD]),
        ("m", [M3ZD]),
        ("20261123-194501-k7qx", [K7QX]),
        ("20261123", [K7QX, M3ZD]),
        ("202611", [K7QX, M3ZD, OLD]),
        ("3zd", [M3ZD]),
        ("194501-k7qy", [OLD]),
        ("eval.py", [M3ZD]),
        ("eval", [M3ZD]),
        ("/home/me/eval.py", [M3ZD]),
        ("train.py", [K7QX, OLD, NAMED]),
        ("base", [NAMED]),
        ("line", [NAMED]),
        ("d", []),  # a letter at the end of a name says too little
        ("2", []),  # a rank
        ("202", []),
        ("nothing", []),
    ],
)
def test_a_run_is_meant_by_its_name_its_script_or_a_part_of_its_name(typed, found):
    assert best_matches(typed, RUNS) == found


def test_what_fits_as_a_whole_wins_over_what_fits_in_part():
    whole, script = run("train"), run("b", "train")
    begins = run("train-2", "x.py")
    assert best_matches("train", [begins, script, whole]) == [whole]
    assert best_matches("train", [begins, script]) == [script]
    assert best_matches("train", [begins]) == [begins]


def test_runs_that_could_be_meant_are_listed_with_script_and_age_the_newest_that_runs_first():
    error = several("202611 may be any of 4 runs", RUNS, Typed("stop"))
    assert error.render() == (
        "error: 202611 may be any of 4 runs:\n"
        "  m3zd      eval.py   running for 3 d\n"
        "  k7qx      train.py  running for 4 d\n"
        "  k7qy      train.py  began 10 d 10 h ago\n"
        "  baseline  train.py  began 104 d 4 h ago\n"
        "\n"
        "hint: name one: `ddplaunch stop m3zd`\n"
    )


def test_of_equal_names_those_are_listed_that_can_be_typed():
    same = [run("20261123-194501-k7qx", ago=3), run("20261124-194501-k7qx", ago=2), run("x", ago=1, folder="/logs/x_1")]
    error = several("twice", [*same, run("x", ago=0, folder="/logs/x_2")], Typed("logs"))
    assert [line.split()[0] for line in error.message.splitlines()[1:]] == [
        "/logs/x_2",
        "/logs/x_1",
        "20261124-194501-k7qx",
        "20261123-194501-k7qx",
    ]
    assert error.hint == "name one: `ddplaunch logs /logs/x_2`"


def test_of_many_runs_the_newest_are_listed():
    many = [run(f"run-{number}", ago=number) for number in range(50)]
    lines = several("many", many, Typed("logs")).message.splitlines()
    assert lines[1].split()[0] == "run-0"
    assert lines[-1].strip() == "and 42 more"
    assert len(lines) == 10


# --- names


def test_the_short_name_is_the_end_of_the_long_one_and_is_like_no_word_and_no_number():
    names = [folders.run_id_of(spec()) for _ in range(200)]
    shorts = [folders.short(name) for name in names]
    assert len(set(shorts)) > 195
    assert all(
        name.endswith(f"-{short}") and name[:8] == time.strftime("%Y%m%d")
        for name, short in zip(names, shorts, strict=True)
    )
    assert all(len(short) == 4 and short[0].isalpha() and not set(short) & set("aeiou01l") for short in shorts)
    assert len({name[0] for name in shorts}) > 10  # so that a beginning helps


@pytest.mark.parametrize(
    ("run_id", "short"),
    [
        ("20261122-113617-dc9b", "dc9b"),
        ("20261122-113617-k7qx.1", "k7qx.1"),
        ("baseline-1", "baseline-1"),
        ("20261122-113617-k7qx-other", "20261122-113617-k7qx-other"),
    ],
)
def test_a_name_that_was_asked_for_is_its_own_short_name(run_id, short):
    assert folders.short(run_id) == short


def test_a_job_has_the_name_that_was_asked_for():
    assert folders.run_id_of(spec(run_id="mine")) == "mine"


# --- what a run says, and its folder holds


@given(st.text(), st.text(), st.floats(min_value=0, max_value=1e12))
def test_whatever_a_run_says_of_itself_takes_one_line(name, command, seconds):
    reply = Run(name, "vm", 1, "/x", command, "running", seconds, 1, 1, 0, 0, 0, "1")
    for place in (SocketPath("/tmp/ddplaunch-0", "x.0123"), SocketPath(f"/runs/{name}", run_socket.NAME)):
        text = heading(find.of_running(RunReplies(place, reply, (), "")))
        assert not any(ord(char) < 32 or char in "\x7f\u2028\u2029\x85" for char in text)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"[]\n",
        b"[" * 9000 + b"\n",
        b'{"event":"job_started","program":7,"at":"x"}\n',
        b'{"event":"job_started","at":1e300}\n',
    ],
)
def test_a_folder_with_odd_events_is_a_run_without_a_script(tmp_path, start):
    folder = tmp_path / "odd\nname\x1b[2J"
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(start)
    found = find.of_folder(str(folder))
    assert (found.run_id, found.script) == ("odd?name?[2J", "")
    assert abs(found.began - time.time()) < 600


def test_the_script_and_the_begin_of_a_run_stand_in_its_events(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "two/node-0", tmp_path / "two/node-1"):
        folder.mkdir(parents=True)
        event = {"event": "job_started", "at": NOW - 60, "program": "pkg/train.py"}
        (folder / "events.jsonl").write_text('{"event":"notice"}\n' + json.dumps(event) + "\n")
    for name in ("one", "two"):
        found = find.of_folder(str(tmp_path / name))
        assert (found.program, found.began) == ("train.py", NOW - 60)


@pytest.mark.parametrize(
    ("folder", "whole"),
    [("/s/runs/k7qx", "/s/runs/k7qx"), ("/s/runs/k7qx/node-1", "/s/runs/k7qx"), ("/s/runs/node-1", "/s/runs/node-1")],
)
def test_the_folder_of_a_node_lies_in_that_of_the_run(folder, whole):
    assert find.run_folder_of(folder) == whole


# --- completion


def test_running_jobs_are_offered_first_the_newest_first_and_nothing_that_a_shell_would_take_apart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(tmp_path / "none"))
    env = {"XDG_STATE_HOME": str(tmp_path)}
    for ago, name in enumerate(
        ("20261123-194501-k7qx", "two\nlines", "a b", "a,b", "\x1b[2J", "x;y", "20261101-194501-k7qy")
    ):
        folder = Path(tmp_path, "ddplaunch/runs", name)
        folder.mkdir(parents=True)
        event = {"event": "job_started", "at": NOW - 86400 * (ago + 5), "program": "a\nb.py"}
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    found = find.completions(env, "", "logs")
    assert [name for name, _ in found] == ["k7qx", "k7qy"]
    assert found[0][1].startswith("a?b.py began 5 d")
    assert [name for name, _ in find.completions(env, "2026110", "logs")] == ["20261101-194501-k7qy"]
    assert find.completions(env, "", "stop") == []
    ordered = newest_first([OLD, K7QX, NAMED, M3ZD])
    assert ordered == [M3ZD, K7QX, OLD, NAMED]
