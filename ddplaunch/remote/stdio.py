"""Our ends of the two pipes to whoever started this agent: frames come in, frames go out. Decides nothing."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from ddplaunch.remote.protocol import TO_HOST, Decoder, FrameError, greeting, pack

_READ = 1 << 16  # bytes at a time


class InputPipe:
    """Frames from our stdin."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._decoder = Decoder(TO_HOST)

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._fd

    def read(self) -> bool:
        """Take in what is there; say whether more may come."""
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._decoder.feed(data)
        return bool(data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Give the next frame that is there.

        Raises:
            FrameError: what is there is no frame.
        """
        return self._decoder.take()

    def wait(self, patience: float) -> tuple[bytes, bytes] | None:
        """Wait for a frame, `patience` seconds at most; None if none comes, or never will."""
        give_up = time.monotonic() + patience
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        try:
            while (frame := self.take()) is None:
                left = give_up - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000) or not self.read():
                    return None
        except FrameError:
            return None
        return frame

    def close(self) -> None:
        """Close it in this process."""
        os.close(self._fd)


class OutputPipe:
    """Frames to our stdout, after the greeting. Never blocks, never grows without end if its user heeds `size`."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._queue = deque([memoryview(greeting())])
        self.size = len(self._queue[0])  # bytes waiting
        self.sent = 0  # bytes that were taken, ever
        self.broken = False  # nobody will read any more: everything is dropped
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
        """Drop what waits and whatever comes."""
        self.broken = True
        self._queue.clear()
        self.size = 0

    def close(self) -> None:
        """Close it in this process."""
        os.close(self._fd)


def own() -> tuple[InputPipe, OutputPipe]:
    """Take our stdin and stdout for frames alone; whoever reads or prints from now on gets /dev/null and our stderr."""
    pipes = InputPipe(os.dup(0)), OutputPipe(os.dup(1))
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    os.close(devnull)
    return pipes
