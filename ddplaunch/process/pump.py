"""Reads what workers write: one pipe per stream, without blocking. Shows nothing; passes bytes on as they came."""

from __future__ import annotations

import os
from collections.abc import Callable

from ddplaunch.process.linux import grow_pipe, unread

CHUNK = 1 << 16  # bytes read at once
PIPE = 1 << 18  # bytes that a worker can write before it blocks
PIPES = 1 << 25  # bytes of all pipes; above 64 MiB a user's further pipes are tiny (pipe-user-pages-soft, pipe(7))


def room(pipes: int) -> int:
    """Return the size of each of so many pipes."""
    return min(PIPE, PIPES // max(1, pipes))


class Pump:
    """The reading end of one stream of one worker."""

    def __init__(self, sink: Callable[[bytes], None], size: int = PIPE) -> None:
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        grow_pipe(self.fd, size)
        self._sink = sink
        self.open = True

    def started(self) -> None:
        """Close our copy of the writing end, so that the end of the stream can be seen."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def read(self) -> bool:
        """Pass one chunk on; False if there was none, for now or, with `open` False, for good."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.open = False
            return False
        self._sink(data)
        return True

    def drain(self) -> None:
        """Pass on everything that was written so far, and no more: what a worker left behind may write for ever."""
        left = unread(self.fd)
        while left > 0:
            data = os.read(self.fd, min(CHUNK, left))
            left -= len(data)
            self._sink(data)

    def close(self) -> None:
        """Close both ends."""
        self.started()
        os.close(self.fd)
