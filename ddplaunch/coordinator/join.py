"""From the options to the agent's link: who is the coordinator, what the key is, what the first message holds."""

from __future__ import annotations

import hashlib
import os
import selectors
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import __version__
from ddplaunch.cluster import Allocation, Rendezvous
from ddplaunch.control import messages
from ddplaunch.control.dialer import Target, answers
from ddplaunch.control.fields import host, line
from ddplaunch.control.handshake import Key, key
from ddplaunch.coordinator.agents import Agents
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import Link
from ddplaunch.coordinator.local_link import LocalLink, job_policy
from ddplaunch.coordinator.remote_link import RemoteLink
from ddplaunch.coordinator.terms import Terms
from ddplaunch.errors import LaunchError
from ddplaunch.net.addresses import is_own
from ddplaunch.net.resolver import look_up
from ddplaunch.options import token
from ddplaunch.options.argv import to_argv
from ddplaunch.plan import Plan
from ddplaunch.plan.ranks import host_of
from ddplaunch.process import clock
from ddplaunch.record import record, replace
from ddplaunch.report.job_reporter import JobReporter
from ddplaunch.report.reporter import Reporter
from ddplaunch.spec import JobSpec, ProgramKind
from ddplaunch.supervise import job

if TYPE_CHECKING:
    from ddplaunch.coordinator.link import LinkHandler


@record(kw_only=True)
class JoinRequest:
    """All that this agent needs to find the others."""

    spec: JobSpec
    allocation: Allocation
    draft: Plan
    rendezvous: Rendezvous
    key: Key
    facts: messages.NodeFacts
    has_front: bool  # a command has started all agents as a Slurm step


def prepare(spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str], *, torch: str) -> JoinRequest:
    """Settle how this agent finds the others; may look a name up. The secret, if there is one, is in `env`."""
    rendezvous = allocation.rendezvous
    assert rendezvous is not None
    # without a token only this distinguishes a job from another with the same rendezvous host; agents that we start have one
    port = "" if allocation.start else str(rendezvous.ports[0])
    name = "\0".join((allocation.identity, spec.rdzv_id or "", port))
    if rendezvous.coordinator is None and not _is_here(rendezvous.addresses[0], quiet=spec.verbosity < 0):
        rendezvous = replace(rendezvous, coordinator=False)
    return JoinRequest(
        spec=spec,
        allocation=allocation,
        draft=draft,
        rendezvous=rendezvous,
        key=key(env.get(token.VARIABLE, "").strip() or None, name),
        facts=messages.NodeFacts(
            ddplaunch=__version__,
            python=sys.version.partition(" ")[0],
            torch=line(torch),
            script=line(_digest(spec)),
            nnodes=_nnodes(spec),
        ),
        has_front=token.RDZV_PORT in env,
    )


def join(request: JoinRequest, handler: LinkHandler, reporter: Reporter, selector: selectors.BaseSelector) -> Link:
    """Give the agent's link to the coordinator, which may be here.

    Raises:
        LaunchError: no port is free to listen on, or another agent here is the coordinator already.
    """
    coordinator = Coordinator(
        _policy(request), request.draft, JobReporter(reporter, request.spec), clock.now, handler.ask_apart
    )
    agents = _listen(request, coordinator, reporter, selector)
    if agents is not None:
        handler.listening(agents.port)
        own = LocalLink(handler, coordinator, clock.now)
        coordinator.join(own, agents.join(_hello(request, request.rendezvous.addresses[0])), agents)
        return own
    link = RemoteLink(
        handler,
        selector,
        key=request.key,
        hello=partial(_hello, request),
        source=request.rendezvous.source,
        heartbeat_timeout=request.spec.heartbeat_timeout,
        rdzv_timeout=request.spec.rdzv_timeout,
        clock=clock.now,
    )
    link.aim(request.rendezvous.addresses, request.rendezvous.ports)
    return link


def _listen(
    request: JoinRequest, coordinator: Coordinator, reporter: Reporter, selector: selectors.BaseSelector
) -> Agents | None:
    """Listen for the other agents, if this is the coordinator, or the first agent of the job on the rendezvous host.

    A port is tried by listening there: a look whether it is free would keep it from others meanwhile.

    Raises:
        LaunchError: no port is free, or another agent of the job listens already where this one should.
    """
    rendezvous = request.rendezvous
    ports, key = rendezvous.ports, request.key

    def listen(ports: Sequence[int]) -> Agents:
        return Agents(_terms(request, ports), coordinator, reporter.print, selector, clock.now)

    if rendezvous.coordinator:
        agents = listen(ports)
        before = ports[: ports.index(agents.port)] if agents.port in ports else ()
        if before and answers(key, [_target(rendezvous, port) for port in before]):
            agents.close()
            raise LaunchError(
                "node rank 0 is taken: another ddplaunch on this host is the coordinator of this job",
                hint="give each node a rank of its own with --node-rank",
            )
        return agents
    if rendezvous.coordinator is False:
        return None
    for port in ports:
        with suppress(LaunchError):
            return listen((port,))
        if answers(key, [_target(rendezvous, port)]):
            return None
    return listen(ports)  # or the error says which ports are taken


def _target(rendezvous: Rendezvous, port: int) -> Target:
    """Where another agent on this host would listen."""
    address = rendezvous.listen or "127.0.0.1"
    return (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port))


def _policy(request: JoinRequest) -> job.Policy:
    allocation = request.allocation
    task = allocation.task
    min_nodes, max_nodes = allocation.nnodes if task is None else (task.world_size, task.world_size)
    return replace(
        job_policy(request.spec, min_nodes, max_nodes),
        # tasks of a step, or ranks of mpirun, are started once
        replaceable=not allocation.start and allocation.cluster not in ("slurm", "mpi"),
        may_leave=not allocation.start and not request.has_front,
        called=bool(allocation.start),
        names=allocation.hosts if len(allocation.hosts) == max_nodes else (),
        command=_command_elsewhere(request),
    )


def _command_elsewhere(request: JoinRequest) -> tuple[str, ...]:
    """What to type on another node, if its user does; the word `--node-rank=` lacks the rank."""
    spec = request.spec
    if request.allocation.cluster != "static" or (spec.rdzv_conf and "is_host" in spec.rdzv_conf):
        return ()
    origin = spec.origin("env")
    secret = () if origin == "--env" else ("env",)  # variables from files may be, and this is printed
    words = to_argv(spec, without=frozenset({"verbosity", "local_addr", "log_dir", "run_id", *secret}))
    if "--env-file" in origin:
        words.insert(0, "--env-file=...")
    if spec.master_addr is None and not spec.rdzv_endpoint:
        words.insert(0, f"--master-addr={request.allocation.endpoint.address or socket.gethostname()}")
    return ("ddplaunch", *("--node-rank=" if word.startswith("--node-rank=") else shlex.quote(word) for word in words))


def _terms(request: JoinRequest, ports: Sequence[int]) -> Terms:
    return Terms(
        max_nodes=_policy(request).max_nodes,
        run_id=request.draft.run_id,
        address=request.allocation.endpoint.address or request.spec.local_addr,
        key=request.key,
        listen=request.rendezvous.listen,
        ports=ports,
        has_front=request.has_front,
        heartbeat_timeout=request.spec.heartbeat_timeout,
    )


def _hello(request: JoinRequest, reached: str) -> messages.Hello:
    task = request.allocation.task
    return messages.Hello(
        place=request.allocation.node_rank if task is None else task.rank,
        seat=messages.Seat(host(host_of(request.allocation, socket.gethostname())), len(request.draft.workers)),
        backend=request.draft.backend,
        backend_reason=line(request.draft.reasons["backend"]),
        reached=host(reached),
        facts=request.facts,
    )


def _is_here(address: str, *, quiet: bool) -> bool:
    """Whether a name or address is this host's own; one that does not resolve may resolve later."""

    def notify() -> None:
        if not quiet:
            sys.stderr.write(f"ddplaunch: looking up {address}, to see whether the rendezvous host is this one\n")

    return any(is_own(str(sockaddr[0])) for _, sockaddr in look_up(address, notify).targets)


def _digest(spec: JobSpec) -> str:
    """What distinguishes two versions of the program; "" where that is not a file of its own."""
    if spec.program.kind is not ProgramKind.SCRIPT or not os.path.isfile(spec.program.target):
        return ""
    with open(spec.program.target, "rb") as file:
        return f"{os.path.basename(spec.program.target)} ({hashlib.file_digest(file, 'sha256').hexdigest()[:12]})"


def _nnodes(spec: JobSpec) -> str:
    low, high = spec.nnodes
    return str(low) if low == high else f"{low}:{high}"
