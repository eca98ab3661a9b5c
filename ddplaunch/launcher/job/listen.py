"""The coordinator among several nodes: whether it is here, where it listens, and what it sets for the agents of the others.

An agent that knows the coordinator to be elsewhere imports none of this.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job.step import REGROUP
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agents
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.local_link import job_policy
from ddplaunch.launcher.job.orders import Generation, Listening
from ddplaunch.launcher.job.remote_link import LEAVES
from ddplaunch.launcher.tell.blame import Suspect
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.plan.cluster.endpoints import is_same_host
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.dialer import answers, target
from ddplaunch.reach.silence import seconds_to_follow, seconds_to_gather
from ddplaunch.spec.job import Source
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.spec.outcome import Why
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_own

if TYPE_CHECKING:
    from ddplaunch.launcher.job.link import JoinRequest, Link
    from ddplaunch.launcher.job.orders import Order
    from ddplaunch.launcher.tell.reporter import Reporter

# options that other nodes need not have
_OF_ONE_NODE = ("local_addr", "log_dir", "metrics_file", "notify", "quiet", "run_id", "verbose")


def coordinate_if_here(
    request: JoinRequest,
    hello: messages.Hello,
    loop: Loop,
    reporter: Reporter,
    link_to: Callable[[Coordinator], Link],
) -> Link | None:
    """Return the link to a coordinator in this process, if the coordinator belongs here; `hello` is from its own agent.

    Raises LaunchError: no port is free to listen on, or another agent here is the coordinator already.
    """
    state = job.begin(_policy(request), loop.now(), first_term(time.time()))
    coordinator = Coordinator(loop, state, request.draft, JobReporter(reporter))
    agents = _listen_if_here(request, coordinator, reporter, loop)
    if agents is None:
        return None
    loop.post(Listening(agents.port))
    own = link_to(coordinator)
    coordinator.join(own.take, agents.join(hello), agents)
    return own


def _listen_if_here(request: JoinRequest, coordinator: Coordinator, reporter: Reporter, loop: Loop) -> Agents | None:
    """Listen for the other agents, if this is the coordinator, or the first agent of the job on the rendezvous host.

    A port is tried by listening there: a look whether it is free would keep it from others meanwhile.

    Raises LaunchError: no port is free, or another agent of the job listens already where this one should.
    """
    rendezvous, spec, allocation = request.rendezvous, request.spec, request.allocation

    def listen_at(ports: Sequence[int]) -> Agents:
        given = allocation.endpoint.address
        is_any = given is not None and is_same_host(given, "localhost")  # which each host calls itself
        terms = replace(
            _terms(request, coordinator),
            address=(None if is_any else given) or spec.local_addr,
            names=_own_names(rendezvous.addresses),
            ports=ports,
        )
        return Incoming(loop, terms, coordinator, reporter.print).agents

    def answers_at(ports: Sequence[int]) -> bool:
        return answers(request.key, [target(rendezvous.listen or "127.0.0.1", port) for port in ports])

    ports = rendezvous.ports
    if rendezvous.coordinator:
        agents = listen_at(ports)
        before = ports[: ports.index(agents.port)] if agents.port in ports else ()
        if before and answers_at(before):
            agents.connections.close()
            raise LaunchError(
                "node rank 0 is taken: another ddplaunch on this host is the coordinator of this job",
                hint="give each node a rank of its own with --node-rank",
            )
        return agents
    if rendezvous.coordinator is False:
        return None
    for port in ports:
        with suppress(LaunchError):
            return listen_at((port,))
        if answers_at((port,)):
            return None
    return listen_at(ports)  # or the error says which ports are taken


def _own_names(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return which of the addresses of node 0 are those of this node, which is node 0; of several, some may be of other hosts."""
    if len(addresses) == 1:
        return tuple(addresses)
    return tuple(one for one in addresses if is_own(one) or is_same_host(one, socket.gethostname()))


def _terms(request: JoinRequest, coordinator: Coordinator) -> Terms:
    """Return what a coordinator here sets for all nodes."""
    return Terms(
        max_nodes=coordinator.state.policy.max_nodes,
        run_id=request.draft.run_id,
        address=request.spec.local_addr,
        key=request.key,
        listen=request.rendezvous.listen,
        ports=(0,),
        has_front=request.allocation.has_front,
        heartbeat_timeout=request.spec.heartbeat_timeout,
        may_shorten_silence=request.spec.may_shorten_silence,
        listening=request.listening,
    )


class Inheritance(Struct, frozen=True):
    """What a node takes over with."""

    succession: messages.Succession
    since: float  # when the coordinator announced that
    past: Generation | None  # that this node has begun last
    lost: str  # the coordinator, and how it was lost: "node 0 (a): connection closed"
    lost_address: str  # of the connection to it, numeric
    lost_has_ended: bool
    left: bool  # it did so by a signal, which may be on its way to others
    ended: tuple[messages.Candidate, ...]
    refused: tuple[messages.Candidate, ...]  # other nodes that no longer listen
    listening: socket.socket


def take_over(
    request: JoinRequest,
    inheritance: Inheritance,
    hello: messages.Hello,
    loop: Loop,
    reporter: Reporter,
    take: Callable[[Order], None],
) -> Coordinator:
    """Return a coordinator that takes over from one that was lost; its own agent has this `hello` and `take` gives it orders."""
    told, policy = inheritance.succession, replace(_policy(request), names=(), command=())
    within = seconds_to_gather(request.spec.heartbeat_timeout)
    skipped = 1 + int.from_bytes(os.urandom(3))
    state = job.take_over(
        policy,
        told.history,
        told.electorates,
        inheritance.since,
        loop.now(),
        within,
        told=(one.votes for one in told.candidates),
        skipped=skipped,
    )
    state = job.without_coordinator(state, inheritance.lost, told.coordinator, has_ended=inheritance.lost_has_ended)
    if inheritance.left:
        state = replace(state, rendezvous=state.rendezvous.not_before(loop.now() + REGROUP))
    if inheritance.lost.partition(": ")[2].startswith(LEAVES):
        state = replace(state, why=Why.NODE_LEFT)
    ended = tuple(vote for one in inheritance.ended for vote in one.votes)
    refused = tuple(vote for one in inheritance.refused for vote in one.votes)
    state = replace(state, succession=replace(state.succession.with_ended(ended), refused=refused))
    job_reporter = JobReporter(reporter)
    lost = Suspect(told.host, inheritance.lost_address)
    job_reporter.coordinator_lost(lost, inheritance.lost.partition(": ")[2])
    coordinator = Coordinator(loop, state, request.draft, job_reporter)
    terms = replace(_terms(request, coordinator), run_id=told.run_id, listening=inheritance.listening)
    agents = Incoming(loop, terms, coordinator, reporter.print, told.seals).agents
    agents.continue_with(inheritance.past)
    coordinator.join(take, agents.join(hello), agents)
    coordinator.take_up(hello.stop)
    if terms.has_front:  # else the job would outlive a command that is lost together with node 0

        def end() -> None:
            coordinator.feed(job.StopRequested(Why.FRONT_LOST, 0, loop.now()))

        agents.expect_watcher(seconds_to_follow(terms.heartbeat_timeout), end)
    loop.handle(Listening(agents.port))  # ahead of all that this agent will report of the job
    return coordinator


def _policy(request: JoinRequest) -> job.Policy:
    """Return what the user and the cluster decided about the nodes of the job."""
    allocation = request.allocation
    task = allocation.task
    min_nodes, max_nodes = allocation.nnodes if task is None else (task.world_size, task.world_size)
    return replace(
        job_policy(request.spec, min_nodes, max_nodes),
        spares=request.spec.spares,
        has_successors=allocation.is_elastic,
        replaceable=not allocation.has_one_screen,  # what starts all agents does so once
        may_leave=not allocation.start and not allocation.has_front,
        dispatched=bool(allocation.start),
        names=allocation.hosts if len(allocation.hosts) == max_nodes else (),
        command=_command_elsewhere(request),
    )


def _command_elsewhere(request: JoinRequest) -> tuple[str, ...]:
    """Return the command for another node, if users start the nodes, else (); the word `--node-rank=` lacks the rank."""
    spec = request.spec
    if request.allocation.cluster != "static" or (spec.rdzv_conf and "is_host" in spec.rdzv_conf):
        return ()
    import shlex  # only what users type on each node needs it

    given = [one for one in spec.given if one.name not in _OF_ONE_NODE and one.source is not Source.DEFAULT]
    words = ["=".join(BY_NAME[one.name].words(one.text)) for one in given]
    words += [f"--env={name}={value}" for name, value in spec.env if name not in spec.secret]
    words += ["--", spec.program.target, *spec.program.args]
    if "--env-file" in spec.secret.values():
        words.insert(0, "--env-file=...")
    if spec.master_addr is None and not spec.rdzv_endpoint:
        words.insert(0, f"--master-addr={request.allocation.endpoint.address or socket.gethostname()}")
    return ("ddplaunch", *("--node-rank=" if word.startswith("--node-rank=") else shlex.quote(word) for word in words))
