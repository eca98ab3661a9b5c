"""The coordinator's connections: which peers are alive, and the offsets of their clocks. Decides nothing about the job."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from math import inf
from socket import socket
from typing import Protocol

from msgspec import Struct

from ddplaunch.launcher.job import messages
from ddplaunch.reach.channel.handshake import Key, Server
from ddplaunch.reach.channel.listener import Listener
from ddplaunch.reach.channel.peer import Greeting, Peer, PeerOwner
from ddplaunch.reach.silence import Keepalive
from ddplaunch.system.fields import Malformed, line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.port import listen

_TOO_MANY = "too many connections"
_PONGS_KEPT = 8  # pongs: the quickest of the last ones counts, so that drifting clocks are followed


class Heartbeat:
    """Counts pings without an answer, and measures the offset between two clocks as NTP does."""

    def __init__(self) -> None:
        self.unanswered = 0  # pings since the last message, but for those out of turn
        self._samples: deque[tuple[float, float]] = deque(maxlen=_PONGS_KEPT)  # (round trip, offset), seconds

    def pong_received(self, sent: float, at: float, now: float) -> None:
        """Take a pong: the ping was sent at `sent` and answered at `at` by the other clock, the pong arrived at `now`."""
        if sent <= now:
            self._samples.append((now - sent, (sent + now) / 2 - at))

    @property
    def offset(self) -> float:
        """What has to be added to the other clock's times to get ours, in seconds; right to half a round trip."""
        if not self._samples:
            return 0.0
        trip, offset = min(self._samples)
        return 0.0 if abs(offset) <= trip / 2 else offset  # if they may be one clock, as on one host, they are

    @property
    def error(self) -> float:
        """How many seconds the offset may be wrong by; 0.0 if it is taken for one clock."""
        return min(self._samples)[0] / 2 if self._samples and self.offset else 0.0


_BEATS_UNTIL_SILENT = 2  # from one ping to the next
_PINGS_PER_TURN = 256  # in one turn of the loop: what else there is does not wait for thousands
# connections that there may be at once, in a job of few nodes; else twice as many as nodes
_PEERS_OF_SMALL_JOB = 64


class Terms(Struct, frozen=True, kw_only=True):
    """What the coordinator sets for the agents of all nodes."""

    keepalive: Keepalive
    run_id: str
    address: str | None  # MASTER_ADDR as the user or the cluster gave it; None: as the others reach this node
    # by which others may reach it: this node was told them itself, on its own command line, say
    names: tuple[str, ...] = ()
    key: Key
    listen: str | None  # numeric address to listen on; None: all
    ports: Sequence[int] | None  # candidates to listen on; None: all connections are carried, see `Connections.adopt`
    listening_socket: socket | None = None  # what listens already, at one of the ports


class _Connection:
    """A peer, and what its pings, its answers and its lease have come to. Times are of the loop, unless it is said."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.host_silence = 0.0  # seconds for which the kernel of its host sent nothing, as last measured
        self.heartbeat = Heartbeat()
        # it has sent a valid message besides pongs; else nothing but a refusal tells the user of it if it is expelled
        self.is_known = False
        # when each ping was sent that has no answer yet, the oldest first; this and `answered` by time.monotonic of this process
        self.pings: deque[float] = deque()
        self.answered = -inf  # when the last ping was sent that it has answered
        self.renewal = -inf  # the number of the last renewal of its lease: when it was sent, by the agent's clock
        self.renewed_at = -inf  # when that renewal came: the lease began no later
        self.heard_at = -inf  # when any message came last

    def renew_lease(self, message: messages.Hello | messages.Pong, at: float) -> None:
        """Take a renewal of the lease, which comes with a hello and with each answer to a ping.

        Raises Malformed: it answers another ping than the oldest, or has a number before the last one's.
        """
        if isinstance(message, messages.Pong):
            if not self.pings or self.pings.popleft() != message.sent:
                raise Malformed("an answer to a ping that was not sent")
            self.answered = message.sent
            if message.at < self.renewal:
                raise Malformed("a renewal from before the last one")
        self.renewal, self.renewed_at = message.at, at


class Receiver(Protocol):
    """Who takes the messages of the peers, and hears what becomes of their connections."""

    def on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """Take a valid message of a peer, other than a pong."""

    def on_pong(self) -> None:
        """Hear that a peer has answered a ping."""

    def on_part_dropped(self, id: int, reason: str) -> None:
        """Hear that a message was malformed which only tells of workers, and was left out: no node is lost for that."""

    def on_lost(self, id: int, reason: str, renewed_at: float) -> None:
        """Hear that a peer is lost, or was expelled; `renewed_at` is when the last renewal of its lease came, -inf if none."""

    def on_refused(self, address: str, reason: str) -> None:
        """Hear that a connection from this address was refused."""


class Connections:
    """Authenticated peers by number, in order of arrival; each is pinged from time to time.

    Each ping says which pong has come last, since the lease of a peer runs from when the peer sent that one.
    """

    def __init__(self, loop: Loop, terms: Terms, receiver: Receiver) -> None:
        """Listen on one of the ports of `terms`, if it has any. Raises LaunchError: all are taken."""
        self._loop = loop
        self._terms = terms
        self._receiver = receiver
        self._silence = terms.keepalive.silence()  # judges from what time on a peer is silent for too long
        self._beat = terms.keepalive.beat  # seconds from ping to ping
        self._beat_at = loop.timer(None, self._send_heartbeats)
        self._next_beat = 0.0  # when the next round of pings is due
        self._unpinged: list[int] = []  # peers whose ping of this round is yet to be sent
        # whether this round was due; else `ping_all` wanted it, and no peer is lost by it
        self._round_counts_silence = True
        self._pinged_all_at = -inf  # when `ping_all` was last called, by time.monotonic
        self._connections: dict[int, _Connection] = {}
        self._last_id = 0
        # twice: an agent that was lost may be back before its old connection has ended
        self._most_peers = max(_PEERS_OF_SMALL_JOB, 2 * terms.keepalive.max_nodes)
        self._listener: Listener | None = None
        if terms.ports is not None:  # else something else carries all connections, which `adopt` takes
            self._listener = Listener(
                loop,
                terms.listening_socket or listen(terms.listen, terms.ports),
                terms.key,
                self,
                tcp_user_timeout=terms.keepalive.tcp_user_timeout,
                max_half_open=self._most_peers,
            )
        self.port = 0 if self._listener is None else self._listener.port

    @property
    def ids(self) -> Collection[int]:
        """The peers that are connected."""
        return self._connections.keys()

    def send(self, id: int, payload: bytes) -> None:
        """Send a message; drop it if the peer is gone."""
        if (connection := self._connections.get(id)) is not None:
            connection.peer.send(payload)

    def admit(self, id: int) -> None:
        """Take long messages from a peer from now on."""
        if (connection := self._connections.get(id)) is not None:
            connection.peer.admit()

    def ping_all(self) -> None:
        """Ping all peers now, out of turn: many who want that within a round trip make nobody look dead."""
        self._pinged_all_at = time.monotonic()
        if self._connections:
            self._beat_at.set(self._loop.now())

    @property
    def all_answered_ping_all(self) -> bool:
        """Whether each peer has answered a ping that was sent since `ping_all` was last called."""
        return all(map(self.has_answered_ping_all, self._connections))

    def has_answered_ping_all(self, id: int) -> bool:
        """Return whether a peer has answered a ping that was sent since `ping_all` was last called."""
        return id in self._connections and self._connections[id].answered >= self._pinged_all_at

    def offset(self, id: int) -> tuple[float, float]:
        """Return what has to be added to this peer's times to get ours, in seconds, and how wrong that may be."""
        connection = self._connections.get(id)
        return (0.0, 0.0) if connection is None else (connection.heartbeat.offset, connection.heartbeat.error)

    @property
    def reached_at(self) -> str | None:
        """The address of this node that most of the others reach."""
        addresses = Counter(connection.peer.local_address for connection in self._connections.values())
        return addresses.most_common(1)[0][0] if addresses else None

    def far_address(self, id: int) -> str:
        """Return the address from which a peer is connected; "" if it is gone."""
        return self._connections[id].peer.address if id in self._connections else ""

    def local_address(self, id: int) -> str:
        """Return the address of this node that a peer has reached, as the kernel of this node has it."""
        return self._connections[id].peer.local_address

    def drop(self, id: int) -> None:
        """Close a connection and report nothing."""
        if (connection := self._connections.pop(id, None)) is not None:
            connection.peer.close()

    def receive_rest(self, id: int) -> None:
        """Take what a peer has sent that has ended."""
        if (connection := self._connections.get(id)) is not None:
            connection.peer.receive_rest()

    def renewed_at(self, id: int) -> float:
        """Return when the last answer of a peer came, which has renewed its lease."""
        return self._connections[id].renewed_at

    def is_silent(self, id: int) -> bool:
        """Return whether a peer has answered none of the last pings."""
        return (
            id not in self._connections
            or self._loop.now() - self._connections[id].heard_at > _BEATS_UNTIL_SILENT * self._beat
        )

    def expel(self, id: int, reason: str, *, may_return: bool = False) -> None:
        """Close a connection, and report it as lost; `may_return`: its agent may come back as a new node."""
        connection = self._connections.get(id)
        if connection is not None:
            if not connection.is_known:  # the job knows no agent there, so nothing else tells the user
                self._report_refusal(connection.peer.address, reason)
            connection.peer.send(messages.encode(messages.GivenUp(line(reason), may_return)))
        self.drop(id)
        self._receiver.on_lost(id, reason, -inf if connection is None else connection.renewed_at)

    def _report_refusal(self, address: str, reason: str) -> None:
        if self._listener is None:
            self._receiver.on_refused(address, reason)
        else:
            self._listener.report_refusal(address, reason)

    def close(self) -> None:
        """Close everything."""
        if self._listener is not None:
            self._listener.close()
        self._beat_at.cancel()
        for connection in self._connections.values():
            connection.peer.close()
        self._connections.clear()

    # --- what comes in

    def adopt(self, sock: socket, address: str, owner: PeerOwner) -> None:
        """Greet an agent over a connection that something else carries, as ssh does; its owner then adds the peer here."""
        Greeting(self._loop, sock, (address, 0), Server(self._terms.key), owner)

    def on_opened(self, peer: Peer) -> None:
        """Take a peer that has proven the key. Called by the listener."""
        self.add(peer)

    def on_refused(self, who: str, reason: str) -> None:
        """Pass on who was refused. Called by the listener."""
        self._receiver.on_refused(who, reason)

    def add(self, peer: Peer) -> int | None:
        """Take a peer, and ask for its clock by a first ping; return its number, or None if there are too many."""
        if len(self._connections) >= self._most_peers:
            self._report_refusal(peer.address, _TOO_MANY)
            peer.send(messages.encode(messages.GivenUp(_TOO_MANY)))
            peer.close()
            return None
        self._last_id += 1
        id = self._last_id
        self._connections[id] = _Connection(peer)
        peer.received = lambda payload: self._on_payload(id, payload)
        peer.closed = lambda reason: self._on_closed(id, reason)
        self._ping(id)
        if not self._beat_at.is_set:
            self._beat_at.set(self._loop.now() + self._beat)
        return id

    def _on_payload(self, id: int, payload: bytes) -> None:
        """Pass on a message of a peer; expel a peer whose message is malformed. Called by the peer."""
        connection = self._connections[id]
        try:
            message = self._decode(id, payload)
            if isinstance(message, messages.Hello | messages.Pong):
                connection.renew_lease(message, self._loop.now())
        except Malformed as error:
            self.expel(id, f"sent a malformed message ({error})")
            return
        connection.heartbeat.unanswered = 0  # any message shows that the peer lives
        connection.heard_at = self._loop.now()
        if isinstance(message, messages.Pong):
            # shows the offset of its clock
            connection.heartbeat.pong_received(message.sent, message.at, time.monotonic())
            self._receiver.on_pong()
        elif message is not None:
            self._receiver.on_message(id, message)
            connection.is_known = True  # to the receiver, which tells the user if it is lost

    def _decode(self, id: int, payload: bytes) -> messages.ToCoordinator | None:
        """Return the message in these bytes.

        A malformed message that only tells of workers is reported to the receiver and left out: in place of an answer, return one
        that says so (`NoAnswer`), in place of any other, None. Raises Malformed: any other message is malformed.
        """
        try:
            return messages.for_coordinator(payload)
        except Malformed as error:
            try:
                stand_in = messages.stand_in_for_malformed(payload)
            except Malformed:
                raise error from None
            self._receiver.on_part_dropped(id, str(error))
            return stand_in

    def _on_closed(self, id: int, reason: str) -> None:
        """Lose a peer whose connection has ended. Called by the peer."""
        connection = self._connections.pop(id)
        when = self._loop.clock.paused(self._terms.keepalive.timeout)
        # not that the process has ended: whatever stands between, as a proxy, may have closed the connection of one that lives
        why = f"{reason} while the coordinator was {when}" if when else reason
        self._receiver.on_lost(id, why, connection.renewed_at)

    # --- time

    def _send_heartbeats(self) -> None:
        """Go on with a round of pings, or begin one: ping the next peers, or give up those that were silent for too long.

        What counts is the number of pings, so that a pause of this process makes no peer look dead. Called by the loop.
        """
        now = self._loop.now()
        if not self._unpinged:
            self._begin_round(now)
        # not if `ping_all` wanted the round, which may be right after the last one
        counts_silence = self._round_counts_silence
        next_ones, self._unpinged = self._unpinged[:_PINGS_PER_TURN], self._unpinged[_PINGS_PER_TURN:]
        if self._unpinged:
            self._beat_at.set(now)  # in the next turn of the loop
        else:
            self._beat_at.set(self._next_beat if self._connections else None)
        for id in next_ones:
            if id not in self._connections:
                continue  # it has gone since the round began
            if counts_silence and self._is_silent_for_too_long(id):
                silent_for = self._connections[id].heartbeat.unanswered * self._beat
                self.expel(id, self._silence.describe(silent_for), may_return=True)  # as a new node
                continue
            if counts_silence:
                self._connections[id].heartbeat.unanswered += 1
            self._ping(id)

    def _begin_round(self, now: float) -> None:
        """Begin a round of pings; it is out of turn, and counts no silence, if `ping_all` wanted it before the next beat."""
        self._unpinged = list(self._connections)
        self._round_counts_silence = now >= self._next_beat
        if self._round_counts_silence:
            self._next_beat = now + self._beat

    def _is_silent_for_too_long(self, id: int) -> bool:
        """Measure for how long a peer and its host have been silent; return whether the peer is lost by that."""
        connection = self._connections[id]
        agent_silence, host_silence = connection.heartbeat.unanswered * self._beat, connection.peer.host_silence()
        self._silence.observe(connection.host_silence, host_silence)  # one that has ended allows longer ones
        connection.host_silence = host_silence
        return self._silence.seconds_left(agent_silence, host_silence, beat=self._beat) == 0

    def _ping(self, id: int) -> None:
        connection = self._connections[id]
        ping = messages.Ping(time.monotonic(), self._silence.host_limit, max(connection.renewal, 0.0))
        connection.pings.append(ping.sent)
        connection.peer.send(messages.encode(ping))
