"""Processes that workers leave behind: the agent, which adopts them (it is a subreaper), finds, signals and reaps them."""

from __future__ import annotations

import os
import time

from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.generations import Generations
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import descendants, reap, signal_leftovers

# rest after a look at all children, in times of what the look took: thousands may end one by one
_REST_AFTER_REAPING = 9
_REST_AFTER_SWEEP = 1


class Leftovers:
    """All processes below the agent that are none of its own. Posts `ReapDue` when some have ended, with a rest in between."""

    def __init__(self, loop: Loop, files: FileQueue, generations: Generations) -> None:
        """Leave alone the workers of these generations, and the process that writes `files`."""
        self._loop = loop
        self._files = files
        self._generations = generations
        self._rests_until = 0.0  # on the loop's clock: no `ReapDue` is posted before
        self._reap_timer = loop.timer(None, lambda: loop.post(events.ReapDue()))

    def on_child_ended(self) -> None:
        """Post `ReapDue` soon: some child has ended."""
        if not self._reap_timer.is_set:
            self._reap_timer.set(max(self._loop.now(), self._rests_until))

    def reap(self) -> None:
        """Reap what has ended, except for workers, which are reaped together, and for children that others reap."""
        began, workers = time.monotonic(), self._generations.workers
        reap(self._own_children | (workers.pids if workers is not None else frozenset()))
        self._rest_from_looking(times=_REST_AFTER_REAPING, as_long_as=time.monotonic() - began)

    def find(self, signum: int = 0, *, sparing: bool = False) -> tuple[str, ...]:
        """Return which processes are left, each as in a sentence ("pid 7 (sleep)"), and signal them if `signum` is not 0.

        `sparing` leaves out processes that clean up after others and then exit by themselves; NVIDIA's MPS daemon is told to.
        """
        if signum and sparing and self._generations.workers is not None:
            self._generations.workers.dismiss_services()
        began = time.monotonic()
        below_guard = self._generations.starter.leftovers()  # a guard, the parent of forked workers, adopts as we do
        left = [*descendants(os.getpid(), but_for=self._own_children), *below_guard]
        if signum:
            signal_leftovers(signum, left, sparing=sparing)
        # thousands may end one by one: for as long as this took, `reap` does not look
        self._rest_from_looking(times=_REST_AFTER_SWEEP, as_long_as=time.monotonic() - began)
        return tuple(map(str, left))

    @property
    def _own_children(self) -> frozenset[int]:
        """Our children that are neither workers that live nor left behind by any."""
        workers, starter = self._generations.workers, self._generations.starter
        ended = workers.ended if workers is not None else frozenset[int]()
        return ended | starter.pids | self._loop.asked_pids | {self._files.pid}

    def _rest_from_looking(self, *, times: int, as_long_as: float) -> None:
        """Look at no child for so many `times` the seconds that a look at all of them has taken."""
        self._rests_until = self._loop.now() + times * as_long_as
