"""`ddplaunch warm`: which interpreters are kept warm for this user on this machine, and their end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import starmap

from msgspec import Struct

from ddplaunch.launcher.workers import warm
from ddplaunch.record import run_socket
from ddplaunch.system.console.tables import NAME, NOTE, Block, Look, fits, line, section, sentence, table, written
from ddplaunch.system.words import count, duration

_COLUMNS = ("pid", "interpreter", "has imported", "runs", "is kept")


class WarmState(Struct, frozen=True):
    """What an interpreter that is kept warm says of itself."""

    pid: int
    runs: int  # that it has served
    running: int  # runs that it serves now
    seconds: int  # until it ends, if no run comes
    python: str  # its path
    modules: str  # that it has imported


def state_of(name: str) -> WarmState | None:
    """Return the state of the interpreter with this socket; None if that interpreter has ended.

    Raises OSError: it does not answer.
    """
    try:
        fields = warm.ask(name, "status").split("\t")  # those of WarmState, in their order
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    if len(fields) != len(WarmState.__struct_fields__):  # an answer cut short: it is ending
        return None
    *numbers, python, modules = fields
    pid, runs, running, seconds = map(int, numbers)
    return WarmState(pid, runs, running, seconds, python, modules)


def show(env: Mapping[str, str], *, stop: bool) -> str:
    """Return a table of the interpreters that are kept warm; with `stop` have each end after its last run, and say so of each.

    One that does not answer has a sentence instead; with `stop` it is killed.
    """
    rows: list[Sequence[str]] = []
    sentences = []
    for name in warm.socket_names():
        try:
            state = state_of(name)  # None: it has just ended, and is left out
            if state is not None and stop:
                sentences.append(_have_end(name, state))
            elif state is not None:
                rows.append(_row(state))
        except OSError:
            sentences.append(_on_silent(name, stop=stop))
    look = Look.of_stdout(env)
    blocks = [*(_blocks(rows, look) if rows else []), *([section(*map(line, sentences))] if sentences else [])]
    return written(blocks, look) if blocks else "no interpreter is kept warm"


def _blocks(rows: Sequence[Sequence[str]], look: Look) -> list[Block]:
    """Return the rows as a table; where the screen is too narrow for that, each row apart, its values below each other."""
    whole = table(rows, header=_COLUMNS, styles=(NAME,), right=("pid",))
    if fits(whole, look):
        return [whole]
    width = max(map(len, _COLUMNS))
    return [section(*starmap(partial(_value, width), zip(_COLUMNS, row, strict=True))) for row in rows]


def _value(width: int, name: str, value: str) -> Block:
    """Return a value behind its name; only a list or a sentence may be broken, between words."""
    label = f"{name:{width}}  "
    if name in ("has imported", "is kept"):
        return sentence((label, NOTE), value)
    return line((label, NOTE), (value, NAME if name == "pid" else ""))


def _row(state: WarmState) -> Sequence[str]:
    running = f" ({state.running} now)" if state.running else ""
    lasts = "while it is used" if state.running else f"{duration(state.seconds)} more, unless a run comes"
    return str(state.pid), state.python, state.modules or "nothing", f"{state.runs}{running}", lasts


def _have_end(name: str, state: WarmState) -> str:
    """Have an interpreter end after its last run; return a sentence that says so."""
    after = f" after {count(state.running, 'run')}" if state.running else ""
    with suppress(FileNotFoundError, ConnectionRefusedError):  # it has ended meanwhile
        warm.ask(name, "stop")
    return f"process {state.pid} ends{after}"


def _on_silent(name: str, *, stop: bool) -> str:
    """Return a sentence about an interpreter that does not answer, as while it imports; with `stop`, kill it."""
    with suppress(OSError), warm.connect(name) as sock:
        pid = run_socket.pid_of(sock)
        with open(f"/proc/{pid}/environ", "rb") as file:
            is_interpreter = f"\0{warm.SERVE_VARIABLE}=".encode() in b"\0" + file.read()
        if not is_interpreter:  # until exec the process is a copy of the run that starts it
            return "one that has just been started"
        if not stop:
            return f"process {pid}: imports still, or hangs"
        os.kill(pid, signal.SIGKILL)
        return f"process {pid} did not answer, and was killed"
    return "one that does not answer"
