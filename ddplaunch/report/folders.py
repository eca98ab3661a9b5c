"""The folders of runs on a disk: makes a new one, and tells those whose run goes on. Other jobs may be making theirs."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from itertools import count

OF_A_NODE = ("node-", "rank-")  # what the names of such folders begin with


def make(root: str, name: str) -> tuple[str, int]:
    """Make the folder `name` below `root`, or one with a number behind its name if there is such a one.

    Give its path, and a descriptor: what is done by that is done in this folder, whatever has its name by then.

    Raises: OSError.
    """
    make_all(root)
    for number in count():
        path = f"{root}/{name}.{number}" if number else f"{root}/{name}"
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    raise AssertionError


def make_all(path: str) -> None:
    """Make this folder, its owner's alone, and those above it, in which no other user may put another in its place.

    Raises: OSError.
    """
    before = os.umask(0o022)  # for those above; the mode is for the last one
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    finally:
        os.umask(before)


def replaceable_in(path: str) -> str | None:
    """Return the folder above this one in which every user may rename what is others', None if there is none.

    In one with the sticky bit, as /tmp has it, only the owner may.
    """
    while path != (path := os.path.dirname(path)):
        if os.stat(path).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            return path
    return None


def lock(events: int) -> None:
    """Show others that the run goes on, for as long as any process of ours has this file open."""
    try:
        fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks


def parts_of(run: str) -> list[str]:
    """Return the folders of a run that hold events: those of its nodes, or its own."""
    try:
        with os.scandir(run) as entries:
            nodes = [
                entry.path
                for entry in entries
                if entry.name.startswith(OF_A_NODE) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        nodes = []
    return nodes or [run]


def goes_on(run: str, *, for_sure: bool = False) -> bool:
    """Whether the run in this folder has not ended; `for_sure`: no, where the file system has no locks to tell by."""
    return any(_is_written(f"{part}/events.jsonl", for_sure) for part in parts_of(run))


def _is_written(file: str, for_sure: bool) -> bool:
    """Whether the agent that writes these events still runs."""
    try:
        events = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe may have no writer to wait for
    except OSError:
        return False
    try:
        fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return not for_sure and not os.path.exists(f"{os.path.dirname(file)}/summary.json")
    finally:
        os.close(events)
    return False
