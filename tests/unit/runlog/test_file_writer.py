"""The process that writes the files of a run, called in ours: what it does of what was left to it, and how it shows that."""

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

from ddplaunch.record import file_writer, folders, log, old_runs
from ddplaunch.record.file_queue import (
    CLOSE,
    END,
    EVENT,
    JSON,
    MAKE,
    OPEN,
    PROGRESS,
    REPLACE,
    WRITE,
    header,
    pack,
    values_of,
)
from ddplaunch.system.loop.stream import LENGTH_WORD
from tests.conftest import until
from tests.runs import run_of


def message(kind: bytes, data: bytes = b"", number: int = 0) -> bytes:
    return header(kind, number, len(data)) + data


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
    make = message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": None, "keep": 30}))
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
    make = message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": None, "keep": 30}))
    steps(make, message(EVENT, pack(values)), message(JSON, pack(("plan.json", values))))
    assert (tmp_path / "run" / "events.jsonl").read_text() == json.dumps(values) + "\n"
    assert (tmp_path / "run" / "plan.json").read_text() == json.dumps(values, indent=1) + "\n"


def test_a_bug_of_ours_is_reported_to_the_agent() -> None:
    ours, its = socket.socketpair()
    ours.shutdown(socket.SHUT_WR)
    shared = left(message(REPLACE, b"\xff\nthe name is not UTF-8"))
    file_writer.run(its.detach(), shared)
    os.close(shared)
    assert "UnicodeDecodeError" in values_of(ours.recv(100_000)[LENGTH_WORD:])["problem"]
    ours.close()


@pytest.mark.parametrize("before", [0.0, 2 * old_runs.AGAIN_AFTER], ids=["never", "two hours before"])
def test_old_runs_are_removed_while_there_is_nothing_to_write(tmp_path: Path, monkeypatch, before: float) -> None:
    monkeypatch.setattr(file_writer, "TIDY_AFTER", 1e9 if not before else 0.0)  # the first time at once
    runs = tmp_path / "runs"
    old, young = run_of(runs, "old", days=31), run_of(runs, "young")
    if before:
        marker = tmp_path / "runs-tidied"
        marker.touch()
        os.utime(marker, (time.time() - before,) * 2)
    ours, its = socket.socketpair()
    shared = left()
    writer = threading.Thread(target=file_writer.run, args=(its.detach(), shared))
    writer.start()
    ours.sendall(message(MAKE, pack({"root": str(runs), "name": "run", "runs": str(runs), "keep": 30})))
    until(lambda: not old.exists(), "the removal")
    ours.sendall(message(END))
    writer.join()
    assert young.exists()
    ours.close()
    os.close(shared)


def test_no_message_waits_until_old_runs_are_removed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    old = run_of(runs, "old", days=31)
    make = message(MAKE, pack({"root": str(runs), "name": "run", "runs": str(runs), "keep": 30}))
    assert steps(make, message(EVENT, pack({}))) == 2
    assert old.exists()


def test_a_tidying_that_fails_ends_no_writer(tmp_path: Path, monkeypatch) -> None:
    def fails(*_args: object):
        yield
        raise RecursionError("a bug of ours")

    monkeypatch.setattr(file_writer, "TIDY_AFTER", 0.0)
    monkeypatch.setattr(old_runs, "tidy", fails)
    ours, its = socket.socketpair()
    shared = left()
    writer = threading.Thread(target=file_writer.run, args=(its.detach(), shared))
    writer.start()
    ours.sendall(message(MAKE, pack({"root": str(tmp_path), "name": "run", "runs": str(tmp_path), "keep": 30})))
    until((tmp_path / "run" / "events.jsonl").exists, "the folder")
    for _ in range(3):
        ours.sendall(message(EVENT, pack({})))
    ours.sendall(message(END))
    writer.join()
    assert (tmp_path / "run" / "events.jsonl").read_text() == "{}\n" * 3
    ours.close()
    os.close(shared)


LOCKS = """
import os, sys
from ddplaunch.record import folders
folders.lock(os.open(sys.argv[1], os.O_WRONLY))
print(flush=True)
input()
"""


def test_a_run_goes_on_until_the_process_that_writes_it_has_ended_and_be_it_killed(tmp_path: Path) -> None:
    run = run_of(tmp_path, "run")
    command = [sys.executable, "-c", LOCKS, str(run / "events.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        before = folders.goes_on(str(run))
        writer.kill()
    assert before
    assert not folders.goes_on(str(run))
