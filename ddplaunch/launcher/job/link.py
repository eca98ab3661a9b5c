"""An agent's link to the coordinator: reports go there, orders come from there; and the lease of a node that it may lose."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job.orders import ClientOrder, Forward, Generation, JobEnd
from ddplaunch.system.fields import Malformed
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    import socket

    from ddplaunch.launcher.job import messages
    from ddplaunch.launcher.job.coordinator import Coordinator
    from ddplaunch.launcher.job.orders import Order, Report
    from ddplaunch.plan import Plan
    from ddplaunch.plan.cluster import Allocation, Rendezvous
    from ddplaunch.reach.channel.handshake import Key
    from ddplaunch.spec.job import JobSpec


class JoinRequest(Struct, frozen=True, kw_only=True):
    """All that this agent needs to find the others."""

    spec: JobSpec
    allocation: Allocation
    draft: Plan  # of this node, as if all nodes were like it
    rendezvous: Rendezvous  # where the coordinator is
    key: Key  # by which all agents of the job know each other
    facts: messages.NodeFacts  # what should be equal on all nodes
    listening_socket: socket.socket | None  # what the others can reach already, if the coordinator is here
    carried: socket.socket | None = None  # the connection to the coordinator, which what has started this agent carries


class Link(ABC):
    """An agent's link to the coordinator, in this process (`LocalLink`) or elsewhere (`RemoteLink`)."""

    coordinator: Coordinator | None = None  # if it is in this process

    def __init__(self, loop: Loop) -> None:
        """Post each order to this loop, whose owner is an agent, or a command that has started agents."""
        self._loop = loop
        self.end: JobEnd | None = None  # how the job has ended, once that is known
        self._has_ended = False

    @abstractmethod
    def send(self, report: Report) -> None:
        """Report to the coordinator, as far as it is reached."""

    @property
    def address(self) -> str | None:
        """The address of this node that the others reach, as far as it is known."""
        return None if self.coordinator is None else self.coordinator.reached_at

    @property
    def is_waiting(self) -> bool:
        """Whether the coordinator was lost and is waited for."""
        return False

    @property
    def has_begun(self) -> bool:
        """Whether this node has had a generation from the coordinator that there is, not only from one before it."""
        return True

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of this node."""
        return self._has_ended if self.coordinator is None else self.coordinator.is_over

    def give_up(self) -> None:
        """Wait for the coordinator no longer."""
        self._has_ended = True

    @abstractmethod
    def close(self) -> None:
        """Let go of all that is open."""

    def on_order(self, order: Order) -> None:
        """Post an order of the coordinator to the loop, whose owner carries it out; after the end of the job there is none."""
        match order:
            case JobEnd() if self._has_ended:
                pass  # a link that has lost the coordinator ends the job for this node itself
            case JobEnd():
                self._has_ended, self.end = True, order
                self._loop.post(order)
            case (
                Generation()
                | Forward()
                | node.StopOrdered()
                | node.AllStacksRead()
                | node.KillOrdered()
                | node.StoreOrdered()
            ):
                self._loop.post(order)
            case _:  # about what a client asks, or says to a worker
                self._loop.post(ClientOrder(order))


class LeaseClock(Protocol):
    """The clock by which a lease runs: `BootTime`, or a loop."""

    def now(self) -> float:
        """Return the time in seconds."""


class BootTime:
    """The clock of the machine: goes on while the machine sleeps, or this process is stopped."""

    def now(self) -> float:
        """Return the seconds since the machine has started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """Runs from when this node sent the last renewal that the coordinator has echoed; its first renewal needs no echo.

    The coordinator takes it to run from when that renewal arrived, which is later, and begins no generation without this node
    before it is over. A renewal's number is the time of its sending, by a clock that only this node reads.
    """

    def __init__(self, seconds: float, clock: LeaseClock) -> None:
        """`seconds` may be inf, for a job that never goes on without a node.

        The coordinator may set fewer, with a generation: `seconds` is what was typed on this node.
        """
        self.seconds = seconds
        self._clock = clock
        # renewals that were not echoed: the number, and when it was sent
        self._sent: deque[tuple[float, float]] = deque()
        self._echoed = 0.0  # the number of the last one that was; 0.0: none
        self._runs_from = inf  # when the last renewal that counts was sent

    def begin(self) -> None:
        """Forget the coordinator that was followed before; the lease begins with the next renewal."""
        self._sent.clear()
        self._echoed = 0.0
        self._runs_from = inf

    def renew(self, number: float) -> None:
        """Note that a renewal is sent now."""
        now = self._clock.now()
        self._sent.append((number, now))
        if self._runs_from == inf:
            self._runs_from = now

    def extend(self, number: float) -> None:
        """Extend the lease, since the coordinator has echoed the renewal of this number. Raises Malformed: it was never sent."""
        if number == self._echoed:  # no other has come since
            return
        while self._sent and self._sent[0][0] < number:
            self._sent.popleft()
        if not self._sent or self._sent[0][0] != number:
            raise Malformed("echoes a renewal that was not sent")
        self._echoed, self._runs_from = self._sent.popleft()

    @property
    def is_over(self) -> bool:
        """Whether no worker of this node may live any more."""
        return self.left == 0

    @property
    def left(self) -> float:
        """The seconds until the lease is over, at least 0.0."""
        return max(0.0, self._runs_from + self.seconds - self._clock.now())
