"""What an agent does where the coordinator is on no node: its node is the first one, which the others reach, or reaches that one.

The first node is node 0 of a generation. The nodes do not talk to each other through the coordinator there, so each other node
keeps a connection to the first one while a generation runs, and reports when it hears the first one no longer. The coordinator
decides what follows from that. It also holds the meeting (`meeting.py`) in which nodes are asked to do this.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch.launcher.job.orders import MAX_ADDRESSES, CannotLead, Lead, MeetAt, Reached
from ddplaunch.launcher.job.search import Search
from ddplaunch.reach.channel import handshake
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.listener import Listener
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.reach.silence import Keepalive
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import line, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_loopback, usable_addresses
from ddplaunch.system.net.port import PortTaken, listen, reserve

if TYPE_CHECKING:
    from ddplaunch.launcher.job.link import Link

REACHED_WITHIN = 15.0  # seconds: names that are looked up, and a packet that is lost on the way, take a part of that
_PEERS_OF_SMALL_JOB = 64


class Probe:
    """This node's part in a meeting (the nodes of a generation find a way to the first one), and while that generation runs."""

    def __init__(self, loop: Loop, key: Key, keepalive: Keepalive, link: Link) -> None:
        """Take part in no meeting yet; `key` is that of the job, and `link` takes the reports on what comes of a meeting."""
        self._loop = loop
        self._key = key
        self._keepalive = keepalive
        self._link = link
        self._part: _FirstNode | _OtherNode | None = None

    def on_order(self, order: Lead | MeetAt) -> None:
        """Take part in the next meeting, in place of the last one: be its first node (`Lead`), or reach it (`MeetAt`)."""
        self.close()
        # a key for each meeting: nobody takes another port of the job, or one of an earlier meeting, for the first node
        key = handshake.key(self._key.hex(), f"meeting {order.meeting}")
        if isinstance(order, MeetAt):
            self._part = _OtherNode(self._loop, key, self._keepalive, order, self._link)
            return
        try:
            self._part = first = _FirstNode(self._loop, key, self._keepalive, order)
        except PortTaken:
            self._link.send(CannotLead(order.meeting, is_taken=True))
        except LaunchError as error:
            reason, hint = piece(error.message), piece(error.hint or "")
            self._link.send(CannotLead(order.meeting, is_taken=False, reason=reason, hint=hint, status=error.status))
        else:
            self._link.send(first.ready_report)

    def on_generation_ended(self) -> None:
        """Hear the first node no longer: nothing of the generation is left here. Others may still want to hear the first node."""
        if isinstance(self._part, _OtherNode):
            self.close()

    @property
    def address(self) -> str | None:
        """The address by which this node and the others reach each other; None if that is not known."""
        return self._part.address if self._part is not None else None

    def close(self) -> None:
        """Close all that is open."""
        if self._part is not None:
            self._part.close()
            self._part = None


class _FirstNode:
    """The first node: MASTER_PORT is reserved, and whoever reaches this node gets each of its pings back."""

    def __init__(self, loop: Loop, key: Key, keepalive: Keepalive, order: Lead) -> None:
        """Reserve the port, and listen for the others at any other one.

        Raises LaunchError, or PortTaken if the coordinator tries again (`order.again`).
        """
        # twice: a node may reach this one again before its old connection has ended
        self._most_peers = max(_PEERS_OF_SMALL_JOB, 2 * keepalive.max_nodes)
        self._peers: set[Peer] = set()
        self._reservation = reserve(order.master_port, order.port_origin, again=order.again)
        try:
            self._listener = Listener(
                loop,
                listen(None, (0,)),
                key,
                self,
                tcp_user_timeout=keepalive.tcp_user_timeout,
                max_half_open=self._most_peers,
            )
        except LaunchError:
            self._reservation.release()
            raise
        self.ready_report = MeetAt(order.meeting, self._reservation.port, own_addresses(), self._listener.port)

    def on_refused(self, who: str, reason: str) -> None:
        """Say nothing: a node of the job that is refused says itself that it does not reach this one. Called by the listener."""

    def on_opened(self, peer: Peer) -> None:
        """Answer the pings of another node. Called by the listener."""
        if len(self._peers) >= self._most_peers:
            peer.close()
            return
        self._peers.add(peer)
        peer.received = peer.send
        peer.closed = lambda reason: self._peers.discard(peer)

    @property
    def address(self) -> str | None:
        """The address of this node that most of the others have reached."""
        found = Counter(peer.local_address for peer in self._peers)
        return found.most_common(1)[0][0] if found else None

    def close(self) -> None:
        """Release the port, and hear nobody any more."""
        self._reservation.release()
        self._listener.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()


class _OtherNode:
    """A node that is not the first: looks for the first node at all of that one's addresses, then pings that node."""

    def __init__(self, loop: Loop, key: Key, keepalive: Keepalive, order: MeetAt, link: Link) -> None:
        """Look for the first node; report by `link` whether it is reached, and then that it is not heard any more."""
        self._loop = loop
        self._meeting_number = order.meeting
        self._link = link
        self._timeout, self._beat, self._silence = keepalive.timeout, keepalive.beat, keepalive.silence()
        self._peer: Peer | None = None  # the connection to the first node, once it is reached
        self._unanswered = 0  # pings since the last answer: a pause of this process makes nobody look dead
        self._host_silence = 0.0  # seconds for which the kernel of that node sent nothing, as last measured
        # when the search is given up; once the first node is reached, when the next ping is due
        self._due = loop.timer(loop.now() + REACHED_WITHIN, self._on_due)
        self._search = Search(loop, key, self, tcp_user_timeout=keepalive.tcp_user_timeout)
        self._search.begin((address, order.listen_port) for address in order.addresses)

    def on_found(self, peer: Peer, found_as: str) -> None:
        """Report that the first node is reached, and ping it from now on. Called by the search."""
        self._peer = peer
        peer.received, peer.closed = self._on_answer, self._on_closed
        self._link.send(Reached(self._meeting_number, found_as))
        self._due.set(self._loop.now())

    def _on_answer(self, payload: bytes) -> None:
        self._unanswered = 0

    def _on_due(self) -> None:
        """Ping the first node, or report that it is silent for too long, or was not reached in time. Called by the loop."""
        if self._peer is None:
            self._lose(self._search.refusals.text)
            return
        agent_silence, host_silence = self._unanswered * self._beat, self._peer.host_silence()
        # a silence of its host that has ended allows longer ones
        self._silence.observe(self._host_silence, host_silence)
        self._host_silence = host_silence
        if self._silence.seconds_left(agent_silence, host_silence, beat=self._beat) == 0:
            self._lose(self._silence.describe(agent_silence))
            return
        self._unanswered += 1
        self._peer.send(b"ping")
        self._due.set(self._loop.now() + self._beat)

    def _on_closed(self, reason: str) -> None:
        """Lose the first node, whose connection has ended. Called by the peer."""
        when = self._loop.clock.paused(self._timeout)
        self._lose(f"{reason}, while this node was {when}" if when else reason)

    def _lose(self, reason: str) -> None:
        """Report that the first node is not reached, or not heard any more, and look for it no longer."""
        self.close()
        self._link.send(Reached(self._meeting_number, "", line(reason)))

    @property
    def address(self) -> str | None:
        """The address from which this node has reached the first one."""
        return self._peer.local_address if self._peer is not None else None

    def close(self) -> None:
        """Look for the first node, or hear it, no longer."""
        self._due.cancel()
        self._search.stop()
        if self._peer is not None:
            self._peer.close()


def own_addresses() -> tuple[str, ...]:
    """Return where other hosts may reach this one: the address that ssh has connected to, and those of its interfaces."""
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    known = [address for address in connection[2:3] if not is_loopback(address)]
    return tuple(dict.fromkeys((*known, *usable_addresses())))[:MAX_ADDRESSES]
