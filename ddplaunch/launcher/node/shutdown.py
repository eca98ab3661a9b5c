"""The last step of an agent: it reports how the job ended, hands its output over, and may queue the job again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.launcher.tell.story import Ended
from ddplaunch.reach.pipes import UNREAD_TIMEOUT, FrontPipes
from ddplaunch.spec.outcome import Intent
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import look

if TYPE_CHECKING:
    from ddplaunch.launcher.job.link import Link
    from ddplaunch.launcher.node.job import Requeue
    from ddplaunch.launcher.node.outward import Errands

OUTPUT_DELAY = 0.5  # seconds that the last output has to come through Slurm before the job is queued again


class Shutdown:
    """What follows the loop."""

    def __init__(
        self, loop: Loop, context: AgentContext, signals: SignalSource, pipes: FrontPipes, requeue: Requeue | None
    ) -> None:
        self._loop = loop
        self._context = context
        self._queue = context.queue
        self._files = context.files
        self._reporter = context.reporter
        self._signals = signals
        self._pipes = pipes
        self._requeue = requeue

    def conclude(self, ended: Ended, link: Link, at: float) -> None:
        """Report how the job ended, unless it is to be queued again."""
        end = link.end
        assert end is not None
        if end.requeue:
            self._reporter.story.note_left_after(end.requeue)
        if self._own_requeue(link) is None:
            self._reporter.write_summary(ended, at)
            self._reporter.print_end(end.why, end.text)
            self._advise()

    def _advise(self) -> None:
        """Say which imports the next run could find warm."""
        preload = self._context.draft.preload
        if self._context.draft.keep_warm is not None and preload is not None:
            from ddplaunch.spec.error_file import advice_on_imports  # few jobs keep anything warm

            if text := advice_on_imports(self._context.error_files.slow_imports, preload):
                self._reporter.print(text)

    def wait_for(self, errands: Iterable[Errands]) -> None:
        """Wait until what is told to programs outside is told, unless the user does not wait; each has a time limit."""
        before = self._signals.stop_signals
        while any(one.is_busy for one in errands) and self._signals.stop_signals == before:
            self._loop.run_once()

    def leave(self, ended: Ended, link: Link) -> None:
        """End this agent: requeue the job if that is due, which may end this process, too; then hand over all output."""
        end = link.end
        if end is not None and (requeue := self._own_requeue(link)) is not None:
            asked = self._loop.ask(partial(requeue.decide, end.requeue), requeue.undecided(end.requeue))
            decision, at = self._signals.wait_for(asked), time.monotonic()
            self._reporter.print_end(end.why, end.text)
            failed = self._submit(requeue, decision)
            self._reporter.story.note_left_after(end.requeue, decision, failed)
            self._reporter.write_summary(ended, at)
        self.leave_early()

    def leave_early(self) -> None:
        """Have all files of the run written, and hand over all output."""
        self._end_files()
        self.hand_over()
        self._signals.see_front_go_on()

    def _end_files(self) -> None:
        """Wait until all files of the run are written, unless their disk hangs, or is slow and the user does not wait."""
        self._files.end()
        before = self._signals.stop_signals
        while self._files.is_busy and self._signals.stop_signals == before:
            self._loop.run_once()
        if self._files.is_open and (writer := look(self._files.pid)) is not None:
            self._pipes.spare(writer.pid, writer.started)
        self._reporter.report_folder(leaves=True)

    def hand_over(self) -> None:
        """Wait until the front has taken all output; after a stop, only as long as the front takes any."""
        sent, read_by = self._queue.sent, self._loop.timer(None, lambda: None)
        is_limited = False
        while self._queue.size:
            if self._signals.end_asked and (not is_limited or self._queue.sent != sent):
                sent, is_limited = self._queue.sent, True
                read_by.set(self._loop.now() + UNREAD_TIMEOUT)
            elif is_limited and not read_by.is_set:
                return
            self._loop.run_once()

    def _own_requeue(self, link: Link) -> Requeue | None:
        """What queues the job again, if it is to be done from here: where the coordinator is, or was lost after a notice."""
        end = link.end
        is_here = link.coordinator is not None or (end is not None and end.why == "lost")
        return self._requeue if end is not None and end.requeue and is_here else None

    def _submit(self, requeue: Requeue, decision: Intent) -> str | None:
        """Requeue the job if that was decided; return the reason if that failed. The requeue ends this process, too."""
        self._reporter.print(decision.text)
        if not decision.requeues:
            return None
        self.hand_over()
        if not self._context.inputs.leads:
            # srun drops what it has not read when its step ends, and there is no sign of when it has
            self._signals.wait(OUTPUT_DELAY)
        failed = self._signals.wait_for(self._loop.ask(requeue.submit, requeue.unsent))
        if failed is not None:
            self._reporter.print(failed)
        return failed
