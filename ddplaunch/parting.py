"""The last that an agent does: all that was said is taken, and a job that is to go on later goes back into the queue."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.hearing import Hearing
from ddplaunch.link import HASTE, Outbox
from ddplaunch.valve import Valve

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.slurmjob import Intent, WayBack

PASSAGE = 0.5  # seconds that the last words have to come through Slurm before the job is sent back


class Parting:
    """The way out of the loop."""

    def __init__(self, outbox: Outbox, selector: selectors.BaseSelector, hearing: Hearing, valve: Valve) -> None:
        self._outbox = outbox
        self._selector = selector
        self._hearing = hearing
        self._valve = valve

    def hand_over(self, *, stopped: bool) -> None:
        """Wait until the front has taken all output; of a job that was told to stop, only while it takes any."""

        def stop() -> None:
            nonlocal stopped
            stopped = True

        self._valve.mind(None, True, time.monotonic())
        self._hearing.only_stops(stop)
        while self._outbox.size:
            ready = self._selector.select(HASTE if stopped else None)
            if not ready:
                return
            for key, _ in ready:
                key.data()

    def go_back(self, way: WayBack, intent: Intent, say: Callable[[str], None], *, stopped: bool) -> str | None:
        """Send the job back, if it is to go, which ends us too; give the reason if that cannot be done."""
        say(intent.words)
        if not intent.goes:
            return None
        self.hand_over(stopped=stopped)
        # srun drops what it has not read when its step ends, and nobody says when it has
        self._hearing.wait(PASSAGE)
        failed = way.go()
        if failed is not None:
            say(failed)
        return failed
