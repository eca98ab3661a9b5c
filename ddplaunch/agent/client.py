"""One that has connected to the socket of the run: a request comes, replies go as far as they are read. Never waits for it."""

from __future__ import annotations

import socket

from ddplaunch import __version__
from ddplaunch.agent.events import ClientAsked, ClientGone, ClientsFailed
from ddplaunch.control import requests
from ddplaunch.control.handshake import Decoder, pack
from ddplaunch.coordinator.questions import Asker
from ddplaunch.errors import expendable
from ddplaunch.fields import Malformed, line
from ddplaunch.loop.loop import READ, WRITE, Loop
from ddplaunch.loop.stream import FrameError, SendBuffer

REQUEST_TIMEOUT = 5.0  # seconds in which a client has to send its request
READ_TIMEOUT = 10.0  # seconds, beyond those that the nodes have, in which it has to read the replies
_CHUNK = 1 << 16  # bytes


class Client:
    """One connection: a request comes, replies go as far as they are read."""

    def __init__(self, loop: Loop, sock: socket.socket, number: int) -> None:
        self.number = number
        self.awaits_end = False
        self.asker: Asker | None = None
        self._loop = loop
        self._sock = sock
        self._decoder = Decoder()
        self._buffer = SendBuffer(sock.sendmsg)
        self._has_asked = False
        self._is_last = False  # nothing follows what waits
        self._time_is_up = loop.timer(loop.now() + REQUEST_TIMEOUT, self.close)
        loop.watch(sock, self._ready)

    def _ready(self) -> None:
        expendable(self._served, lambda why: self._loop.post(ClientsFailed(why)))

    def _served(self) -> None:
        self._flush()
        if self._sock.fileno() < 0:
            return
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        elif not self._has_asked:
            self._decoder.feed(data)
            self._take()

    def _take(self) -> None:
        try:
            if (payload := self._decoder.take()) is None:
                return
            protocol = requests.protocol_of(payload).protocol
            if protocol != requests.PROTOCOL:
                self.refuse(f"it has protocol {requests.PROTOCOL} (ddplaunch {__version__}), this command {protocol}")
                return
            request = requests.for_agent(payload)
        except (FrameError, Malformed) as error:
            self.refuse(f"ddplaunch {__version__}, which runs it, does not know this request: {error}")
            return
        self._has_asked = True
        self._time_is_up.cancel()
        self._loop.post(ClientAsked(self.number, request))

    def limit(self, seconds: float) -> None:
        """Drop the connection in so many seconds, and in those that the client has to read the replies."""
        self._time_is_up.set(self._loop.now() + seconds + READ_TIMEOUT)

    def refuse(self, reason: str) -> None:
        """Refuse to answer, and say why."""
        self._has_asked = True
        self.finish(requests.RequestRefused(line(reason)))

    def finish(self, reply: requests.Reply) -> None:
        """Send the last reply."""
        self._is_last = True
        if not self._time_is_up.is_set:
            self.limit(0.0)
        self.send(reply)

    def send(self, reply: requests.Reply) -> None:
        """Send a reply, or keep it until there is room; nothing once the connection is closed."""
        if self._sock.fileno() < 0:
            return
        try:
            self._buffer.put(pack(requests.encode(reply)))
        except OSError:
            self.close()
            return
        self._watch()

    def hand_over(self, *last: requests.Reply) -> socket.socket | None:
        """Give the connection away behind these replies, unless it is lost."""
        for reply in last:
            self.send(reply)
        if self._sock.fileno() < 0:
            return None
        self._loop.unwatch(self._sock)
        self._time_is_up.cancel()
        given, self._sock = self._sock, socket.socket()
        self._sock.close()
        self._loop.post(ClientGone(self.number))
        return given

    @property
    def queued(self) -> int:
        """How many bytes it has not read."""
        return self._buffer.size

    def _flush(self) -> None:
        try:
            self._buffer.flush()
        except OSError:
            self.close()
            return
        self._watch()

    def _watch(self) -> None:
        if self._is_last and not self._buffer.size:
            self.close()
        elif self._sock.fileno() >= 0:
            self._loop.watch(self._sock, self._ready, READ | WRITE if self._buffer.size else READ)

    def close(self) -> None:
        """Drop the connection."""
        if self._sock.fileno() >= 0:
            self._time_is_up.cancel()
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._buffer.take()
            self._loop.post(ClientGone(self.number))
