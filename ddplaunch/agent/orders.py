"""What the coordinator orders this node to do, on its way from the link into the loop. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.generations import Generations
from ddplaunch.agent.pipes import CONTROL, OutputQueue
from ddplaunch.agent.signals import SignalOrigin, SignalSource
from ddplaunch.coordinator.link import Generation, JobEnd
from ddplaunch.process import clock
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise import node

if TYPE_CHECKING:
    from ddplaunch.control.questions import Answer, Ask
    from ddplaunch.coordinator.link import Report
    from ddplaunch.process.apart import AskApart
    from ddplaunch.process.ask import Asked

MAX_QUESTIONS = 8  # that children answer at once


class Orders:
    """What a link hands to an agent: its `LinkHandler`."""

    def __init__(
        self,
        queue: OutputQueue,
        signals: SignalSource,
        generations: Generations,
        *,
        feed: Callable[[node.Event], None],
        report: Callable[[Report], None],
        reporter: Reporter,
        ask_apart: AskApart,
    ) -> None:
        self._queue = queue
        self._signals = signals
        self._generations = generations
        self._feed = feed
        self._report = report
        self.print = reporter.print
        self.ask_apart = ask_apart
        self.job_end: JobEnd | None = None  # how the job has ended
        self._asked: dict[int, Asked[Any]] = {}  # the children that answer, by the number of the question

    def feed(self, event: node.Event) -> None:
        """Take an event; it is processed when the loop comes to it."""
        self._feed(event)

    def forward(self, signum: int) -> None:
        """Pass a signal on to the workers."""
        self._signals.received(signum, SignalOrigin.COORDINATOR)

    def listening(self, port: int) -> None:
        """Report where the coordinator, which is here, listens: the command that starts the other agents passes it on."""
        self._queue.put(CONTROL, b'{"type":"listening","port":%d}' % port)

    def ask(self, ask: Ask) -> None:
        """Answer a question about the workers of this node, unless too many are being answered."""
        from ddplaunch.control.questions import Answered  # only a job that is looked into needs it

        number = ask.number
        if number in self._asked:
            return  # it was asked before
        if len(self._asked) >= MAX_QUESTIONS:
            from ddplaunch.control.questions import NoAnswer  # nobody asks so much

            self._report(Answered(number, NoAnswer(f"answers {MAX_QUESTIONS} questions just now, and no more at once")))
            return

        def reply(answer: Answer) -> None:
            self._asked.pop(number, None)
            self._report(Answered(number, answer))

        asked = self._generations.answer(ask.question, reply)
        if asked is not None and asked.pid:
            self._asked[number] = asked

    def forget(self, number: int) -> None:
        """Have the child that would answer this question end."""
        if (asked := self._asked.get(number)) is not None:
            asked.give_up()

    def begin(self, generation: Generation, address: str | None) -> None:
        """Start the workers; `address` is that of this node as the others reach it."""
        self._generations.prepare(generation, address)
        self._feed(node.GenerationBegun(generation.number, generation.ranks, clock.now(), generation.alone))

    def end(self, end: JobEnd) -> None:
        """End: the job has ended."""
        self.job_end = end
        self._feed(node.JobEnded(end.status, clock.now()))
