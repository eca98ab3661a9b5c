"""The link of an agent to a coordinator on another host: how it is looked for, reached and lost."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddplaunch import exitcodes
from ddplaunch.control.dialer import Dialer
from ddplaunch.control.handshake import UNPROVEN, WRONG_KEY, Key
from ddplaunch.control.peer import Peer
from ddplaunch.coordinator import messages
from ddplaunch.coordinator.link import JobEnd, Link, NodeEnd
from ddplaunch.coordinator.trust import OrderSequence
from ddplaunch.fields import Malformed
from ddplaunch.net.resolver import Answer, Resolver
from ddplaunch.process.clock import PROCESS_CLOCK, paused
from ddplaunch.supervise import node
from ddplaunch.supervise.deadline import soonest

if TYPE_CHECKING:
    from ddplaunch.coordinator.link import LinkHandler, Report

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

    def __init__(
        self,
        handler: LinkHandler,
        selector: selectors.BaseSelector,
        *,
        key: Key,
        hello: Callable[[str], messages.Hello | messages.Watch],
        source: str | None,
        heartbeat_timeout: float,
        rdzv_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        """Prepare to look for the coordinator.

        `hello` gives the first message, from the name under which the coordinator was reached. `heartbeat_timeout` are the
        seconds after which a silent one counts as lost, `rdzv_timeout` those after which one that was not reached is given up.
        """
        super().__init__(handler)
        self._clock = clock
        self._selector = selector
        self._hello = hello
        self._heartbeat_timeout = heartbeat_timeout
        PROCESS_CLOCK.protect(heartbeat_timeout)
        self._peer: Peer | None = None
        self._sequence: OrderSequence | None = None  # from the first message on
        self._names: dict[str, str] = {}  # what the targets were called, by numeric address
        self._queries: tuple[tuple[str, int], ...] = ()
        self._resolver: Resolver | None = None
        self._resolve_at: float | None = None
        self._problem, self._tells = NO_ANSWER, -1
        self._began = clock()
        self._rdzv_timeout = rdzv_timeout
        self._lost_at: float = self._began + rdzv_timeout
        self._notice_at: float | None = self._began + FIRST_NOTICE
        self._dialer = Dialer(
            selector,
            key,
            source=source,
            opened=self._opened,
            refused=self._refused,
            user_timeout=2 * heartbeat_timeout,  # whether the coordinator is lost is decided here
            clock=clock,
        )

    # --- connecting

    def aim(self, hosts: Sequence[str], ports: Sequence[int]) -> None:
        """Look for the coordinator at these places."""
        self._queries = tuple((host, port) for host in hosts for port in ports)
        self._resolve()

    def _resolve(self) -> None:
        self._resolve_at = None
        if self._resolver is not None:
            self._resolver.close()
        self._resolver = Resolver(self._selector, self._queries, self._resolved)

    def _resolved(self, answers: Sequence[Answer]) -> None:
        targets = []
        for answer in answers:
            for family, sockaddr in answer.targets:
                self._names.setdefault(str(sockaddr[0]), answer.host)
                targets.append((family, sockaddr))
            if answer.error:
                self._failed(f"{answer.host}: {answer.error}", telling(answer.error))
                self._resolve_at = self._clock() + RESOLVE_AGAIN
        if targets:
            self._dialer.set_targets(targets)

    def _refused(self, endpoint: str, reason: str) -> None:
        self._failed(f"{endpoint}: {reason}", telling(reason))

    def _failed(self, problem: str, tells: int) -> None:
        # of all attempts; the latest of those that tell as much, but the first of refused connections
        if tells > self._tells or tells == self._tells > 0:
            self._problem, self._tells = problem, tells

    def _opened(self, peer: Peer) -> None:
        self._dialer.stop()
        self._resolve_at = None
        if self._resolver is not None:
            self._resolver.close()
        self._peer = peer
        self._notice_at = None
        peer.received, peer.closed = self._received, self._closed
        self._lost_at = self._clock() + self._heartbeat_timeout
        hello = self._hello(self._names.get(peer.address, peer.address))
        self._sequence = OrderSequence(hello)
        peer.send(messages.encode(hello))

    # --- reports and orders

    def send(self, report: Report) -> None:
        """Report to the coordinator; without one, a stop ends this node."""
        if self._peer is not None and self._sequence is not None:
            if isinstance(report, NodeEnd):
                self._sequence.ended()
            if not isinstance(report, node.Suspend | node.Resume):  # here the time of the job goes on
                self._peer.send(messages.encode(messages.fitted(report)))
        elif isinstance(report, node.ReportStopping):
            # no other agent knows of this node yet
            status = exitcodes.of_signal(report.signum) if report.signum else exitcodes.NODE_LOST
            self.take(JobEnd(status=status, why=report.why.value))

    def expect_one_fewer(self) -> None:
        """Ignore it: only the agent of node 0 learns of nodes that were given up."""

    @property
    def address(self) -> str | None:
        """The address that this node connects from."""
        return self._peer.local_address if self._peer is not None else None

    def _received(self, payload: bytes) -> None:
        self._lost_at = self._clock() + self._heartbeat_timeout
        try:
            message = messages.for_agent(payload)
            if self._sequence is not None:
                self._sequence.check(message)
        except Malformed as error:
            self._lose(f"the coordinator sent a malformed message ({error})")
            return
        if isinstance(message, messages.Ping):
            if self._peer is not None:
                self._peer.send(messages.encode(messages.Pong(message.sent, time.monotonic())))
        else:
            self.take(messages.on_arrival(message, self._clock()))

    def _closed(self, reason: str) -> None:
        # who was paused is lost to the others, and not they to it
        if when := paused(self._heartbeat_timeout):
            self._end_as_lost(f"this node was {when}, and the coordinator (node 0) was gone then: {reason}")
        else:
            self._lose(reason)

    # --- losing it

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        if self._has_ended:
            return None
        return soonest(self._lost_at, self._resolve_at, self._notice_at, self._dialer.deadline)

    def expire(self, now: float) -> None:
        """Do what the time asks for."""
        if self._has_ended:
            return
        self._dialer.expire(now)
        if self._resolve_at is not None and now >= self._resolve_at:
            self._resolve()
        if self._notice_at is not None and now >= self._notice_at:
            self._notice_at = now + NEXT_NOTICE
            self._handler.print(f"looking for node 0 at {self._places} ({self._problem})")
        if now < self._lost_at:
            return
        if self._peer is not None:
            self._lose(f"silent for {self._heartbeat_timeout:g} s")
            return
        text = (
            f"error: node 0 was not reached within {self._rdzv_timeout:g} s at {self._places} ({self._problem})\n\n"
            "hint: is ddplaunch running on node 0, and does every node use the same address and token?\n"
        )
        self.take(JobEnd(status=exitcodes.RENDEZVOUS, why="not_reached", text=text))

    @property
    def _places(self) -> str:
        hosts = dict.fromkeys(f"[{host}]" if ":" in host else host for host, _ in self._queries)
        ports = sorted({port for _, port in self._queries})
        return f"{', '.join(hosts)}, " + (f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else f"port {ports[0]}")

    def _lose(self, reason: str) -> None:
        self._end_as_lost(f"the coordinator (node 0) was lost: {reason}")

    def _end_as_lost(self, error: str) -> None:
        self.take(JobEnd(status=exitcodes.NODE_LOST, why="lost", text=f"error: {error}\n"))

    @property
    def is_reached(self) -> bool:
        """Whether the coordinator has been found."""
        return self._peer is not None

    @property
    def pids(self) -> frozenset[int]:
        """The child that looks names up."""
        pid = self._resolver.pid if self._resolver is not None else None
        return frozenset() if pid is None else frozenset({pid})

    def close(self) -> None:
        """Close all that is open."""
        self._dialer.stop()
        if self._resolver is not None:
            self._resolver.close()
        if self._peer is not None:
            self._peer.close()
