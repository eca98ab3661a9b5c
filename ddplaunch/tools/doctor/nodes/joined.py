"""Nodes on which mpirun, srun or their user has started the doctor: each connects to node 0, where the doctor examines all."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.plan.cluster import Allocation, Rendezvous
from ddplaunch.plan.cluster.endpoints import job_name
from ddplaunch.plan.cluster.hostlist import Host as HostOfList
from ddplaunch.reach.channel.dialer import Dialer, DialResult, Target
from ddplaunch.reach.channel.handshake import Key, key
from ddplaunch.reach.channel.listener import MAX_REFUSALS, Listener
from ddplaunch.reach.channel.peer import HANDSHAKE_TIMEOUT, Peer
from ddplaunch.reach.connections import AgentStart, HostPhase
from ddplaunch.reach.order import Orders
from ddplaunch.reach.protocol import PROTOCOL, HostOrder
from ddplaunch.reach.protocol import order as order_in
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import OK, RENDEZVOUS
from ddplaunch.system.fields import Host, Line, Malformed, decoder, line
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.loop.stream import FrameError
from ddplaunch.system.net.addresses import look_up
from ddplaunch.system.net.port import listen
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.words import duration, some
from ddplaunch.tools.doctor.nodes.host import Examinee

WITHIN = 60.0  # seconds in which all nodes have to be there, unless --rdzv-timeout says less
_IDLE_LIMIT = 300.0  # seconds without a question; with thousands of nodes a round of measurements may take that long
_MOST_SILENT = 256  # connections that have proved the key and not said hello
_UNCONFIRMED_LIMIT = 60.0  # seconds without a confirmed packet after which the kernel gives a connection up


class _Hello(Struct, frozen=True):
    """The first message of a node to node 0, which sends the node its order then."""

    ddplaunch: Line
    host: Host
    node_rank: Annotated[int, Meta(ge=0)] | None  # None: any that is free


_hello = decoder(_Hello)


def node_rank_of(allocation: Allocation) -> int | None:
    """Return the rank of this node; None if the first node assigns it."""
    return allocation.node_rank if allocation.task is None else allocation.task.node_rank


def number_of_nodes(allocation: Allocation) -> int:
    """Return how many nodes the job has."""
    _least, most = allocation.nnodes
    return most if allocation.task is None else allocation.task.nnodes


def is_first_here(allocation: Allocation) -> bool:
    """Return whether this process stands for its node; of several, as in `mpirun -n 8`, the first does."""
    return allocation.task is None or allocation.task.local_rank == 0


def is_coordinator(rendezvous: Rendezvous) -> bool:
    """Return whether this is node 0, where the doctor examines the others; may look up a name."""
    if rendezvous.coordinator is not None:
        return rendezvous.coordinator
    from ddplaunch.system.net.addresses import is_own  # few jobs need it

    with disk_watch_paused():
        targets = look_up(rendezvous.addresses[0], slow=lambda: None).targets  # nothing is said of a slow lookup
    return any(is_own(str(sockaddr[0])) for _, sockaddr in targets)


# --- on node 0


class Doctor(Protocol):
    """Who is told of nodes that have joined: `Nodes`."""

    def connected(self, host: JoinedNode, protocol: int, version: str) -> None:
        """Handle that the node is there."""

    def report_received(self, host: JoinedNode, data: bytes) -> None:
        """Handle a message of the node."""

    def disconnected(self, host: JoinedNode) -> None:
        """Handle the end of the connection."""

    @property
    def joining(self) -> Mapping[int, JoinedNode]:
        """The nodes that somebody else starts, by rank."""

    def note_name(self, rank: int, name: str) -> None:
        """Note what a node calls itself."""


class JoinedNode:
    """The connection from a node that connects by itself; looks like a `HostConnection`."""

    def __init__(self, agent: AgentStart, handler: Doctor) -> None:
        """Prepare; `adopt` begins."""
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

    def adopt(self, peer: Peer, version: str) -> None:
        """Take over the connection of this node, on which its ddplaunch of this version has said hello."""
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
    """On node 0: listens for the other nodes of the job, and hands the connection of each to the `JoinedNode` of its rank."""

    def __init__(
        self,
        loop: Loop,
        spec: JobSpec,
        env: Mapping[str, str],
        allocation: Allocation,
        doctor: Doctor,
    ) -> None:
        """Listen for the nodes that join; the doctor gets the name of each, unless the cluster names them.

        Raises:
            LaunchError: no port is free.
        """
        rendezvous = allocation.rendezvous
        assert rendezvous is not None
        self._doctor = doctor
        self._cluster_names_nodes = len(allocation.hosts) == number_of_nodes(allocation)
        if not self._cluster_names_nodes:
            doctor.note_name(0, host_name(socket.gethostname()))
        self._missing = dict(doctor.joining)  # nodes that have not connected yet, by rank
        self._listener = Listener(
            loop,
            listen(rendezvous.listen, rendezvous.ports),
            _key(spec, env, allocation),
            self,
            tcp_user_timeout=_UNCONFIRMED_LIMIT,
        )
        self._loop = loop
        self._silent: dict[Peer, Timer] = {}  # connections without a hello, the oldest first, and when they are closed
        self._refusals = 0  # that were reported

    def on_refused(self, who: str, reason: str) -> None:
        """Say who was refused, and why, for the first few: without a token anybody may come. Called by the listener, too."""
        self._refusals += 1
        if self._refusals <= MAX_REFUSALS:
            say(f"{who} was refused: {reason}")

    def on_opened(self, peer: Peer) -> None:
        """Wait for the hello of a node that has proved the key. Called by the listener."""
        if len(self._silent) == _MOST_SILENT:
            oldest = next(iter(self._silent))
            self._dismiss(oldest)
        self._silent[peer] = self._loop.timer(self._loop.now() + HANDSHAKE_TIMEOUT, partial(self._dismiss, peer))
        peer.received, peer.closed = partial(self._on_hello, peer), lambda _: self._dismiss(peer)

    def _on_hello(self, peer: Peer, data: bytes) -> None:
        """Hand a node to the `JoinedNode` of its rank, or of the lowest free one if it has none; refuse any other rank."""
        self._silent.pop(peer).cancel()
        try:
            hello = _hello(data)
        except Malformed:
            peer.close()
            return
        lowest_free = min(self._missing, default=-1)
        rank = lowest_free if hello.node_rank is None else hello.node_rank
        node = self._missing.pop(rank, None)
        if node is None:
            self.on_refused(hello.host, f"node rank {rank} is taken, or too high")
            peer.close()
            return
        if not self._cluster_names_nodes:
            self._doctor.note_name(rank, hello.host)
        node.adopt(peer, hello.ddplaunch)

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
    """Connect to node 0 and answer what the doctor there asks, until it closes the connection; return the exit status.

    Raises:
        LaunchError: node 0 is not reached, or does not examine this node.
    """
    assert allocation.rendezvous is not None
    targets = _targets(allocation.rendezvous)
    with closing(Loop()) as loop:
        peer = _dial(loop, targets, spec, env, allocation)
        return _Answering(loop, peer, spec, env, allocation).run()


def _targets(rendezvous: Rendezvous) -> list[Target]:
    """Return all sockets at which node 0 may listen: each address of each of its names, at each port; raise if there is none."""
    with disk_watch_paused():
        # a lookup may take long, without a hung disk, and nothing is said of that
        answers = [look_up(name, slow=lambda: None) for name in rendezvous.addresses]
    targets = []
    for family, sockaddr in (target for answer in answers for target in answer.targets):
        address, _no_port, *scope = sockaddr  # of IPv6 also flow label and interface
        targets += [(family, (address, port, *scope)) for port in rendezvous.ports]
    if not targets:
        raise LaunchError(
            f"{some(rendezvous.addresses)}, the name of node 0: {answers[0].error}",
            hint=f"correct it in /etc/hosts or DNS (`getent hosts {rendezvous.addresses[0]}`)",
            status=RENDEZVOUS,
        )
    return targets


def _dial(loop: Loop, targets: list[Target], spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> Peer:
    """Try all targets again and again, until one is node 0; raise LaunchError if none is in time."""
    result = DialResult()
    dialer = Dialer(loop, _key(spec, env, allocation), result, tcp_user_timeout=_UNCONFIRMED_LIMIT)
    dialer.set_targets(targets)
    until = loop.now() + min(spec.rdzv_timeout, WITHIN)
    wake = loop.timer(until, lambda: None)  # only ends the loop's sleep
    while result.peer is None and loop.now() < until:
        loop.run_once()
    wake.cancel()
    dialer.stop()
    if result.peer is None:
        tried = "; ".join(f"{endpoint}: {why}" for endpoint, why in list(result.reasons.items())[:4])
        raise LaunchError(
            f"node 0 is not reached: {tried}",
            hint="start the doctor there too, and open these ports. `ddplaunch doctor --standalone` examines one machine alone",
            status=RENDEZVOUS,
        )
    return result.peer


class _Answering:
    """On another node: answers node 0, which sends an order (the job, as for an agent), then requests, and closes at the end."""

    def __init__(self, loop: Loop, peer: Peer, spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> None:
        """Say hello to node 0 over `peer`, on which both sides have proved that they know the secret of the job."""
        self._loop = loop
        self._peer = peer
        self._spec = spec
        self._env = env
        self._allocation = allocation
        self._examinee: Examinee | None = None  # until the order has come
        self._has_ended = False
        self._fault = ""  # why this node answers no more: what claims to be node 0 is none, or is silent
        self._idle = loop.timer(loop.now() + _IDLE_LIMIT, self._on_idle)
        peer.admit()  # take long messages, too
        peer.received, peer.closed = self._on_message, self._on_closed
        hello = _Hello(line(__version__), host_name(socket.gethostname()), node_rank_of(allocation))
        peer.send(msgspec.json.encode(hello))

    def run(self) -> int:
        """Answer until node 0 has gone; return the exit status.

        Raises:
            LaunchError: what answers in the place of node 0 is no doctor of ours, or asks nothing any more.
        """
        while not self._has_ended and not self._fault:
            self._loop.run_once()
        self._peer.close()
        if self._fault:
            raise LaunchError(
                f"node 0 does not examine this node: {self._fault}",
                hint="is it another version of ddplaunch, or another program? A token keeps others out: `--token-file`",
                status=RENDEZVOUS,
            )
        return OK

    def _on_message(self, data: bytes) -> None:
        """Take the order, which comes first, and then answer requests. Called by the peer."""
        self._idle.set(self._loop.now() + _IDLE_LIMIT)
        try:
            if self._examinee is not None:
                self._examinee.on_request(data)
                return
            order = _own_order(order_in(data), self._spec, self._env, self._allocation)
            # whatever ports node 0 asks for, this node listens at the one that was typed here only
            typed_port = self._allocation.endpoint.port
            may_listen = () if typed_port is None else (typed_port,)
            self._examinee = Examinee(self._loop, order, self._peer, may_listen=may_listen)
        except Malformed as error:
            self._set_fault(f"what it asks is refused: {error}")

    def _on_idle(self) -> None:
        self._set_fault(f"it has asked nothing for {duration(_IDLE_LIMIT)}")

    def _on_closed(self, _reason: str) -> None:
        self._has_ended = True

    def _set_fault(self, why: str) -> None:
        self._fault = self._fault or why


def _key(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> Key:
    """Return the key by which the nodes of a job know each other: made of the token, if there is one, and the job's name."""
    return key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation))


def _own_order(order: HostOrder, spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> HostOrder:
    """Return this node's own order: the node runs what it was started with, whatever a peer says that claims to be node 0.

    From the peer's order are only the secret of the measurements, how its screen shows text, and the node rank where none was
    typed.

    Raises:
        Malformed: it is for another node.
    """
    own_rank, number = node_rank_of(allocation), number_of_nodes(allocation)
    possible_ranks = range(1, number) if own_rank is None else (own_rank,)
    if order.node_rank not in possible_ranks:
        raise Malformed(f"its order is for node {order.node_rank}")
    assert allocation.rendezvous is not None
    # an order names all hosts, of which only node 0's matters here
    hosts = [allocation.rendezvous.addresses[0], *(f"node-{other}" for other in range(1, number))]
    return Orders(
        spec=spec,
        allocation=replace(allocation, hosts_to_start_on=tuple(HostOfList(name=name) for name in hosts)),
        env=token.visible_to_workers(env),
        cwd=os.getcwd(),
        run_id="doctor",
        token=order.token,
        screen=order.screen,
    ).for_host(order.node_rank)
