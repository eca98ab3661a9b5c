"""Pipes of frames between the dispatcher and an agent, to whom they are stdin and stdout. Decides nothing."""

from __future__ import annotations

import os
import selectors
from collections import deque

from ddplaunch.process import clock
from ddplaunch.remote.protocol import TO_HOST, FrameError, PipeDecoder, greeting, pack

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
        self._queue = deque([memoryview(first)] if first else [])
        self.size = len(first)  # bytes waiting
        self.sent = 0  # bytes written so far
        self.broken = False  # the reader has closed it: everything is dropped
        self.flush()

    def fileno(self) -> int:
        """The descriptor to watch for writability while anything waits."""
        return self._fd

    def put(self, tag: bytes, data: bytes) -> None:
        """Queue a frame, and send what can be sent at once."""
        if self.broken:
            return
        frame = pack(tag, data)
        self._queue.append(memoryview(frame))
        self.size += len(frame)
        self.flush()

    def flush(self) -> None:
        """Write until there is no room left."""
        while self._queue:
            try:
                written = os.write(self._fd, self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self.abandon()
                return
            self.size -= written
            self.sent += written
            if written == len(self._queue[0]):
                self._queue.popleft()
            else:
                self._queue[0] = self._queue[0][written:]

    def abandon(self) -> None:
        """Drop all output, queued and to come."""
        self.broken = True
        self._queue.clear()
        self.size = 0

    def close(self) -> None:
        """Close it in this process."""
        os.close(self._fd)


def claim_stdio() -> tuple[InputPipe, OutputPipe]:
    """Send the greeting; from now on stdin and stdout are for frames alone: other code reads /dev/null and prints to stderr."""
    pipes = InputPipe(os.dup(0)), OutputPipe(os.dup(1), greeting())
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    os.close(devnull)
    return pipes
