"""The process that writes the files of a run, called in ours: what it does of what was left to it, and how it shows that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from signal import Signals

import pytest

from ddplaunch.output import log
from ddplaunch.output.file_messages import CLOSE, END, EVENT, JSON, MAKE, OPEN, PROGRESS, REPLACE, WRITE, pack, replies
from ddplaunch.report import file_writer, folders
from ddplaunch.report.state_folder import BEGAN
from tests.conftest import until


def message(kind: bytes, data: bytes = b"", number: int = 0) -> bytes:
    return kind + number.to_bytes(4, "little") + len(data).to_bytes(8, "little") + data


def left(*messages: bytes) -> int:
    """The file in which these are left to it."""
    shared = os.memfd_create("test")
    os.pwrite(shared, bytes(PROGRESS) + b"".join(messages), 0)
    return shared


def steps(*messages: bytes) -> int:
    """How many steps of progress it shows when it carries these out."""
    ours, its = socket.socketpair()
    ours.close()
    shared = left(*messages)
    file_writer.run(its.detach(), shared)
    found = os.pread(shared, PROGRESS, 0)
    os.close(shared)
    assert int.from_bytes(found[:8], "little") == sum(map(len, messages))
    return int.from_bytes(found[8:], "little")


def test_a_log_whose_parts_are_joined_shows_progress_with_each_piece(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(log, "_PIECE", 100)
    make = message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": None, "kept": 1}))
    opened = message(OPEN, pack({"name": "log", "limit": 6000}), 1)
    written = [message(WRITE, b"x" * 99 + b"\n", 1)] * 45  # half of the limit, and one and a half segments
    assert steps(make, opened, *written, message(CLOSE, b"", 1)) == 2 + 45 + 1 + 15
    assert (tmp_path / "run" / "log").stat().st_size == 4500


def test_values_become_the_json_that_they_would_have_been_here(tmp_path: Path) -> None:
    values = {
        "signal": Signals.SIGTERM,
        "at": 1.5,
        "ranks": (0, 1),
        "of": {2: None},
        "name": "a\udc80\u20ac\n",
        "ok": True,
    }
    make = message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": None, "kept": 1}))
    steps(make, message(EVENT, pack(values)), message(JSON, pack(("plan.json", values))))
    assert (tmp_path / "run" / "events.jsonl").read_text() == json.dumps(values) + "\n"
    assert (tmp_path / "run" / "plan.json").read_text() == json.dumps(values, indent=1) + "\n"


def test_a_bug_of_ours_is_reported_to_the_agent() -> None:
    ours, its = socket.socketpair()
    ours.shutdown(socket.SHUT_WR)
    shared = left(message(REPLACE, b"\xff\nthe name is not UTF-8"))
    file_writer.run(its.detach(), shared)
    os.close(shared)
    assert "UnicodeDecodeError" in replies(ours.recv(100_000))[0][0]["problem"]
    ours.close()


def old_runs(root: Path, number: int) -> list[Path]:
    """Runs that ended long ago, oldest first; each has two files."""
    runs = [root / f"{number - at:05}" for at in range(number)]  # their names are in another order
    for at, run in enumerate(runs):
        run.mkdir()
        (run / "summary.json").touch()
        (run / "events.jsonl").touch()
        os.utime(run / "events.jsonl", (at + 1, at + 1))
    return runs


@pytest.mark.parametrize(
    ("number", "after"), [pytest.param(41, 1e9, id="many-at-once"), pytest.param(25, 0.0, id="a-few-later")]
)
def test_old_runs_are_removed_while_there_is_nothing_to_write(tmp_path: Path, monkeypatch, number, after) -> None:
    monkeypatch.setattr(file_writer, "TIDY_AFTER", after)
    runs = old_runs(tmp_path, number)
    ours, its = socket.socketpair()
    shared = left()
    writer = threading.Thread(target=file_writer.run, args=(its.detach(), shared))
    writer.start()
    ours.sendall(message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": str(tmp_path), "kept": 20})))
    until(lambda: [run for run in runs if run.exists()] == runs[-19:], "the newest")
    ours.sendall(message(END))
    writer.join()
    ours.close()
    os.close(shared)


def test_no_message_waits_until_old_runs_are_removed(tmp_path: Path) -> None:
    runs = old_runs(tmp_path, 60)
    make = message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": str(tmp_path), "kept": 20}))
    assert steps(make, message(EVENT, pack({}))) == 2
    assert all(run.exists() for run in runs)


def test_a_tidying_that_fails_ends_no_writer(tmp_path: Path, monkeypatch) -> None:
    def fails(*_args: object):
        yield
        raise RecursionError("a bug of ours")

    monkeypatch.setattr(file_writer, "TIDY_AFTER", 0.0)
    monkeypatch.setattr(folders, "keep_newest", fails)
    ours, its = socket.socketpair()
    shared = left()
    writer = threading.Thread(target=file_writer.run, args=(its.detach(), shared))
    writer.start()
    ours.sendall(message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": str(tmp_path), "kept": 20})))
    until((tmp_path / "run" / "events.jsonl").exists, "the folder")
    for _ in range(3):
        ours.sendall(message(EVENT, pack({})))
    ours.sendall(message(END))
    writer.join()
    assert (tmp_path / "run" / "events.jsonl").read_text() == "{}\n" * 3
    ours.close()
    os.close(shared)


def keep_newest(root: Path, number: int) -> int:
    """Return the number of steps."""
    return sum(1 for _ in folders.keep_newest(str(root), number))


def test_of_thousands_of_runs_the_newest_are_kept_in_steps_that_grow_with_them_only(tmp_path: Path) -> None:
    runs = old_runs(tmp_path, 1000)
    assert keep_newest(tmp_path, 20) == 1000 + 3 * 980  # a look at each, its names, its files
    assert sorted(tmp_path.iterdir()) == sorted(runs[-20:])
    assert keep_newest(tmp_path, 20) == 0


def test_of_very_many_runs_each_job_however_short_removes_some_that_the_names_of_others_show_to_be_old(tmp_path):
    runs = [tmp_path / time.strftime(f"{BEGAN}-0000", time.localtime(at * 3600)) for at in range(1, 301)]
    for at, run in enumerate(runs, 1):
        run.mkdir()
        (run / "events.jsonl").touch()
        os.utime(run / "events.jsonl", (at * 3600 + 60, at * 3600 + 60))
    os.utime(runs[0] / "events.jsonl")  # it has begun first, and ended just now
    of_the_future = tmp_path / "99990101-000000-0000"
    of_the_future.mkdir()
    tidying = folders.keep_newest(str(tmp_path), 20)
    for _ in range(11):  # looks at five, and the names and files of three of them
        next(tidying)
    assert [run for run in runs if not run.exists()] == runs[1:4]
    for _ in tidying:
        pass
    assert sorted(tmp_path.iterdir()) == [runs[0], *runs[-18:], of_the_future]


def test_a_run_that_goes_on_is_not_removed_and_a_pipe_in_the_place_of_its_events_not_waited_for(tmp_path: Path) -> None:
    goes_on, pipe, *others = old_runs(tmp_path, 22)
    (pipe / "events.jsonl").unlink()
    os.mkfifo(pipe / "events.jsonl")
    os.utime(pipe / "events.jsonl", (2, 2))
    events = os.open(goes_on / "events.jsonl", os.O_WRONLY)
    folders.lock(events)
    keep_newest(tmp_path, 20)
    os.close(events)
    assert sorted(tmp_path.iterdir()) == sorted([goes_on, *others])


MOUNTS = """
mount -t tmpfs none "$1/mounted" && mount --bind "$2" "$1/bound" || exit 77
touch "$1/mounted/kept"
"$3" -c "import sys; from ddplaunch.report import folders; [*folders.keep_newest(sys.argv[1], 20)]" "$(dirname "$1")"
cd "$1" && find . -type f
"""


def test_what_is_mounted_below_an_old_run_stays(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    run = old_runs(runs, 21)[0]
    others = tmp_path / "others"  # of the same file system
    for folder in (run / "mounted", run / "bound", run / "a/b", others):
        folder.mkdir(parents=True)
    for file in (run / "a/b/file", others / "kept"):
        file.touch()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTS, "sh"]
    done = subprocess.run([*inside, run, others, sys.executable], capture_output=True, text=True, check=False)
    if "unshare: " in done.stderr or done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert sorted(done.stdout.split()) == ["./bound/kept", "./mounted/kept"], done.stderr


LOCKS = """
import os, sys
from ddplaunch.report import folders
folders.lock(os.open(sys.argv[1], os.O_WRONLY))
print(flush=True)
input()
"""


def test_a_run_goes_on_until_the_process_that_writes_it_has_ended_and_be_it_killed(tmp_path: Path) -> None:
    (run,) = old_runs(tmp_path, 1)
    command = [sys.executable, "-c", LOCKS, str(run / "events.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        before = folders.goes_on(str(run))
        writer.kill()
    assert before
    assert not folders.goes_on(str(run))
