"""--live in the watcher of a step: srun's output passes through here. Without --live srun writes to the terminal itself."""

from __future__ import annotations

import os

from ddplaunch.reach.pipes import FULL, MESSAGE, STDERR, STDOUT, OutputQueue
from ddplaunch.system.loop.loop import Loop


class StepOutput:
    """Passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(self, loop: Loop, queue: OutputQueue, fds: tuple[int, int]) -> None:
        """Read these descriptors, which are srun's stdout and stderr."""
        self._loop = loop
        self._queue = queue
        self._streams = dict(zip(fds, (STDOUT, STDERR), strict=True))
        self._reads = False
        for fd in fds:
            os.set_blocking(fd, False)
        self.update()

    def update(self) -> None:
        """Read, or leave alone, as the queue has room."""
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
            self._queue.put(self._streams[fd], data)
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
