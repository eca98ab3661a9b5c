"""The sockets of interpreters that are kept warm, and what one has to have in common with a run to serve it. Starts nothing."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.process.fork_requests import ServerLost
from ddplaunch.process.guard import Guard
from ddplaunch.runlog import run_socket
from ddplaunch.warm import inherited
from ddplaunch.words import why_failed

ANSWER_WITHIN = 1.0  # seconds
MOST = 4  # that a user has on a machine; each may hold what torch takes of memory
_PREFIX = ".warm-"  # a hidden name: it is no socket of a run
_LONGEST_ANSWER = 8192  # bytes


class Place(Struct, frozen=True):
    """An interpreter that fits a run, which is there or is to be."""

    name: str  # of its socket
    seconds: int  # that it is kept unused
    folder: str  # of the script
    is_new: bool = False  # this run has started it


def connect(name: str) -> socket.socket:
    """Connect to the interpreter with this socket.

    Raises:
        FileNotFoundError, ConnectionRefusedError: there is none.
        OSError: it does not answer, or is not ours.
    """
    folder = run_socket.open_runtime_folder()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)  # where many wait already, we do not
        sock.connect(run_socket.address(folder, name))
        if run_socket.uid_of(sock) != os.getuid():
            raise PermissionError("its socket is another user's")
        sock.settimeout(ANSWER_WITHIN)
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def ask(name: str, line: str) -> str:
    """Send it a line; give the answer, "" if it has ended meanwhile.

    Raises: as `connect`.
    """
    with connect(name) as sock:
        sock.sendall(os.fsencode(line) + b"\n")
        with suppress(ConnectionResetError):
            return os.fsdecode(sock.recv(_LONGEST_ANSWER)).rstrip("\n")
    return ""


def guard_at(place: Place, output: int) -> Guard:
    """Have a guard forked for this run, which says when it is ready; `output` as for `Guard`.

    Raises:
        ServerLost: there is nothing to fork it, or it does not answer.
    """
    try:
        connection = connect(place.name)
        connection.sendall(os.fsencode(f"guard {place.seconds} {place.folder}\n"))
    except OSError as error:
        raise ServerLost(why_failed(error)) from None
    return Guard(connection, output, inherited.check)


def names() -> Iterator[str]:
    """Return the sockets that there are."""
    with suppress(OSError):
        folder = run_socket.open_runtime_folder()
        try:
            yield from sorted(name for name in os.listdir(folder) if name.startswith(_PREFIX))
        finally:
            os.close(folder)


def remove_ended() -> None:
    """Remove the sockets of those that were killed."""
    for name in names():
        try:
            connect(name).close()
        except ConnectionRefusedError:
            run_socket.remove_refusing(run_socket.runtime_folder(os.getuid()), name)
        except OSError:
            pass


def make_room() -> None:
    """Have those end that were taken longest ago, if there were too many with one more; with its last run, what serves one."""
    folder, taken = run_socket.runtime_folder(os.getuid()), {}
    for name in names():
        with suppress(OSError):
            taken[name] = os.stat(f"{folder}/{name}").st_mtime_ns
    for name in sorted(taken, key=lambda name: taken[name])[: 1 - MOST]:
        with suppress(OSError), connect(name) as sock:
            sock.sendall(b"stop\n")  # and waits for no answer: it may import still


def name_for(argv: Sequence[str], env: Mapping[str, str], modules: Sequence[str], folder: str) -> str | None:
    """Return the name of the socket where an interpreter listens that fits: other names, other interpreters; None: none can.

    It fits if it was started by the same interpreter and version of ddplaunch, with the same variables and modules, and by a
    process that had inherited the same. Modules beside the script, in this folder, are of that folder alone.
    """
    here = inherited.own()
    if here is None:
        return None
    import hashlib  # most jobs need none

    bootstrap = os.path.dirname(argv[1])
    files = [
        argv[0],
        sys.executable,
        *(f"{bootstrap}/{name}" for name in sorted(os.listdir(bootstrap)) if name.endswith(".py")),
    ]
    # the interpreter has made these absolute when it started
    paths = [os.path.abspath(path) for path in env["PYTHONPATH"].split(os.pathsep)] if env.get("PYTHONPATH") else []
    beside = [
        name
        for name in modules
        if os.path.exists(stem := f"{folder}/{name.partition('.')[0]}") or os.path.exists(f"{stem}.py")
    ]
    parts = [folder if beside else "", __version__, *argv[:2], *map(_stamp, files), *modules, *paths]
    parts += [f"{name}={value}" for some in (env, here) for name, value in sorted(some.items())]
    return _PREFIX + hashlib.sha256(b"\0".join(map(os.fsencode, parts))).hexdigest()[:32]


def _stamp(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:  # a name that is looked for on PATH
        return path
    return f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}"
