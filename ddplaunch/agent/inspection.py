"""What looks into the workers of this node while they run: their stacks, whether they move, what is asked of them, debuggers.

It is made when it is first needed; it decides nothing, and what it finds becomes events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.context import AgentContext
from ddplaunch.agent.events import QuestionAnswered
from ddplaunch.agent.stack_taker import StackTaker
from ddplaunch.agent.workers import CurrentWorkers, Workers
from ddplaunch.errors import visible
from ddplaunch.loop.loop import Loop
from ddplaunch.stacks import Sample
from ddplaunch.supervise import node

if TYPE_CHECKING:
    from ddplaunch.agent.client import Client
    from ddplaunch.agent.debuggers import Debuggers
    from ddplaunch.agent.observer import Observer
    from ddplaunch.control.questions import Answer, Question
    from ddplaunch.loop.loop import Asked
    from ddplaunch.plan import Plan


MAX_QUESTIONS = 8  # that children answer at once


class Inspection:
    """Of one generation after another: what was asked about the workers of one is not told of those of the next."""

    def __init__(self, loop: Loop, context: AgentContext, current: CurrentWorkers) -> None:
        self._loop = loop
        self._context = context
        self._current = current
        self._taker = StackTaker(loop, context.draft.workers[0].host)
        self._observer: Observer | None = None
        self._debuggers: Debuggers | None = None
        self._asked: dict[int, Asked[Any]] = {}  # the children that answer, by the number of the question
        self._before: tuple[Sample, ...] = ()  # where the workers were when they had to end
        self.samples: tuple[Sample, ...] = ()  # the same, if it is to be told

    def begin(self) -> None:
        """Forget what was seen of the last generation."""
        self._observer, self._before, self.samples = None, (), ()

    def take_stacks(self, workers: Workers, within: float, *, ras: bool, silently: bool) -> None:
        """Find out where these workers are, which have to end; `silently`: to be told only if some do not move any more."""
        reply = partial(self._stacks_taken, workers, silently=silently)
        self._taker.take(workers.running.values(), within, reply, made=tuple, ras=ras)

    def _stacks_taken(self, workers: Workers, samples: Sequence[Sample] | None, *, silently: bool) -> None:
        if workers is self._current.workers:  # those of the generation before have ended by themselves
            self._before = tuple(samples or ())
            self.samples = () if silently else self._before
            known, waiting = _of_workers(self._before), frozenset[int]()
            if known:
                from ddplaunch.stacks.merge import is_waiting  # what has taken them was found, so this is

                waiting = frozenset(rank for rank, sample in known.items() if is_waiting(sample))
            self._loop.post(node.StacksCaptured(self._loop.now(), frozenset(known), waiting))

    def look_for_stuck(self, workers: Workers, ranks: Collection[int], within: float) -> None:
        """Find out which of these workers stand where they did when their stacks were taken."""
        running = [workers.running[rank] for rank in ranks if rank in workers.running]
        self._taker.take(running, within, partial(self._stuck_found, workers), made=tuple)

    def _stuck_found(self, workers: Workers, samples: Sequence[Sample] | None) -> None:
        if workers is self._current.workers:
            from ddplaunch.stacks.merge import standing

            before, now = _of_workers(self._before), _of_workers(samples or ())
            stuck = frozenset(rank for rank in before.keys() & now if standing(before[rank]) == standing(now[rank]))
            self.samples = self._before if stuck else self.samples
            self._loop.post(node.StuckFound(stuck, self._loop.now()))

    def keep_stacks(self, workers: Workers) -> None:
        """Write where these workers were to the folder of the run, if that is known."""
        if self.samples:
            from ddplaunch.stacks.merge import lines, merge

            text = "\n".join(map(str, lines(merge(self.samples, threads=True), "", threads=True)))
            workers.keep_stacks(visible(f"{text}\n").encode(errors="replace"))

    def observe(self, workers: Workers, *, asks: bool) -> None:
        """Look whether any of these workers has moved."""
        if self._observer is None:
            from ddplaunch.agent.observer import Observer  # most jobs need none

            self._observer = Observer(self._loop, self._taker)
        self._observer.look(workers, partial(self._observed, workers), asks=asks)

    def _observed(self, workers: Workers, moved: bool) -> None:
        if workers is self._current.workers:
            self._loop.post(node.Observed(moved, self._loop.now()))

    def answer(self, number: int, question: Question, plan: Plan) -> None:
        """Answer a question about the workers, now or later, unless too many are being answered.

        `plan` tells of the workers while there are none.
        """
        from ddplaunch.agent.answers import answer  # only a job that is looked into needs it
        from ddplaunch.control.questions import NoAnswer

        if number in self._asked:
            return  # it was asked before
        if len(self._asked) >= MAX_QUESTIONS:
            self._answered(number, NoAnswer(f"answers {MAX_QUESTIONS} questions just now, and no more at once"))
            return
        debugged = self._debuggers.ranks if self._debuggers is not None else frozenset[int]()
        reply = partial(self._answered, number)
        asked = answer(question, self._current.workers, plan, debugged, self._taker, reply)
        if asked is not None and asked.pid:
            self._asked[number] = asked

    def _answered(self, number: int, answer: Answer) -> None:
        from ddplaunch.control.questions import Answered

        self._asked.pop(number, None)
        self._loop.post(QuestionAnswered(Answered(number, answer)))

    def forget(self, number: int) -> None:
        """Have the child that would answer this question end."""
        if (asked := self._asked.get(number)) is not None:
            asked.give_up()

    @property
    def debuggers(self) -> Debuggers:
        """Where workers ask for what a debugger needs."""
        if self._debuggers is None:
            from ddplaunch.agent.debuggers import Debuggers  # few jobs are debugged

            self._debuggers = Debuggers(self._loop, self._context, self._current)
        return self._debuggers

    def detach_debuggers(self) -> None:
        """Have no worker stay in a debugger."""
        if self._debuggers is not None:
            self._debuggers.detach_all()

    def attach(self, rank: int, client: Client) -> None:
        """Have a worker open a debugger for a client, which is told if that cannot be."""
        from ddplaunch.agent.debuggers import CannotAttach  # few jobs are debugged

        try:
            self.debuggers.attach(rank, client)
        except CannotAttach as error:
            client.refuse(str(error))

    def forget_client(self, number: int) -> None:
        """Have no worker come for a client that has gone."""
        if self._debuggers is not None:
            self._debuggers.forget(number)

    def close(self) -> None:
        """Release all."""
        if self._debuggers is not None:
            self._debuggers.close()


def _of_workers(samples: Sequence[Sample]) -> dict[int, Sample]:
    """Return the samples of workers whose stacks are known, by rank."""
    return {one.rank: one for one in samples if one.main and not (one.child or one.ended)}
