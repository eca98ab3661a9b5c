"""Nodes on which mpirun, srun or their user has started the doctor. They connect to node 0, which examines all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.plan.cluster import Allocation, Rendezvous
from ddplaunch.plan.cluster.endpoints import job_name
from ddplaunch.plan.cluster.hostlist import Host as HostOfList
from ddplaunch.reach.channel.dialer import Dialer
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.listener import MAX_REFUSALS, Listener
from ddplaunch.reach.channel.peer import HANDSHAKE_TIMEOUT, Peer
from ddplaunch.reach.connections import AgentStart, HostPhase
from ddplaunch.reach.messages import HostOrder
from ddplaunch.reach.messages import order as order_in
from ddplaunch.reach.order import Orders
from ddplaunch.reach.protocol import PROTOCOL
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import OK, RENDEZVOUS
from ddplaunch.system.fields import Host, Line, Malformed, decoder, line
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.net.port import listen
from ddplaunch.system.net.resolver import look_up
from ddplaunch.system.process.apart import waiting
from ddplaunch.system.words import duration, some
from ddplaunch.tools.doctor.nodes.host import Examinee

WITHIN = 60.0  # seconds in which all nodes have to be there, unless --rdzv-timeout says less
_IDLE = 300.0  # seconds without a question; with thousands of nodes a round of measurements may take that long
_MOST_SILENT = 256  # connections that have proved the key and not said hello
_SILENT = 60.0  # seconds without a confirmed packet after which the kernel gives a connection up


class _Hello(Struct, frozen=True):
    """The first message of a node to node 0."""

    ddplaunch: Line
    host: Host
    node_rank: Annotated[int, Meta(ge=0)] | None  # None: any that is free


_hello = decoder(_Hello)


def rank_of(allocation: Allocation) -> int | None:
    """Return the rank of this node; None if the first node assigns it."""
    return allocation.node_rank if allocation.task is None else allocation.task.node_rank


def number_of(allocation: Allocation) -> int:
    """Return how many nodes the job has."""
    return allocation.nnodes[1] if allocation.task is None else allocation.task.nnodes


def is_first_here(allocation: Allocation) -> bool:
    """Return whether this process stands for its node; of several, as in `mpirun -n 8`, the first does."""
    return allocation.task is None or allocation.task.local_rank == 0


def is_coordinator(rendezvous: Rendezvous) -> bool:
    """Return whether this node examines the others; may look up a name."""
    if rendezvous.coordinator is not None:
        return rendezvous.coordinator
    from ddplaunch.system.net.addresses import is_own  # few jobs need it

    with waiting():
        targets = look_up(rendezvous.addresses[0], lambda: None).targets
    return any(is_own(str(sockaddr[0])) for _, sockaddr in targets)


# --- on node 0


class Doctor(Protocol):
    """Who is told of a node that has joined."""

    def connected(self, host: JoinedNode, protocol: int, version: str) -> None:
        """Handle that the node is there."""

    def report_received(self, host: JoinedNode, data: bytes) -> None:
        """Handle a message of the node."""

    def disconnected(self, host: JoinedNode) -> None:
        """Handle the end of the connection."""


class JoinedNode:
    """The connection from a node that connects by itself; looks like a `HostConnection`."""

    def __init__(self, agent: AgentStart, handler: Doctor) -> None:
        """Prepare; `take` begins."""
        self.agent = agent
        self.phase = HostPhase.WAITING
        self.fault = ""  # why the connection was closed
        self._handler = handler
        self._peer: Peer | None = None

    def start(self, _env: Mapping[str, str], _open_files: tuple[int, int], _handled: Collection[int]) -> None:
        """Wait: somebody else starts it."""
        self.phase = HostPhase.STARTING

    @property
    def address(self) -> str:
        """The numeric address from which this node is connected."""
        return "" if self._peer is None else self._peer.address

    def take(self, peer: Peer, version: str) -> None:
        """Take the connection of this node."""
        self._peer, self.phase = peer, HostPhase.CONNECTED
        peer.admit()
        peer.received, peer.closed = self._on_message, self._on_closed
        self._handler.connected(self, PROTOCOL, version)

    def send(self, _tag: bytes, data: bytes) -> None:
        """Send a message: first the order, then requests."""
        if self._peer is not None:
            self._peer.send(data)

    def kill(self) -> None:
        """Close the connection, at which the program on the node ends."""
        if self._peer is not None:
            self._peer.close()
        self.phase = HostPhase.CLOSED

    close_stdin = kill

    def _on_message(self, data: bytes) -> None:
        try:
            self._handler.report_received(self, data)
        except FrameError as error:
            self._on_closed(str(error))

    def _on_closed(self, reason: str) -> None:
        self.fault = reason
        self.kill()
        self._handler.disconnected(self)


class Gathering:
    """Listens for the other nodes of the job, and hands each to the connection of its rank."""

    def __init__(
        self,
        loop: Loop,
        spec: JobSpec,
        env: Mapping[str, str],
        allocation: Allocation,
        named: Callable[[int, str], None],
    ) -> None:
        """Listen; `named` gets what each node calls itself, unless the cluster names it.

        Raises:
            LaunchError: no port is free.
        """
        rendezvous = allocation.rendezvous
        assert rendezvous is not None
        self._named = named
        self._has_names = len(allocation.hosts) == number_of(allocation)
        self._waiting: dict[int, JoinedNode] = {}
        self._listener = Listener(
            loop,
            listen(rendezvous.listen, rendezvous.ports),
            key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
            opened=self._on_opened,
            refused=self._report_refusal,
            user_timeout=_SILENT,
        )
        self._loop = loop
        self._silent: dict[Peer, Timer] = {}  # connections without a hello, and when they are closed
        self._refusals = 0  # that were printed

    def expect(self, nodes: Mapping[int, JoinedNode]) -> None:
        """Wait for the nodes of these ranks."""
        self._waiting = dict(nodes)

    def _report_refusal(self, who: str, why: str) -> None:
        """Print who was refused, and why, a few times: without a token anybody may come."""
        self._refusals += 1
        if self._refusals <= MAX_REFUSALS:
            say(f"{who} was refused: {why}")

    def _on_opened(self, peer: Peer) -> None:
        """Wait for the hello of a node that has proved the key; refuse a node rank that is taken, or too high."""
        if len(self._silent) == _MOST_SILENT:
            self._dismiss(next(iter(self._silent)))  # has had most time

        def on_hello(data: bytes) -> None:
            self._silent.pop(peer).cancel()
            try:
                hello = _hello(data)
            except Malformed:
                return peer.close()
            rank = hello.node_rank if hello.node_rank is not None else min(self._waiting, default=-1)
            if (node := self._waiting.pop(rank, None)) is None:  # a rank that there is not, or is twice
                self._report_refusal(hello.host, f"node rank {rank} is taken, or too high")
                return peer.close()
            if not self._has_names:  # else who has started the nodes knows what they are called
                self._named(rank, hello.host)
            return node.take(peer, hello.ddplaunch)

        self._silent[peer] = self._loop.timer(self._loop.now() + HANDSHAKE_TIMEOUT, partial(self._dismiss, peer))
        peer.received, peer.closed = on_hello, lambda _: self._dismiss(peer)

    def _dismiss(self, peer: Peer) -> None:
        """Close a connection that has not said hello."""
        self._silent.pop(peer).cancel()
        peer.close()

    def close(self) -> None:
        """Listen no more, and close what never said hello."""
        self._listener.close()
        for peer in [*self._silent]:
            self._dismiss(peer)


# --- on the others


def be_examined(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> int:
    """Connect to node 0 and answer what it asks, until it closes the connection; return the exit status.

    Raises:
        LaunchError: node 0 is not reached.
    """
    loop = Loop()
    peers: list[Peer] = []
    reasons: dict[str, str] = {}
    rendezvous = allocation.rendezvous
    assert rendezvous is not None
    with waiting():
        answers = [look_up(address, lambda: None) for address in rendezvous.addresses]
    targets = [
        (family, (sockaddr[0], port, *sockaddr[2:]))
        for answer in answers
        for family, sockaddr in answer.targets
        for port in rendezvous.ports
    ]
    if not targets:
        raise LaunchError(
            f"{some(rendezvous.addresses)}, the name of node 0: {answers[0].error}",
            hint=f"correct it in /etc/hosts or DNS (`getent hosts {rendezvous.addresses[0]}`)",
            status=RENDEZVOUS,
        )
    dialer = Dialer(
        loop,
        key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
        opened=peers.append,
        refused=reasons.__setitem__,
        user_timeout=_SILENT,
    )
    dialer.set_targets(targets)
    until = loop.now() + min(spec.rdzv_timeout, WITHIN)
    wake = loop.timer(until, lambda: None)
    while not peers and loop.now() < until:
        loop.run_once()
    wake.cancel()
    dialer.stop()
    if not peers:
        tried = "; ".join(f"{endpoint}: {why}" for endpoint, why in list(reasons.items())[:4])
        raise LaunchError(
            f"node 0 is not reached: {tried}",
            hint="start the doctor there too, and open these ports. `ddplaunch doctor --standalone` examines one machine alone",
            status=RENDEZVOUS,
        )
    try:
        return _answer(loop, peers[0], spec, env, allocation)
    finally:
        loop.close()


def _answer(loop: Loop, peer: Peer, spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> int:
    """Introduce this node, and answer until node 0 has gone.

    Raises:
        LaunchError: what answers in the place of node 0 is no doctor of ours, or asks nothing any more.
    """
    hello = _Hello(line(__version__), host_name(socket.gethostname()), rank_of(allocation))
    examinees: list[Examinee] = []
    ended: list[str] = []
    faults: list[str] = []

    def on_message(data: bytes) -> None:
        idle.set(loop.now() + _IDLE)
        try:
            if examinees:
                examinees[0].take(data)
            else:
                own = _own_order(order_in(data), spec, env, allocation)
                port = allocation.endpoint.port
                examinees.append(Examinee(loop, own, peer.send, may_listen=() if port is None else (port,)))
        except Malformed as error:
            faults.append(f"what it asks is refused: {error}")

    idle = loop.timer(loop.now() + _IDLE, lambda: faults.append(f"it has asked nothing for {duration(_IDLE)}"))
    peer.admit()
    peer.received, peer.closed = on_message, ended.append
    peer.send(msgspec.json.encode(hello))
    while not ended and not faults:
        loop.run_once()
    peer.close()
    if faults:
        raise LaunchError(
            f"node 0 does not examine this node: {faults[0]}",
            hint="is it another version of ddplaunch, or another program? A token keeps others out: `--token-file`",
            status=RENDEZVOUS,
        )
    return OK


def _own_order(order: HostOrder, spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> HostOrder:
    """Return this node's own order: the node runs what it was started with, whatever a peer says that claims to be node 0.

    Of that the order has the secret of the measurements alone, and the node rank where none was typed.

    Raises:
        Malformed: it is for another node.
    """
    rank, number = rank_of(allocation), number_of(allocation)
    if order.node_rank not in (range(1, number) if rank is None else (rank,)):
        raise Malformed(f"its order is for node {order.node_rank}")
    assert allocation.rendezvous is not None
    hosts = [allocation.rendezvous.addresses[0], *(f"node-{other}" for other in range(1, number))]
    return Orders(
        spec=spec,
        allocation=replace(allocation, start=tuple(HostOfList(name=name) for name in hosts)),
        env=token.public(env),
        cwd=os.getcwd(),
        run_id="doctor",
        token=order.token,
        screen=order.screen,
    ).for_host(order.node_rank)
