"""Whether the nodes of a generation hear its first node, where the coordinator is none of them: the part of each node.

The first node reserves MASTER_PORT and listens. The others find out at which of its addresses they reach it, and keep that
connection while the generation runs: they report it if they no longer hear the first node, which the coordinator may still hear.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ddplaunch.launcher.job.orders import Lead, LeadRefused, Leads, Reach, Reached, Unheard
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.listener import Listener
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.system import fields
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import usable_addresses
from ddplaunch.system.net.port import PortTaken, Reservation, reserve
from ddplaunch.system.net.resolver import Answer, Resolver

REACH_WITHIN = 15.0  # seconds that a node has to reach the first one
_BEAT = 1.0  # seconds from one question to the first node to the next
_SAID = b'"here"'


class Hearing:
    """One node's part, from the order to lead or to reach to the end of the generation."""

    def __init__(
        self,
        loop: Loop,
        key: Key,
        heartbeat_timeout: float,
        report: Callable[[Leads | LeadRefused | Reached | Unheard], None],
    ) -> None:
        self._loop = loop
        self._key = key
        self._heartbeat_timeout = heartbeat_timeout
        self._report = report
        self._reservation: Reservation | None = None
        self._listener: Listener | None = None
        self._dialer: Dialer | None = None
        self._resolver: Resolver | None = None
        self._peers: list[Peer] = []  # of the first node: all that hear it; of another: the first node
        self._names: dict[str, str] = {}  # what the addresses were called, by numeric address
        self._problem = "it has not answered"
        self._number = -1  # of the generation
        self._unanswered = 0.0  # seconds since the first node has said anything, as questions count them
        self._beat_at = loop.timer(None, self._beat)
        self._give_up_at = loop.timer(None, self._give_up)
        self.address: str | None = None  # of this node, as the others reach it

    # --- the first node

    def lead(self, order: Lead) -> None:
        """Reserve MASTER_PORT and listen for the other nodes; report where."""
        self.close()
        self._number = order.number
        try:
            self._reservation = reserve(order.port, order.origin, again=order.again)
            self._listener = Listener(
                self._loop,
                self._key,
                address=None,
                ports=(0,),
                opened=self._on_heard,
                refused=lambda _address, _reason: None,
                user_timeout=2 * self._heartbeat_timeout,
            )
        except PortTaken:
            self._report(LeadRefused(order.number, "the port is taken", is_taken=True))
            return
        except LaunchError as error:
            hint, text = error.hint or "", fields.line(error.message.partition("\n")[0])
            self._report(LeadRefused(order.number, text, fields.line(hint), error.status))
            return
        connection = os.environ.get(
            "SSH_CONNECTION", ""
        ).split()  # client's address and port, server's address and port
        found = dict.fromkeys((order.name, *connection[2:3], *usable_addresses()))
        self._report(Leads(order.number, self._reservation.port, self._listener.port, tuple(map(fields.host, found))))

    def _on_heard(self, peer: Peer) -> None:
        """Answer whatever another node asks. Called by the listener."""
        self._peers.append(peer)
        self.address = peer.local_address
        peer.received = lambda _: peer.send(_SAID)
        peer.closed = lambda _: self._peers.remove(peer)

    # --- another node

    def reach(self, order: Reach) -> None:
        """Find out at which of its addresses the first node is reached; report that, or that none answers."""
        self.close()
        self._number = order.number
        self._dialer = Dialer(
            self._loop,
            self._key,
            source=None,
            opened=self._on_reached,
            refused=self._on_refused,
            user_timeout=2 * self._heartbeat_timeout,
        )
        self._give_up_at.set(self._loop.now() + REACH_WITHIN)
        queries = tuple((address, order.heard_at) for address in order.addresses)
        self._resolver = Resolver(self._loop, queries, self._on_resolved)

    def _on_resolved(self, answers: Sequence[Answer]) -> None:
        targets = []
        for answer in answers:
            for family, sockaddr in answer.targets:
                self._names.setdefault(str(sockaddr[0]), answer.host)
                targets.append((family, sockaddr))
            if answer.error:
                self._on_refused(answer.host, answer.error)
        if targets and self._dialer is not None:
            self._dialer.set_targets(targets)

    def _on_refused(self, where: str, reason: str) -> None:
        self._problem = f"{where}: {reason}"

    def _on_reached(self, peer: Peer) -> None:
        """Keep the first connection to the first node. Called by the dialer."""
        assert self._dialer is not None
        self._dialer.stop()
        self._give_up_at.cancel()
        self._peers, self.address, self._unanswered = [peer], peer.local_address, 0.0
        peer.received, peer.closed = self._on_answer, self._on_lost
        self._report(Reached(self._number, fields.host(self._names.get(peer.address, peer.address))))
        self._beat_at.set(self._loop.now() + _BEAT)

    def _on_answer(self, _: bytes) -> None:
        self._unanswered = 0.0

    def _beat(self) -> None:
        """Ask the first node; give it up once it has not answered for too long. A pause of this process loses nobody."""
        if self._unanswered >= self._heartbeat_timeout:
            self._on_lost(f"silent for {self._heartbeat_timeout:g} s")
            return
        self._unanswered += _BEAT
        self._peers[0].send(_SAID)
        self._beat_at.set(self._loop.now() + _BEAT)

    def _on_lost(self, reason: str) -> None:
        number = self._number
        self.close()
        self._report(Unheard(number, fields.line(reason)))

    def _give_up(self) -> None:
        number, problem = self._number, self._problem
        self.close()
        self._report(Reached(number, None, fields.line(problem)))

    # ---

    def close(self) -> None:
        """Let go of the port and of all connections."""
        self._beat_at.cancel()
        self._give_up_at.cancel()
        for part in (self._listener, self._resolver):
            if part is not None:
                part.close()
        if self._dialer is not None:
            self._dialer.stop()
        for peer in self._peers:
            peer.close()
        if self._reservation is not None:
            self._reservation.release()
        self._peers = []
        self._listener = self._resolver = self._dialer = self._reservation = None
