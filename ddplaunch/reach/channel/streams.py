"""Streams of bytes between a command and a node, over a channel that carries messages: numbered, and each in a window.

Either side sends at most `WINDOW` chunks that the other has not written to its socket yet. So neither keeps more than that,
however little is read at the far end, and no stream holds up the channel. What flows is not looked into.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Annotated, Protocol

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


class StreamsOwner(Protocol):
    """Who has `Streams`, and a channel to their other side."""

    def send_chunk(self, chunk: Chunk) -> None:
        """Send a chunk to the other side."""

    def on_stream_ended(self, number: int) -> None:
        """Hear, once, that a stream is over."""


class Streams:
    """The streams whose local ends are sockets here, for the loop of an agent or of a command."""

    def __init__(self, loop: Loop, owner: StreamsOwner) -> None:
        """Have no stream yet."""
        self._loop = loop
        self.owner = owner
        self._streams: dict[int, _Stream] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, number: int, sock: socket.socket, within: float | None = None, late: bytes = b"") -> None:
        """Begin a stream: what is read from this socket is sent, and what comes is written to it.

        Unless data, or the end, comes from the other side in `within` seconds, the stream ends here with the words `late`.
        """
        sock.setblocking(False)
        no_reply_timer = self._loop.timer(None, lambda: self.finish(number, late))
        no_reply_timer.set(None if within is None else self._loop.now() + within)
        self._streams[number] = _Stream(self._loop, self, sock, number, no_reply_timer)

    def take(self, chunk: Chunk) -> None:
        """Take a chunk of the other side; one of a stream that is over changes nothing."""
        if (stream := self._streams.get(chunk.number)) is not None:
            stream.take(chunk)

    def finish(self, number: int, last: bytes = b"") -> None:
        """End a stream from here: write this to its socket as far as there is room, and close both sides."""
        if (stream := self._streams.get(number)) is not None:
            self.owner.send_chunk(Chunk(number))
            stream.finish(last)

    def close(self) -> None:
        """End all streams here, without a word to the other side."""
        for stream in list(self._streams.values()):
            stream.finish()

    def forget(self, number: int) -> None:
        """Forget a stream whose socket is closed. Called by the stream."""
        if self._streams.pop(number, None) is not None:
            self.owner.on_stream_ended(number)


class _Stream:
    """One stream: what its socket here gives goes to the other side in chunks, and the other side's chunks to the socket."""

    def __init__(self, loop: Loop, streams: Streams, sock: socket.socket, number: int, no_reply_timer: Timer) -> None:
        """Carry the bytes of `sock`; the timer ends the stream unless data, or the end, comes from the other side before."""
        self._loop = loop
        self._streams = streams
        self._owner = streams.owner
        self._sock = sock
        self._number = number
        self._no_reply_timer = no_reply_timer
        self._buffer = SendBuffer(sock)
        self._credit = WINDOW  # chunks that may be sent before the other side says that it has taken some
        self._unwritten = 0  # chunks of the other side that wait in the buffer
        self._other_side_has_ended = False  # then what waits in the buffer is all there is
        self._watch()

    def take(self, chunk: Chunk) -> None:
        """Write a chunk of the other side to the socket; end the stream if it is closed, or the window is overrun."""
        self._credit = min(WINDOW, self._credit + chunk.taken)
        is_reply = not chunk.taken  # data, or the end
        if is_reply:
            self._no_reply_timer.cancel()
        overruns_window = chunk.data and self._unwritten == WINDOW
        if overruns_window:
            self._end()
            return
        self._other_side_has_ended = self._other_side_has_ended or chunk.ends
        try:
            if chunk.data:
                self._unwritten += 1
                self._buffer.put(chunk.data)
        except OSError:
            self._end()
            return
        self._acknowledge_or_finish()

    def _acknowledge_or_finish(self) -> None:
        """Tell the other side that its chunks were taken, once all are; end the stream if that was all."""
        if not self._buffer.size and self._other_side_has_ended:
            self.finish()
            return
        if not self._buffer.size and self._unwritten:
            taken, self._unwritten = self._unwritten, 0
            self._owner.send_chunk(Chunk(self._number, taken=taken))
        self._watch()

    def _on_ready(self) -> None:
        """Write what waits to the socket; read a chunk from it and send that, if there is credit. Called by the loop."""
        reads = self._credit and not self._other_side_has_ended
        try:
            self._buffer.flush()
            data = self._sock.recv(CHUNK) if reads else None
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data == b"":  # the socket has ended; None: nothing was read now
            self._end()
            return
        if data:
            self._credit -= 1
            self._owner.send_chunk(Chunk(self._number, data))
        self._acknowledge_or_finish()

    def _watch(self) -> None:
        if self._sock.fileno() < 0:
            return
        reads = READ if self._credit and not self._other_side_has_ended else 0
        if events := reads | (WRITE if self._buffer.size else 0):
            self._loop.watch(self._sock, self._on_ready, events)
        else:
            self._loop.unwatch(self._sock)

    def _end(self) -> None:
        """End the stream because its socket has: the other side is told, unless it has ended the stream itself."""
        if not self._other_side_has_ended:
            self._owner.send_chunk(Chunk(self._number))
        self.finish()

    def finish(self, last: bytes = b"") -> None:
        """Close the socket, with `last` as its last bytes if there is room. A second call has no effect."""
        if self._sock.fileno() < 0:
            return
        if last:
            with suppress(OSError):
                self._buffer.put(last)  # which writes at once what the socket takes; the rest is lost
        self._no_reply_timer.cancel()
        self._loop.unwatch(self._sock)
        self._sock.close()
        self._streams.forget(self._number)
