"""Where the coordinator is to be found. Whoever cannot prove that it belongs to the job costs the others nothing."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from ddplaunch.control.greeting import PATIENCE, Greeting
from ddplaunch.control.handshake import Key, Server
from ddplaunch.control.peer import Peer
from ddplaunch.control.tcp import CLOSED, RESET, Sockaddr, listen, prepare, words

ACCEPTS = 64  # connections that are taken between two looks at everything else
PAUSE = 1.0  # seconds without accepting when the system has no more to give
MOST_REFUSALS = 20  # that are told; a port scanner does not fill a log

_GONE_ALREADY = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)


class Listener:
    """A listening socket in the loop, and the connections that have not said yet who they are.

    `opened` gets each authenticated peer, which is its owner's from then on; it may close without a word, if the other side
    had two ways here and took the other. `refused` gets an address and a reason, each pair once. Both are called from the
    loop and from `expire` only.

    Raises:
        LaunchError: no port is free, or the address is not of this node.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: Key,
        *,
        address: str | None,
        ports: Sequence[int],
        opened: Callable[[Peer], None],
        refused: Callable[[str, str], None],
        user_timeout: float,
        backlog: int = 1024,
        most_half_open: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._key = key
        self._opened = opened
        self._refused = refused
        self._user_timeout = user_timeout
        self._most_half_open = most_half_open
        self._clock = clock
        self._half_open: dict[Greeting, float] = {}  # deadlines, in order of arrival and therefore sorted
        self._resume: float | None = None  # when to accept again
        self._closed = False
        self._told: set[tuple[str, str]] = set()
        self._sock = listen(address, ports, backlog)
        self.port: int = self._sock.getsockname()[1]
        selector.register(self._sock, selectors.EVENT_READ, self._accept)

    def __repr__(self) -> str:
        return f"<listener on port {self.port}, {len(self._half_open)} half-open>"

    @property
    def deadline(self) -> float | None:
        """When to call `expire` at the latest."""
        first = next(iter(self._half_open.values()), None)
        return min((deadline for deadline in (first, self._resume) if deadline is not None), default=None)

    def expire(self, now: float) -> None:
        """Drop who has not said in time who it is; accept again after a pause."""
        for greeting, deadline in list(self._half_open.items()):
            if now < deadline:
                break
            if greeting in self._half_open:  # `refused` may have closed all
                self._drop(greeting, f"did not say who it is in {PATIENCE:g} s")
        if self._resume is not None and now >= self._resume:
            self._resume = None
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Listen no more, and drop who has not said who it is. Peers stay."""
        if self._closed:
            return
        self._closed = True
        if self._resume is None:
            self._selector.unregister(self._sock)
        self._resume = None
        self._sock.close()
        for greeting in self._half_open:
            greeting.discard()
        self._half_open.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE_ALREADY:
                    continue
                # no more files, or no memory: the connection stays in the backlog, which would wake us without end
                self._selector.unregister(self._sock)
                self._resume = self._clock() + PAUSE
                self.tell("new connections", words(error))
                return
            try:
                prepare(sock, self._user_timeout)
            except OSError:  # it has been reset
                sock.close()
                continue
            self._greet(sock, address)
            if self._closed:  # `refused` may have done so
                return

    def _greet(self, sock: socket.socket, address: Sockaddr) -> None:
        def opened(peer: Peer) -> None:
            del self._half_open[greeting]
            self._opened(peer)

        def failed(reason: str) -> None:
            del self._half_open[greeting]
            # who only looked whether anybody listens, or took another way, was refused nothing
            if greeting.heard or reason not in (CLOSED, RESET):
                self.tell(greeting.address, reason)

        greeting = Greeting(sock, address, self._selector, Server(self._key), opened=opened, failed=failed)
        self._half_open[greeting] = self._clock() + PATIENCE
        if len(self._half_open) > self._most_half_open:
            self._drop(next(iter(self._half_open)), "too many connections that do not say who they are")

    def _drop(self, greeting: Greeting, reason: str) -> None:
        del self._half_open[greeting]
        greeting.discard()
        self.tell(greeting.address, reason)

    def tell(self, address: str, reason: str) -> None:
        """Tell `refused`, as far as that is worth it."""
        if (address, reason) not in self._told and len(self._told) < MOST_REFUSALS:
            self._told.add((address, reason))
            self._refused(address, reason)
