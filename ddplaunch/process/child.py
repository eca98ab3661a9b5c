"""A child of this process: what it was started as, and how it ends, by the kernel's own record of it. Decides nothing."""

from __future__ import annotations

import os

from msgspec import Struct


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


class Child(Struct, frozen=True):
    """A process that was started, and the handles that show its end; the holder of this value owns them."""

    pid: int  # also its session and its process group
    pidfd: int
    failure: int  # pipe: holds an errno if exec failed, is at its end if it succeeded

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
        os.close(self.failure)

    def reap(self) -> Usage:
        """Reap it, which frees its pid, and close the handles. One that cannot be killed is left to its next parent."""
        self.abandon()
        pid, _, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return Usage(0, 0.0)
        return Usage(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)
