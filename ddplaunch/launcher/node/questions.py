"""Answers, in the agent of a node, what observers (`ddplaunch ps`) ask about its workers: the coordinator passes questions on.

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
    from ddplaunch.record.window.questions import AskArrivals
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
        number, question = ask.number, ask.question
        if number in self._children:
            return  # the question came before, and a child is at work on its answer
        if len(self._children) >= MAX_QUESTIONS:
            self._reply(number, NoAnswer(f"answers {MAX_QUESTIONS} questions just now, and no more at once"))
        elif isinstance(question, AskStatus):
            self._reply(number, self._status(plan, exits))
        elif isinstance(question, AskStacks):
            self._have_stacks_captured(number, question)
        else:
            self._have_arrivals_read(number, question)

    def _have_stacks_captured(self, number: int, question: AskStacks) -> None:
        """Have a child capture where the workers are; without frames, only which collectives torch's recorder knows of."""
        child = self._generations.inspection.capture(
            self._generations.running.values(),
            question.within,
            partial(self._on_answer, number),
            convert_samples=partial(answers.stacks, threads=question.threads),  # what the child sends of them
            native=question.native,
            stacks=question.frames,
            ras=question.frames,  # and what NCCL's RAS service says of the job
        )
        self._keep_until_answer(number, child)

    def _have_arrivals_read(self, number: int, question: AskArrivals) -> None:
        """Have a child read when the workers came to their collectives, from torch's recorders in them."""
        running = self._generations.running
        sockets = {rank: worker.recorder_socket for rank, worker in running.items() if worker.recorder_socket}
        if not sockets:
            # no collectives are recorded here, to whose times `wall` would be added
            self._reply(number, NodeArrivals(wall=0, series=()))
            return
        until = time.monotonic() + question.within
        # `every`: of many steps only each so many
        read = partial(answers.arrivals, sockets, until=until, every=question.every)
        self._keep_until_answer(
            number, self._generations.inspection.ask(read, question.within, partial(self._on_answer, number))
        )

    def _keep_until_answer(self, number: int, child: Pending[Any]) -> None:
        """Keep a child that answers a question; there is none if it could not be made, which is answered already."""
        if child.pid:
            self._children[number] = child

    def _status(self, plan: Plan, exits: Sequence[WorkerExit]) -> Answer:
        """Return what each worker of the plan does, or how it has ended."""
        generations, folder, workers = self._generations, self._context.folder, self._generations.workers
        written = workers.written if workers is not None else {}
        progress = workers.progress if workers is not None else {}
        debugged = generations.made_debuggers.held_ranks if generations.made_debuggers is not None else frozenset()
        gpus = generations.sampler.gpus(generations.plan.workers)
        log_folder = (folder.path or "") if folder is not None else ""
        return answers.status(plan.workers, generations.running, exits, written, progress, debugged, gpus, log_folder)

    def _on_answer(self, number: int, answer: Answer | None) -> None:
        """Take what a child has found out; None: there could be no child, or it has failed. Called by the loop."""
        self._children.pop(number, None)
        self._reply(number, answer or NoAnswer("could not create the process that asks the workers"))

    def _reply(self, number: int, answer: Answer) -> None:
        self._loop.post(QuestionAnswered(Answered(number, answer)))

    def forget(self, number: int) -> None:
        """Have the child that would answer this question end."""
        if (asked := self._children.get(number)) is not None:
            asked.give_up()
