"""The folders of all runs on a disk: makes a new one, removes the oldest. Other jobs may be doing the same."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count

from ddplaunch.process.removal import remove
from ddplaunch.report.state_folder import BEGAN

OF_A_NODE = ("node-", "rank-")  # what the names of such folders begin with

_MANY = 5  # times as many as are kept


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


def keep_newest(root: str, number: int) -> Iterator[None]:
    """Remove all but so many newest runs and those that still go on, in small steps.

    Raises: OSError.
    """
    newest: list[tuple[float, str]] = []
    paths = sorted(entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    if len(paths) <= number:
        return
    surely_old = _surely_old(paths, number)
    for path in paths:
        written = _last_written(path)
        yield
        if time.strftime(BEGAN, time.localtime(written)) < surely_old:
            yield from _remove_run(path)
            continue
        newest.append((written, path))
        # of thousands some are removed before all have been looked at
        if len(newest) == 2 * number:
            yield from _remove_oldest(newest, number)
    yield from _remove_oldest(newest, number)


def _surely_old(paths: Sequence[str], number: int) -> str:
    """Return a time, as in names, by which a run has ended that cannot be one of the newest; "" if the names tell of none.

    Only by this each of many short jobs, which all begin anew, removes some. Several times as many have begun since, as clocks
    and time zones may differ between hosts.
    """
    now = time.strftime(BEGAN)
    names = (os.path.basename(path)[: len(now)] for path in paths)
    began = [name for name in names if name.replace("-", "", 1).isdecimal() and name[8:9] == "-" and name <= now]
    return began[-_MANY * number] if len(began) >= _MANY * number else ""


def _remove_oldest(runs: list[tuple[float, str]], number: int) -> Iterator[None]:
    """Leave only so many in the list, the newest."""
    runs.sort()
    old = runs[:-number]
    del runs[:-number]
    for _, path in old:
        yield from _remove_run(path)


def _remove_run(folder: str) -> Iterator[None]:
    """Remove a run that does not go on, as far as it can be."""
    if not goes_on(folder):
        yield from remove(folder)


def _last_written(run: str) -> float:
    times = []
    for path in (*_events_files(run), run):
        try:
            times.append(os.stat(path).st_mtime)
        except OSError:
            pass
    return times[0] if len(times) == 1 else max(times[:-1], default=0.0)  # 0: removed meanwhile


def lock(events: int) -> None:
    """Show others that the run goes on, for as long as any process of ours has this file open."""
    try:
        fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks


def _events_files(run: str) -> list[str]:
    """The files of events in the folder of a run: its own, or those of its nodes."""
    try:
        nodes = [entry.path for entry in os.scandir(run) if entry.is_dir() and entry.name.startswith(OF_A_NODE)]
    except OSError:
        nodes = []
    return [f"{folder}/events.jsonl" for folder in (nodes or [run])]


def goes_on(run: str, *, for_sure: bool = False) -> bool:
    """Whether the run in this folder has not ended; `for_sure`: no, where the file system has no locks to tell by."""
    return any(_is_written(file, for_sure) for file in _events_files(run))


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
