"""Has this node's workers asked by a child, while the loop goes on: for stacks, and when they came to their collectives.

Waits for nothing; knows no reason why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ddplaunch.loop.loop import Loop
from ddplaunch.process.ask import FIRST
from ddplaunch.process.child import RunningWorker
from ddplaunch.stacks import Sample

if TYPE_CHECKING:
    from ddplaunch.control.questions import NodeArrivals
    from ddplaunch.loop.loop import Asked

T = TypeVar("T")
_LATE = 5.0  # seconds that a child may take longer than it has, on a busy machine, before it is killed


class StackTaker:
    """One taking after another, or several at once; each is answered by a call of its `reply`."""

    def __init__(self, loop: Loop, host: str) -> None:
        self._loop = loop
        self._host = host

    def take(
        self,
        workers: Iterable[RunningWorker],
        within: float,
        reply: Callable[[T | None], None],
        *,
        made: Callable[[Sequence[Sample]], T],
        native: bool = False,
        stacks: bool = True,
        ras: bool = False,
    ) -> Asked[T | None]:
        """Take the stacks of these workers and of their children in so many seconds; None: there is no room to.

        `made` makes in the child what `reply` gets. `native`: with frames of C. Without `stacks` only what torch tells of the
        collectives, and nobody gets a signal. `ras`: with what NCCL tells of all ranks.
        """
        found = list(workers)
        files = [worker.stacks for worker in found if worker.stacks is not None and stacks]
        until, host = time.monotonic() + within, self._host

        def question() -> T:
            from ddplaunch.stacks.take import Target, take  # the loop does not wait for an import

            left = iter(range(FIRST, FIRST + len(files)))
            targets = [
                Target(
                    worker.rank,
                    worker.pid,
                    next(left) if worker.stacks is not None and stacks else None,
                    worker.recorder,
                )
                for worker in found
            ]
            return made(take(targets, until=until, host=host, native=native, stacks=stacks, ras=ras))

        return self._ask(question, within, reply, files)

    def read_arrivals(
        self, recorders: Mapping[int, str], within: float, every: int, reply: Callable[[NodeArrivals | None], None]
    ) -> Asked[NodeArrivals | None]:
        """Have the recorders of these ranks asked; None: there is no room to."""
        until = time.monotonic() + within

        def question() -> NodeArrivals:
            from ddplaunch.stacks.read_arrivals import read

            return read(recorders, until=until, every=every)

        return self._ask(question, within, reply)

    def _ask(
        self,
        question: Callable[[], T],
        within: float,
        reply: Callable[[T | None], None],
        descriptors: Sequence[int] = (),
    ) -> Asked[T | None]:
        def guarded() -> T | None:
            try:
                return question()
            except Exception:  # noqa: BLE001 - whatever it is, it is no reason to end a job
                return None

        return self._loop.ask(guarded, None, reply, descriptors, within + _LATE)
