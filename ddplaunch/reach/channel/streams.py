"""Streams of bytes between a command and a node, over a channel that carries messages: numbered, and each in a window.

Either side sends at most `WINDOW` chunks that the other has not written to its socket yet. So neither keeps more than that,
however little is read at the far end, and no stream holds up the channel. What flows is not looked into.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.system.fields import Number
from ddplaunch.system.loop.loop import READ, WRITE, Loop, Timer
from ddplaunch.system.loop.stream import SendBuffer

CHUNK = 1 << 15  # bytes
WINDOW = 16  # chunks


class Chunk(Struct, frozen=True, tag="chunk"):
    """A piece of a stream, or how many pieces of the other side were taken; neither: the stream has ended."""

    number: Number
    data: Annotated[bytes, Meta(max_length=CHUNK)] = b""
    taken: Annotated[int, Meta(ge=0, le=WINDOW)] = 0

    @property
    def ends(self) -> bool:
        """Whether the stream has ended."""
        return not self.data and not self.taken


class Streams:
    """The streams whose local ends are sockets here."""

    def __init__(
        self, loop: Loop, send: Callable[[Chunk], None], ended: Callable[[int], object] = lambda _: None
    ) -> None:
        """`send` takes each chunk for the other side; `ended` is told once which stream is over."""
        self._loop = loop
        self._send = send
        self._ended = ended
        self._streams: dict[int, _Stream] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, number: int, sock: socket.socket, within: float | None = None, late: bytes = b"") -> None:
        """Begin a stream: what is read from this socket is sent, and what comes is written to it.

        Unless the other side sends anything `within` seconds, the stream ends here with the words `late`.
        """
        sock.setblocking(False)
        stream = self._streams[number] = _Stream(self._loop, sock, number, self._send, self._over)
        stream.give_up = self._loop.timer(None, lambda: self.finish(number, late))
        stream.give_up.set(None if within is None else self._loop.now() + within)

    def take(self, chunk: Chunk) -> None:
        """Take a chunk of the other side; one of a stream that is over changes nothing."""
        if (stream := self._streams.get(chunk.number)) is not None:
            stream.take(chunk)

    def finish(self, number: int, last: bytes = b"") -> None:
        """End a stream from here: write this to its socket as far as there is room, and close both sides."""
        if (stream := self._streams.get(number)) is not None:
            self._send(Chunk(number))
            stream.finish(last)

    def close(self) -> None:
        """End all streams here, without a word to the other side."""
        for stream in list(self._streams.values()):
            stream.finish()

    def _over(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._ended(number)


class _Stream:
    def __init__(
        self, loop: Loop, sock: socket.socket, number: int, send: Callable[[Chunk], None], over: Callable[[int], None]
    ) -> None:
        """Carry the bytes of `sock` in chunks, and write the other side's chunks to `sock`; `over` is called at the end."""
        self._loop = loop
        self._sock = sock
        self._number = number
        self._send = send
        self._over = over
        self._buffer = SendBuffer(sock.sendmsg)
        self._room = WINDOW  # chunks that the other side takes now
        self._kept = 0  # chunks that wait in the buffer
        self._has_ended = False  # the other side has: what waits is all there is
        self.give_up: Timer | None = None  # the other side, while it has sent nothing
        self._watch()

    def take(self, chunk: Chunk) -> None:
        """Write a chunk of the other side to the socket; end the stream if the other side overruns the window."""
        self._room = min(WINDOW, self._room + chunk.taken)
        if self.give_up is not None and not chunk.taken:
            self.give_up.cancel()
        if chunk.data and self._kept == WINDOW:  # it knows no window
            self._end()
            return
        self._has_ended = self._has_ended or chunk.ends
        try:
            if chunk.data:
                self._kept += 1
                self._buffer.put(chunk.data)
        except OSError:
            self._end()
            return
        self._written()

    def _written(self) -> None:
        """Tell the other side that its chunks were taken, once all are; end the stream if that was all."""
        if not self._buffer.size and self._has_ended:
            self.finish()
            return
        if not self._buffer.size and self._kept:
            taken, self._kept = self._kept, 0
            self._send(Chunk(self._number, taken=taken))
        self._watch()

    def _on_ready(self) -> None:
        """Write what waits, and send a chunk of what was read, if the other side has room. Called by the loop."""
        try:
            self._buffer.flush()
            data = self._sock.recv(CHUNK) if self._room and not self._has_ended else None
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":
            self._end()
            return
        if data:
            self._room -= 1
            self._send(Chunk(self._number, data))
        self._written()

    def _watch(self) -> None:
        if self._sock.fileno() < 0:
            return
        reads = READ if self._room and not self._has_ended else 0
        if events := reads | (WRITE if self._buffer.size else 0):
            self._loop.watch(self._sock, self._on_ready, events)
        else:
            self._loop.unwatch(self._sock)

    def _end(self) -> None:
        """End the stream because its socket has: the other side is told, unless it has ended the stream itself."""
        if not self._has_ended:
            self._send(Chunk(self._number))
        self.finish()

    def finish(self, last: bytes = b"") -> None:
        """Close the socket, with `last` as its last bytes if there is room."""
        if self._sock.fileno() >= 0:
            with suppress(OSError):
                if last:
                    self._buffer.put(last)
            if self.give_up is not None:
                self.give_up.cancel()
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._over(self._number)
