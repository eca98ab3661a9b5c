"""Notices of the job's or this node's end by files and commands, not signals: --notice-file, --notice-command, --stop-file.

A child looks each second, so that a disk or a command that hangs costs the job nothing; the agent itself does not wake.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto

from ddplaunch.launcher.node.events import NoticeSeen
from ddplaunch.record.folders import replaceable_by, unknown_owners
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.command import run_in_shell
from ddplaunch.system.words import why_failed

EVERY = 1.0  # seconds from one look at a file to the next
COMMAND_EVERY = 5.0  # seconds from one end of the command to its next start
COMMAND_LIMIT = 10.0  # seconds that the command may take
# exit statuses of a shell: a program that it cannot execute or find, and a command whose syntax is wrong
_CANNOT_RUN = (126, 127)
_WRONG_SYNTAX = 2
_TRIES_AGAIN = ". ddplaunch tries again"
_CHILD_HAS_ENDED = "the process that looked for it has ended. No notice comes from there"
_ONLY_YOU_OR_ROOT = "and only you or root can give the notice"
_WRITTEN_THERE_WITHIN = 2.0  # seconds from the last write to the last change of a file that is where it was written


def watch(loop: Loop, spec: JobSpec, env: Mapping[str, str], *, leaves: bool) -> None:
    """Post `NoticeSeen` when the file of --notice-file appears or changes, or the command of --notice-command exits with 0.

    `leaves`: the job goes on without this node, which SIGTERM has it leave.
    """
    notice = signal.SIGTERM if leaves else spec.notices[0]
    if spec.notice_file:
        _watch_file(loop, "--notice-file", spec.notice_file, 0.0, notice)
    if spec.notice_command:
        option = f"--notice-command {spec.notice_command}"
        _watch_one(loop, Command(spec.notice_command, env), lambda problem: NoticeSeen(option, notice, problem))


def watch_stop_file(loop: Loop, path: str, changed_within: float) -> None:
    """Post `NoticeSeen` when this file appears or changes, or has done so within the last so many seconds."""
    _watch_file(loop, "--stop-file", path, changed_within, signal.SIGTERM, stops_job=True)


def _watch_file(
    loop: Loop, option: str, path: str, changed_within: float, signum: int, *, stops_job: bool = False
) -> None:
    watched = File(os.path.abspath(path), time.time_ns() - int(changed_within * 1e9))
    _watch_one(loop, watched, lambda problem: NoticeSeen(f"{option} {path}", signum, problem, stops_job))


def _watch_one(loop: Loop, watched: Watched, event: Callable[[str], NoticeSeen]) -> None:
    """Have a child wait for the notice; after a problem, which is posted, another child."""

    def answered(answer: tuple[str, Watched] | None) -> None:
        problem, again = answer or (_CHILD_HAS_ENDED, None)
        loop.post(event(problem))
        if problem and again is not None:
            _watch_one(loop, again, event)

    loop.ask(lambda: (watched.wait(), watched), None, answered)


class Look(Enum):
    """What a look at a file or a command has found, if there is no problem."""

    NOTICE = auto()
    NOTHING_YET = auto()


class Watched(ABC):
    """What may give a notice, and is looked at again and again, in a child."""

    looks_every: float  # seconds from one look to the next

    def __init__(self) -> None:
        self._told: set[str] = set()  # the problems that `wait` has returned

    def wait(self) -> str:
        """Return "" once there is the notice; or why there may never be one, if that was not returned before."""
        while True:
            try:
                found: Look | str = self.look()
            except OSError as error:  # of the network's disk, or for lack of a process: it may pass
                found = f"{why_failed(error)}{_TRIES_AGAIN}"
            if found is Look.NOTICE:
                return ""
            if isinstance(found, str) and found not in self._told:
                self._told.add(found)
                return found
            time.sleep(self.looks_every)

    @abstractmethod
    def look(self) -> Look | str:
        """Return whether there is a notice; or, as a text for the user, why there may never be one as things are."""


class File(Watched):
    """A file of this user or root, which gives a notice once it appears or changes after `since`, nanoseconds of the clock."""

    looks_every = EVERY

    def __init__(self, path: str, since: int) -> None:
        super().__init__()
        self._path = path
        self._since = since
        self._has_looked = False  # before the first look is over, `since` decides whether the file is new
        self._found_before: os.stat_result | None = None  # as it was when it was last seen; None: it was not there

    def look(self) -> Look | str:
        """Return NOTICE if the file has appeared or changed since the last look, the first time since `since`; or a problem."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._has_looked = True
            return why_it_cannot_appear(self._path) or Look.NOTHING_YET
        if not stat.S_ISREG(found.st_mode):
            self._has_looked = True
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
            return f"it is {what}, and only a file counts"
        why_not = why_not_ours(self._path, found)
        if not why_not and self._has_appeared_or_changed(found):
            return Look.NOTICE
        self._found_before, self._has_looked = found, True
        return why_not or Look.NOTHING_YET

    def _has_appeared_or_changed(self, found: os.stat_result) -> bool:
        """Whether the file was made, written or moved there since the last look: `chmod` and `ln` change the ctime alone."""
        if not self._has_looked:
            return min(found.st_mtime_ns, found.st_ctime_ns) >= self._since
        before = self._found_before
        if before is None or (found.st_mtime_ns, found.st_size) != (before.st_mtime_ns, before.st_size):
            return True
        # some file systems give an untouched file another inode number
        return found.st_ino != before.st_ino and found.st_ctime_ns != before.st_ctime_ns


def why_it_cannot_appear(path: str) -> str:
    """Return why this file cannot appear as things are, so that it may be mistyped; "" where there is a folder for it."""
    folder = there = os.path.dirname(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return f"{there} is a file, not a folder"
    return "" if there == folder else f"there is no folder {folder} yet"


# --- who has put a file where it is: one that stops a job counts only from this user or root. Its content is not read


def why_not_ours(path: str, found: os.stat_result) -> str:
    """Return why the file at an absolute path, `found` there, may be another user's doing; "" if this user or root put it there.

    The owner tells who wrote a file, and who made a link. It is compared as the folder shows it, since a file server or a
    container may show this user as another one there. Where another user may rename files, that user may have moved one of
    ours there, so that only a file counts which was just written there: to move or link it changes the ctime alone.

    Raises OSError.
    """
    above = path
    while above != os.path.dirname(above):  # the path and all folders in it, as any of them may be a link
        link = os.lstat(above)
        if stat.S_ISLNK(link.st_mode) and not _is_own(link.st_uid, os.path.dirname(above)):
            return f"{'it' if above == path else above} is a link of user {link.st_uid}, {_ONLY_YOU_OR_ROOT}"
        above = os.path.dirname(above)
    if not _is_own(found.st_uid, os.path.dirname(path)):
        return f"it belongs to user {found.st_uid}, {_ONLY_YOU_OR_ROOT}"
    was_written_there = found.st_nlink == 1 and abs(found.st_ctime - found.st_mtime) < _WRITTEN_THERE_WITHIN
    if not was_written_there and (who := replaceable_by(path)):  # as "any user may: /data has no sticky bit"
        return f"it was moved or linked there, which another user can do: {who.partition(': ')[2] or who}"
    return ""


def _is_own(uid: int, folder: str) -> bool:
    """Whether a file of this owner in a folder is one of this user or root, or of whom a server takes for this user there."""
    if uid in (os.geteuid(), 0):
        return True
    if uid in unknown_owners():  # in a container, as all are that it does not know, the root of the host among them
        above = os.stat(folder)
        return above.st_uid == uid and not above.st_mode & stat.S_IWOTH
    return uid == _owner_of_new_file(folder)


def _owner_of_new_file(folder: str) -> int:
    """Return who owns what we make in a folder, since a server may map root or all to another user; -1: we can make nothing."""
    path = f"{folder}/.ddplaunch-{os.urandom(8).hex()}"
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
            os.unlink(path)
    return -1


# --- commands


class Command(Watched):
    """A command of the shell, which gives a notice once it exits with 0."""

    looks_every = COMMAND_EVERY

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        super().__init__()
        self._command = command
        self._env = env

    def look(self) -> Look | str:
        """Run the command, and return NOTICE if it exits with 0; a problem if it cannot run, or runs too long."""
        code, said = run_in_shell(self._command, self._env, COMMAND_LIMIT)
        if code is None:
            return f"it was killed after {COMMAND_LIMIT:g} s{_TRIES_AGAIN}"
        if code in _CANNOT_RUN:
            return f"the shell cannot run it (exit status {code}){_TRIES_AGAIN}"
        if code == _WRONG_SYNTAX and self._has_wrong_syntax():  # other programs exit with that, too
            return f"the shell cannot read it: {line(said.splitlines()[0])}"
        return Look.NOTICE if code == 0 else Look.NOTHING_YET

    def _has_wrong_syntax(self) -> bool:
        """Whether the shell cannot read the command, as `sh -n` finds out, which runs nothing."""
        code, _ = run_in_shell(f"sh -n -c {shlex.quote(self._command)}", self._env, COMMAND_LIMIT)
        return bool(code)  # None: the shell hangs
