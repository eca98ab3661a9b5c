"""Which host has the coordinator of a job whose agents were started from here, and whether the one before it has ended.

The agents decide who takes over. Of two nodes, the one that is left cannot know whether the other has ended or is cut off, and
this side often can: each agent ends soon after its connection to here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ddplaunch.reach.connections import HostConnection, HostPhase
from ddplaunch.reach.protocol import COORDINATOR_ENDED
from ddplaunch.system.exitcodes import NODE_LOST
from ddplaunch.system.loop.loop import Loop

_LATE = 1.0  # seconds, beyond the heartbeat timeout, in which an agent without a connection to here begins to end


class CoordinatorHost:
    """Follows the coordinator from host to host."""

    def __init__(self, loop: Loop, hosts: Sequence[HostConnection], min_nodes: int, heartbeat_timeout: float) -> None:
        """Begin with the first host; a job that needs all its hosts keeps its coordinator."""
        self._loop = loop
        self._fence = heartbeat_timeout + _LATE
        self.may_change = min_nodes < len(hosts)
        self.current = hosts[0]  # the coordinator of the last generation that began
        self._successors: list[HostConnection] = []  # whose agents have taken over since, the last one last
        self._known = {hosts[0]}  # all that were one of both
        self._ended: set[HostConnection] = set()  # whose agents go on nowhere
        self._confirmed: set[HostConnection] = set()  # successors that know that those before them have ended
        self._is_over = False  # the job, as the coordinator has decided
        self._generations: dict[HostConnection, int] = {}  # the last that has begun on each host

    def speaks_for_job(self, host: HostConnection) -> bool:
        """Whether the coordinator is on this host, or was, or its agent has taken over."""
        return host in self._known

    @property
    def speakers(self) -> tuple[HostConnection, ...]:
        """The hosts that may know how the job has ended, the one that knows best first."""
        return (self.current, *reversed(self._successors))

    @property
    def answering(self) -> HostConnection:
        """The host whose agent is asked about the job: the coordinator's, or once that is lost the last that has taken over."""
        return next((host for host in self.speakers if host.phase is HostPhase.CONNECTED), self.current)

    def took_over(self, host: HostConnection) -> None:
        """Note that the agent of a host waits for the others as their coordinator."""
        self._known.add(host)
        self._successors = [*(one for one in self._successors if one is not host), host]
        self._confirmed.discard(host)
        self._answer()

    def begun(self, host: HostConnection) -> None:
        """Note that a generation has begun with the coordinator on this host."""
        self.current, self._successors = host, []

    def generation_begun(self, host: HostConnection, number: int) -> None:
        """Note that this generation has begun on a host."""
        self._generations[host] = number

    def agent_ended(self, host: HostConnection, status: int = NODE_LOST) -> None:
        """Note that the agent of a host has ended, or begun to end, and so coordinates nothing any more.

        If that of the coordinator was not lost, the job has its end: another node may only not know that yet.
        """
        self._is_over = self._is_over or (host is self.current and status != NODE_LOST)
        self._ended.add(host)
        self._answer()

    def disconnected(self, host: HostConnection) -> None:
        """Expect the agent of a host to end: at the end of its connection, or when it has had no frame for too long."""
        if self.may_change:
            self._loop.timer(self._loop.now() + self._fence, partial(self.agent_ended, host))

    def _answer(self) -> None:
        """Tell each successor, once, that all coordinators before that one have ended; or end it, with the job.

        One that the job has gone on without is told nothing: it would count with nodes that have gone on.
        """
        last = max(self._generations.values(), default=-1)
        for at, host in enumerate(self._successors):
            if self._is_over:
                host.close_stdin()
            elif self._generations.get(host, -1) < last:
                continue
            elif host not in self._confirmed and self._ended.issuperset((self.current, *self._successors[:at])):
                self._confirmed.add(host)
                host.send(COORDINATOR_ENDED, b"")
