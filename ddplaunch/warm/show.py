"""`ddplaunch warm`: which interpreters are kept warm for this user on this machine, and their end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from msgspec import Struct

from ddplaunch.errors import count
from ddplaunch.report import run_socket
from ddplaunch.report.words import duration
from ddplaunch.warm import find
from ddplaunch.warm.prepare import VARIABLE


class Kept(Struct, frozen=True):
    """An interpreter that is kept warm, as it says of itself."""

    pid: int
    runs: int  # that it has served
    running: int
    seconds: int  # until it ends, if no run comes
    python: str
    modules: str

    def __str__(self) -> str:
        lasts = "while it is used" if self.running else f"for {duration(self.seconds)} more, unless a run comes"
        used = f"{count(self.runs, 'run')}, of which {self.running} now" if self.running else count(self.runs, "run")
        return f"process {self.pid}: {self.python} with {self.modules or 'nothing'} imported; served {used}; is kept {lasts}"


def kept(name: str) -> Kept | None:
    """Ask the one with this socket; None if there is none any more, or it does not answer.

    Raises:
        OSError: it does not answer.
    """
    try:
        fields = find.ask(name, "status").split("\t")
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    if len(fields) != 6:
        return None
    pid, runs, running, seconds = map(int, fields[:4])
    return Kept(pid, runs, running, seconds, *fields[4:])


def show(*, stop: bool) -> str:
    """Show all of them, or end them: those that run workers with their last."""
    lines = []
    for name in find.names():
        try:
            found = kept(name)
            if found is not None:
                lines.append(_stopped(name, found) if stop else str(found))
        except OSError:
            lines.append(_silent(name, stop=stop))
    return "\n".join(lines) or "no interpreter is kept warm"


def _stopped(name: str, found: Kept) -> str:
    with suppress(FileNotFoundError, ConnectionRefusedError):
        find.ask(name, "stop")
    return f"process {found.pid} ends" + (f" after {count(found.running, 'run')}" if found.running else "")


def _silent(name: str, *, stop: bool) -> str:
    """Say so of one that does not answer, as while it imports; end it."""
    with suppress(OSError), find.connect(name) as sock:
        pid = run_socket.pid_of(sock)
        with open(f"/proc/{pid}/environ", "rb") as file:
            is_one = f"\0{VARIABLE}=".encode() in b"\0" + file.read()
        if not is_one:
            return "one that has just been started"
        if not stop:
            return f"process {pid}: imports still, or hangs"
        os.kill(pid, signal.SIGKILL)
        return f"process {pid} did not answer, and was killed"
    return "one that does not answer"
