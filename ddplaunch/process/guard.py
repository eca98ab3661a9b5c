"""The guard of a run, seen from the agent: forks its workers and is their parent. Its other half is worker/guard.py.

It is forked from the interpreter that is kept warm, so it is no child of ours, nor are the workers. What the kernel tells a
parent comes from it: how each worker has ended, by a pipe, and SIGCHLD. That the guard has ended itself, whatever ended it,
shows as the end of another pipe; the kernel has killed its workers then, and what they have started is killed by worker/warm.py,
which closes the connection when nothing is left of it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from ddplaunch.process.child import End, Usage
from ddplaunch.process.fork_requests import Fork, ForkRequests, ServerLost, joined, nothing_failed
from ddplaunch.process.start import StartError
from ddplaunch.process.tree import Process, descendants, look


class Guard(ForkRequests):
    """A process that has the workers of this run as its children."""

    _what = b"fork\0"

    def __init__(self, connection: socket.socket, output: int, check: Callable[[int], None]) -> None:
        """Use this connection; `output` is a descriptor that the guard is to have for as long as it lives.

        `check` raises ServerLost if workers may not be forked from this process.
        """
        super().__init__(connection)
        self._check = check
        self._output = output
        self._process: Process | None = None
        self._life = -1  # pipe: at its end when the guard has ended; -1 before it is ready, and when it is closed
        self.is_over = False  # it has ended, and nothing is left of what it and its workers have started

    @property
    def pid(self) -> int:
        """Its process, 0 while that is not known."""
        return self._process.pid if self._process is not None else 0

    def _take(self, what: str, text: str) -> None:
        if what == "guard":
            self._process = look(int(text))

    def read(self) -> None:
        """Take in what it says of its start; see `ForkRequests.read`."""
        was_ready = self.is_ready
        super().read()
        if self.is_ready and not was_ready:
            self._check(self.pid)
            self._begin()

    def _begin(self) -> None:
        """Tell it what all workers have in common."""
        opened = []
        try:
            self._life, life = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.append(life)
            opened.append(os.open(".", os.O_PATH | os.O_CLOEXEC))
            mask = os.umask(0)
            os.umask(mask)
            self._send(joined(["agent", str(os.getpid()), str(mask)]), opened[1], self._output, life)
        except OSError as error:
            raise ServerLost(str(error.strerror)) from None
        finally:
            for fd in opened:
                os.close(fd)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and the kernel has killed its workers."""
        with suppress(BlockingIOError):
            return self._life < 0 or not os.read(self._life, 1)
        return False

    def fork(self, forks: Sequence[Fork]) -> list[GuardedChild]:
        """Fork workers; see `ForkServer.fork`."""
        reads: list[int] = []
        writes: list[int] = []
        try:
            try:
                for _ in forks:
                    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                    reads.append(read)
                    writes.append(write)
            except OSError as error:
                raise StartError(error.errno or errno.EMFILE, "cannot create a pipe", len(reads)) from None
            return self._fork(forks, lambda pid: GuardedChild(self, pid, reads.pop(0)), writes)
        finally:
            for fd in (*reads, *writes):
                os.close(fd)

    def left(self) -> list[Process]:
        """Return what is below it; itself, once it was killed, until all that was is gone."""
        if self._process is None or self.is_over:
            return []
        return [self._process] if self.has_ended else list(descendants(self.pid))

    def reap(self, pid: int) -> Usage:
        """Have it reap a worker; what that has used is lost where it does not answer."""
        if self.has_ended:
            return Usage(0, 0.0)
        try:
            what, *fields = self._ask(joined(["reap", str(pid)]))[-1].split(" ")
            if what == "usage":
                return Usage(int(fields[0]) * 1024, float(fields[1]))
        except (ServerLost, ValueError):
            pass
        return Usage(0, 0.0)

    def rouse(self) -> None:
        """Have it go on if it is stopped."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, with all that is below it, whatever it is doing."""
        self._socket.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1  # the number may soon be another file's


class GuardedChild:
    """A worker that a guard has forked; the same to its owner as a `Child`."""

    def __init__(self, guard: Guard, pid: int, status: int) -> None:
        """Own `status`, the pipe to which the guard writes how it has ended, or which it closes when it ends itself.

        Raises:
            OSError: no descriptors are left; `status` is closed.
        """
        self._guard = guard
        self._end: End | None = None
        self.pid = pid
        self.ended = status
        opened = [status]
        try:
            self.failure = nothing_failed()
            opened.append(self.failure)
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            for fd in opened:
                os.close(fd)
            raise

    @property
    def is_kept(self) -> bool:
        """Whether no other process can have its pid and group until it is reaped."""
        return not self._guard.has_ended

    def look(self) -> End | None:
        """Return how it ended, None while it lives; does not reap it."""
        if self._end is None:
            try:
                status = os.read(self.ended, 32)
            except BlockingIOError:
                return None
            self._end = End.of(*map(int, status.split())) if status else End(None, signal.SIGKILL, False)
        return self._end

    @property
    def has_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, or has ended."""
        now = look(self.pid)
        return self.look() is not None or now is None or now.state in "TtZX"

    def rouse_parent(self) -> None:
        """Have what tells of its end go on, if it is stopped."""
        self._guard.rouse()

    def abandon(self) -> None:
        """Close the handles."""
        for fd in (self.pidfd, self.failure, self.ended):
            os.close(fd)

    def reap(self) -> Usage:
        """Reap it, which frees its pid, and close the handles."""
        self.abandon()
        return self._guard.reap(self.pid)
