"""The coordinator among several nodes: whether it is here, where it listens, and what it sets for the agents of the others.

An agent that knows the coordinator to be elsewhere imports none of this.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agents
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.local_link import LocalLink, job_policy
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
from ddplaunch.system.net.addresses import Answer, Resolver, is_own

if TYPE_CHECKING:
    from ddplaunch.launcher.job.link import JoinRequest, Link
    from ddplaunch.launcher.tell.reporter import Reporter

# options that other nodes need not have
_OPTIONS_OF_ONE_NODE = ("local_addr", "log_dir", "metrics_file", "notify", "quiet", "run_id", "verbose")


def coordinate_if_here(request: JoinRequest, hello: messages.Hello, loop: Loop, reporter: Reporter) -> Link | None:
    """Become the coordinator, if it belongs here, and return the link of its own agent, which says `hello`; else return None.

    Raises LaunchError: no port is free to listen on, or another agent here is the coordinator already.
    """
    state = job.first_state(_policy(request), loop.now(), first_term(time.time()))
    coordinator = Coordinator(loop, state, request.draft, JobReporter(reporter))
    agents = _listen_if_here(request, coordinator, loop)
    if agents is None:
        return None
    loop.post(Listening(agents.port))  # for a command that starts the other agents
    # static: users type a command on each node, with this address
    if request.allocation.cluster == "static" and request.allocation.endpoint.address is not None:
        _warn_if_name_leads_nowhere(request.allocation.endpoint.address, loop, reporter)
    own = LocalLink(loop, coordinator)
    coordinator.add_own_agent(own.on_order, agents.add_own(hello), agents)
    return own


def _warn_if_name_leads_nowhere(name: str, loop: Loop, reporter: Reporter) -> None:
    """Warn if the name under which other nodes, started by hand, look for node 0 leads nowhere: they would say so there only."""

    def on_answer(answer: Answer) -> None:
        if why := answer.error:
            reporter.print(
                f"warning: the other nodes look for this one as {name}, which cannot be looked up here: {why}"
            )

    Resolver(loop, name, on_answer)  # a numeric address has no such error


def _listen_if_here(request: JoinRequest, coordinator: Coordinator, loop: Loop) -> Agents | None:
    """Listen for the other agents if this agent is the coordinator, or the first one of the job on the rendezvous host.

    Return None if another one is. Raises LaunchError: no port is free, or another agent of the job listens already where this one
    should.
    """
    ports, is_coordinator = request.rendezvous.ports, request.rendezvous.coordinator
    if is_coordinator is None:  # whichever agent comes first on this, the rendezvous host
        return _listen_if_first(request, coordinator, loop)
    if not is_coordinator:
        return None
    agents = _listen(request, coordinator, loop, ports)
    # another coordinator, which came before, listens at an earlier one of the ports; if 0 was given (any free port), none does
    ports_before = ports[: ports.index(agents.port)] if agents.port in ports else ()
    if ports_before and _is_coordinator_at(request, ports_before):
        agents.connections.close()
        raise LaunchError(
            "node rank 0 is taken: another ddplaunch on this host is the coordinator of this job",
            hint="give each node a rank of its own with --node-rank",
        )
    return agents


def _listen_if_first(request: JoinRequest, coordinator: Coordinator, loop: Loop) -> Agents | None:
    """Listen at the first free port, unless an agent of the same job answers at one before it: then return None.

    A port is tried by listening there: a look whether it is free would keep it from others meanwhile. Raises LaunchError: all
    ports are taken.
    """
    ports = request.rendezvous.ports
    for port in ports:
        with suppress(LaunchError):
            return _listen(request, coordinator, loop, (port,))
        if _is_coordinator_at(request, (port,)):
            return None
    return _listen(request, coordinator, loop, ports)  # the error says which ports are taken


def _listen(request: JoinRequest, coordinator: Coordinator, loop: Loop, ports: Sequence[int]) -> Agents:
    """Listen for the other agents at one of these ports, and return the list of them. Raises LaunchError: all are taken."""
    return Incoming(loop, _terms(request, coordinator.state.policy.max_nodes, ports), coordinator).agents


def _terms(request: JoinRequest, max_nodes: int, ports: Sequence[int]) -> Terms:
    """Return what a coordinator that may listen on these ports sets for the agents of so many nodes."""
    given = request.allocation.endpoint.address
    # "localhost" and the like are another host on each node, so no address for the others
    means_each_host = given is not None and is_same_host(given, "localhost")
    return Terms(
        keepalive=Keepalive.of(request.spec, max_nodes),
        run_id=request.draft.run_id,
        address=(None if means_each_host else given) or request.spec.local_addr,
        names=_own_names(request.rendezvous.addresses),  # by which agents may have reached this node
        key=request.key,
        listen=request.rendezvous.listen,
        ports=ports,
        listening_socket=request.listening_socket,  # None: none listens yet
    )


def turn_others_away(request: JoinRequest, why: LaunchError, reason: str) -> bool:
    """Return whether this node is node 0. If so, tell the other nodes first that it is not fit.

    `why` is the error of this node, `reason` what its health check has found. Where the first agent on this host is node 0, the
    others look for it at the first port first. Raises LaunchError: no port is free, as where another agent here is node 0.
    """
    from ddplaunch.launcher.job.turn_away import turn_away  # few nodes are not fit

    policy, rendezvous = _policy(request), request.rendezvous
    if rendezvous.coordinator is False:
        return False
    terms = _terms(request, policy.max_nodes, rendezvous.ports if rendezvous.coordinator else rendezvous.ports[:1])
    turn_away(terms, why, reason, policy.max_nodes - 1)
    return True


def _is_coordinator_at(request: JoinRequest, ports: Sequence[int]) -> bool:
    """Whether a coordinator of this job, which proves the job's key, answers at one of these ports of this host."""
    return answers(request.key, [target(request.rendezvous.listen or "127.0.0.1", port) for port in ports])


def _own_names(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return which of the addresses of node 0 are those of this node, which is node 0; of several, some may be of other hosts."""
    if len(addresses) == 1:
        return tuple(addresses)
    return tuple(one for one in addresses if is_own(one) or is_same_host(one, socket.gethostname()))


def _policy(request: JoinRequest) -> job.Policy:
    """Return what the user and the cluster decided about the nodes of the job."""
    spec, allocation, task = request.spec, request.allocation, request.allocation.task
    # where the cluster starts one agent for each rank (`task`), each counts as a node
    min_nodes, max_nodes = allocation.nnodes if task is None else (task.world_size, task.world_size)
    names_all_nodes = len(allocation.hosts) == max_nodes
    return replace(
        job_policy(
            spec,
            min_nodes,
            max_nodes,
            names=allocation.hosts if names_all_nodes else (),
            has_lease=allocation.is_elastic,  # the job may go on without a node that is lost, once its lease is over
        ),
        nodes_are_replaceable=not allocation.has_one_screen,  # has_one_screen: one command has started all agents, once
        nodes_may_leave=not allocation.hosts_to_start_on
        and not allocation.has_front,  # else a signal to one agent is for the job
        command_elsewhere=_command_elsewhere(request),
    )


def _command_elsewhere(request: JoinRequest) -> tuple[str, ...]:
    """Return the command for another node, if users start the nodes, else (); the word `--node-rank=` lacks the rank."""
    spec = request.spec
    # with torchrun's is_host, users say on each node whether it is the host, so the command differs
    if request.allocation.cluster != "static" or (spec.rdzv_conf and "is_host" in spec.rdzv_conf):
        return ()
    import shlex  # only what users type on each node needs it

    given = [one for one in spec.given if one.name not in _OPTIONS_OF_ONE_NODE and one.source is not Source.DEFAULT]
    words = ["=".join(BY_NAME[one.name].words(one.text)) for one in given]  # as they were typed: --option=value
    words += [f"--env={name}={value}" for name, value in spec.env if name not in spec.origins_of_secrets]
    words += ["--", spec.program.target, *spec.program.args]
    # the user has to name the file there: what it holds is not shown
    if "--env-file" in spec.origins_of_secrets.values():
        words.insert(0, "--env-file=...")
    if spec.master_addr is None and not spec.rdzv_endpoint:
        words.insert(0, f"--master-addr={request.allocation.endpoint.address or socket.gethostname()}")
    return ("ddplaunch", *("--node-rank=" if word.startswith("--node-rank=") else shlex.quote(word) for word in words))
