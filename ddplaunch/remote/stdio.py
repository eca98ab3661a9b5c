"""Pipes of frames between the dispatcher and an agent, to whom they are stdin and stdout. Decides nothing."""

from __future__ import annotations

import os
import selectors
from functools import partial

from ddplaunch.loop.buffer import SendBuffer
from ddplaunch.loop.frames import FrameError
from ddplaunch.loop.loop import WRITE, Loop
from ddplaunch.process import clock
from ddplaunch.remote.protocol import TO_HOST, PipeDecoder, greeting, pack

_READ = 1 << 16  # bytes at a time


class InputPipe:
    """Frames from our stdin."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._decoder = PipeDecoder(TO_HOST)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._fd

    def read(self) -> bool:
        """Read what has arrived; return whether more may come."""
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._decoder.feed(data)
        return bool(data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the next complete frame, None if there is none yet.

        Raises:
            FrameError: what arrived is no frame.
        """
        return self._decoder.take()

    def wait(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Wait for a frame, `timeout` seconds at most; None if none came in time, or the stream has ended."""
        deadline = clock.now() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            try:
                while (frame := self.take()) is None:
                    if not clock.wait(selector, deadline) or not self.read():
                        return None
            except FrameError:
                return None
        return frame

    def close(self) -> None:
        """Close it in this process."""
        os.close(self._fd)


class OutputPipe:
    """Frames to the other side. Never blocks; bounded if its user watches `size`."""

    def __init__(self, fd: int, first: bytes = b"") -> None:
        """Send `first` before any frame."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = SendBuffer(partial(os.writev, fd))
        self._loop: Loop | None = None
        self.broken = False  # the reader has closed it: everything is dropped
        if first:
            self._put(first)

    @property
    def size(self) -> int:
        """The bytes that wait."""
        return self._buffer.size

    @property
    def sent(self) -> int:
        """The bytes that were taken, ever."""
        return self._buffer.sent

    def attach(self, loop: Loop) -> None:
        """Have the loop send what waits."""
        self._loop = loop
        self._watch()

    def put(self, tag: bytes, data: bytes) -> None:
        """Queue a frame, and send what can be sent at once."""
        if not self.broken:
            self._put(pack(tag, data))

    def _put(self, data: bytes) -> None:
        try:
            self._buffer.put(data)
        except OSError:
            self.abandon()
        self._watch()

    def _flush(self) -> None:
        try:
            self._buffer.flush()
        except OSError:
            self.abandon()
        self._watch()

    def _watch(self) -> None:
        if self._loop is not None and self.size:
            self._loop.watch(self._fd, self._flush, WRITE)
        elif self._loop is not None:
            self._loop.unwatch(self._fd)

    def abandon(self) -> None:
        """Drop all output, queued and to come."""
        self.broken = True
        self._buffer.take()
        self._watch()

    def close(self) -> None:
        """Close it in this process."""
        if self._loop is not None:
            self._loop.unwatch(self._fd)
        os.close(self._fd)


def claim_stdio() -> tuple[InputPipe, OutputPipe]:
    """Send the greeting; from now on stdin and stdout are for frames alone: other code reads /dev/null and prints to stderr."""
    pipes = InputPipe(os.dup(0)), OutputPipe(os.dup(1), greeting())
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    os.close(devnull)
    return pipes
