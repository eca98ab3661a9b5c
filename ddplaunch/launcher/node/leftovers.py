"""What workers leave behind: the agent, a subreaper, looks for such processes, signals and reaps them."""

from __future__ import annotations

import os
import time

from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.generations import Generations
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.tree import descendants, reap, signal_leftovers

# rest after a look at all children, in times of what the look took: thousands may end one by one
_REST = 9
_REST_OF_SWEEP = 1


class Leftovers:
    """Posts when there is something to reap, but not all the time."""

    def __init__(self, loop: Loop, files: FileQueue, generations: Generations) -> None:
        """Look for processes that are neither workers of these generations nor the one that takes `files`."""
        self._loop = loop
        self._files = files
        self._generations = generations
        self._rests_until = 0.0
        self._due = loop.timer(None, self._post)

    def child_ended(self) -> None:
        """Note that some child has ended."""
        if not self._due.is_set:
            self._due.set(max(self._loop.now(), self._rests_until))

    def _post(self) -> None:
        self._loop.post(events.ReapDue())

    def reap(self) -> None:
        """Reap what has ended, except for workers, which are reaped together, and for children that others reap."""
        began, workers = time.monotonic(), self._generations.workers
        reap(self._others | (workers.pids if workers is not None else frozenset()))
        self._rest(time.monotonic() - began, _REST)

    def find(self, signum: int = 0, *, sparing: bool = False) -> tuple[str, ...]:
        """Return what is left, each as in a sentence, and signal it if `signum` is one.

        `sparing` spares those that clean up and then exit by themselves.
        """
        if signum and sparing and self._generations.workers is not None:
            self._generations.workers.dismiss_services()
        began = time.monotonic()
        left = [*descendants(os.getpid(), but_for=self._others), *self._generations.starter.leftovers()]
        if signum:
            signal_leftovers(signum, left, sparing=sparing)
        self._rest(time.monotonic() - began, _REST_OF_SWEEP)
        return tuple(map(str, left))

    @property
    def _others(self) -> frozenset[int]:
        """Our children that are neither workers that live nor left behind by any."""
        workers, starter = self._generations.workers, self._generations.starter
        ended = workers.ended if workers is not None else frozenset[int]()
        return ended | starter.pids | self._loop.asked_pids | {self._files.pid}

    def _rest(self, took: float, times: int) -> None:
        self._rests_until = self._loop.now() + took * times
