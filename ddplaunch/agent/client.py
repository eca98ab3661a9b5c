"""One that has connected to the socket of the run: a request comes, replies go as far as they are read. Never waits for it."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch import __version__
from ddplaunch.control import requests
from ddplaunch.control.frames import Decoder, FrameError, pack
from ddplaunch.coordinator.questions import Asker
from ddplaunch.fields import Malformed, line
from ddplaunch.process import clock

if TYPE_CHECKING:
    from ddplaunch.agent.debuggers import Visitor

REQUEST_TIMEOUT = 5.0  # seconds in which a client has to send its request
READ_TIMEOUT = 10.0  # seconds, beyond those that the nodes have, in which it has to read the replies
_CHUNK = 1 << 16  # bytes


class Client:
    """One connection: a request comes, replies go as far as they are read."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        guard: Callable[[Callable[[], None]], None],
        *,
        asked: Callable[[Client, requests.Request], None],
        gone: Callable[[Client], None],
    ) -> None:
        self.until: float | None = clock.now() + REQUEST_TIMEOUT  # by the clock of deadlines
        self.awaits_end = False
        self.asker: Asker | None = None
        self.visitor: Visitor | None = None
        self._sock = sock
        self._selector = selector
        self._asked = asked
        self._gone = gone
        self._decoder = Decoder()
        self._queue = bytearray()
        self._has_asked = False
        self._is_last = False  # nothing follows what waits
        self._ready = lambda: guard(self._served)
        selector.register(sock, selectors.EVENT_READ, self._ready)

    def _served(self) -> None:
        self._flush()
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
        self._has_asked, self.until = True, None
        self._asked(self, request)

    def refuse(self, reason: str) -> None:
        """Return no answer, and say why."""
        self._has_asked = True
        self.finish(requests.RequestRefused(line(reason)))

    def finish(self, reply: requests.Reply) -> None:
        """Send the last reply."""
        self._is_last = True
        if self.until is None:
            self.until = clock.now() + READ_TIMEOUT
        self.send(reply)

    def send(self, reply: requests.Reply) -> None:
        """Send a reply, or keep it until there is room; nothing once the connection is closed."""
        if self._sock.fileno() < 0:
            return
        self._queue += pack(requests.encode(reply))
        self._flush()

    def hand_over(self) -> socket.socket | None:
        """Return the connection away, unless it is lost."""
        self.send(requests.Attached())
        if self._sock.fileno() < 0:
            return None
        self._selector.unregister(self._sock)
        given, self._sock = self._sock, socket.socket()
        self._sock.close()
        self._gone(self)
        return given

    @property
    def queued(self) -> int:
        """How many bytes it has not read."""
        return len(self._queue)

    def _flush(self) -> None:
        try:
            while self._queue:
                del self._queue[: self._sock.send(memoryview(self._queue)[:_CHUNK].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._queue or not self._is_last:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0)
            if self._sock.fileno() >= 0:
                self._selector.modify(self._sock, events, self._ready)
        else:
            self.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._sock.fileno() >= 0:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._queue.clear()
            self._gone(self)
