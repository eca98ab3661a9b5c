"""Notices that come by files and commands in place of signals: --notice-file, --notice-command and --stop-file.

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

from ddplaunch.launcher.node.events import NoticeSeen
from ddplaunch.launcher.node.giver import why_not_ours
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.command import run_in_shell
from ddplaunch.system.words import why_failed

EVERY = 1.0  # seconds from one look at a file to the next
COMMAND_EVERY = 5.0  # seconds from one end of the command to its next start
COMMAND_LIMIT = 10.0  # seconds that the command may take
_CANNOT_RUN = (126, 127)
_WRONG_SYNTAX = 2
_AGAIN = ". ddplaunch tries again"
_ENDED = "the process that looked for it has ended. No notice comes from there"


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


def watch_stop_file(loop: Loop, path: str, seconds: float) -> None:
    """Post `NoticeSeen` when this file appears or changes, or has done so within the last `seconds`."""
    _watch_file(loop, "--stop-file", path, seconds, signal.SIGTERM, stops_job=True)


def _watch_file(loop: Loop, option: str, path: str, seconds: float, signum: int, *, stops_job: bool = False) -> None:
    watched = File(os.path.abspath(path), time.time_ns() - int(seconds * 1e9))
    _watch_one(loop, watched, lambda problem: NoticeSeen(f"{option} {path}", signum, problem, stops_job))


def _watch_one(loop: Loop, watched: Watched, event: Callable[[str], NoticeSeen]) -> None:
    """Have a child wait for the notice; after a problem, which is posted, another child."""

    def answered(answer: tuple[str, Watched] | None) -> None:
        problem, again = answer or (_ENDED, None)
        loop.post(event(problem))
        if problem and again is not None:
            _watch_one(loop, again, event)

    loop.ask(lambda: (watched.wait(), watched), None, answered)


class Watched(ABC):
    """What may give a notice, and is looked at again and again."""

    every: float  # seconds from one look to the next

    def __init__(self) -> None:
        self._told: set[str] = set()

    def wait(self) -> str:
        """Return "" once there is the notice; or why there may never be one, if that was not returned before."""
        while True:
            try:
                problem = self.look()
            except OSError as error:  # of the network's disk, or for lack of a process: it may pass
                problem = f"{why_failed(error)}{_AGAIN}"
            if problem is None:
                return ""
            if problem and problem not in self._told:
                self._told.add(problem)
                return problem
            time.sleep(self.every)

    @abstractmethod
    def look(self) -> str | None:
        """Return None for the notice, "" if there is none yet, or why there may never be one."""


class File(Watched):
    """A file of this user or root, which gives a notice once it appears or changes after `since`, nanoseconds of the clock."""

    every = EVERY

    def __init__(self, path: str, since: int) -> None:
        super().__init__()
        self._path = path
        self._since = since
        self._has_looked = False
        self._before: os.stat_result | None = None  # as it was when it was last seen

    def look(self) -> str | None:
        """Return None if the file has appeared or changed since the last look."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._has_looked = True
            return what_lacks(self._path)
        if not stat.S_ISREG(found.st_mode):
            self._has_looked = True
            what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
            return f"it is {what}, and only a file counts"
        if why := why_not_ours(self._path, found):
            self._before, self._has_looked = found, True
            return why
        if self._is_new(found):
            return None
        self._before, self._has_looked = found, True
        return ""

    def _is_new(self, found: os.stat_result) -> bool:
        """Return whether the file was made, written or moved there: `chmod` and `ln` change the ctime alone."""
        if not self._has_looked:
            return min(found.st_mtime_ns, found.st_ctime_ns) >= self._since
        before = self._before
        if before is None or (found.st_mtime_ns, found.st_size) != (before.st_mtime_ns, before.st_size):
            return True
        # some file systems give an untouched file another inode number
        return found.st_ino != before.st_ino and found.st_ctime_ns != before.st_ctime_ns


def what_lacks(path: str) -> str:
    """Return why this file cannot appear as things are, so that it may be mistyped; "" where there is a folder for it."""
    folder = there = os.path.dirname(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return f"{there} is a file, not a folder"
    return "" if there == folder else f"there is no folder {folder} yet"


class Command(Watched):
    """A command of the shell, which gives a notice once it exits with 0."""

    every = COMMAND_EVERY

    def __init__(self, command: str, env: Mapping[str, str]) -> None:
        super().__init__()
        self._command = command
        self._env = env

    def look(self) -> str | None:
        """Return None if the command exits with 0."""
        code, said = run_in_shell(self._command, self._env, COMMAND_LIMIT)
        if code is None:
            return f"it was killed after {COMMAND_LIMIT:g} s{_AGAIN}"
        if code in _CANNOT_RUN:
            return f"the shell cannot run it (exit status {code}){_AGAIN}"
        # other programs exit with that, too
        if (
            code == _WRONG_SYNTAX
            and run_in_shell(f"sh -n -c {shlex.quote(self._command)}", self._env, COMMAND_LIMIT)[0]
        ):
            return f"the shell cannot read it: {line(said.splitlines()[0])}"
        return "" if code else None
