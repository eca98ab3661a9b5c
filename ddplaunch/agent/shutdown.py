"""The last step of an agent: it reports how the job ended, hands its output over, and may queue the job again."""

from __future__ import annotations

import selectors
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ddplaunch.agent.pipes import UNREAD_TIMEOUT, Backpressure, FrontPipes, OutputQueue
from ddplaunch.agent.signals import SignalSource
from ddplaunch.coordinator.link import JobEnd
from ddplaunch.output.file_queue import FileQueue
from ddplaunch.process import clock
from ddplaunch.process.tree import look
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise.node import State
from ddplaunch.supervise.outcome import Intent, Why, WorkerExit

OUTPUT_DELAY = 0.5  # seconds that the last output has to come through Slurm before the job is queued again


if TYPE_CHECKING:  # to make a Protocol takes longer than to import most modules
    from ddplaunch.process.apart import AskApart

    class Requeue(Protocol):
        """What asks the cluster to queue the job again; each call may take seconds."""

        def decide(self, signum: int) -> Intent:
            """Find out whether the job is to be queued again after the notice `signum`."""

        def submit(self) -> str | None:
            """Queue the job again; give the reason in a sentence if that cannot be done."""

        def undecided(self, signum: int) -> Intent:
            """Return what `decide` comes to if the cluster has not answered."""

        @property
        def unsent(self) -> str | None:
            """What `submit` gives then."""


class Shutdown:
    """What follows the loop."""

    def __init__(
        self,
        queue: OutputQueue,
        selector: selectors.BaseSelector,
        signals: SignalSource,
        backpressure: Backpressure,
        files: FileQueue,
        pipes: FrontPipes,
        *,
        reporter: Reporter,
        requeue: Requeue | None,
        ask_apart: AskApart,
    ) -> None:
        self._queue = queue
        self._selector = selector
        self._signals = signals
        self._backpressure = backpressure
        self._files = files
        self._pipes = pipes
        self._reporter = reporter
        self._requeue = requeue
        self._ask_apart = ask_apart

    def conclude(self, state: State, exits: list[WorkerExit], end: JobEnd, at: float) -> None:
        """Report how the job ended, unless it is to be queued again."""
        if end.requeue:
            self._reporter.left_after(end.requeue)
        if self._own_requeue(end) is None:
            self._reporter.write_summary(state, exits, end.why, at)
            self._reporter.print_end(end.why, end.text)

    def leave(self, state: State, exits: list[WorkerExit], end: JobEnd) -> None:
        """Queue the job again if it is to be, when all others know of the end, for it ends us too; hand over all output."""
        if (requeue := self._own_requeue(end)) is not None:
            asked = self._ask_apart(partial(requeue.decide, end.requeue), requeue.undecided(end.requeue))
            decision, at = self._signals.wait_for(asked), time.monotonic()
            self._reporter.print_end(end.why, end.text)
            failed = self._submit(requeue, decision, state)
            self._reporter.left_after(end.requeue, decision, failed)
            self._reporter.write_summary(state, exits, end.why, at)
        self.leave_early(state)

    def leave_early(self, state: State) -> None:
        """Have all files of the run written, and hand over all output."""
        self._end_files()
        self._hand_over(state)

    def _end_files(self) -> None:
        """Wait until all files of the run are written, unless their disk hangs, or is slow and the user does not wait."""
        self._files.end()
        urged = self._signals.urged
        while self._files.is_busy and self._signals.urged == urged:
            clock.dispatch(self._selector, self._files.deadline)
            self._files.expire(clock.now())
        if self._files.is_open and (writer := look(self._files.pid)) is not None:
            self._pipes.leave(writer.pid, writer.started)
        self._reporter.leave_folder()

    def _hand_over(self, state: State) -> None:
        """Wait until the front has taken all output; of a job that was asked to stop, only while it takes any."""
        self._backpressure.update(_pause_nothing, True, clock.now())
        sent, read_by = self._queue.sent, None
        while self._queue.size:
            stopped = state.why is Why.SIGNALLED or self._signals.end_asked
            if stopped and (read_by is None or self._queue.sent != sent):
                sent, read_by = self._queue.sent, clock.now() + UNREAD_TIMEOUT
            elif read_by is not None and clock.now() >= read_by:
                return
            clock.dispatch(self._selector, read_by)

    def _own_requeue(self, end: JobEnd) -> Requeue | None:
        """What queues the job again, if it is to be done from here."""
        return self._requeue if end.requeue and not end.is_watched else None

    def _submit(self, requeue: Requeue, decision: Intent, state: State) -> str | None:
        """Queue the job again, if that was decided, which ends us too; give the reason if that cannot be done."""
        self._reporter.print(decision.text)
        if not decision.requeues:
            return None
        self._hand_over(state)
        # srun drops what it has not read when its step ends, and there is no sign of when it has
        self._signals.wait(OUTPUT_DELAY)
        failed = self._signals.wait_for(self._ask_apart(requeue.submit, requeue.unsent))
        if failed is not None:
            self._reporter.print(failed)
        return failed


def _pause_nothing(_paused: bool) -> None:
    """There are no workers any more."""
