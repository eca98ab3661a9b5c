"""The last that an agent does: it tells how the job ended and hands that over; a job may go back into the queue."""

from __future__ import annotations

import selectors
import time
from typing import TYPE_CHECKING, Protocol

from ddplaunch.agent.pipes import HASTE, Backpressure, OutputQueue
from ddplaunch.agent.signals import SignalSource
from ddplaunch.record import replace
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise.node import State, Why
from ddplaunch.supervise.outcome import WorkerExit

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.control.messages import Quit
    from ddplaunch.supervise.outcome import Intent

PASSAGE = 0.5  # seconds that the last words have to come through Slurm before the job is sent back


class Requeue(Protocol):
    """What asks the cluster to queue the job again; each call may take seconds."""

    def decide(self, signum: int) -> Intent:
        """Find out whether the job is to go back after the notice `signum`."""

    def go(self) -> str | None:
        """Send the job back; give the reason in a sentence if that cannot be done."""


class Shutdown:
    """The way out of the loop."""

    def __init__(
        self,
        queue: OutputQueue,
        selector: selectors.BaseSelector,
        signals: SignalSource,
        backpressure: Backpressure,
        *,
        reporter: Reporter,
        requeue: Requeue | None,
    ) -> None:
        self._queue = queue
        self._selector = selector
        self._signals = signals
        self._backpressure = backpressure
        self._reporter = reporter
        self._requeue = requeue

    def conclude(self, state: State, exits: list[WorkerExit], word: Quit | None, at: float) -> State:
        """Tell how the job ended, unless it is to go back, and give the last state; `word` is what the coordinator said."""
        if word is None:
            state = replace(state, status=self._reporter.learn_the_end(state))
        if notice := _notice(state, word):
            self._reporter.left_after(notice)
        if self._way(state, word) is None:
            self._reporter.seal(state, exits, word, at)
            self._reporter.last_words(state, exits, word, at)
        return state

    def leave(self, state: State, exits: list[WorkerExit], word: Quit | None) -> None:
        """Send the job back if it is to go, when all others have been told, for it ends us too; hand over what was said."""
        if (way := self._way(state, word)) is not None:
            notice = _notice(state, word)
            intent, at = way.decide(notice), time.monotonic()
            self._reporter.last_words(state, exits, word, at)
            failed = self._go_back(way, intent, state)
            self._reporter.left_after(notice, intent, failed)
            self._reporter.seal(state, exits, word, at)
        self.hand_over(state)

    def hand_over(self, state: State) -> None:
        """Wait until the front has taken all output; of a job that was told to stop, only while it takes any."""
        stopped = state.why is Why.SIGNALLED

        def stop() -> None:
            nonlocal stopped
            stopped = True

        self._backpressure.mind(None, True, time.monotonic())
        self._signals.only_stops(stop)
        while self._queue.size:
            ready = self._selector.select(HASTE if stopped else None)
            if not ready:
                return
            for key, _ in ready:
                key.data()

    def _way(self, state: State, word: Quit | None) -> Requeue | None:
        """The way back into the queue, if it is to be gone from here."""
        is_watched = word is not None and word.is_watched
        return self._requeue if _notice(state, word) and not is_watched else None

    def _go_back(self, way: Requeue, intent: Intent, state: State) -> str | None:
        """Send the job back, if it is to go, which ends us too; give the reason if that cannot be done."""
        self._reporter.say(intent.words)
        if not intent.goes:
            return None
        self.hand_over(state)
        # srun drops what it has not read when its step ends, and nobody says when it has
        self._signals.wait(PASSAGE)
        failed = way.go()
        if failed is not None:
            self._reporter.say(failed)
        return failed


def _notice(state: State, word: Quit | None) -> int:
    """The notice after which the job should go back into the queue, 0 if it should not."""
    return state.requeue if word is None else word.requeue
