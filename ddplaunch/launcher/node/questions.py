"""What observers ask about the workers of this node: the coordinator passes their questions on, and this has them answered.

Imported with the first question; `launcher/look/answers.py` makes the answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.look import answers
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.events import QuestionAnswered
from ddplaunch.launcher.node.generations import Generations
from ddplaunch.plan import Plan
from ddplaunch.record.window.questions import Answer, Answered, Ask, AskStacks, AskStatus, NoAnswer, NodeArrivals
from ddplaunch.spec.outcome import WorkerExit
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.system.loop.loop import Pending

MAX_QUESTIONS = 8  # that children answer at once


class Questions:
    """Answers questions about the workers of this node, now or later, each by one `QuestionAnswered`."""

    def __init__(self, loop: Loop, context: AgentContext, generations: Generations) -> None:
        """Prepare to answer about the workers of these generations, whichever there is."""
        self._loop = loop
        self._context = context
        self._generations = generations
        self._children: dict[int, Pending[Any]] = {}  # the children that answer, by the number of the question

    def answer(self, ask: Ask, plan: Plan, exits: Sequence[WorkerExit]) -> None:
        """Answer a question, unless too many are being answered; `plan` has the workers, and `exits` how some have ended."""
        number, question, generations = ask.number, ask.question, self._generations
        if number in self._children:
            return  # it was asked before
        if len(self._children) >= MAX_QUESTIONS:
            self._reply(number, NoAnswer(f"answers {MAX_QUESTIONS} questions just now, and no more at once"))
            return
        if isinstance(question, AskStatus):
            self._reply(number, self._status(plan, exits))
            return
        reply, running = partial(self._on_answer, number), generations.running
        if isinstance(question, AskStacks):
            asked = generations.inspection.capture(
                running.values(),
                question.within,
                reply,
                convert=partial(answers.stacks, threads=question.threads),
                native=question.native,
                stacks=question.frames,
                ras=question.frames,
            )
        else:
            recorders = {rank: worker.recorder for rank, worker in running.items() if worker.recorder}
            if not recorders:
                self._reply(number, NodeArrivals(wall=0, series=()))
                return
            until = time.monotonic() + question.within
            read = partial(answers.arrivals, recorders, until=until, every=question.every)
            asked = generations.inspection.ask(read, question.within, reply)
        if asked.pid:
            self._children[number] = asked

    def _status(self, plan: Plan, exits: Sequence[WorkerExit]) -> Answer:
        """Return what each worker of the plan does."""
        generations, context, workers = self._generations, self._context, self._generations.workers
        return answers.status(
            plan.workers,
            generations.running,
            exits,
            workers.written if workers is not None else {},
            workers.progress if workers is not None else {},
            generations.debugged.ranks if generations.debugged is not None else frozenset(),
            generations.sampler.gpus(generations.plan.workers),
            (context.folder.path or "") if context.folder is not None else "",
        )

    def _on_answer(self, number: int, answer: Answer | None) -> None:
        """Take what the child has found out. Called by the loop."""
        self._children.pop(number, None)
        self._reply(number, answer or NoAnswer("could not create the process that asks the workers"))

    def _reply(self, number: int, answer: Answer) -> None:
        self._loop.post(QuestionAnswered(Answered(number, answer)))

    def forget(self, number: int) -> None:
        """Have the child that would answer this question end."""
        if (asked := self._children.get(number)) is not None:
            asked.give_up()
