"""What srun writes, where the command in an allocation reads it: all of it with --live, its stderr if there are several nodes.

srun passes on the lines of the agents, and adds lines of its own to its stderr, which alone tell that a task could not begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from ddplaunch.reach.pipes import FULL, MESSAGE, STDERR, STDOUT, OutputQueue
from ddplaunch.reach.slurm.task_end import TaskEnd, TaskEnds
from ddplaunch.system.loop.loop import Loop

_STREAMS = {1: STDOUT, 2: STDERR}


class StepOutput:
    """Passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(
        self, loop: Loop, queue: OutputQueue, fds: Mapping[int, int], on_task_end: Callable[[TaskEnd], None]
    ) -> None:
        """Read these descriptors, by that of srun which each is: 1, 2 or both. `on_task_end` gets the ends that srun reports."""
        self._loop = loop
        self._queue = queue
        self._streams = {fd: _STREAMS[of_srun] for of_srun, fd in fds.items()}
        self._task_ends = TaskEnds()
        self._on_task_end = on_task_end
        self._reads = False
        self.writes_itself = False  # the front is lost: what comes is written to our own stdout and stderr
        for fd in self._streams:
            os.set_blocking(fd, False)
        self.update()

    def update(self) -> None:
        """Begin to read if the queue to the front is less than half full, and stop once it is full: not at each message."""
        reads = not self._queue.full if self._reads else self._queue.size < FULL // 2
        if reads != self._reads:
            self._reads = reads
            for fd in self._streams:
                if reads:
                    self._loop.watch(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]  # fd is bound here
                else:
                    self._loop.unwatch(fd)

    def _read(self, fd: int) -> bool:
        """Pass a piece on; return whether there was one. Called by the loop."""
        try:
            data = os.read(fd, MESSAGE)
        except BlockingIOError:
            return False
        if data:
            stream = self._streams[fd]
            if self.writes_itself:
                with suppress(OSError):  # nobody reads it any more
                    os.write(1 if stream == STDOUT else 2, data)
            else:
                self._queue.put(stream, data)
            if stream == STDERR:
                for end in self._task_ends.feed(data):
                    self._on_task_end(end)
        else:
            self._loop.unwatch(fd)
            del self._streams[fd]
            os.close(fd)
        return bool(data)

    def drain(self) -> None:
        """Pass on what is left, once srun has ended."""
        for fd in list(self._streams):
            while self._read(fd):
                pass
