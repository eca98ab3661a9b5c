"""An authenticated connection in the agent's loop. Never blocks, starts no thread, counts no heartbeats, has no clock."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.control.frames import Decoder
from ddplaunch.control.handshake import Session
from ddplaunch.control.tcp import CLOSED, describe, host_of
from ddplaunch.loop.buffer import SendBuffer
from ddplaunch.loop.frames import FrameError
from ddplaunch.loop.loop import READ, WRITE, Loop

MAX_QUEUED = 8 << 20  # bytes waiting for a peer above which it is given up
CHUNK = 1 << 16  # bytes read or sent at once, so that a busy peer leaves time for the others
MAX_DISCARDED = 64  # chunks that are discarded when a connection is closed; more are not waited for

DOES_NOT_READ = "does not read"


class Peer:
    """The other side of an authenticated connection.

    Its owner sets `received` and `closed` as soon as it gets the peer. Both are called from the loop only, never from within
    `send` or `close`; `closed` is called once, and not after `close`. What the other side had sent before the connection
    broke is still received, even if sending already fails.
    """

    def __init__(self, loop: Loop, sock: socket.socket, address: str, session: Session, decoder: Decoder) -> None:
        self.address = address  # of the other side, numeric
        self.local_address = host_of(sock.getsockname())
        self.received: Callable[[bytes], None] = lambda payload: None  # until the owner sets it
        self.closed: Callable[[str], None] = lambda reason: None
        self._sock = sock
        self._loop = loop
        self._session = session
        self._decoder = decoder
        self._buffer = SendBuffer(sock.sendmsg)
        self._broken = ""  # why nothing can be sent any more
        self._open = True
        loop.watch(sock, self._ready)

    def __repr__(self) -> str:
        return f"<peer {self.address}, {'open' if self._open else 'closed'}>"

    def admit(self) -> None:
        """Take long frames from now on."""
        self._decoder.trust()

    def send(self, payload: bytes) -> None:
        """Send a payload of at most `frames.LIMIT` bytes; drop it if the connection is broken or closed."""
        if self._broken or not self._open:
            return
        try:
            self._buffer.put(self._session.seal(payload))
        except OSError as error:
            self._break(describe(error))
            return
        if self._buffer.size > MAX_QUEUED:
            self._break(DOES_NOT_READ)
        self._watch()

    def close(self) -> None:
        """Send what is queued as far as the socket takes it at once, and close.

        To be sure that the last frames arrive, wait until the other side closes.
        """
        if not self._open:
            return
        self._flush()
        try:
            self._sock.shutdown(socket.SHUT_WR)
            # to close a socket that holds unread data is a reset, which may overtake our last frames
            for _ in range(MAX_DISCARDED):
                if not self._sock.recv(CHUNK):
                    break
        except OSError:
            pass
        self._discard()

    def deliver(self) -> None:
        """Pass to the owner all whole frames that have arrived."""
        while self._open:
            try:
                frame = self._decoder.take()
                if frame is None:
                    return
                payload = self._session.open(frame)
            except FrameError as error:
                self._end(str(error))
                return
            self.received(payload)

    def _ready(self) -> None:
        if self._broken == DOES_NOT_READ:
            self._end(DOES_NOT_READ)
            return
        self._flush()
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(describe(error))
            return
        if data:
            self._decoder.feed(data)
            self.deliver()
        else:
            self._end(self._broken or CLOSED)

    def _flush(self) -> None:
        try:
            self._buffer.flush()
        except OSError as error:
            self._break(describe(error))
        self._watch()

    def _watch(self) -> None:
        self._loop.watch(self._sock, self._ready, READ | WRITE if self._buffer.size else READ)

    def _break(self, reason: str) -> None:
        """Give up sending. The loop sees the shutdown and calls the owner, which must not be re-entered here."""
        self._broken = reason
        self._buffer.take()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster

    def _end(self, reason: str) -> None:
        self._discard()
        self.closed(reason)

    def _discard(self) -> None:
        self._open = False
        self._buffer.take()
        self._loop.unwatch(self._sock)
        self._sock.close()
