"""`ddplaunch warm`: which interpreters are kept warm for this user on this machine, and their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch.launcher.workers import warm
from ddplaunch.record import run_socket
from ddplaunch.system.console.tables import NAME, Look, line, section, table, written
from ddplaunch.system.words import count, duration

_COLUMNS = ("pid", "interpreter", "has imported", "runs", "is kept")


class Kept(Struct, frozen=True):
    """An interpreter that is kept warm, as it says of itself."""

    pid: int
    runs: int  # that it has served
    running: int
    seconds: int  # until it ends, if no run comes
    python: str
    modules: str


def kept(name: str) -> Kept | None:
    """Return the state of the interpreter with this socket; None if that interpreter has ended.

    Raises:
        OSError: it does not answer.
    """
    try:
        fields = warm.ask(name, "status").split("\t")
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    if len(fields) != 6:
        return None
    pid, runs, running, seconds = map(int, fields[:4])
    return Kept(pid, runs, running, seconds, *fields[4:])


def show(env: Mapping[str, str], *, stop: bool) -> str:
    """Return what is shown of all interpreters that are kept warm; `stop` ends them, each with the last worker that it runs."""
    rows: list[Sequence[str]] = []
    sentences = []
    for name in warm.names():
        try:
            found = kept(name)
            if found is None:
                continue
            if stop:
                after = f" after {count(found.running, 'run')}" if found.running else ""
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    warm.ask(name, "stop")
                sentences.append(f"process {found.pid} ends{after}")
                continue
        except OSError:
            sentences.append(_silent(name, stop=stop))
            continue
        running = f" ({found.running} now)" if found.running else ""
        lasts = "while it is used" if found.running else f"{duration(found.seconds)} more, unless a run comes"
        rows.append((str(found.pid), found.python, found.modules or "nothing", f"{found.runs}{running}", lasts))
    lines = [section(*map(line, sentences))] if sentences else []
    blocks = [*([table(rows, header=_COLUMNS, styles=(NAME,), right=_COLUMNS[:1], wraps=True)] if rows else []), *lines]
    return written(blocks, Look.of_stdout(env)) if blocks else "no interpreter is kept warm"


def _silent(name: str, *, stop: bool) -> str:
    """Return a sentence about an interpreter that does not answer, as while it imports; with `stop`, kill it."""
    with suppress(OSError), warm.connect(name) as sock:
        pid = run_socket.pid_of(sock)
        with open(f"/proc/{pid}/environ", "rb") as file:
            is_one = f"\0{warm.VARIABLE}=".encode() in b"\0" + file.read()
        if not is_one:
            return "one that has just been started"
        if not stop:
            return f"process {pid}: imports still, or hangs"
        os.kill(pid, signal.SIGKILL)
        return f"process {pid} did not answer, and was killed"
    return "one that does not answer"
