"""Has the stacks of this node's workers taken by a child, while the loop goes on. Waits for nothing; knows no reason why."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Sequence

from ddplaunch.process.ask import FIRST, Asked
from ddplaunch.process.worker import RunningWorker
from ddplaunch.stacks import Sample


class StackTaker:
    """One taking after another, or several at once; each is answered by a call of its `reply`."""

    def __init__(self, selector: selectors.BaseSelector, host: str) -> None:
        self._selector = selector
        self._host = host
        self._asked: list[Asked[Sequence[Sample] | None]] = []

    @property
    def pids(self) -> frozenset[int]:
        """The processes that take stacks just now."""
        return frozenset(asked.pid for asked in self._asked if asked.pid)

    def take(
        self,
        workers: Iterable[RunningWorker],
        within: float,
        reply: Callable[[Sequence[Sample] | None], None],
        *,
        native: bool = False,
    ) -> None:
        """Take the stacks of these workers and of their children in so many seconds; None: there is no room to.

        `native`: with frames of C.
        """
        found = list(workers)
        files = [worker.stacks for worker in found if worker.stacks is not None]
        until, host = time.monotonic() + within, self._host

        def question() -> Sequence[Sample] | None:
            from ddplaunch.stacks.take import Target, take  # the loop does not wait for an import

            left = iter(range(FIRST, FIRST + len(files)))
            targets = [
                Target(worker.rank, worker.pid, None if worker.stacks is None else next(left), worker.recorder)
                for worker in found
            ]
            try:
                return take(targets, until=until, host=host, native=native)
            except Exception:  # noqa: BLE001 - whatever it is, it is no reason to end a job
                return None

        asked: Asked[Sequence[Sample] | None] = Asked(question, None, self._selector, reply, files)
        self._asked = [*(one for one in self._asked if one.pid), asked]

    def close(self) -> None:
        """Give up what is not answered yet."""
        for asked in self._asked:
            asked.give_up()
