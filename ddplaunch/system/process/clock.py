"""Deadlines, which are seconds or None, and their clock: it stands still while this process does not run. Decides nothing.

A process that is stopped, frozen, or on a machine that sleeps receives nothing and ends nothing that is due; mostly its workers
do not run either. So deadlines are times of this clock. A time that is shown, or compared with one of another process, is
CLOCK_MONOTONIC's.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from math import inf

from msgspec import Struct

BEAT = 1.0  # seconds that a sleep before a deadline lasts at most: so much of a pause is taken for time
LATE = 1.0  # seconds from look to look, sleep aside, that count as time: a busy machine makes a process wait for less


class Pause(Struct, frozen=True):
    """A time in which this process did not run, though it should have woken."""

    seconds: float
    ended_at: float  # by the clock


class Clock:
    """CLOCK_BOOTTIME, which goes on while the machine sleeps, without the time in which this process did not run."""

    def __init__(self, read: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        self._read = read
        self._seen = read()
        self._missed = 0.0  # seconds
        self._longest_sleep = BEAT
        self.pause: Pause | None = None  # the last one that was notable

    def now(self) -> float:
        """Return the time in seconds."""
        return self._advance(intended_sleep=0.0)

    def begin(self) -> None:
        """Take nothing for a pause that was until now: this process has had no deadline."""
        self.now()
        self.pause = None

    def protect(self, timeout: float) -> None:
        """Sleep so short from now on that no pause uses up a time limit like this one."""
        self._longest_sleep = min(self._longest_sleep, timeout / 4)

    def select(
        self, selector: selectors.BaseSelector, deadline: float, lenient_deadline: float = inf
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events until the deadline, but for a short sleep at most; without a deadline (inf), as long as it takes.

        A pause of this process within a sleep cannot be told from the sleep. `lenient_deadline` is that of what may come late:
        this process wakes for it, but a pause until then counts as time.
        """
        if deadline == inf:
            ready = selector.select(None if lenient_deadline == inf else max(0.0, lenient_deadline - self.now()))
            self._advance(intended_sleep=inf)  # no pause counts: nothing was due
            return ready
        sleep = min(max(0.0, min(deadline, lenient_deadline) - self.now()), self._longest_sleep)
        ready = selector.select(sleep)
        self._advance(intended_sleep=sleep)
        return ready

    def wait(self, selector: selectors.BaseSelector, deadline: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events, in as many sleeps as it takes; give none once the deadline has come."""
        while self.now() < deadline:
            if ready := self.select(selector, deadline):
                return ready
        return []

    def _advance(self, *, intended_sleep: float) -> float:
        """Let the time pass since the last call, in which this process wanted to sleep so many seconds, and return the time.

        What has passed beyond that and LATE is a pause: this process did not run, and the clock stood still.
        """
        at = self._read()
        missed, self._seen = at - self._seen - intended_sleep, at
        if missed > LATE:
            self._missed += missed
            self.pause = Pause(missed, at - self._missed)
        return at - self._missed

    def paused(self, within: float) -> str:
        """Say that this process had been paused if it was, until at most `within` seconds ago: "paused for 20 s"; else ""."""
        if self.pause is None or self.now() - self.pause.ended_at >= within:
            return ""
        return f"paused for {self.pause.seconds:.0f} s"


PROCESS_CLOCK = Clock()
now, wait, paused = PROCESS_CLOCK.now, PROCESS_CLOCK.wait, PROCESS_CLOCK.paused


def soonest(*deadlines: float | None) -> float | None:
    """Return the earliest of these deadlines, None if there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def is_due(deadline: float | None, at: float) -> bool:
    """Whether this deadline has come."""
    return deadline is not None and at >= deadline


def later(deadline: float | None, seconds: float) -> float | None:
    """Return the deadline moved by so many seconds; None if there is none."""
    return None if deadline is None else deadline + seconds
