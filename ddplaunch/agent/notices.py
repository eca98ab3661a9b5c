"""Notices that come by files and commands in place of signals: --notice-file, --notice-command and --stop-file.

A child looks each second, so that a disk or a command that hangs costs the job nothing; the agent itself does not wake.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch.agent.events import NoticeSeen
from ddplaunch.loop.loop import Loop
from ddplaunch.process.shell import run_in_shell
from ddplaunch.spec import JobSpec

EVERY = 1.0  # seconds from one look at a file to the next
COMMAND_EVERY = 5.0  # seconds from one end of the command to its next start
COMMAND_LIMIT = 10.0  # seconds that the command may take
_CANNOT_RUN = (126, 127)
_ENDED = "the process that looked for it has ended"

Wait = Callable[[], str]  # returns when there is news: "" for the notice, else why none can come


def watch(loop: Loop, spec: JobSpec, env: Mapping[str, str], *, leaves: bool) -> None:
    """Post `NoticeSeen` when the file of --notice-file appears or changes, or the command of --notice-command exits with 0.

    `leaves`: the job goes on without this node, which SIGTERM has it leave.
    """
    notice = signal.SIGTERM if leaves else spec.notices[0]
    if spec.notice_file:
        _watch_file(loop, "--notice-file", spec.notice_file, 0.0, notice)
    if spec.notice_command:
        command = partial(wait_for_command, spec.notice_command, env)
        _watch_one(loop, f"--notice-command {spec.notice_command}", command, notice)


def watch_stop_file(loop: Loop, path: str, seconds: float) -> None:
    """Post `NoticeSeen` when this file appears or changes, or has done so within the last `seconds`."""
    _watch_file(loop, "--stop-file", path, seconds, signal.SIGTERM, stops_job=True)


def _watch_file(loop: Loop, option: str, path: str, seconds: float, signum: int, *, stops_job: bool = False) -> None:
    option, path = f"{option} {path}", os.path.abspath(path)
    since = time.time_ns() - int(seconds * 1e9)
    _watch_one(loop, option, partial(wait_for_file, path, since), signum, stops_job=stops_job)

    def looked(lack: str) -> None:
        if lack:
            loop.post(NoticeSeen(option, signum, lack))

    loop.ask(partial(what_lacks, path), "", looked)


def _watch_one(loop: Loop, option: str, wait: Wait, signum: int, *, stops_job: bool = False) -> None:
    def answered(problem: str) -> None:
        none_comes = f"{problem}. No notice comes from there" if problem else ""
        loop.post(NoticeSeen(option, signum, none_comes, stops_job))

    loop.ask(wait, _ENDED, answered)


def what_lacks(path: str) -> str:
    """Return that there is no folder yet in which this file could appear: it may be mistyped; "" where there is one."""
    folder = os.path.dirname(path)
    return "" if os.path.exists(folder) else f"there is no folder {folder} yet"


def wait_for_file(path: str, since: int) -> str:
    """Return "" once this file has appeared or changed after `since`, nanoseconds of the clock; else why that cannot be seen."""
    try:
        before = _changed_at(path)
        if before is not None and before >= since:
            return ""  # while this process was being started
        while (changed_at := _changed_at(path)) is None or changed_at == before:
            time.sleep(EVERY)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _changed_at(path: str) -> int | None:
    """Return when a file was last made, written or replaced; None where no file is."""
    try:
        return os.stat(path).st_ctime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def wait_for_command(command: str, env: Mapping[str, str]) -> str:
    """Return "" once a shell's command has exited with 0; else why the shell cannot run it."""
    while True:
        code, _ = run_in_shell(command, env, COMMAND_LIMIT)
        if code in (0, *_CANNOT_RUN):
            return f"the shell cannot run it (exit status {code})" if code else ""
        time.sleep(COMMAND_EVERY)
