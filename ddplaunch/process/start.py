"""Starts one worker: fork, a session of its own, exec. Watches nothing; the caller owns the child."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions make enums of all numbers, in each child anew
import errno
import os
import resource
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct

from ddplaunch.process.child import Child
from ddplaunch.process.linux import of_open_files, signal_at_end_of

if TYPE_CHECKING:
    from ddplaunch.process.guard import GuardedChild


STACKS_FD = 200  # high: scripts of the shell use low ones; below 256, to which the kernel makes tables of them
STACKS_SIGNAL = signal.SIGRTMAX - 5
ATTACH_SIGNAL = signal.SIGRTMAX - 6  # has a worker ask for a debugger, see worker/signals.py


class Stdio(Struct, frozen=True):
    """The file descriptors that a child gets as 0, 1 and 2, and as STACKS_FD."""

    stdin: int
    stdout: int
    stderr: int
    stacks: int | None = None  # where the worker is to write its stacks, see worker/signals.py


class StartError(Exception):
    """A worker could not be started: the program's fault (ENOENT, EACCES, ENOEXEC) or the machine's (EAGAIN, EMFILE)."""

    def __init__(self, number: int, doing: str, place: int = 0, *, elsewhere: bool = False) -> None:
        """`place` is that of the worker among those that were to start together; `elsewhere`: where limits may be others."""
        super().__init__(f"{doing}: {os.strerror(number)}{'' if elsewhere else of_open_files(number)}")
        self.errno = number
        self.doing = doing
        self.place = place


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdio: Stdio,
    *,
    handled: Collection[int],
    cpus: Iterable[int] = (),
    open_files: tuple[int, int] | None = None,
) -> Child:
    """Start `argv` in a session of its own; it is killed when this process ends, whatever ends it.

    `handled` are `handled_signals()`, which a caller that starts many computes once; `cpus` binds it to these logical
    CPUs; `open_files` is its RLIMIT_NOFILE (soft, hard). Returns before exec:
    `why_not_started` gives, of a child that has ended, whether exec succeeded.

    Raises:
        StartError: the machine cannot create another process; nothing is left behind.
    """
    us = os.getpid()
    fds: list[int] = []
    # until exec the child has our handlers, and would handle a signal in our place
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, handled)
    try:
        fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = os.fork()
        if pid == 0:
            _exec_program(us, argv, env, stdio, handled, frozenset(cpus), open_files, fds[1])
        os.close(fds.pop())
        try:
            return Child(pid, os.pidfd_open(pid), fds[0])
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise StartError(error.errno or errno.EAGAIN, "cannot create a process") from None
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def handled_signals() -> tuple[int, ...]:
    """Return the signals that this process has a handler for."""
    return tuple(signum for signum in _signal.valid_signals() if callable(_signal.getsignal(signum)))


def why_not_started(child: Child | GuardedChild, program: str) -> StartError | None:
    """Return the reason why a child that has ended failed to exec; None if exec succeeded."""
    try:
        number = os.read(child.failure, 16)
    except BlockingIOError:  # it was killed before exec, and another process still has a copy of the other end
        return None
    return StartError(int(number), program) if number else None


def _exec_program(
    parent: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdio: Stdio,
    handled: Iterable[int],
    cpus: frozenset[int],
    open_files: tuple[int, int] | None,
    failure: int,
) -> NoReturn:
    try:
        os.setsid()
        signal_at_end_of(parent, signal.SIGKILL)
        # duplicates above 2 first, so that no dup2 overwrites a descriptor that is still to be copied; what is in its place
        # stays, since a low limit may leave no room for a duplicate
        copied = [stdio.stdin, stdio.stdout, stdio.stderr]
        while any(fd <= 2 and fd != target for target, fd in enumerate(copied)):
            copied = [fd if fd > 2 or fd == target else os.dup(fd) for target, fd in enumerate(copied)]
        for target, fd in enumerate(copied):
            if fd == target:
                os.set_inheritable(fd, True)
            else:
                os.dup2(fd, target)
        if stdio.stacks is not None:
            failure = _place(stdio.stacks, STACKS_FD, failure)
        if cpus:
            os.sched_setaffinity(0, cpus)
        if open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        _reset_signals(handled)
        # looked for only where it has to be: in a fork each step touches pages anew
        execute = os.execve if "/" in argv[0] else os.execvpe
        execute(argv[0], tuple(argv), env)
    except OSError as error:
        os.write(failure, str(error.errno).encode())
    finally:
        os._exit(127)


def _place(fd: int, target: int, kept: int) -> int:
    """Move a descriptor to this number; return the number of `kept`, which may have stood there.

    A low limit of open files forbids high numbers.
    """
    with suppress(OSError):
        kept = os.dup(kept) if kept == target else kept
        if fd == target:
            os.set_inheritable(fd, True)
        else:
            os.dup2(fd, target)
    return kept


def _reset_signals(handled: Iterable[int]) -> None:
    """Restore the default action of these signals, except of those that the caller ignores (nohup); then unblock them."""
    ignored_by_python = (_signal.SIGPIPE, _signal.SIGXFSZ)  # and exec keeps a signal ignored
    for signum in (*handled, *ignored_by_python):
        _signal.signal(signum, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
