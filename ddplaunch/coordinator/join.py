"""From what was asked to the agent's way to the others: who is the coordinator, what the key is, what is said first."""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from platform import python_version

from ddplaunch import __version__
from ddplaunch.cluster import Allocation, Meeting
from ddplaunch.control import messages
from ddplaunch.control.dialer import Target, answers
from ddplaunch.control.handshake import Key, key
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import LinkHandler, Nodes
from ddplaunch.coordinator.local_link import LocalLink
from ddplaunch.coordinator.remote_link import RemoteLink
from ddplaunch.coordinator.terms import Terms
from ddplaunch.errors import LaunchError
from ddplaunch.net.addresses import is_own
from ddplaunch.options import token
from ddplaunch.plan import Plan
from ddplaunch.record import record, replace
from ddplaunch.report.job_reporter import JobReporter
from ddplaunch.report.reporter import Reporter
from ddplaunch.spec import JobSpec, ProgramKind
from ddplaunch.supervise import job as coordinate


@record(kw_only=True)
class JoinRequest:
    """How this agent comes to the others."""

    spec: JobSpec
    allocation: Allocation
    draft: Plan
    meeting: Meeting
    key: Key
    facts: messages.NodeFacts


def way(spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str], *, torch: str) -> JoinRequest:
    """Settle how this agent finds the others; may look a name up.

    Raises:
        LaunchError: the token cannot be read.
    """
    meeting = allocation.meeting
    assert meeting is not None
    # without a token this is all that tells a job from another that meets on the same host; agents that we start have one
    port = "" if allocation.start else str(meeting.ports[0])
    job = "\0".join((allocation.identity, spec.rdzv_id or "", port))
    if meeting.coordinator is None and not _is_here(meeting.addresses[0]):
        meeting = replace(meeting, coordinator=False)
    return JoinRequest(
        spec=spec,
        allocation=allocation,
        draft=draft,
        meeting=meeting,
        key=key(token.find(spec, env), job),
        facts=messages.NodeFacts(
            ddplaunch=__version__,
            python=python_version(),
            torch=torch,
            script=_digest(spec),
            nnodes=_nnodes(spec),
        ),
    )


def join(way: JoinRequest, handler: LinkHandler, reporter: Reporter, selector: selectors.BaseSelector) -> Nodes:
    """Make the agent's way to the others, in its loop.

    Raises:
        LaunchError: no port is free to listen on, or another agent here is what this one should be.
    """
    coordinator = _coordinator(way, _reporter(way, reporter), selector)
    if coordinator is not None:
        handler.listening(coordinator.port)
        own = LocalLink(handler, coordinator, time.monotonic)
        coordinator.join(own, _hello(way, way.meeting.addresses[0]))
        return Nodes(own)
    link = RemoteLink(
        handler,
        selector,
        key=way.key,
        hello=partial(_hello, way),
        source=way.meeting.source,
        silence=way.spec.heartbeat_timeout,
        patience=way.spec.rdzv_timeout,
        clock=time.monotonic,
    )
    link.aim(way.meeting.addresses, way.meeting.ports)
    return Nodes(link)


def _coordinator(way: JoinRequest, reporter: JobReporter, selector: selectors.BaseSelector) -> Coordinator | None:
    """Be the coordinator, if that is this agent, or if it is the first of the job on the host where all meet.

    A port is tried by listening there: whoever only looked whether it is free would keep it from others meanwhile.

    Raises:
        LaunchError: no port is free, or another agent of the job listens already where this one should.
    """
    ports, key = way.meeting.ports, way.key
    if way.meeting.coordinator:
        coordinator = Coordinator(_terms(way, ports), reporter, selector, time.monotonic)
        before = ports[: ports.index(coordinator.port)] if coordinator.port in ports else ()
        if before and answers(key, [_target(way.meeting, port) for port in before]):
            coordinator.close()
            raise LaunchError(
                "node rank 0 is taken: another ddplaunch on this host is the coordinator of this job",
                hint="give each node a rank of its own with --node-rank",
            )
        return coordinator
    if way.meeting.coordinator is False:
        return None
    for port in ports:
        with suppress(LaunchError):
            return Coordinator(_terms(way, (port,)), reporter, selector, time.monotonic)
        if answers(key, [_target(way.meeting, port)]):
            return None
    return Coordinator(
        _terms(way, ports), reporter, selector, time.monotonic
    )  # or the error says which ports are taken


def _target(meeting: Meeting, port: int) -> Target:
    """Where another agent on this host would listen."""
    address = meeting.listen or "127.0.0.1"
    return (socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port))


def _reporter(way: JoinRequest, reporter: Reporter) -> JobReporter:
    return JobReporter(reporter, timeout=way.spec.timeout, max_restarts=way.spec.max_restarts)


def _terms(way: JoinRequest, ports: Sequence[int]) -> Terms:
    spec, allocation = way.spec, way.allocation
    least, most = (allocation.task.world_size,) * 2 if allocation.task is not None else allocation.nnodes
    return Terms(
        policy=coordinate.Policy(
            least=least,
            most=most,
            max_restarts=spec.max_restarts,
            meeting_time=spec.rdzv_timeout,
            last_call=spec.last_call,
            replaceable=not allocation.start,
            notices=frozenset(spec.requeue_on),
            names=allocation.hosts if len(allocation.hosts) == most else (),
        ),
        run_id=way.draft.run_id,
        address=allocation.address or spec.local_addr,
        port=allocation.port or 0,
        key=way.key,
        listen=way.meeting.listen,
        ports=ports,
        silence=spec.heartbeat_timeout,
    )


def _hello(way: JoinRequest, reached: str) -> messages.Hello:
    task = way.allocation.task
    return messages.Hello(
        place=way.allocation.node_rank if task is None else task.rank,
        seat=messages.Seat(_host(way.allocation), len(way.draft.workers)),
        backend=way.draft.backend,
        backend_reason=way.draft.reasons["backend"],
        reached=reached,
        facts=way.facts,
    )


def _host(allocation: Allocation) -> str:
    """The name of this host: as the user or the cluster has it, else its own."""
    place, hosts = allocation.node_rank, allocation.hosts
    return hosts[place] if place is not None and len(hosts) == allocation.nnodes[1] else socket.gethostname()


def _is_here(host: str) -> bool:
    """Whether a name or address is this host's own."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the name may be known later
    return any(is_own(str(address[0])) for *_, address in found)


def _digest(spec: JobSpec) -> str:
    """What tells two versions of the program apart; "" where that is not a file of its own."""
    if spec.program.kind is not ProgramKind.SCRIPT or not os.path.isfile(spec.program.target):
        return ""
    with open(spec.program.target, "rb") as file:
        return f"{os.path.basename(spec.program.target)} ({hashlib.file_digest(file, 'sha256').hexdigest()[:12]})"


def _nnodes(spec: JobSpec) -> str:
    least, most = spec.nnodes
    return str(least) if least == most else f"{least}:{most}"
