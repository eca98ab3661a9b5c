"""Holds the workers' output back when nobody reads ours, but not for ever. Moves no bytes itself."""

from __future__ import annotations

import selectors

from ddplaunch.crew import Crew
from ddplaunch.link import FULL, Outbox

STUCK = 5.0  # seconds without progress after which whoever reads our stdout no longer holds the workers up


class Valve:
    """Watches the outbox.

    Full: the workers' pipes are left alone, as a shell pipeline would do it. Full for STUCK seconds without the
    reader taking a byte: the workers go on, and what they write goes to the logs only, until the outbox has room.
    """

    def __init__(self, outbox: Outbox, selector: selectors.BaseSelector) -> None:
        self._outbox = outbox
        self._selector = selector
        self._watched = False
        self._held = False
        self._muted = False
        self._sent = 0
        self.deadline: float | None = None  # when to look again, CLOCK_MONOTONIC seconds

    def mind(self, crew: Crew | None, logged: bool, now: float) -> bool:
        """Adapt to how full the outbox is; say whether output is now to be dropped from view.

        `logged` says whether all output is in logs too; if it is not, nothing is ever dropped.
        """
        self._watch(bool(self._outbox.size))
        if self._outbox.size < FULL // 2:
            self._held = self._muted = False
            self.deadline = None
        elif self._outbox.full and not self._held and not self._muted:
            self._held = True
            self._expect_progress(now)
        elif (
            self._muted and not logged
        ):  # a log could not be written any more: from here on waiting is better than losing
            self._held, self._muted = True, False
            self._expect_progress(now)
        elif self._held and self.deadline is not None and now >= self.deadline:
            if logged and self._sent == self._outbox.sent:
                self._held, self._muted = False, True
                self.deadline = None
            else:
                self._expect_progress(now)
        if crew is not None:
            crew.pause_output(self._held)
        return self._muted

    def _expect_progress(self, now: float) -> None:
        self._sent = self._outbox.sent
        self.deadline = now + STUCK

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._selector.register(self._outbox, selectors.EVENT_WRITE, self._outbox.flush)
        elif self._watched and not wanted:
            self._selector.unregister(self._outbox)
        self._watched = wanted
