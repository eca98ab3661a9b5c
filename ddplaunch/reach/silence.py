"""How often the two sides of a connection hear each other, and how long one may be silent: what was measured goes in.

Two silences count. An agent is silent while it sends no message: it may be gone, stopped, or slow because its host swaps. A host
is silent while its kernel acknowledges no packet: it is off or cut off, since a kernel answers for a slow agent as well. So a
silent host is given up earlier. `docs/design/control-channel.md` has the measurements.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.reach.channel.peer import sends_again_each_second

if TYPE_CHECKING:
    from ddplaunch.spec.job import JobSpec

FACTOR = 3  # of the longest silence of any host that has ended: a network that pauses once does so again, for longer
# seconds: pauses of 4 s are survived, in which virtual machines move and networks find another way
SHORTEST_LIMIT = 6.0
# seconds, where a kernel sends again 3.0 s and 6.2 s after a loss, with nothing in between: see `reach.channel.peer.prepare`
SHORTEST_LIMIT_WITH_GAPS = 8.0
_NODES_PER_BEAT = 2000  # for so many more nodes, one more second from ping to ping
_ROUND_TRIP = 0.1  # of a beat, for the answer to a ping: without it, the coordinator would miss a host one ping later


class Keepalive(Struct, frozen=True, kw_only=True):
    """What holds for all connections between the nodes of a job."""

    max_nodes: int = 1
    timeout: float  # seconds after which a silent agent counts as lost
    may_be_shorter: bool = False  # for a host that answers nothing

    @classmethod
    def of(cls, spec: JobSpec, max_nodes: int) -> Keepalive:
        """Return what the user has asked for, for a job of so many nodes."""
        return cls(max_nodes=max_nodes, timeout=spec.heartbeat_timeout, may_be_shorter=spec.may_shorten_silence)

    @property
    def beat(self) -> float:
        """Seconds from one ping to the next; always the same, since what counts is the number of pings without an answer."""
        return min(max(1.0, self.max_nodes / _NODES_PER_BEAT), self.timeout / 4)

    @property
    def tcp_user_timeout(self) -> float:
        """Seconds after which the kernel may close a connection: whether the other side is lost is decided here, before that."""
        return 2 * self.timeout

    def silence(self) -> Silence:
        """Return how long the other sides may be silent."""
        least = self.timeout
        if self.may_be_shorter:
            least = SHORTEST_LIMIT if sends_again_each_second() else SHORTEST_LIMIT_WITH_GAPS
        return Silence(self.timeout, least)


class Silence:
    """The time limits for the silence of an agent and of its host, the same for all: all lose the coordinator at one time."""

    def __init__(self, most: float, least: float) -> None:
        """An agent may be silent for `most` seconds, its host for `least` seconds at first; if both are equal, none adapts."""
        self.most = most
        self.host_limit = min(least, most)

    def observe(self, before: float, host: float) -> None:
        """Take for how many seconds a host has been silent, when last measured and by now.

        Only a silence that has ended raises the limit: one that lasts would otherwise never reach it.
        """
        if host < before:
            self.host_limit = min(self.most, max(self.host_limit, float(ceil(FACTOR * before))))

    def seconds_left(self, agent: float, host: float, beat: float = 0.0) -> float:
        """Return how long the other side may still be silent, if its agent and its host have been for so long; 0.0: it is lost.

        It is lost once its agent has been silent for `most`, or its agent and its host for `host_limit`. One that counts pings
        without an answer gives their `beat`: the answer to the ping before these came about a beat earlier.
        """
        return max(0.0, min(self.most - agent, self.host_limit - min(agent + beat, host + beat * _ROUND_TRIP)))

    def describe(self, agent: float) -> str:
        """Say for how long the agent of a lost side was silent at least: "silent for 5 s"."""
        return f"silent for {self.most if agent >= self.most else self.host_limit:g} s"


def describe_way(agent: float, host: float, *, sends_in_vain: bool) -> str:
    """Say that a lost side hears nothing from here, if that can be known: ", and hears nothing from here"; else "".

    Its kernel has sent packets since its agent was last heard, and none of them acknowledged what was sent from here again.
    Once nothing is acknowledged, a TCP connection carries nothing new either way, so its agent is silent too.
    """
    return ", and hears nothing from here" if sends_in_vain and host < agent / 2 else ""
