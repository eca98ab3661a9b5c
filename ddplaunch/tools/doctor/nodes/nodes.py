"""The nodes from the doctor's side: starts a program on each, asks many at once, and waits for none longer than it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import time
from typing import Generic, TypeVar

from msgspec import Struct, field

from ddplaunch import __version__
from ddplaunch.reach import diagnose
from ddplaunch.reach.connections import AgentStart, HostConnection, HostPhase
from ddplaunch.reach.diagnose import HostError
from ddplaunch.reach.protocol import ORDER, PROTOCOL, REQUEST
from ddplaunch.reach.startup import NOTICE_AFTER, Calls
from ddplaunch.system.errors import say
from ddplaunch.system.fields import Malformed, decoder
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.words import some
from ddplaunch.tools.doctor.nodes import messages
from ddplaunch.tools.doctor.nodes.joined import JoinedNode
from ddplaunch.tools.doctor.nodes.messages import Answered, Asked, Reply, Request

_TRAVEL_TIME = 2.0  # seconds for an answer to arrive, beyond those that the node has for it
_END_WITHIN = 2.0  # seconds in which the programs on the nodes have to end
_STOPPED_ANSWERING = HostError(
    "it has stopped answering", "is it stopped, overloaded, or its network cut? `ssh {host}`"
)


def _not_joined(within: float) -> HostError:
    hint = "start the doctor on each node, with the same options. `ddplaunch doctor --standalone` examines one machine alone"
    return HostError(f"it has not joined within {within:g} s", hint)


R = TypeVar("R", bound=Reply)
R_co = TypeVar("R_co", bound=Reply, covariant=True)


class Batch(Struct, Generic[R_co], kw_only=True):
    """Requests that were sent together, and the replies, all of one kind, as they come."""

    kind: type[R_co]
    sent_at: float  # seconds since 1970
    until: float  # of the loop's clock
    pending: dict[int, int] = field(default_factory=dict)  # which node has not answered, by request number
    replies: dict[int, R_co] = field(default_factory=dict)  # by node rank
    failures: dict[int, str] = field(default_factory=dict)  # why a node has no reply, by node rank
    came_at: dict[int, float] = field(default_factory=dict)  # seconds since 1970, by node rank

    def take(self, answered: Answered) -> None:
        """Take the answer of a node that is pending; raise Malformed if it is of another kind."""
        rank = self.pending.pop(answered.number)
        self.came_at[rank] = time()
        if answered.why_none is None:
            self.replies[rank] = decoder(self.kind)(answered.reply)
        else:
            self.failures[rank] = answered.why_none


class Nodes:
    """The connections to all nodes. A node that does not start, answer or stay is `lost`, with the reason, and asked no more."""

    may_call = True  # nothing holds calls back

    def __init__(
        self, loop: Loop, agents: Sequence[AgentStart], *, starter: str, python: str, env: Mapping[str, str]
    ) -> None:
        """Prepare to start these programs by ssh, srun, ... (`starter`), with the variables `env`.

        An agent without a command is started by somebody else, and joins.
        """
        self._loop = loop
        self._starter = starter
        self._python = python
        self._hosts: list[HostConnection | JoinedNode] = [  # by node rank
            HostConnection(agent, loop, self) if agent.argv else JoinedNode(agent, self) for agent in agents
        ]
        called = [host for host in self._hosts if isinstance(host, HostConnection)]
        open_files_before = raise_open_files()  # what ssh and the nodes get
        self._calls = Calls(loop, called, env, open_files_before, self)
        self.names = [agent.host for agent in agents]  # by node rank
        self._request_numbers = count(1)
        self._batches: list[Batch[Reply]] = []  # that are waited for
        self.lost: dict[int, HostError] = {}  # why, by node rank

    @property
    def alive(self) -> list[int]:
        """The ranks of the nodes that are connected."""
        return [
            rank for rank, host in enumerate(self._hosts) if rank not in self.lost and host.phase is HostPhase.CONNECTED
        ]

    def start(self, within: float) -> None:
        """Start the programs, and wait until each is connected, or lost because it is not `within` so many seconds."""
        self._calls.make_next()  # as many as may be called at a time; each that connects has the next one called
        starting = (HostPhase.WAITING, HostPhase.STARTING)

        def report_silent() -> None:
            silent = [self.names[rank] for rank, host in enumerate(self._hosts) if host.phase in starting]
            say(f"waiting {within:g} s at most for {some(silent)}")

        notice = self._loop.timer(self._loop.now() + NOTICE_AFTER, report_silent)
        self._run(lambda: not any(host.phase in starting for host in self._hosts), self._loop.now() + within)
        notice.cancel()
        for host in self._hosts:
            if host.phase in starting:
                is_started_by_us = bool(host.agent.argv)
                self._lose(host, diagnose.not_started(within) if is_started_by_us else _not_joined(within))

    @property
    def joining(self) -> dict[int, JoinedNode]:
        """The nodes that somebody else starts, by rank."""
        return {rank: host for rank, host in enumerate(self._hosts) if isinstance(host, JoinedNode)}

    def note_name(self, rank: int, name: str) -> None:
        """Note what a node calls itself; of several with one name each gets its rank too."""
        self.names[rank] = f"{name}:{rank}" if name in self.names else name

    def _run(self, is_done: Callable[[], bool], until: float) -> None:
        """Run the loop until something is done, or its clock shows `until`."""
        wake = self._loop.timer(until, lambda: None)  # only ends the loop's sleep
        while not is_done() and self._loop.now() < until:
            self._loop.run_once()
        wake.cancel()

    # --- requests

    def post(self, kind: type[R], requests: Mapping[int, Request], within: float) -> Batch[R]:
        """Send each node its request, by node rank, to be answered `within` so many seconds by a reply of this kind."""
        batch = Batch(kind=kind, sent_at=time(), until=self._loop.now() + within + _TRAVEL_TIME)
        for rank in self.alive:
            if rank in requests:
                number = next(self._request_numbers)
                batch.pending[number] = rank
                self._hosts[rank].send(REQUEST, messages.encode(Asked(number, requests[rank], within)))
        self._batches.append(batch)
        return batch

    def wait(self, batch: Batch[R]) -> Batch[R]:
        """Return the batch when all its nodes have answered, or the time is up; a node that has not answered then is lost."""
        self._run(lambda: not batch.pending, batch.until)
        self._batches.remove(batch)
        for rank in batch.pending.values():
            self._lose(self._hosts[rank], _STOPPED_ANSWERING)
        return batch

    def ask(self, kind: type[R], requests: Mapping[int, Request], within: float) -> Batch[R]:
        """Send requests, by node rank, and wait for the replies, which are of this kind."""
        return self.wait(self.post(kind, requests, within))

    def _lose(self, host: HostConnection | JoinedNode, why: HostError) -> None:
        """Ask a node no more."""
        rank = host.agent.node_rank
        self.lost.setdefault(rank, why)
        for batch in self._batches:
            batch.pending = {number: node for number, node in batch.pending.items() if node != rank}
        host.kill()

    def close(self) -> None:
        """End the programs on all nodes."""
        for host in self._hosts:
            host.close_stdin()
        is_closed = lambda: all(host.phase in (HostPhase.CLOSED, HostPhase.WAITING) for host in self._hosts)  # noqa: E731
        self._run(is_closed, self._loop.now() + _END_WITHIN)
        for host in self._hosts:
            host.kill()
        self._run(is_closed, self._loop.now() + _END_WITHIN)

    # --- what connections report

    def connected(self, host: HostConnection | JoinedNode, protocol: int, version: str) -> None:
        """Send a node its order (what it runs the job with), unless it has another ddplaunch. Called by connections."""
        if protocol != PROTOCOL or version != __version__:
            self._lose(host, diagnose.other_version(version))
        else:
            host.send(ORDER, host.agent.order())
        self._calls.make_next()

    def report_received(self, host: HostConnection | JoinedNode, data: bytes) -> None:
        """Put a reply into the batch that waits for it; one that comes too late is dropped. Called by connections.

        Raises:
            FrameError: the data are no reply.
        """
        try:
            answered = messages.answered(data)
            for batch in self._batches:
                if batch.pending.get(answered.number) == host.agent.node_rank:  # no node answers for another
                    batch.take(answered)
        except Malformed as error:
            raise FrameError(f"sent a malformed reply ({error})") from None

    def disconnected(self, host: HostConnection | JoinedNode) -> None:
        """Find out why a node is gone, and call it again if that may help, else lose it. Called by connections."""
        if isinstance(host, JoinedNode):
            self._lose(host, HostError(f"lost: {host.fault}"))
            return
        error = diagnose.of_host(self._starter, self._python, host)
        is_lost = host.agent.node_rank in self.lost
        is_called_again = not is_lost and error.may_be_reached_later and self._calls.repeat(host)
        if not is_called_again:
            self._lose(host, error)
        self._calls.make_next()  # of the hosts that wait, because only so many are called at once

    def output_received(self, host: HostConnection | JoinedNode, stream: bytes, data: bytes) -> None:
        """Drop output, which these programs have none of."""

    def chunk_received(self, host: HostConnection | JoinedNode, data: bytes) -> None:
        """Drop parts of streams, which these programs have none of."""
