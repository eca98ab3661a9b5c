"""Starts a child of this process, such as a worker (fork, a session of its own, exec), signals it, and gives its end."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's functions make enums of all numbers, in each child anew
import errno
import os
import resource
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from msgspec import Struct

from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import of_open_files, signal_at_end_of
from ddplaunch.system.process.tree import Process, signal_process, transferred

STACKS_FD = 200  # high: scripts of the shell use low ones; below 256, to which the kernel makes tables of them
STACKS_SIGNAL = signal.SIGRTMAX - 5
ATTACH_SIGNAL = signal.SIGRTMAX - 6  # has a worker ask for a debugger, see worker/signals.py
_FOR_WHOLE_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


class Stdio(Struct, frozen=True):
    """The file descriptors that a child gets as 0, 1 and 2, and as STACKS_FD."""

    stdin: int
    stdout: int
    stderr: int
    stacks: int | None = None  # where the worker is to write its stacks, see worker/signals.py


class StartError(Exception):
    """A worker could not be started: the program's fault (ENOENT, EACCES, ENOEXEC) or the machine's (EAGAIN, EMFILE)."""

    def __init__(self, number: int, doing: str, index: int = 0, *, elsewhere: bool = False) -> None:
        """`index` is that of the worker among those that were to start together; `elsewhere`: where limits may be others."""
        super().__init__(f"{doing}: {os.strerror(number)}{'' if elsewhere else of_open_files(number)}")
        self.errno = number
        self.doing = doing
        self.index = index


class End(Struct, frozen=True):
    """How a process ended."""

    code: int | None  # exit status; None if a signal ended it
    signal: int | None
    core_dumped: bool

    @classmethod
    def of(cls, code: int, status: int) -> End:
        """Return it for si_code and si_status of waitid(2)."""
        if code == os.CLD_EXITED:
            return cls(status, None, False)
        return cls(None, status, code == os.CLD_DUMPED)

    def __str__(self) -> str:
        return f"exit status {self.code}" if self.signal is None else f"killed by signal {self.signal}"


class Usage(Struct, frozen=True):
    """What a process and the children it waited for have used."""

    peak_rss: int  # bytes, of the largest of them
    cpu_seconds: float  # user and system


class Child(Struct):
    """A process that this one has started, and the handles that show its end; the holder of this value owns them."""

    pid: int  # also its session and its process group
    pidfd: int
    failure: int = -1  # pipe: holds an errno if exec failed, is at its end if it succeeded; -1: nothing was executed

    @property
    def ended(self) -> int:
        """The descriptor that is readable once `look` gives its end."""
        return self.pidfd

    @property
    def is_kept(self) -> bool:
        """Whether no other process can have its pid and group until it is reaped."""
        return True

    def look(self) -> End | None:
        """Return how it ended, None while it lives; does not reap it."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if info is None else End.of(info.si_code, info.si_status)

    @property
    def has_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, or has ended."""
        return os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def rouse_parent(self) -> None:
        """Have what tells of its end go on, if it is stopped: this process runs."""

    def abandon(self) -> None:
        """Close the handles."""
        os.close(self.pidfd)
        if self.failure >= 0:
            os.close(self.failure)

    def reap(self) -> Usage:
        """Reap it, which frees its pid, and close the handles. One that cannot be killed is left to its next parent."""
        self.abandon()
        pid, _, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return Usage(0, 0.0)
        return Usage(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdio: Stdio,
    *,
    handled: Collection[int],
    cpus: Iterable[int] = (),
    open_files: tuple[int, int] | None = None,
) -> Child:
    """Start `argv` in a session of its own. The kernel kills the child when this process ends, however it ends.

    `handled` are `handled_signals()`, which a caller that starts many computes once. `cpus` are the logical CPUs to which the
    child is bound; `open_files` is its RLIMIT_NOFILE (soft, hard). Returns before exec: once the child has ended,
    `why_not_started` says whether exec succeeded.

    Raises StartError: the machine cannot create another process; nothing is left behind.
    """
    us = os.getpid()
    open_fds: list[int] = []  # closed here if anything fails
    # until exec the child has our handlers, and would handle a signal in our place
    mask_before = _signal.pthread_sigmask(_signal.SIG_BLOCK, handled)
    try:
        open_fds += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        failure, childs_failure = open_fds
        pid = fork()
        if pid == 0:
            _exec_program(us, argv, env, stdio, handled, frozenset(cpus), open_files, childs_failure)
        os.close(open_fds.pop())
        try:
            return Child(pid, os.pidfd_open(pid), failure)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except OSError as error:
        for fd in open_fds:
            os.close(fd)
        raise StartError(error.errno or errno.EAGAIN, "cannot create a process") from None
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask_before)


def handled_signals() -> tuple[int, ...]:
    """Return the signals that this process has a handler for."""
    return tuple(signum for signum in _signal.valid_signals() if callable(_signal.getsignal(signum)))


def why_not_started(child: Child, program: str) -> StartError | None:
    """Return the reason why a child that has ended failed to exec; None if exec succeeded."""
    if child.failure < 0:
        return None
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
    """Become the program, in the child of `parent`: set up session, streams, CPUs, limits and signals, then exec.

    If that fails, write the errno to the pipe `failure`. The other parameters are those of `start`.
    """
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
            failure = _renumber(stdio.stacks, STACKS_FD, failure)  # the pipe moves if it has that number itself
        if cpus:
            os.sched_setaffinity(0, cpus)
        if open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
        # the default action, except for signals that the caller ignores (nohup): Python ignores the last two, and exec keeps that
        for signum in (*handled, _signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(signum, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        # exec keeps timers, and what another tool has each process do after a fork may have started one, such as a profiler's
        for timer in (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF):
            _signal.setitimer(timer, 0)
        # the PATH is searched only where it has to be: in a fork each step touches pages anew
        execute = os.execve if "/" in argv[0] else os.execvpe
        execute(argv[0], tuple(argv), env)
    except OSError as error:
        os.write(failure, str(error.errno).encode())
    finally:
        os._exit(127)


def _renumber(fd: int, target: int, kept: int) -> int:
    """Give a descriptor the number `target`; return the number of the descriptor `kept`, another one if that was `target`."""
    with suppress(OSError):  # a low limit of open files forbids high numbers
        kept = os.dup(kept) if kept == target else kept
        if fd == target:
            os.set_inheritable(fd, True)
        else:
            os.dup2(fd, target)
    return kept


class RunningWorker:
    """A worker that was started and is not yet reaped.

    Its zombie is kept until `reap`: as long as it is there, its pid and its group cannot be reused,
    so that signals to the group of a worker that ended reach what it left behind and no other process.
    """

    def __init__(
        self,
        rank: int,
        child: Child,
        started_at: float,
        *,
        by_itself: bool,
        terminal: bool = False,
        stacks: int | None = None,
        recorder_socket: str = "",
    ) -> None:
        """`stacks` is the file for the worker's stacks; at the `recorder_socket` torch tells of the worker's collectives.

        `by_itself`, as for a Python program: signals but SIGKILL, SIGSTOP and SIGCONT go to its process alone while that lives.
        A data loader would be killed, or run an inherited handler, while its parent needs it. The worker ends what it has
        started, or the agent sweeps that. Not `by_itself` is another command, mostly a wrapper: signals go to its whole group.
        """
        self.rank = rank
        self.pid = child.pid
        self.ended = child.ended  # the descriptor that is readable once `look` gives its end
        self.child = child
        self._by_itself = by_itself
        self.terminal = terminal  # whether it writes to the terminal itself
        self.stacks = stacks  # None: it has no such file
        self.recorder_socket = recorder_socket  # "": torch records nothing there
        self.started_at = started_at  # CLOCK_MONOTONIC seconds
        self.stopped_with: int | None = None  # the last signal sent to end it
        self.stopped_at: float | None = None  # when the first of them was sent
        self._written_before: int | None = None  # bytes that it had written when it was asked to end

    def look(self) -> End | None:
        """Return how it ended, None while it lives; does not reap it."""
        return self.child.look()

    def why_not_started(self, program: str) -> StartError | None:
        """Return the reason, once it has ended, why exec failed; None if it succeeded."""
        return why_not_started(self.child, program)

    def reaches_group(self, signum: int) -> bool:
        """Whether a signal goes to its process group, not to the worker alone."""
        has_ended = self.look() is not None
        return not self._by_itself or signum in _FOR_WHOLE_GROUP or has_ended

    def signal(self, signum: int, members: Iterable[Process] | None = None) -> None:
        """Send a signal to the worker, or to its process group if the signal `reaches_group`.

        `members`: of the group, to these processes alone and the worker, so that others of the group are spared.
        """
        if not self.child.is_kept:  # its pid may be another process's
            return
        try:
            if not self.reaches_group(signum):
                signal.pidfd_send_signal(self.child.pidfd, signum)
            elif members is None:
                os.killpg(self.pid, signum)
            else:
                signal.pidfd_send_signal(self.child.pidfd, signum)
                for process in members:
                    if process.pid != self.pid:
                        signal_process(process, signum)
        except ProcessLookupError:
            os.kill(self.pid, signum)  # it has not yet made its group, or is a zombie without one
        except PermissionError:
            pass  # all in the group have changed their user

    def end(self, signum: int, at: float, members: Iterable[Process] | None = None, *, had_it: bool = False) -> None:
        """Note that the worker, if it lives, is stopped by this signal at `at` (monotonic seconds), and send the signal.

        `had_it`: the worker has had the signal already, as from the terminal. `members`: see `signal`; None: all of its group.
        """
        if self.look() is None:
            self.stopped_with = int(signum)
            if self.stopped_at is None:
                self.stopped_at = at
        if had_it:
            return
        self.signal(signum, members)
        if signum != signal.SIGKILL:
            self.signal(signal.SIGCONT)  # a process that is stopped takes no other signal
        self.child.rouse_parent()  # a guard, which is to report the end, may be stopped

    def count_written(self) -> None:
        """Count what it writes from now on, when it and all others were asked to end, if it is not counted yet."""
        if self._written_before is None and self.stopped_at is not None:
            self._written_before = transferred(self.pid)[1]

    def written_since_stop(self) -> int:
        """How many bytes it has written since it was asked to end, to files and pipes."""
        return max(transferred(self.pid)[1] - (self._written_before or 0), 0)

    def reap(self) -> Usage:
        """Reap it, which frees its pid. A process that cannot be killed is left to its next parent."""
        if self.stacks is not None:
            os.close(self.stacks)
        return self.child.reap()
