"""A listening socket in a loop. Out of files or memory, it accepts nothing for a second. Knows no protocol."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Any

PAUSE = 1.0  # seconds
_GONE_ALREADY = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)


class Acceptor:
    """Hands each connection, of the type of `sock`, to `accepted`, with its address; that may close this object.

    One that cannot be accepted stays in the backlog, and the socket readable: without a pause the loop would be a busy one.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        accepted: Callable[[Any, Any], object],
        *,
        clock: Callable[[], float],
        most: int = 64,
        paused: Callable[[OSError], object] = lambda _: None,
        guard: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        """Own the socket; take at most so many in a turn of the loop. `paused` hears why none are; `guard` makes each call."""
        self._sock = sock
        self._selector = selector
        self._accepted = accepted
        self._clock = clock
        self._most = most
        self._paused = paused
        self._guard = guard
        self.deadline: float | None = None  # of the pause: when to call `expire`

    def start(self) -> None:
        """Take connections; a second time changes nothing."""
        if self.deadline is None and self._sock not in self._selector.get_map():
            self._selector.register(self._sock, selectors.EVENT_READ, lambda: self._guard(self._accept))

    def expire(self, now: float) -> None:
        """Go on after a pause."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self.start()

    def close(self) -> None:
        """Take none any more; a second time changes nothing."""
        self._stop()
        self.deadline = None
        self._sock.close()

    def _stop(self) -> None:
        if self._sock.fileno() >= 0 and self._sock in self._selector.get_map():
            self._selector.unregister(self._sock)

    def _accept(self) -> None:
        for _ in range(self._most):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE_ALREADY:
                    continue
                self._stop()
                self.deadline = self._clock() + PAUSE
                self._paused(error)
                return
            sock.setblocking(False)
            self._accepted(sock, address)
            if self._sock.fileno() < 0:
                return
