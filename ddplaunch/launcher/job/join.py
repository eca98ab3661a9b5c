"""From the options to the agent's link: the coordinator, the key, the first message; and to the plan once all have joined."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.link import JoinRequest, Link
from ddplaunch.launcher.job.messages import Withdrawal
from ddplaunch.launcher.tell.reporter import Reporter
from ddplaunch.plan import Agreed, Plan
from ddplaunch.plan.cluster import Allocation, Rendezvous
from ddplaunch.plan.cluster.endpoints import job_name
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import make_plan
from ddplaunch.plan.ranks import host_of
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.spec.options import token
from ddplaunch.spec.options.parsers import write_nnodes
from ddplaunch.system.errors import LaunchError, own_imports, write_stderr
from ddplaunch.system.fields import host, line, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import interface_of

if TYPE_CHECKING:
    from ddplaunch.launcher.job.remote_link import RemoteLink

_WITHDRAWAL_WITHIN = 5.0  # seconds in which node 0 has to be reached: it may have started a moment later
_NODE_0_LOST_AFTER = 5.0  # seconds without a word from node 0 after which it is lost


def prepare(
    spec: JobSpec,
    allocation: Allocation,
    draft: Plan,
    env: Mapping[str, str],
    *,
    torch: str,
    listening_socket: socket.socket | None = None,
    carried: socket.socket | None = None,
) -> JoinRequest:
    """Decide how this agent finds the other nodes; may look up a name. The secret, if there is one, is in `env`.

    `torch` is its version here. `listening_socket` is one that listens already for other agents, if the coordinator is here;
    `carried` is the connection to a coordinator elsewhere that ssh carries. Imports the modules that `join` will need.
    """
    rendezvous = allocation.rendezvous
    assert rendezvous is not None  # agents that meet have one
    rendezvous = _find_out_if_coordinator(rendezvous, spec)
    with own_imports():  # now, while a failed import can still be reported
        if rendezvous.coordinator is not False:
            from ddplaunch.launcher.job import listen  # noqa: F401
        if not rendezvous.coordinator:
            from ddplaunch.launcher.job import remote_link  # noqa: F401
    return JoinRequest(
        spec=spec,
        allocation=allocation,
        draft=draft,
        rendezvous=rendezvous,
        key=key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
        facts=messages.NodeFacts(
            ddplaunch=__version__,
            python=sys.version.partition(" ")[0],
            torch=line(torch),
            script=line(_digest(spec)),
            nnodes=_typed_nnodes(allocation.nnodes, spec.spares),
        ),
        listening_socket=listening_socket,
        carried=carried,
    )


def _find_out_if_coordinator(rendezvous: Rendezvous, spec: JobSpec) -> Rendezvous:
    """Return the rendezvous with what can be known of where the coordinator is; may look up a name.

    None: the first agent on the rendezvous host becomes the coordinator, so it is not here if that is another host.
    """
    if rendezvous.coordinator is None and not _is_here(rendezvous.addresses[0], quiet=spec.verbosity < 0):
        return replace(rendezvous, coordinator=False)
    return rendezvous


def _typed_nnodes(nnodes: tuple[int, int], spares: int) -> str:
    """Return the numbers of nodes as a user types them, to be compared between nodes: "2:4", "2 with --spares 1"."""
    running = write_nnodes((nnodes[0], nnodes[1] - spares))
    return f"{running} with --spares {spares}" if spares else running


def join(request: JoinRequest, loop: Loop, reporter: Reporter) -> Link:
    """Return the agent's link to the coordinator, which may be here.

    Raises LaunchError: no port is free to listen on, or another agent here is the coordinator already.
    """
    hello = _hello(request)
    if request.rendezvous.coordinator is not False:  # it is here, or perhaps: then it depends on which ports are taken
        from ddplaunch.launcher.job.listen import coordinate_if_here

        own = coordinate_if_here(request, hello, loop, reporter)
        if own is not None:
            return own
    link = _remote_link(request, hello, loop)
    if request.carried is not None:  # ssh, which has started this agent, carries its connection too
        link.adopt(request.carried)
    else:
        link.aim(request.rendezvous.addresses, request.rendezvous.ports)
    return link


def _remote_link(request: JoinRequest, hello: messages.Hello, loop: Loop) -> RemoteLink:
    """Return a link to a coordinator elsewhere, which is not looked for yet."""
    from ddplaunch.launcher.job.link import BootTime, Lease
    from ddplaunch.launcher.job.remote_link import CoordinatorElsewhere, RemoteLink

    spec, allocation, node_0 = request.spec, request.allocation, request.rendezvous.addresses[0]
    elsewhere = CoordinatorElsewhere(
        key=request.key,
        first_message=hello,
        keepalive=Keepalive.of(spec, allocation.nnodes[1]),
        rdzv_timeout=spec.rdzv_timeout,
        how_back=_how_back(allocation, node_0),  # what the user reads while a lost node 0 is waited for
        command_host=node_0 if allocation.has_front else "",  # has_front: a command, there, has started all agents
    )
    # only a job that may go on without this node limits the life of its workers
    seconds = spec.heartbeat_timeout if allocation.is_elastic else inf
    # simulated nodes, and what coordinates them, are paused together with this machine
    clock = loop if spec.simulate else BootTime()
    return RemoteLink(loop, elsewhere, Lease(seconds, clock))


def _how_back(allocation: Allocation, node_0: str) -> str:
    """Return what brings a lost node 0 back, after "waiting"; "" if the others do not wait for it."""
    if not allocation.is_elastic or allocation.has_one_screen:
        return ""
    if allocation.cluster == "kubernetes":
        return "for its pod to start again"
    with_rank = "" if allocation.node_rank is None else ", with `--node-rank 0`"
    return f"for it to come back: type its command again on {node_0}{with_rank}"


def _hello(request: JoinRequest) -> messages.Hello:
    """Return the first message of this agent to the coordinator; a link sets `reached` again: under which name or address."""
    task = request.allocation.task  # where the cluster starts an agent for each rank
    return messages.Hello(
        requested_rank=request.allocation.node_rank if task is None else task.rank,
        host=host(host_of(request.allocation, socket.gethostname())),
        workers=len(request.draft.workers),
        backend=request.draft.backend,
        backend_reason=line(request.draft.reasons["backend"]),
        reached=host(request.rendezvous.addresses[0]),
        facts=request.facts,
    )


def _is_here(address: str, *, quiet: bool) -> bool:
    """Whether a name or address belongs to this host; False for a name that does not resolve yet."""
    with own_imports():
        # only where the cluster does not say which node is the coordinator
        from ddplaunch.system.net.addresses import is_own, look_up

    def say_that_it_takes_long() -> None:
        if not quiet:
            write_stderr(f"ddplaunch: looking up {address}, to see whether the rendezvous host is this one\n")

    return any(is_own(str(sockaddr[0])) for _, sockaddr in look_up(address, say_that_it_takes_long).targets)


def _digest(spec: JobSpec) -> str:
    """Return the name and a hash of the script, which differ between two versions; "" if the program is no script."""
    if spec.program.kind is not ProgramKind.SCRIPT or not os.path.isfile(spec.program.target):
        return ""
    try:
        with open(spec.program.target, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError:
        return ""  # it is gone meanwhile, which its workers tell
    return f"{os.path.basename(spec.program.target)} ({digest.hexdigest()[:12]})"


# --- once all have joined


def agreed_plan(
    agreed: Agreed, port: int, address: str | None, spec: JobSpec, allocation: Allocation, node: Node
) -> Plan:
    """Make the plan of this node for the generation that begins; `address` is this node's, as the others reach it.

    Raises LaunchError: what was agreed on does not fit this node.
    """
    chosen = interface_of(spec.local_addr) if spec.local_addr else None
    interface = chosen or (interface_of(address) if address is not None else None)
    reason = allocation.endpoint.port_reason if allocation.endpoint.port else "reserved on node 0"
    known = replace(allocation.endpoint, port=port, port_reason=reason)
    return make_plan(
        spec, replace(allocation, endpoint=known), node, run_id=agreed.run_id, agreed=agreed, interface=interface
    )


# --- a node that cannot take part


def how_to_tell_unfit(
    spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str]
) -> Callable[[LaunchError, str], object]:
    """Return what tells the other nodes that this one is not fit: as node 0 those that come in a short time, else node 0.

    It gets the error of this node, and what the health check has found, and never fails itself. It reads no file, and its modules
    are imported now: the disk may be what is not fit.
    """
    with own_imports():
        from ddplaunch.launcher.job import remote_link  # noqa: F401
    rendezvous = allocation.rendezvous
    # this one is certainly not node 0, or there is no other, which `withdraw` sees
    if rendezvous is None or rendezvous.coordinator is False or allocation.nnodes[1] == 1:
        return lambda why, _found: withdraw(spec, allocation, env, why)
    with own_imports():
        from ddplaunch.launcher.job import turn_away  # noqa: F401
        from ddplaunch.launcher.job.listen import turn_others_away

    def tell(why: LaunchError, found: str) -> None:
        """Tell those that look for this node, if it is node 0, else node 0: the error, and what the health check has found."""
        with suppress(LaunchError):
            request = JoinRequest(
                spec=spec,
                allocation=allocation,
                draft=draft,
                rendezvous=_find_out_if_coordinator(rendezvous, spec),
                key=key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
                facts=messages.NodeFacts("", "", "", "", ""),  # there is nobody to compare them
                listening_socket=None,
            )
            if turn_others_away(request, why, found):
                return
        withdraw(spec, allocation, env, why)

    return tell


def withdraw(spec: JobSpec, allocation: Allocation, env: Mapping[str, str], why: LaunchError) -> bool:
    """Tell a node 0 on another host that this node does not take part; return whether node 0 was reached.

    The others need not wait for this node then. Never fails itself.
    """
    from ddplaunch.launcher.job.remote_link import CoordinatorElsewhere, RemoteLink  # few jobs need it

    rendezvous, task = allocation.rendezvous, allocation.task
    # the command that starts all agents, or this one alone, sees how this process ends
    is_known_otherwise = bool(allocation.hosts_to_start_on) or allocation.nnodes[1] == 1
    is_node_0 = rendezvous is not None and rendezvous.coordinator
    if rendezvous is None or is_node_0 or is_known_otherwise:
        return False
    withdrawal = Withdrawal(
        requested_rank=allocation.node_rank if task is None else task.rank,
        host=host(host_of(allocation, socket.gethostname())),
        reason=piece(why.message.partition("\n")[0]),
        hint=piece((why.hint or "").partition("\n")[0]),
    )
    loop = Loop()
    elsewhere = CoordinatorElsewhere(
        key=key(env.get(token.VARIABLE, "").strip() or None, job_name(spec, allocation)),
        first_message=withdrawal,
        keepalive=Keepalive(timeout=_NODE_0_LOST_AFTER),
        rdzv_timeout=_WITHDRAWAL_WITHIN,
    )
    link = RemoteLink(loop, elsewhere)
    link.aim(rendezvous.addresses, rendezvous.ports)
    while link.end is None:  # node 0 closes the connection, or is not reached
        loop.run_once()
    link.close()
    loop.close()
    return link.end.why != "not_reached"
