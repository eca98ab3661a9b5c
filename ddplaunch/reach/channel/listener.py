"""The socket at which the coordinator (the agent of node 0, in its role) waits for the agents of other nodes.

A connection that is not authenticated can neither delay nor starve the others.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import takewhile

from ddplaunch.reach.channel.handshake import Key, Server
from ddplaunch.reach.channel.peer import (
    HANDSHAKE_TIMEOUT,
    RESET,
    Greeting,
    Peer,
    PeerOwner,
    Sockaddr,
    describe,
    prepare,
)
from ddplaunch.spec.outcome import CLOSED
from ddplaunch.system.loop.loop import Acceptor, Loop
from ddplaunch.system.net.addresses import is_own

MAX_REFUSALS = 20  # that are reported; a port scanner does not fill a log


class Listener:
    """A listening socket in the loop, and the connections that are not authenticated yet."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        key: Key,
        owner: PeerOwner,
        *,
        tcp_user_timeout: float,
        max_half_open: int = 256,
    ) -> None:
        """Own a socket that listens already, as of `listen` in system/net/port.py; take what proves to know `key`.

        The owner hears of each address and reason once. At most `max_half_open` connections are unauthenticated at a time.
        `tcp_user_timeout` is theirs, in seconds.
        """
        self._loop = loop
        self._key = key
        self._owner = owner
        self._tcp_user_timeout = tcp_user_timeout
        self._max_half_open = max_half_open
        self._half_open: dict[_HalfOpen, None] = {}  # in order of arrival, and so of `dropped_at`
        self._drop_timer = loop.timer(None, self._drop_late)
        self._origins = Origins()  # by address: the host or network that connections from there count for
        self._closed = False
        self._reported: set[tuple[str, str]] = set()  # to the owner: the address and the reason
        self.port: int = sock.getsockname()[1]
        # in a turn of the loop few connections are accepted, so that those before them are served as well; but where thousands
        # come at once, a connection that is accepted late is given up by the other side
        at_a_time = max(1, max_half_open // 4)
        self._acceptor = Acceptor(loop, sock, self, most=at_a_time)
        self._acceptor.start()

    def __repr__(self) -> str:
        return f"<listener on port {self.port}, {len(self._half_open)} half-open>"

    def _drop_late(self) -> None:
        """Drop connections whose handshake takes too long."""
        now = self._loop.now()
        for late in list(takewhile(lambda one: now >= one.dropped_at, self._half_open)):
            if late in self._half_open:  # the owner may have closed this listener
                self._drop(late, f"handshake not completed in {HANDSHAKE_TIMEOUT:g} s")

    def close(self) -> None:
        """Stop listening, and drop unauthenticated connections. Peers stay open."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        for one in self._half_open:
            one.greeting.discard()
        self._half_open.clear()
        self._drop_timer.cancel()

    def on_pause(self, error: OSError) -> None:
        """Report that no connection can be accepted for now. Called by the acceptor."""
        self.report_refusal("new connections", describe(error))

    def on_connection(self, sock: socket.socket, address: Sockaddr) -> None:
        """Begin the handshake with a new connection; where too many are unauthenticated, drop one of the largest crowd.

        Called by the acceptor.
        """
        try:
            prepare(sock, self._tcp_user_timeout)
        except OSError:  # it has been reset
            sock.close()
            return
        newest = _HalfOpen(self, self._loop, sock, address, self._key)
        self._half_open[newest] = None
        self._drop_timer.set_by(newest.dropped_at)
        if len(self._half_open) > self._max_half_open:
            oldest_first = list(self._half_open)
            index = index_to_drop([self._origins[one.greeting.address] for one in oldest_first])
            self._drop(oldest_first[index], "too many unauthenticated connections")

    def authenticated(self, half_open: _HalfOpen, peer: Peer) -> None:
        """Hand a connection whose handshake is done to the owner. Called by the connection."""
        self._forget(half_open)
        self._owner.on_opened(peer)

    def failed(self, half_open: _HalfOpen, reason: str) -> None:
        """Forget a connection that has closed, and report the reason. Called by the connection."""
        self._forget(half_open)
        # a port probe, or a peer that took another address, was not refused
        if half_open.greeting.received_any or reason not in (CLOSED, RESET):
            self.report_refusal(half_open.greeting.address, reason)

    def _drop(self, half_open: _HalfOpen, reason: str) -> None:
        self._forget(half_open)
        half_open.greeting.discard()
        self.report_refusal(half_open.greeting.address, reason)

    def _forget(self, half_open: _HalfOpen) -> None:
        del self._half_open[half_open]
        self._drop_timer.set(next((one.dropped_at for one in self._half_open), None))

    def report_refusal(self, address: str, reason: str) -> None:
        """Report to the owner, each pair once and at most MAX_REFUSALS of them."""
        if (address, reason) not in self._reported and len(self._reported) < MAX_REFUSALS:
            self._reported.add((address, reason))
            self._owner.on_refused(address, reason)


class _HalfOpen:
    """A connection that is not authenticated yet; tells the listener what becomes of it."""

    def __init__(self, listener: Listener, loop: Loop, sock: socket.socket, address: Sockaddr, key: Key) -> None:
        self._listener = listener
        self.dropped_at = loop.now() + HANDSHAKE_TIMEOUT  # if it is still not authenticated then
        self.greeting = Greeting(loop, sock, address, Server(key), self)

    def on_opened(self, peer: Peer) -> None:
        """Hand the peer over. Called by the greeting."""
        self._listener.authenticated(self, peer)

    def on_refused(self, _who: str, reason: str) -> None:
        """Report why there is no peer. Called by the greeting."""
        self._listener.failed(self, reason)


def index_to_drop(origins: Sequence[Hashable]) -> int:
    """Return the index of the connection to drop, given where each comes from, the oldest first.

    That is the oldest of the origin that has most, so that no origin crowds out others, nor silence somebody who speaks. Of
    several origins with equally many, the newest connection is dropped: whoever comes later takes nothing from the others.
    """
    counts = Counter(origins)
    most = max(counts.values())
    crowded = [origin for origin, number in counts.items() if number == most]
    if len(crowded) == 1:
        return origins.index(crowded[0])
    return max(at for at, origin in enumerate(origins) if counts[origin] == most)


class Origins(dict[str, Hashable]):
    """What connections from an address count as, found once for each address; itself while that cannot be found.

    One process of this host has all of 127.0.0.0/8 and each address of its own to connect from, so all these are one origin.
    One host elsewhere has an IPv4 address, or 64 bits of an IPv6 one.
    """

    _MOST = 10_000

    def __missing__(self, address: str) -> Hashable:
        if len(self) >= self._MOST:
            self.clear()
        try:
            self[address] = origin = origin_of(address)
        except (OSError, ImportError):  # no descriptor is free to look at the interfaces of this host
            return address
        return origin


def origin_of(address: str) -> Hashable:
    """Return what a numeric address counts as: this host, a host elsewhere, or the first 64 bits of an IPv6 address."""
    if is_own(address):
        return "this host"
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8] if ":" in address else address
