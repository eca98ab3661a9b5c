"""Connects to the coordinator: tries all its candidate addresses until one answers. Resolves no names."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from math import inf

from ddplaunch.control.greeting import HANDSHAKE_TIMEOUT, Greeting
from ddplaunch.control.handshake import Client, Key
from ddplaunch.control.peer import Peer
from ddplaunch.control.tcp import Sockaddr, describe, endpoint_of, error_of, prepare

CONNECT_TIMEOUT = 2.0  # seconds for a target to send its first bytes, at first
# seconds at most, doubled each time that a target has accepted the connection and sent nothing: before a coordinator that
# thousands reach at once there is a queue, and who leaves it has to wait for as long once more
MAX_TIMEOUT = 60.0
STAGGER = 0.25  # seconds until the next target is tried while one has not answered yet (RFC 8305)
SHORTEST_PAUSE = 0.01  # seconds between two rounds
GROWTH = 1.25  # of the pause from round to round: delays a connection by at most a quarter of the time waited so far
LONGEST_PAUSE = 1.0  # seconds
_LOOK = 1.0  # seconds in which `answers` tries its targets again
_PATIENCE = 5.0  # seconds in which one that accepts has to answer: a coordinator listens before it has imported all

Target = tuple[int, Sockaddr]  # address family and socket address, as getaddrinfo gives them


class Dialer:
    """Attempts to reach one coordinator, in the loop.

    `opened` gets the first peer that is authenticated; all other attempts are dropped then, until `set_targets` is called again.
    `refused` gets each endpoint that failed, and why. Both are called from the loop and from `expire` only.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        key: Key,
        *,
        source: str | None,
        opened: Callable[[Peer], None],
        refused: Callable[[str, str], None],
        user_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selector = selector
        self._key = key
        self._source = source
        self._opened = opened
        self._refused = refused
        self._user_timeout = user_timeout
        self._clock = clock
        self._targets: tuple[Target, ...] = ()
        self._untried: list[Target] = []  # of this round, last first
        self._timeouts: dict[Target, float] = {}  # with those that were silent, seconds
        self._attempts: set[_Attempt] = set()
        self._next = inf  # when to try one more target, or to begin a new round
        self._pause = SHORTEST_PAUSE

    @property
    def deadline(self) -> float | None:
        """When to call `expire` at the latest."""
        soonest = min((attempt.deadline for attempt in self._attempts), default=inf)
        return None if (found := min(soonest, self._next)) == inf else found

    @property
    def is_accepted(self) -> bool:
        """Whether somebody holds a connection of ours, or has sent nothing on an earlier one."""
        return bool(self._timeouts) or any(attempt.is_accepted for attempt in self._attempts)

    def set_targets(self, targets: Sequence[Target]) -> None:
        """Try these targets, in this order, until one answers, in place of any before; `deadline` is at once."""
        self.stop()
        self._targets = tuple(targets)
        if targets:
            self._next = self._clock()

    def expire(self, now: float) -> None:
        """Return up attempts that take too long, and begin what is due."""
        for attempt in [attempt for attempt in self._attempts if now >= attempt.deadline]:
            if attempt in self._attempts:  # `refused` may have stopped all
                if attempt.is_waiting:
                    self._timeouts[attempt.target] = min(2 * attempt.timeout, MAX_TIMEOUT)
                attempt.time_out()
        if now >= self._next:
            self._go_on(now)

    def stop(self) -> None:
        """Drop all attempts, and try no more."""
        for attempt in self._attempts:
            attempt.discard()
        self._attempts.clear()
        self._untried.clear()
        self._next = inf
        self._pause = SHORTEST_PAUSE

    def _go_on(self, now: float) -> None:
        """Begin the next attempt that can be begun; with none left in this round, a new one."""
        failed: list[tuple[str, str]] = []
        if not self._untried:
            held = {attempt.target for attempt in self._attempts}
            self._untried = [target for target in reversed(self._targets) if target not in held]
        while self._untried:
            target = self._untried.pop()
            _, address = target
            try:
                sock = self._connect(*target)
            except OSError as error:
                failed.append((endpoint_of(address), describe(error)))
            else:
                timeout = self._timeouts.get(target, CONNECT_TIMEOUT)
                attempt = _Attempt(
                    sock, target, self._selector, now, timeout, won=self._won, lost=self._lost, key=self._key
                )
                self._attempts.add(attempt)
                break
        self._plan(now, STAGGER)
        for endpoint, reason in failed:
            self._refused(endpoint, reason)

    def _connect(self, family: int, address: Sockaddr) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock, self._user_timeout)
            if self._source is not None:
                sock.bind((self._source, 0))
            sock.connect(address)
        except BlockingIOError:
            return sock
        except OSError:
            sock.close()
            raise
        return sock

    def _plan(self, now: float, stagger: float) -> None:
        """Set the time of the next attempt."""
        if self._untried:
            self._next = now + stagger
        elif len(self._attempts) >= len(self._targets):
            self._next = inf
        else:
            self._next = now + self._pause
            self._pause = min(GROWTH * self._pause, LONGEST_PAUSE)

    def _won(self, attempt: _Attempt, peer: Peer) -> None:
        self._attempts.remove(attempt)
        self.stop()
        self._opened(peer)

    def _lost(self, attempt: _Attempt, reason: str) -> None:
        self._attempts.remove(attempt)
        self._plan(self._clock(), 0.0)
        self._refused(attempt.endpoint, reason)


class _Attempt:
    """One connection from connect() to the end of the handshake."""

    def __init__(
        self,
        sock: socket.socket,
        target: Target,
        selector: selectors.BaseSelector,
        began: float,
        timeout: float,
        *,
        key: Key,
        won: Callable[[_Attempt, Peer], None],
        lost: Callable[[_Attempt, str], None],
    ) -> None:
        self.target = target
        self.endpoint = endpoint_of(target[1])
        self.timeout = timeout  # seconds for the first bytes, once it is connected
        self._sock = sock
        self._selector = selector
        self._began = began
        self._key = key
        self._won = won
        self._lost = lost
        self._greeting: Greeting | None = None
        selector.register(sock, selectors.EVENT_WRITE, self._connected)

    @property
    def deadline(self) -> float:
        """A peer that answers has the whole handshake timeout; one that sends nothing is given up earlier, at first."""
        if self._greeting is None:
            return self._began + CONNECT_TIMEOUT
        return self._began + (self._handshake_timeout if self._greeting.received_any else self.timeout)

    @property
    def _handshake_timeout(self) -> float:
        return max(HANDSHAKE_TIMEOUT, 2 * self.timeout)

    @property
    def is_accepted(self) -> bool:
        """Whether the other side has accepted the connection."""
        return self._greeting is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the other side has accepted the connection, and sent nothing yet."""
        return self._greeting is not None and not self._greeting.received_any

    def time_out(self) -> None:
        """Return up."""
        self.discard()
        if self._greeting is None:
            self._lost(self, f"no answer in {CONNECT_TIMEOUT:g} s")
        elif self._greeting.received_any:
            self._lost(self, f"handshake not completed in {self._handshake_timeout:g} s")
        else:
            silent = f"accepted the connection, but sent nothing in {self.timeout:g} s"
            self._lost(self, f"{silent}; it may still be starting, or another program holds the port")

    def discard(self) -> None:
        """Close, without calling back."""
        self._selector.unregister(self._sock)
        self._sock.close()

    def _connected(self) -> None:
        if error := error_of(self._sock):
            self.discard()
            self._lost(self, describe(error))
            return
        self._selector.unregister(self._sock)
        self._greeting = Greeting(
            self._sock,
            self.target[1],
            self._selector,
            Client(self._key),
            opened=lambda peer: self._won(self, peer),
            failed=lambda reason: self._lost(self, reason),
        )


def answers(key: Key, targets: Sequence[Target]) -> bool:
    """Whether a coordinator of this job answers at one of these addresses: soon, or later where a connection is accepted."""
    found: list[Peer] = []
    with selectors.DefaultSelector() as selector:
        dialer = Dialer(selector, key, source=None, opened=found.append, refused=lambda *_: None, user_timeout=1.0)
        dialer.set_targets(targets)
        began = time.monotonic()
        while not found:
            deadline = began + (_PATIENCE if dialer.is_accepted else _LOOK)
            if (now := time.monotonic()) >= deadline:
                break
            dialer.expire(now)
            until = min(dialer.deadline or deadline, deadline)
            for ready, _ in selector.select(max(0.0, until - time.monotonic())):
                ready.data()
        dialer.stop()
        for peer in found:
            peer.close()
    return bool(found)
