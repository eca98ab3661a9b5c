"""Connects to the coordinator (the agent of node 0, in its role): tries all its candidate addresses until one answers.

Runs in the loop of another node's agent. Resolves no names.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from ddplaunch.reach.channel.handshake import Client, Key
from ddplaunch.reach.channel.peer import (
    HANDSHAKE_TIMEOUT,
    Greeting,
    Peer,
    PeerOwner,
    Sockaddr,
    describe,
    endpoint_of,
    error_of,
    keep_rejections,
    prepare,
)
from ddplaunch.system.loop.loop import WRITE, Loop

CONNECT_TIMEOUT = 2.0  # seconds for a target to send its first bytes, at first
# seconds at most, doubled each time that a target has accepted the connection and sent nothing: before a coordinator that
# thousands reach at once there is a queue, and who leaves it has to wait for as long once more
MAX_TIMEOUT = 60.0
STAGGER = 0.25  # seconds until the next target is tried while one has not answered yet (RFC 8305)
SHORTEST_PAUSE = 0.01  # seconds between two rounds
PAUSE_GROWTH = 1.25  # from round to round: delays a connection by at most a quarter of the time waited so far
LONGEST_PAUSE = 1.0  # seconds
_TRIED_FOR = 1.0  # seconds in which `answers` tries its targets again
_ANSWERS_WITHIN = 5.0  # seconds, once one accepts the connection: a coordinator listens before it has imported all

Target = tuple[int, Sockaddr]  # address family and socket address, as getaddrinfo gives them


def target(address: str, port: int) -> Target:
    """Return a numeric address and a port as a target; the scope of fe80::1%eth0 is the interface of that name on this host."""
    if ":" not in address:
        return socket.AF_INET, (address, port)
    plain, _, interface = address.partition("%")
    with suppress(OSError):  # there is none
        return socket.AF_INET6, (plain, port, 0, socket.if_nametoindex(interface) if interface else 0)
    return socket.AF_INET6, (plain, port)


class Dialer:
    """Attempts to reach one coordinator, in the loop."""

    def __init__(self, loop: Loop, key: Key, owner: PeerOwner, *, tcp_user_timeout: float) -> None:
        """Prepare to dial; `set_targets` begins. `tcp_user_timeout` is that of the connections, in seconds.

        The owner gets the first peer that is authenticated; all other attempts are dropped then, until `set_targets` is called
        again. Before, it hears of each attempt that has failed.
        """
        self.loop = loop
        self.key = key
        self._owner = owner
        self._tcp_user_timeout = tcp_user_timeout
        self._targets: tuple[Target, ...] = ()
        self._untried: list[Target] = []  # of this round, last first
        # how long to wait for the first bytes of targets that have accepted a connection and sent nothing; seconds
        self._timeouts_of_silent: dict[Target, float] = {}
        self._attempts: list[_Attempt] = []  # at most one for each target
        self.reached: Target | None = None  # the last target that has answered; None: none has
        self._next_attempt_at = loop.timer(None, self._begin_attempt)  # to try one more target, or to begin a new round
        self._pause_between_rounds = SHORTEST_PAUSE

    @property
    def is_accepted(self) -> bool:
        """Whether somebody holds a connection of ours, or has sent nothing on an earlier one."""
        return bool(self._timeouts_of_silent) or any(attempt.is_accepted for attempt in self._attempts)

    def set_targets(self, targets: Sequence[Target]) -> None:
        """Try these targets, in this order, until one answers, in place of any before."""
        self.stop()
        self._targets = tuple(targets)
        if targets:
            self._next_attempt_at.set(self.loop.now())

    def stop(self) -> None:
        """Drop all attempts, and try no more."""
        for attempt in self._attempts:
            attempt.discard()
        self._attempts.clear()
        self._untried.clear()
        self._next_attempt_at.cancel()
        self._pause_between_rounds = SHORTEST_PAUSE

    def _begin_attempt(self) -> None:
        """Begin an attempt to the next target whose connect() does not fail at once; plan the one after. Called by the timer.

        A round tries each target once, except those to which an attempt of an earlier round still goes on.
        """
        failed_at_once: list[tuple[str, str]] = []
        if not self._untried:
            pending = {attempt.target for attempt in self._attempts}
            self._untried = [target for target in reversed(self._targets) if target not in pending]
        while self._untried:
            target = self._untried.pop()
            _, address = target
            try:
                sock = self._connect(*target)
            except OSError as error:
                failed_at_once.append((endpoint_of(address), describe(error)))
            else:
                first_bytes_within = self._timeouts_of_silent.get(target, CONNECT_TIMEOUT)
                self._attempts.append(_Attempt(self, sock, target, first_bytes_within))
                break
        self._plan_next(STAGGER)
        for endpoint, reason in failed_at_once:  # last, for the owner may stop this dialer
            self._owner.on_refused(endpoint, reason)

    def _connect(self, family: int, address: Sockaddr) -> socket.socket:
        """Return a socket that is connecting; BlockingIOError is the usual way in which a non-blocking connect() begins."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(sock, self._tcp_user_timeout)
            keep_rejections(sock, True)  # the messages of a firewall on the way say why the target is not reached
            sock.connect(address)
        except BlockingIOError:
            return sock
        except OSError:
            sock.close()
            raise
        return sock

    def _plan_next(self, stagger: float) -> None:
        """Set the time of the next attempt: `stagger` seconds from now, or after a pause if it begins a new round."""
        now = self.loop.now()
        all_are_pending = len(self._attempts) >= len(self._targets)
        if self._untried:
            self._next_attempt_at.set(now + stagger)
        elif all_are_pending:  # the first attempt that fails plans the next one
            self._next_attempt_at.cancel()
        else:
            self._next_attempt_at.set(now + self._pause_between_rounds)
            self._pause_between_rounds = min(PAUSE_GROWTH * self._pause_between_rounds, LONGEST_PAUSE)

    def won(self, attempt: _Attempt, peer: Peer) -> None:
        """Stop all other attempts, and hand the peer over. Called by an attempt."""
        self._attempts.remove(attempt)
        self.stop()
        self.reached = attempt.target
        self._owner.on_opened(peer)

    def lost(self, attempt: _Attempt, reason: str) -> None:
        """Plan the next attempt at once, and report why this attempt has failed. Called by the attempt."""
        if attempt.was_silent:
            self._timeouts_of_silent[attempt.target] = min(2 * attempt.first_bytes_within, MAX_TIMEOUT)
        self._attempts.remove(attempt)
        self._plan_next(0.0)
        self._owner.on_refused(endpoint_of(attempt.target[1]), reason)


class _Attempt:
    """One connection from connect() to the end of the handshake, which the dialer learns."""

    def __init__(self, dialer: Dialer, sock: socket.socket, target: Target, first_bytes_within: float) -> None:
        """Follow one connect() to its end; the target's first bytes have to come within so many seconds from now."""
        self.target = target
        self.first_bytes_within = first_bytes_within
        self.was_silent = False  # the other side has accepted the connection, and sent nothing in time
        self._dialer = dialer
        self._sock = sock
        self._loop = dialer.loop
        self._began = self._loop.now()
        self._timer = self._loop.timer(self._began + CONNECT_TIMEOUT, self._on_timeout)
        self._greeting: Greeting | None = None  # None: the other side has not accepted the connection yet
        self._loop.watch(sock, self._on_connected, WRITE)

    @property
    def is_accepted(self) -> bool:
        """Whether the other side has accepted the connection."""
        return self._greeting is not None

    def _on_timeout(self) -> None:
        """Give up; a peer that has sent something has the whole handshake timeout for the rest."""
        # where the first bytes were so late that the timeout was raised, the rest may be late too
        handshake_timeout = max(HANDSHAKE_TIMEOUT, 2 * self.first_bytes_within)
        if self._greeting is not None and self._greeting.received_any:
            handshake_end = self._began + handshake_timeout
            if self._loop.now() < handshake_end:
                self._timer.set(handshake_end)
                return
            reason = f"handshake not completed in {handshake_timeout:g} s"
        elif self._greeting is None:
            reason = f"no answer in {CONNECT_TIMEOUT:g} s"
        else:
            self.was_silent = True
            silent = f"accepted the connection, but sent nothing in {self.first_bytes_within:g} s"
            reason = f"{silent}; it may still be starting, or another program holds the port"
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.discard()
        self._dialer.lost(self, reason)

    def discard(self) -> None:
        """Close, without calling back."""
        self._timer.cancel()
        self._loop.unwatch(self._sock)
        self._sock.close()

    def _on_connected(self) -> None:
        """Begin the handshake, or report why the connect() failed. Called by the loop once the socket can be written."""
        if error := error_of(self._sock):
            self._fail(describe(error))
            return
        keep_rejections(self._sock, False)  # an ICMP message must not end a connection that is made
        self._loop.unwatch(self._sock)
        self._timer.set(self._began + self.first_bytes_within)
        _, address = self.target
        self._greeting = Greeting(self._loop, self._sock, address, Client(self._dialer.key), self)

    def on_opened(self, peer: Peer) -> None:
        """Hand the peer to the dialer. Called by the greeting."""
        self._timer.cancel()
        self._dialer.won(self, peer)

    def on_refused(self, _who: str, reason: str) -> None:
        """Tell the dialer that the handshake has failed. Called by the greeting."""
        self._timer.cancel()
        self._dialer.lost(self, reason)


class DialResult:
    """What a dialer has come to, for a caller that runs the loop itself until there is a peer."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.reasons: dict[str, str] = {}  # by endpoint, why there is no peer so far

    def on_opened(self, peer: Peer) -> None:
        """Keep the peer. Called by the dialer."""
        self.peer = peer

    def on_refused(self, who: str, reason: str) -> None:
        """Keep the reason. Called by the dialer."""
        self.reasons[who] = reason


def answers(key: Key, targets: Sequence[Target]) -> bool:
    """Return whether a coordinator of this job answers at one of these addresses; wait longer where a connection is accepted.

    Waits in a loop of its own, before that of the agent runs.
    """
    result, loop = DialResult(), Loop()
    dialer = Dialer(loop, key, result, tcp_user_timeout=1.0)
    dialer.set_targets(targets)
    began = loop.now()
    while result.peer is None:
        deadline = began + (_ANSWERS_WITHIN if dialer.is_accepted else _TRIED_FOR)
        if loop.now() >= deadline:
            break
        wake = loop.timer(deadline, lambda: None)  # ends run_once(), where nothing else does
        loop.run_once()
        wake.cancel()
    dialer.stop()
    if result.peer is not None:
        result.peer.close()
    loop.close()
    return result.peer is not None
