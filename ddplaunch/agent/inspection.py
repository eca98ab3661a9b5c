"""What looks into the workers of this node while they run: their stacks, whether they move, what is asked of them, debuggers.

It is made when it is first needed; it decides nothing, and what it finds becomes events.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.setup import AgentSetup
from ddplaunch.agent.stack_taker import StackTaker
from ddplaunch.agent.workers import Workers
from ddplaunch.errors import visible
from ddplaunch.process import clock
from ddplaunch.stacks import Sample
from ddplaunch.supervise import node

if TYPE_CHECKING:
    from ddplaunch.agent.debuggers import Debuggers
    from ddplaunch.agent.observer import Observer
    from ddplaunch.control.questions import Answer, Question
    from ddplaunch.plan import Plan
    from ddplaunch.process.ask import Asked


class Inspection:
    """Of one generation after another; `workers` gives those that there are."""

    def __init__(
        self,
        setup: AgentSetup,
        selector: selectors.BaseSelector,
        workers: Callable[[], Workers | None],
        feed: Callable[[node.Event], None],
        write: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._selector = selector
        self._workers = workers
        self._feed = feed
        self._write = write
        self._taker = StackTaker(selector, setup.draft.workers[0].host)
        self._observer: Observer | None = None
        self._debuggers: Debuggers | None = None
        self.samples: tuple[Sample, ...] = ()  # where the workers were when they had to end

    def begin(self) -> None:
        """Forget what was seen of the last generation."""
        self._observer, self.samples = None, ()

    def take_stacks(self, workers: Workers, within: float, *, ras: bool) -> None:
        """Find out where these workers are, which have to end."""
        self._taker.take(workers.running.values(), within, partial(self._stacks_taken, workers), made=tuple, ras=ras)

    def _stacks_taken(self, workers: Workers, samples: Sequence[Sample] | None) -> None:
        if workers is self._workers():  # those of the generation before have ended by themselves
            self.samples = tuple(samples or ())
            waiting = frozenset(self._standing()) if self.samples else frozenset[int]()
            self._feed(node.StacksTaken(clock.now(), waiting))

    def _standing(self, samples: Sequence[Sample] | None = None) -> dict[int, object]:
        """Where each worker stands that waits in a collective, by rank; without samples, by those that were taken for its end."""
        from ddplaunch.stacks.merge import is_waiting, standing

        found = self.samples if samples is None else samples
        return {one.rank: standing(one) for one in found if not (one.child or one.ended) and is_waiting(one)}

    def look_for_stuck(self, workers: Workers, ranks: Collection[int], within: float) -> None:
        """Find out which of these workers still wait where they did when their stacks were taken."""
        running = [workers.running[rank] for rank in ranks if rank in workers.running]
        self._taker.take(running, within, partial(self._stuck_found, workers), made=tuple)

    def _stuck_found(self, workers: Workers, samples: Sequence[Sample] | None) -> None:
        if workers is self._workers():
            before = self._standing()
            stuck = (rank for rank, at in self._standing(samples or ()).items() if before.get(rank) == at)
            self._feed(node.StuckFound(frozenset(stuck), clock.now()))

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

            self._observer = Observer(self._taker)
        self._observer.look(workers, partial(self._observed, workers), asks=asks)

    def _observed(self, workers: Workers, moved: bool) -> None:
        if workers is self._workers():
            self._feed(node.Observed(moved, clock.now()))

    def answer(self, question: Question, plan: Plan, reply: Callable[[Answer], None]) -> Asked[Any] | None:
        """Answer a question about the workers, now or later, by a call of `reply`; `plan` tells of them while there are none.

        Return the child that answers later, if one does.
        """
        from ddplaunch.agent.answers import answer  # only a job that is looked into needs it

        debugged = self._debuggers.ranks if self._debuggers is not None else frozenset[int]()
        return answer(question, self._workers(), plan, debugged, self._taker, reply)

    @property
    def debuggers(self) -> Debuggers:
        """Where workers ask for what a debugger needs."""
        if self._debuggers is None:
            from ddplaunch.agent.debuggers import Debuggers  # few jobs are debugged

            self._debuggers = Debuggers(self._setup, self._selector, self._workers, self._feed, self._write)
        return self._debuggers

    def detach_debuggers(self) -> None:
        """Have no worker stay in a debugger."""
        if self._debuggers is not None:
            self._debuggers.detach_all()

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        return self._debuggers.deadline if self._debuggers is not None else None

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        if self._debuggers is not None:
            self._debuggers.expire(now)

    @property
    def pids(self) -> frozenset[int]:
        """The processes that take stacks just now."""
        return self._taker.pids

    def close(self) -> None:
        """Release all."""
        self._taker.close()
        if self._debuggers is not None:
            self._debuggers.close()
