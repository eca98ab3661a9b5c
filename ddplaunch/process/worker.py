"""One worker from its start until it is reaped: its process, its process group and how it ended. Decides nothing."""

from __future__ import annotations

import os
import signal

from ddplaunch.process.start import Child, StartError, why_not_started
from ddplaunch.record import record

_FOR_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


@record
class End:
    """How a process ended."""

    code: int | None  # exit status; None if a signal ended it
    signal: int | None
    core_dumped: bool

    def __str__(self) -> str:
        return f"exit status {self.code}" if self.signal is None else f"killed by signal {self.signal}"


@record
class Usage:
    """What a process and the children it waited for have used."""

    peak_rss: int  # bytes, of the largest of them
    cpu_seconds: float  # user and system


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
        stacks: int | None = None,
        recorder: str = "",
    ) -> None:
        """`stacks` is the file that it writes its stacks to, `recorder` where torch in it tells of its collectives.

        `by_itself`: signals but SIGKILL, SIGSTOP and SIGCONT go to its process alone while that lives.

        They would kill a data loader, or run the handler that it has inherited, while its parent still needs it. What
        such a worker has started is ended by it, or swept. A command that is no Python program is mostly a wrapper.
        """
        self.rank = rank
        self.pid = child.pid
        self.pidfd = child.pidfd
        self._child = child
        self._by_itself = by_itself
        self.stacks = stacks
        self.recorder = recorder
        self.started_at = started_at  # CLOCK_MONOTONIC seconds
        self.stopped_with: int | None = None  # the last signal sent to end it
        self.stopped_at: float | None = None  # when the first of them was sent
        self._written_before = 0  # bytes, when it was asked to end

    def look(self) -> End | None:
        """Give how it ended, None while it lives; does not reap it."""
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return End(info.si_status, None, False)
        return End(None, info.si_status, info.si_code == os.CLD_DUMPED)

    @property
    def has_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, or has ended."""
        return os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def why_not_started(self, program: str) -> StartError | None:
        """Give the reason, once it has ended, why exec failed; None if it succeeded."""
        return why_not_started(self._child, program)

    def signal(self, signum: int) -> None:
        """Send a signal to it, or to its process group."""
        try:
            if self._by_itself and signum not in _FOR_ALL and self.look() is None:
                signal.pidfd_send_signal(self.pidfd, signum)
                return
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            os.kill(self.pid, signum)  # it has not yet made its group, or is a zombie without one
        except PermissionError:
            pass  # all in the group have changed their user

    def end(self, signum: int, at: float, *, had_it: bool = False) -> None:
        """Send a signal that is meant to end it, unless it had that already, and note so if it still lives."""
        if self.look() is None:
            self.stopped_with = signum
            if self.stopped_at is None:
                self.stopped_at = at
                self._written_before = _written(self.pid)
        if had_it:
            return
        self.signal(signum)
        if signum != signal.SIGKILL:
            self.signal(signal.SIGCONT)  # a process that is stopped takes no other signal

    def written_since_stop(self) -> int:
        """How many bytes it has written since it was asked to end, to files and pipes."""
        return max(_written(self.pid) - self._written_before, 0)

    def reap(self) -> Usage:
        """Reap it, which frees its pid. A process that cannot be killed is left to its next parent."""
        for fd in (self.pidfd, self._child.failure, self.stacks):
            if fd is not None:
                os.close(fd)
        pid, _, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return Usage(0, 0.0)
        return Usage(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)


def _written(pid: int) -> int:
    """The bytes that a process has written so far, as /proc/PID/io counts them; 0 if that cannot be known."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            fields = file.read().split()
        return int(fields[fields.index(b"wchar:") + 1])
    except (OSError, ValueError):
        return 0
