"""One worker from its start until it is reaped: its process, its process group and how it ended. Decides nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from ddplaunch.process.child import Child, End, Usage
from ddplaunch.process.start import StartError, why_not_started
from ddplaunch.process.tree import content

if TYPE_CHECKING:
    from ddplaunch.process.guard import GuardedChild

_FOR_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


class RunningWorker:
    """A worker that was started and is not yet reaped.

    Its zombie is kept until `reap`: as long as it is there, its pid and its group cannot be reused,
    so that signals to the group of a worker that ended reach what it left behind and no other process.
    """

    def __init__(
        self,
        rank: int,
        child: Child | GuardedChild,
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
        self.ended = child.ended  # the descriptor that is readable once `look` gives its end
        self._child = child
        self._by_itself = by_itself
        self.stacks = stacks
        self.recorder = recorder
        self.started_at = started_at  # CLOCK_MONOTONIC seconds
        self.stopped_with: int | None = None  # the last signal sent to end it
        self.stopped_at: float | None = None  # when the first of them was sent
        self._written_before: int | None = None  # bytes, when it was asked to end

    def look(self) -> End | None:
        """Return how it ended, None while it lives; does not reap it."""
        return self._child.look()

    @property
    def is_kept(self) -> bool:
        """Whether no other process can have its pid until it is reaped."""
        return self._child.is_kept

    @property
    def has_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, or has ended."""
        return self._child.has_stopped

    def why_not_started(self, program: str) -> StartError | None:
        """Return the reason, once it has ended, why exec failed; None if it succeeded."""
        return why_not_started(self._child, program)

    def signal(self, signum: int) -> None:
        """Send a signal to it, or to its process group."""
        if not self._child.is_kept:
            return
        try:
            if self._by_itself and signum not in _FOR_ALL and self.look() is None:
                signal.pidfd_send_signal(self._child.pidfd, signum)
                return
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            os.kill(self.pid, signum)  # it has not yet made its group, or is a zombie without one
        except PermissionError:
            pass  # all in the group have changed their user

    def end(self, signum: int, at: float, *, had_it: bool = False) -> None:
        """Send a signal that is meant to end it, unless it had that already, and note so if it still lives."""
        if self.look() is None:
            self.stopped_with = int(signum)
            if self.stopped_at is None:
                self.stopped_at = at
        if had_it:
            return
        self.signal(signum)
        if signum != signal.SIGKILL:
            self.signal(signal.SIGCONT)  # a process that is stopped takes no other signal
        self._child.rouse_parent()

    def count_written(self) -> None:
        """Count what it writes from now on, when it and all others were asked to end, if it is not counted yet."""
        if self._written_before is None and self.stopped_at is not None:
            self._written_before = _written(self.pid)

    def written_since_stop(self) -> int:
        """How many bytes it has written since it was asked to end, to files and pipes."""
        return max(_written(self.pid) - (self._written_before or 0), 0)

    def reap(self) -> Usage:
        """Reap it, which frees its pid. A process that cannot be killed is left to its next parent."""
        if self.stacks is not None:
            os.close(self.stacks)
        return self._child.reap()


def _written(pid: int) -> int:
    """The bytes that a process has written so far, as /proc/PID/io counts them; 0 if that cannot be known."""
    try:
        fields = content(f"/proc/{pid}/io").split()
        return int(fields[fields.index(b"wchar:") + 1])
    except (OSError, ValueError):
        return 0
