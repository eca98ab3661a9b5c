"""Looks whether the workers of a generation move. Asks them only where /proc does not tell.

A worker moves if it, or a process below it, has written to its pipes, read or written files, computed, started or ended a
process. One that computes and does nothing else moves too, unless it waits in a collective, and in the same one as at the look
before: that may be all that keeps the CPU busy. A worker that cannot be judged counts as moving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddplaunch.agent.stack_taker import StackTaker
from ddplaunch.agent.workers import Workers
from ddplaunch.loop.loop import Loop
from ddplaunch.process.child import RunningWorker
from ddplaunch.process.tree import Footprint, footprint
from ddplaunch.stacks import Sample
from ddplaunch.stacks.merge import is_waiting, standing

_IDLE = 0.01  # of a CPU: threads that look from time to time whether something is to be done need less
_LEAST_CPU = 0.02  # seconds: two ticks of the clock
_LEAST_BYTES = 1 << 16  # that are more than one thread telling another to wake up
_WITHIN = 2.0  # seconds to take stacks


class Observer:
    """What was seen of one generation at the last look."""

    def __init__(self, loop: Loop, taker: StackTaker) -> None:
        self._loop = loop
        self._taker = taker
        self._at = 0.0
        self._seen: dict[int, Footprint] = {}
        self._places: dict[int, object] = {}  # in which collective those wait that are busy

    def look(self, workers: Workers, observed: Callable[[bool], None], *, asks: bool = True) -> None:
        """Call `observed` with whether any worker has moved since the last look, now or once they were asked.

        `asks`: those that compute give their stacks; else only torch is asked, and one with a terminal counts as moving.
        """
        running = {rank: worker for rank, worker in workers.running.items() if worker.look() is None}
        before, since = self._seen, self._at
        self._at, self._seen = self._loop.now(), _footprints(running)
        busy = []
        for rank, worker in running.items():
            least = 1 if workers.has_terminal(rank) else _LEAST_BYTES
            may_ask_user = workers.has_terminal(rank) and not asks
            if (
                may_ask_user
                or workers.has_written(rank, since)
                or rank not in before
                or _moved(before[rank], self._seen[rank], least)
            ):
                self._places.clear()
                observed(True)
                return
            if self._seen[rank].cpu_seconds - before[rank].cpu_seconds > max(_LEAST_CPU, _IDLE * (self._at - since)):
                busy.append(worker)
        if not busy:
            observed(False)
            return

        def taken(samples: Sequence[Sample] | None) -> None:
            waits = is_waiting if asks else _has_called
            places = {one.rank: standing(one) for one in samples or () if not one.child and waits(one)}
            moved = any(
                worker.rank not in places or places[worker.rank] != self._places.get(worker.rank) for worker in busy
            )
            self._places = places
            self._seen = _footprints(running)  # to be asked was no movement
            observed(moved)

        self._taker.take(busy, _WITHIN, taken, made=tuple, stacks=asks)


def _footprints(running: dict[int, RunningWorker]) -> dict[int, Footprint]:
    return {rank: footprint(worker.pid) for rank, worker in running.items()}


def _moved(before: Footprint, now: Footprint, least: int) -> bool:
    return now.is_held or now.pids != before.pids or now.transferred - before.transferred >= least


def _has_called(sample: Sample) -> bool:
    """Whether it has called a collective that is not completed."""
    return any(not (call.done or call.is_p2p) for group in sample.groups or () for call in group.calls)
