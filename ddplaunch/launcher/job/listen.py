"""The coordinator among several nodes: whether it is here, where it listens, and what it sets for the agents of the others.

An agent that knows the coordinator to be elsewhere imports none of this.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agents
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.local_link import job_policy
from ddplaunch.launcher.job.orders import Listening
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.plan.cluster.endpoints import is_same_host
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.dialer import answers, target
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.job import Source
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_own

if TYPE_CHECKING:
    from ddplaunch.launcher.job.link import JoinRequest, Link
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
    state = job.first_state(_policy(request), loop.now(), first_term(time.time()))
    coordinator = Coordinator(loop, state, request.draft, JobReporter(reporter))
    agents = _listen_if_here(request, coordinator, reporter, loop)
    if agents is None:
        return None
    loop.post(Listening(agents.port))
    own = link_to(coordinator)
    coordinator.add_own_agent(own.on_order, agents.add_own(hello), agents)
    return own


def _listen_if_here(request: JoinRequest, coordinator: Coordinator, reporter: Reporter, loop: Loop) -> Agents | None:
    """Listen for the other agents, if this is the coordinator, or the first agent of the job on the rendezvous host.

    A port is tried by listening there: a look whether it is free would keep it from others meanwhile.

    Raises LaunchError: no port is free, or another agent of the job listens already where this one should.
    """
    rendezvous, spec, allocation = request.rendezvous, request.spec, request.allocation

    def listen_at(ports: Sequence[int]) -> Agents:
        given = allocation.endpoint.address
        means_each_host = given is not None and is_same_host(given, "localhost")
        terms = replace(
            _terms(request, coordinator),
            address=(None if means_each_host else given) or spec.local_addr,
            names=_own_names(rendezvous.addresses),
            ports=ports,
        )
        return Incoming(loop, terms, coordinator).agents

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
    # it is not known: the first agent on the rendezvous host is the coordinator
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
        keepalive=Keepalive.of(request.spec, coordinator.state.policy.max_nodes),
        run_id=request.draft.run_id,
        address=request.spec.local_addr,
        key=request.key,
        listen=request.rendezvous.listen,
        ports=(0,),
        listening=request.listening,
    )


def _policy(request: JoinRequest) -> job.Policy:
    """Return what the user and the cluster decided about the nodes of the job."""
    allocation = request.allocation
    task = allocation.task
    min_nodes, max_nodes = allocation.nnodes if task is None else (task.world_size, task.world_size)
    return replace(
        job_policy(request.spec, min_nodes, max_nodes),
        spares=request.spec.spares,
        lease=request.spec.heartbeat_timeout + job.KILLED_WITHIN if allocation.is_elastic else 0.0,
        replaceable=not allocation.has_one_screen,  # what starts all agents does so once
        may_leave=not allocation.start and not allocation.has_front,
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
