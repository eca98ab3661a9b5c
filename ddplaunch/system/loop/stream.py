"""Sends and receives over a stream of bytes: keeps what the other side does not take yet, and takes frames apart.

A frame is a length word and as many bytes. Opens nothing, never blocks, looks into no frame. A frame above the limit is refused
by its length word alone, so that the receiver never keeps more than one frame.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from socket import socket

from ddplaunch.system.loop.loop import WRITE, Loop

_BLOCK = 1 << 16  # bytes of small pieces that wait together

Buffer = bytes | bytearray | memoryview


class SendBuffer:
    """Queues what a socket or pipe does not take at once: bytes of a stream, or messages that must stay whole."""

    def __init__(self, file: socket | int) -> None:
        """Send to a socket, or to the descriptor of a pipe; neither may block. -1: to nothing, if nothing is ever put."""
        self._file = file
        self._blocks: deque[bytearray] = deque()  # what waits
        self._sent_of_first = 0  # bytes of the first block
        self.size = 0  # bytes that wait
        self.sent = 0  # bytes that were taken, ever

    def put(self, *pieces: Buffer, joins: bool = True) -> None:
        """Send these pieces as far as there is room, and queue the rest.

        `joins`: the rest may be sent in one piece with bytes that were queued before; False for messages.

        Raises OSError: the other side has closed.
        """
        sent = 0
        if not self._blocks:  # else these pieces come after what waits
            try:
                sent = self._send(pieces)
            except BlockingIOError:
                pass
            self.sent += sent
        if sent == sum(map(len, pieces)):
            return
        rest = memoryview(b"".join(pieces))[sent:]
        is_joined = joins and self.extend(rest, most=_BLOCK)  # to the last block, if that has room
        if not is_joined:
            self._blocks.append(bytearray(rest))
            self.size += len(rest)

    def extend(self, piece: Buffer, *, most: int) -> bool:
        """Add to what is kept last, if that has no more than so many bytes then; return whether it was added."""
        if not self._blocks or len(self._blocks[-1]) + len(piece) > most:
            return False
        self._blocks[-1] += piece
        self.size += len(piece)
        return True

    def _send(self, pieces: Sequence[Buffer]) -> int:
        return os.writev(self._file, pieces) if isinstance(self._file, int) else self._file.sendmsg(pieces)

    def flush(self) -> None:
        """Send what waits, until nothing does or there is no room. Raises OSError: the other side has closed."""
        while self._blocks:
            try:
                sent = self._send((memoryview(self._blocks[0])[self._sent_of_first :],))
            except BlockingIOError:
                return
            self.size -= sent
            self.sent += sent
            self._sent_of_first += sent
            if self._sent_of_first == len(self._blocks[0]):
                self._blocks.popleft()
                self._sent_of_first = 0

    def take(self) -> list[bytes]:
        """Return what waits, and keep none of it."""
        rest = [bytes(block) for block in self._blocks]
        if rest:
            rest[0] = rest[0][self._sent_of_first :]
        self._blocks.clear()
        self.size = self._sent_of_first = 0
        return rest


class Outgoing:
    """A SendBuffer that a loop empties. Never blocks; bounded if the owner watches `size`."""

    def __init__(self, loop: Loop | None, file: socket | int) -> None:
        """Send to `file` as `SendBuffer` does, whenever the loop finds room there; without a loop, only `put` sends."""
        self._loop = loop
        self._file = file
        self._buffer = SendBuffer(file)
        self.broken = False  # the other side has closed: everything is dropped

    @property
    def size(self) -> int:
        """The bytes that wait."""
        return self._buffer.size

    @property
    def sent(self) -> int:
        """The bytes that the other side has taken, ever."""
        return self._buffer.sent

    def abandon(self) -> None:
        """Drop all bytes that wait, and all that come."""
        self.broken = True
        self._buffer.take()
        self._watch()

    def _put(self, *pieces: Buffer, joins: bool = True) -> None:
        """Send these pieces as far as there is room, and keep the rest; see `SendBuffer.put`."""
        self._try(lambda: self._buffer.put(*pieces, joins=joins))

    def _try(self, send: Callable[[], None]) -> None:
        try:
            send()
        except OSError:
            self.abandon()
        self._watch()

    def _watch(self) -> None:
        if self._loop is not None and self.size:
            self._loop.watch(self._file, lambda: self._try(self._buffer.flush), WRITE)
        elif self._loop is not None:
            self._loop.unwatch(self._file)


LENGTH_WORD = 4  # bytes of the length word, big-endian


class FrameError(Exception):
    """What the other side did wrong, as a predicate."""


def head(length: int) -> bytes:
    """Return what comes before so many bytes."""
    return length.to_bytes(LENGTH_WORD)


def pack(*pieces: bytes) -> bytes:
    """Return these pieces as one frame."""
    return b"".join((head(sum(map(len, pieces))), *pieces))


class Decoder:
    """The receiving end of a stream: takes bytes in pieces of any size, and gives frames."""

    __slots__ = ("_buffer", "limit", "tail")

    def __init__(self, limit: int) -> None:
        self._buffer = bytearray()
        self.limit = limit  # bytes of a frame
        self.tail = 0  # bytes that follow each frame and that its length does not count

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
        self._buffer += data

    @property
    def beginning(self) -> bytes:
        """The first bytes that were not taken, to show what came in place of a frame."""
        return bytes(self._buffer[:20])

    def take(self) -> bytes | None:
        """Return the next frame, without its length word, with the `tail` bytes behind it; None while these are incomplete.

        Raises FrameError: the next frame is longer than it may be.
        """
        buffer = self._buffer
        if len(buffer) < LENGTH_WORD:
            return None
        length = int.from_bytes(buffer[:LENGTH_WORD])
        if length > self.limit:
            raise FrameError(f"sent a frame of {length} bytes, at most {self.limit} are allowed")
        end = LENGTH_WORD + length + self.tail
        if len(buffer) < end:
            return None
        frame = bytes(buffer[LENGTH_WORD:end])
        del buffer[:end]
        return frame
