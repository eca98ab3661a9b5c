"""Accepts connections at a listening socket, in a loop. Out of files or memory, it accepts none for a second."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from ddplaunch.system.loop.loop import Loop

PAUSE = 1.0  # seconds
_GONE_ALREADY = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)


class Acceptor:
    """A listening socket: hands each connection, with the peer's address, to `accepted`, which may close this object.

    A connection that cannot be accepted stays in the backlog, and the socket readable: without a pause the loop would be busy.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        accepted: Callable[[Any, Any], object],
        *,
        most: int = 64,
        paused: Callable[[OSError], object] = lambda _: None,
    ) -> None:
        """Own the socket; take at most so many connections in a turn of the loop. `paused` is told why none are taken."""
        self._loop = loop
        self._sock = sock
        self._accepted = accepted
        self._most = most
        self._paused = paused
        self._pause = loop.timer(None, self.start)

    def start(self) -> None:
        """Take connections; a second time changes nothing, and a pause goes on."""
        if not self._pause.is_set:
            self._loop.watch(self._sock, self._on_connection)

    def close(self) -> None:
        """Take none any more; a second time changes nothing."""
        self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock)
            self._sock.close()

    def _on_connection(self) -> None:
        """Take up to `most` new connections; without room for more descriptors, pause for a while. Called by the loop."""
        for _ in range(self._most):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE_ALREADY:  # this client; the next may be there
                    continue
                self._loop.unwatch(self._sock)
                self._pause.set(self._loop.now() + PAUSE)
                self._paused(error)
                return
            sock.setblocking(False)
            self._accepted(sock, address)
            if self._sock.fileno() < 0:  # `accepted` has closed this object
                return
