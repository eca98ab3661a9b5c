"""The link of an agent to a coordinator on another host: how it is looked for, reached and lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from socket import socket
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.messages import OrderSequence
from ddplaunch.launcher.job.orders import JobEnd, LookingForCoordinator, NodeEnd
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import UNPROVEN, WRONG_KEY, Client, Key
from ddplaunch.reach.channel.peer import CLOSED, Greeting, Peer
from ddplaunch.reach.silence import Silence
from ddplaunch.spec.outcome import CUT_OFF
from ddplaunch.system import exitcodes
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.resolver import Answer, Resolver
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import Order, Report

_LOST = "the coordinator (node 0) was lost"
LEAVES = "it leaves ("  # how the reason of a coordinator that leaves by a signal begins
NO_ANSWER = "it has not answered"
CONNECTION_REFUSED = "connection refused"
FIRST_NOTICE = 3.0  # seconds until it is first reported where node 0 is looked for
NEXT_NOTICE = 30.0  # seconds from one such notice to the next
RESOLVE_AGAIN = 1.0  # seconds until a name that was not known is looked up again


def telling(reason: str) -> int:
    """How much this tells of why node 0 is not reached: most what an agent there finds wrong, least that nobody listens."""
    if reason in (WRONG_KEY, UNPROVEN) or reason.startswith("protocol "):
        return 2
    return 0 if reason == CONNECTION_REFUSED else 1


class RemoteLink(Link):
    """The link of an agent to a coordinator elsewhere."""

    _resolve_again = RESOLVE_AGAIN
    _without_front = f"it is {CUT_OFF}"  # why a coordinator leaves that has lost the command with which it was started

    def __init__(
        self,
        loop: Loop,
        *,
        key: Key,
        hello: Callable[[str], messages.FirstMessage],
        source: str | None,
        heartbeat_timeout: float,
        may_shorten_silence: bool = False,
        rdzv_timeout: float,
    ) -> None:
        """Prepare to look for the coordinator.

        `hello` gives the first message, from the name under which the coordinator was reached. `heartbeat_timeout` are the
        seconds after which a silent one counts as lost, earlier if `may_shorten_silence` and the coordinator says so in its
        pings; `rdzv_timeout` those after which one that was not reached is given up.
        """
        super().__init__(loop)
        self._key = key
        self._hello = hello
        self._heartbeat_timeout = heartbeat_timeout
        self._may_shorten_silence = may_shorten_silence
        self._silence = Silence(heartbeat_timeout, heartbeat_timeout)
        self._heard_at = 0.0
        self._answers: deque[tuple[float, float]] = deque(maxlen=8)  # when pings were answered, by both clocks
        self._known_at = -inf  # when the last answer was given that has come there, as it has said
        loop.clock.protect(heartbeat_timeout)
        self._peer: Peer | None = None
        self._sequence: OrderSequence | None = None  # from the first message on
        self._names: dict[str, str] = {}  # what the targets were called, by numeric address
        self._queries: tuple[tuple[str, int], ...] = ()
        self._resolver: Resolver | None = None
        self._resolve_at = loop.timer(None, self._resolve)
        self._problem, self._tells = NO_ANSWER, -1
        self._rdzv_timeout = rdzv_timeout
        self._lost_at = loop.timer(loop.now() + rdzv_timeout, self._on_timeout)
        self._notice_at = loop.timer(loop.now() + FIRST_NOTICE, self._report_search)
        self._dialer = Dialer(
            loop,
            key,
            source=source,
            opened=self._on_opened,
            refused=self._on_refused,
            user_timeout=2 * heartbeat_timeout,  # whether the coordinator is lost is decided here
        )

    # --- connecting

    def aim(self, hosts: Sequence[str], ports: Sequence[int]) -> None:
        """Look for the coordinator at these places."""
        self._queries = tuple((host, port) for host in hosts for port in ports)
        self._resolve()

    def adopt(self, sock: socket, host: str) -> None:
        """Follow the coordinator at the other end of this connection, which something else carries, as ssh does."""

        def failed(reason: str) -> None:
            self._lose(f"{_LOST}: {reason}")

        Greeting(self._loop, sock, (host, 0), Client(self._key), opened=self._on_opened, failed=failed)

    def _resolve(self) -> None:
        """Look up all names again, in place of a look-up that is under way."""
        self._resolve_at.cancel()
        if self._resolver is not None:
            self._resolver.close()
        self._resolver = Resolver(self._loop, self._queries, self._on_resolved)

    def _on_resolved(self, answers: Sequence[Answer]) -> None:
        """Dial the addresses that were found; look up again the names that were not. Called by the resolver."""
        targets = []
        for answer in answers:
            for family, sockaddr in answer.targets:
                self._names.setdefault(str(sockaddr[0]), answer.host)
                targets.append((family, sockaddr))
            if answer.error:
                self._on_refused(answer.host, answer.error)
                self._resolve_at.set(self._loop.now() + self._resolve_again)
        if targets:
            self._dialer.set_targets(targets)

    def _on_refused(self, where: str, reason: str) -> None:
        """Keep the most telling reason of all attempts: the latest of equal ones, but the first of refused connections."""
        tells = telling(reason)
        if tells > self._tells or tells == self._tells > 0:
            self._problem, self._tells = f"{where}: {reason}", tells

    def _on_opened(self, peer: Peer) -> None:
        """Take the connection to the coordinator, and send the first message. Called by the dialer."""
        self._dialer.stop()
        self._resolve_at.cancel()
        if self._resolver is not None:
            self._resolver.close()
        self._peer = peer
        self._answers.clear()
        self._known_at = -inf
        self._notice_at.cancel()
        peer.received, peer.closed = self._on_message, self._on_closed
        self._note_message()
        hello = self._hello(self._names.get(peer.address, peer.address))
        if isinstance(hello, messages.Hello):
            hello = replace(hello, at=self._answer_now())
        self._sequence = OrderSequence(hello)
        peer.send(messages.encode(hello))

    # --- reports and orders

    def send(self, report: Report) -> None:
        """Report to the coordinator. If none was reached yet, a report that this node stops ends this node."""
        if self._peer is not None and self._sequence is not None:
            if isinstance(report, NodeEnd):
                self._sequence.ended()
            if not isinstance(report, node.Suspend | node.Resume):  # here the time of the job goes on
                self._peer.send(messages.encode(messages.fitted(report)))
        elif isinstance(report, node.ReportStopping):
            # no other agent knows of this node yet
            status = exitcodes.of_signal(report.signum) if report.signum else exitcodes.NODE_LOST
            self.take(JobEnd(status=status, why=report.why.value))

    @property
    def address(self) -> str | None:
        """The address that this node connects from, if the coordinator is elsewhere."""
        return self._peer.local_address or None if self._peer is not None else super().address

    def _on_message(self, payload: bytes) -> None:
        """Take an order, or answer a ping; a malformed message loses the coordinator. Called by the peer."""
        self._note_message()
        try:
            message = messages.for_agent(payload)
            if self._sequence is not None:
                self._sequence.check(message)
        except Malformed as error:
            self._lose(f"{_LOST}: the coordinator sent a malformed message ({error})")
            return
        match message:
            case messages.Ping(sent, host_limit, answered):
                if self._may_shorten_silence:
                    self._silence.host_limit = min(host_limit, self._heartbeat_timeout)
                self._known_at = next((when for at, when in self._answers if at == answered), self._known_at)
                self._send(messages.Pong(sent, self._answer_now()))
            case messages.GivenUp(reason):
                if when := self._loop.clock.paused(self._heartbeat_timeout):
                    self._lose(
                        f"this node was {when}, and the coordinator (node 0) goes on without this node: {reason}"
                    )
                else:
                    # other nodes may have been given up, too, and be more than those that are left there
                    self._lose_coordinator(f"it goes on without this node: {reason}", has_ended=False)
            case messages.LeftByNode0(signum, unfit):
                self._on_left(signum, unfit)
            case _:
                self.take(messages.on_arrival(message, self._loop.now()))

    def _answer_now(self) -> float:
        """Return the time of an answer that is sent now, of which the coordinator may say that it has come."""
        self._answers.append((time.monotonic(), self._loop.now()))
        return self._answers[-1][0]

    def _send(self, message: messages.ToCoordinator) -> None:
        if self._peer is not None:
            self._peer.send(messages.encode(message))

    def _note_message(self) -> None:
        """Measure the silence of the coordinator from now on."""
        self._heard_at = self._loop.now()
        self._lost_at.set(self._heard_at + self._silence.host_limit)

    def _on_closed(self, reason: str) -> None:
        if when := self._loop.clock.paused(self._heartbeat_timeout):
            self._wake_without(when, reason)
        else:
            # the kernel closes the connections of a process that ends; who drops this node says so before. A firewall may
            # reset them
            self._lose_coordinator(reason, has_ended=reason == CLOSED)

    # --- losing it

    def take(self, order: Order) -> None:
        """Take an order; after the end of the job nothing is waited for any more."""
        super().take(order)
        if self._has_ended:
            self._stop_waiting()

    def leave(self) -> None:
        """Wait for the coordinator no longer."""
        super().leave()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        for timer in (self._lost_at, self._resolve_at, self._notice_at):
            timer.cancel()
        self._dialer.stop()

    def _report_search(self) -> None:
        """Post where this node looks for node 0, and why node 0 is not reached; again after NEXT_NOTICE."""
        self._notice_at.set(self._loop.now() + NEXT_NOTICE)
        self._loop.post(LookingForCoordinator(f"looking for node 0 at {self._places} ({self._problem})"))

    def _on_timeout(self) -> None:
        """End this node if the coordinator was silent for too long, or was not reached in time. Called by the loop."""
        if self._peer is not None:
            agent = self._loop.now() - self._heard_at
            if left := self._silence.seconds_left(agent, self._peer.host_silence()):
                self._lost_at.set(self._loop.now() + left)
            else:
                self._lose_coordinator(self._silence.describe(agent), has_ended=False)
            return
        text = (
            f"error: node 0 was not reached within {self._rdzv_timeout:g} s at {self._places} ({self._problem})\n\n"
            "hint: is ddplaunch running on node 0, with the same address and token? Type `--node-rank` on all nodes or on none\n"
        )
        self.take(JobEnd(status=exitcodes.RENDEZVOUS, why="not_reached", text=text))

    @property
    def _places(self) -> str:
        hosts = dict.fromkeys(f"[{host}]" if ":" in host else host for host, _ in self._queries)
        ports = sorted({port for _, port in self._queries})
        return f"{', '.join(hosts)}, " + (f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else f"port {ports[0]}")

    def _on_left(self, signum: int, unfit: str) -> None:
        """Lose a coordinator that leaves by this signal, is unfit, or is cut off."""
        if unfit:
            why = f"its health check failed: {unfit}"
        else:
            why = f"{LEAVES}{signal_name(signum)})" if signum else self._without_front
        self._lose_coordinator(why, has_ended=True)

    def _lose_coordinator(self, reason: str, *, has_ended: bool) -> None:
        """End this node, or look for another coordinator; `has_ended`: the process of the last one is known to be gone."""
        self._lose(f"{_LOST}: {reason}")

    def _disconnect(self) -> None:
        """Follow no coordinator, until another one is reached."""
        if self._peer is not None:
            self._peer.close()
            self._peer = self._sequence = None
        self._lost_at.cancel()

    def _wake_without(self, when: str, reason: str) -> None:
        """End this node, which was paused, so that the coordinator has lost it."""
        self._lose(f"this node was {when}, and the coordinator (node 0) was gone then: {reason}")

    def _lose(self, error: str) -> None:
        self.take(JobEnd(status=exitcodes.NODE_LOST, why="lost", text=f"error: {error}\n"))

    @property
    def is_reached(self) -> bool:
        """Whether the coordinator has been found."""
        return self._peer is not None

    def close(self) -> None:
        """Close all that is open."""
        self._stop_waiting()
        if self._resolver is not None:
            self._resolver.close()
        if self._peer is not None:
            self._peer.close()
