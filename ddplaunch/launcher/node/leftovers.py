"""What workers leave behind: the agent, a subreaper, looks for such processes, signals and reaps them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

from ddplaunch.launcher.node import events
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import Process, descendants, reap, signal_leftovers

# rest after a look at all children, in times of what the look took: thousands may end one by one
_REST = 9
_REST_OF_SWEEP = 1


class Leftovers:
    """Posts when there is something to reap, but not all the time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._rests_until = 0.0
        self._due = loop.timer(None, self._post)

    def child_ended(self) -> None:
        """Note that some child has ended."""
        if not self._due.is_set:
            self._due.set(max(self._loop.now(), self._rests_until))

    def _post(self) -> None:
        self._loop.post(events.ReapDue())

    def reap(self, keep: Collection[int]) -> None:
        """Reap what has ended but for these children, which others reap."""
        began = time.monotonic()
        reap(keep)
        self._rest(time.monotonic() - began, _REST)

    def find(
        self, others: Collection[int], elsewhere: Iterable[Process], signum: int = 0, *, sparing: bool = False
    ) -> tuple[str, ...]:
        """Return what is left, each as in a sentence, and signal it if `signum` is one.

        `others` are children that are not looked below, `elsewhere` what does not descend from us and counts too. `sparing`
        spares those that clean up and then exit by themselves.
        """
        began = time.monotonic()
        left = [*descendants(os.getpid(), but_for=others), *elsewhere]
        if signum:
            signal_leftovers(signum, left, sparing=sparing)
        self._rest(time.monotonic() - began, _REST_OF_SWEEP)
        return tuple(map(str, left))

    def _rest(self, took: float, times: int) -> None:
        self._rests_until = self._loop.now() + took * times
