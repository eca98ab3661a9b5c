"""The folders of runs on a disk: makes a new one, and tells those whose run goes on. Other jobs may be making theirs."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from itertools import count

from ddplaunch.process.regular_file import open_regular

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


def replaceable_by(path: str) -> str | None:
    """Say which other user may put something else in the place of this folder; None: nobody but you and root.

    Whoever owns a folder may rename what lies in it, and remove its sticky bit. Every user may do so in one that all may write
    to, unless it has that bit, as /tmp has. Members of a folder's group were let in on purpose. Where `path` leads through links,
    the folders above both count.

    Raises: OSError.
    """
    own = {os.getuid(), 0, *_unknown_owner()}
    for start in dict.fromkeys((path, os.path.realpath(path))):
        above = start
        while above != (above := os.path.dirname(above)):
            found = os.stat(above)
            if found.st_uid not in own:
                return f"user {found.st_uid} may: {above} is theirs"
            if found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                return f"any user may: {above} has no sticky bit (chmod +t)"
    return None


def _unknown_owner() -> list[int]:
    """Return the user as whom files of all others appear in a container's user namespace, which says nothing about them."""
    try:
        with (
            open("/proc/self/uid_map", encoding="ascii") as file,
            open("/proc/sys/fs/overflowuid", encoding="ascii") as uid,
        ):
            return [] if int(file.read().split()[2]) == 2**32 - 1 else [int(uid.read())]
    except (OSError, ValueError, IndexError):
        return []


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
        events = open_regular(file)
    except OSError:
        return False
    with events:
        try:
            fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return not for_sure and not os.path.exists(f"{os.path.dirname(file)}/summary.json")
    return False
