"""From what was asked to the agent's way to the others: who is the coordinator, what the key is, what is said first."""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import time
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from platform import python_version

from ddplaunch import __version__, coordinate, secret
from ddplaunch.cluster import Allocation, Meeting
from ddplaunch.control import messages
from ddplaunch.control.handshake import Key, key
from ddplaunch.errors import LaunchError
from ddplaunch.nodes.coordinator import Coordinator
from ddplaunch.nodes.link import Ears, NetworkLink, answers
from ddplaunch.nodes.nodes import Nodes
from ddplaunch.nodes.own_link import OwnLink
from ddplaunch.nodes.terms import Terms
from ddplaunch.plan import Plan
from ddplaunch.process.network import is_own
from ddplaunch.process.port import reserve
from ddplaunch.record import record, replace
from ddplaunch.report.joint import Joint
from ddplaunch.report.teller import Teller
from ddplaunch.spec import JobSpec, ProgramKind


@record(kw_only=True)
class Way:
    """How this agent comes to the others."""

    spec: JobSpec
    allocation: Allocation
    draft: Plan
    meeting: Meeting
    key: Key
    facts: messages.Facts


def way(spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str], *, torch: str) -> Way:
    """Settle who is the coordinator; may look a name up, and see whether somebody listens there already.

    Raises:
        LaunchError: the token cannot be read, or another agent here is the coordinator though this one should be.
    """
    meeting = allocation.meeting
    assert meeting is not None
    # without a token this is all that tells a job from another that meets on the same host; agents that we start have one
    port = "" if allocation.start else str(meeting.ports[0])
    job = "\0".join((allocation.identity, spec.rdzv_id or "", port))
    secret_key = key(secret.find(spec, env), job)
    if meeting.coordinator is None:
        meeting = _settled(meeting, secret_key)
    elif meeting.coordinator:
        _check_alone(meeting, secret_key)
    return Way(
        spec=spec,
        allocation=allocation,
        draft=draft,
        meeting=meeting,
        key=secret_key,
        facts=messages.Facts(
            ddplaunch=__version__,
            python=python_version(),
            torch=torch,
            script=_digest(spec),
            nnodes=_nnodes(spec),
        ),
    )


def join(way: Way, ears: Ears, teller: Teller, selector: selectors.BaseSelector) -> Nodes:
    """Make the agent's way to the others, in its loop.

    Raises:
        LaunchError: no port is free to listen on.
    """
    told, meeting = way.allocation.meeting, way.meeting
    assert told is not None
    while meeting.coordinator:
        try:
            coordinator = Coordinator(_terms(way, meeting), _voice(way, teller), selector, time.monotonic)
        except LaunchError:
            if told.coordinator is not None or meeting.ports == told.ports:
                raise
            # another agent on this host, of this job or not, has taken the port meanwhile
            meeting = _settled(told, way.key)
        else:
            ears.listening(coordinator.port)
            own = OwnLink(ears, coordinator, time.monotonic)
            coordinator.join(own, _hello(way, meeting.addresses[0]))
            return Nodes(own)
    link = NetworkLink(
        ears,
        selector,
        key=way.key,
        hello=partial(_hello, way),
        source=way.meeting.source,
        silence=way.spec.heartbeat_timeout,
        patience=way.spec.rdzv_timeout,
        clock=time.monotonic,
    )
    link.aim(told.addresses, told.ports)
    return Nodes(link)


def _voice(way: Way, teller: Teller) -> Joint:
    return Joint(teller, timeout=way.spec.timeout, max_restarts=way.spec.max_restarts)


def _terms(way: Way, meeting: Meeting) -> Terms:
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
            names=allocation.hosts if len(allocation.hosts) == most else (),
        ),
        run_id=way.draft.run_id,
        address=allocation.address or spec.local_addr,
        port=allocation.port or 0,
        key=way.key,
        listen=meeting.listen,
        ports=meeting.ports,
        silence=spec.heartbeat_timeout,
    )


def _hello(way: Way, reached: str) -> messages.Hello:
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


def _settled(meeting: Meeting, key: Key) -> Meeting:
    """Settle who is the coordinator: the first agent of the job on the host whose address it is."""
    host = meeting.addresses[0]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return replace(meeting, coordinator=False)  # the name may be known later
    if not any(is_own(str(address[0])) for *_, address in found):
        return replace(meeting, coordinator=False)
    for port in meeting.ports:
        if _is_free(port):
            return replace(meeting, coordinator=True, ports=(port,))
        if answers(key, [(family, (address[0], port)) for family, *_, address in found]):
            return replace(meeting, coordinator=False)
    return replace(meeting, coordinator=True)  # the error says which ports are taken


def _check_alone(meeting: Meeting, key: Key) -> None:
    """See whether another agent on this host is the coordinator already.

    Raises:
        LaunchError: it is.
    """
    address = meeting.listen or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    taken = list(takewhile(lambda port: not _is_free(port), meeting.ports))
    if taken and answers(key, [(family, (address, port)) for port in taken]):
        raise LaunchError(
            "node rank 0 is taken: another ddplaunch on this host is the coordinator of this job",
            hint="give each node a rank of its own with --node-rank",
        )


def _is_free(port: int) -> bool:
    try:
        reserve(port).release()
    except LaunchError:
        return False
    return True


def _digest(spec: JobSpec) -> str:
    """What tells two versions of the program apart; "" where that is not a file of its own."""
    if spec.program.kind is not ProgramKind.SCRIPT or not os.path.isfile(spec.program.target):
        return ""
    with open(spec.program.target, "rb") as file:
        return f"{os.path.basename(spec.program.target)} ({hashlib.file_digest(file, 'sha256').hexdigest()[:12]})"


def _nnodes(spec: JobSpec) -> str:
    least, most = spec.nnodes
    return str(least) if least == most else f"{least}:{most}"
