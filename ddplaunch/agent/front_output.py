"""What the front writes: to stdout, to stderr, to a caller in Python, and to a status area on the terminal. It may block."""

from __future__ import annotations

import errno
import os
import select
from typing import TYPE_CHECKING

from ddplaunch.agent.pipes import BARS, CONTROL, MESSAGE, STDERR, STDOUT
from ddplaunch.process.terminal import size_of

if TYPE_CHECKING:  # most jobs draw no bars
    import socket

    from ddplaunch.output.area import StatusArea

_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_READER_LEFT = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal: no error of ours, and workers do not die of it


class FrontOutput:
    """Where the agent's messages go. A stdout or stderr that takes nothing is dropped, and the rest goes on."""

    def __init__(self, control: int | None) -> None:
        """`control` is a descriptor for what the agent sends to a caller in Python, a line each."""
        self._fds = {STDOUT: 1, STDERR: 2}
        if control is not None:
            self._fds[CONTROL] = control
        self.written = 0  # bytes
        self.failed: str | None = None  # why output could not be written
        self._area: StatusArea | None = None  # since the first bar
        self._terminals: tuple[bytes, ...] = ()  # where lines have to stand above the area, on the last of them

    def show(self, reader: socket.socket) -> None:
        """Write what the agent sends until it ends."""
        buffer = bytearray(MESSAGE + 1)
        view = memoryview(buffer)
        more = select.poll()
        more.register(reader, select.POLLIN)
        while size := reader.recv_into(buffer):
            stream, data = bytes(view[:1]), view[1:size]
            if stream == BARS:
                self._take_bars(bytes(data))
            elif stream == CONTROL:
                self._write(stream, memoryview(bytes(data) + b"\n"))
            elif self._area is not None and stream in self._terminals:
                self._write(stream, memoryview(self._area.write(bytes(data))))
            else:
                self._write(stream, data)
            # after a time in which the terminal took nothing, the last of many states is drawn
            if self._area is not None and not more.poll(0):
                self._draw(self._area)
        if self._area is not None:
            self._write(self._terminals[-1], memoryview(self._area.write(b"")))

    def forget_area(self) -> None:
        """Leave what is drawn where it is: another program writes below it."""
        if self._area is not None:
            self._area.forget()

    def _take_bars(self, message: bytes) -> None:
        from ddplaunch.output.area import StatusArea
        from ddplaunch.output.bars import unpack

        if self._area is None:
            self._terminals = tuple(stream for stream in _NAMES if os.isatty(self._fds.get(stream, -1)))
            self._area = StatusArea() if self._terminals else None
        if self._area is not None:
            self._area.show(unpack(message))

    def _draw(self, area: StatusArea) -> None:
        stream = self._terminals[-1]
        if stream in self._fds:
            self._write(stream, memoryview(area.draw(size_of(self._fds[stream]))))

    def _write(self, stream: bytes, data: memoryview) -> None:
        if stream not in self._fds:
            return
        try:
            while data:
                written = _write(self._fds[stream], data)
                self.written += written
                data = data[written:]
        except OSError as error:
            del self._fds[stream]
            if stream != CONTROL and error.errno not in _READER_LEFT:
                self.failed = (error.strerror or str(error)).lower()
                print_now(f"error: cannot write to {_NAMES[stream]}: {self.failed}\n")


def _write(fd: int, data: memoryview) -> int:
    while True:
        try:
            return os.write(fd, data)
        except BlockingIOError:
            # another process has set O_NONBLOCK on the file that it shares with us: it is not ours to change
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def print_now(text: str) -> None:
    """Write to stderr, whatever comes of it."""
    try:
        os.write(2, text.encode())
    except OSError:
        pass
