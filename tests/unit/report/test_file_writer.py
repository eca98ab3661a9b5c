"""The process that writes the files of a run, called in ours: what it does of what was left to it, and how it shows that."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from signal import Signals

from ddplaunch.output import log
from ddplaunch.output.file_messages import CLOSE, EVENT, JSON, MAKE, OPEN, PROGRESS, REPLACE, WRITE, pack, replies
from ddplaunch.report import file_writer


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
