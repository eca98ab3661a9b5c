"""Hosts on which we start the agents ourselves: which of them, and how many workers each. Pure; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.cluster import Allocation, Rendezvous, Task, checks, endpoints, hostlist, local
from ddplaunch.cluster.facts import ClusterFacts
from ddplaunch.cluster.hostlist import Host
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec
from ddplaunch.words import count


def allocate(
    facts: ClusterFacts,
    cluster: str,
    hosts: Sequence[Host],
    *,
    starter: str,
    source: str,
    resolvable: bool = True,
    here: str | None = None,
    in_step: bool = False,
    notes: Sequence[str] = (),
) -> Allocation:
    """Return the job as many of `hosts` as it asks for; one node that is this host needs no agent started.

    `source` names what listed the hosts, for messages. `resolvable`: workers can resolve these names, which may be known
    to ssh only; `here` is the cluster's name for this host. `in_step`: the agent of this host is started as all others are.

    Raises:
        LaunchError: the job asks for more than there is, or --node-rank is given.
    """
    spec = facts.spec
    if spec.node_rank is not None:
        raise LaunchError(
            f"{spec.asked('node_rank', spec.node_rank)}: ddplaunch starts all nodes of {source} itself, in their order",
            hint="leave --node-rank out",
        )
    found = _filtered(spec, hosts)
    nnodes, chosen = _choose(spec, found, source)
    chosen = tuple(_with_workers(spec, host) for host in chosen)
    remarks = [*notes, *_unused(found[len(chosen) :], source)]
    is_here = len(chosen) == 1 and chosen[0].devices is None and _is_here(chosen[0], here or facts.hostname)
    if is_here and not in_step:
        return local.alone(spec, chosen[0].address, cluster=cluster, nproc_per_node=chosen[0].slots, notes=remarks)
    return Allocation(
        cluster=cluster,
        nnodes=nnodes,
        hosts=tuple(host.address for host in chosen),
        endpoint=endpoints.of_workers(spec, address=_address(chosen, source, resolvable=resolvable)),
        start=chosen,
        starter=starter,
        is_here=is_here,
        notes=(*remarks, *checks.endpoint_unused(spec, "ddplaunch chooses the endpoint of agents that it starts")),
    )


def _filtered(spec: JobSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts without those that are not to be used."""
    if spec.include:
        return hostlist.include(hosts, spec.include, spec.origin("include"))
    if spec.exclude:
        return hostlist.exclude(hosts, spec.exclude, spec.origin("exclude"))
    return tuple(hosts)


def _choose(spec: JobSpec, hosts: tuple[Host, ...], source: str) -> tuple[tuple[int, int], tuple[Host, ...]]:
    """As many of the hosts as nodes are asked for; all without --nnodes."""
    if not checks.nnodes_asked(spec):
        return (len(hosts), len(hosts)), hosts
    min_nodes, max_nodes = spec.nnodes
    if min_nodes > len(hosts):
        names = hostlist.compress([host.address for host in hosts])
        raise LaunchError(
            f"{checks.asked_nnodes(spec)}, but {source} has {count(len(hosts), 'node')}: {names}",
            hint=f"--nnodes {len(hosts)}, or leave it out to use all",
        )
    chosen = hosts[:max_nodes]
    return (min_nodes, len(chosen)), chosen


def _with_workers(spec: JobSpec, host: Host) -> Host:
    """This host with the number of workers that was asked for.

    Raises:
        LaunchError: it has fewer slots.
    """
    wanted = spec.nproc_per_node
    if wanted is None or host.slots is None:
        return host
    if isinstance(wanted, int) and wanted > host.slots:
        raise LaunchError(
            f"{spec.asked('nproc_per_node', wanted)}, but {host.address} has {count(host.slots, 'slot')}",
            hint=f"list it as {host.address}:{wanted}",
        )
    return replace(host, slots=wanted if isinstance(wanted, int) else None)


def _address(chosen: tuple[Host, ...], source: str, *, resolvable: bool) -> tuple[str | None, str]:
    if len(chosen) == 1:
        return endpoints.LOOPBACK, "a single node"
    return (chosen[0].address, f"the first node of {source}") if resolvable else endpoints.BY_NODE_0


def _is_here(host: Host, hostname: str) -> bool:
    return host.name == host.address and (host.name == "localhost" or endpoints.is_same_host(host.name, hostname))


def _unused(hosts: Sequence[Host], source: str) -> list[str]:
    if not hosts:
        return []
    return [f"{hostlist.compress([host.address for host in hosts])} of {source} is not used: --nnodes asks for fewer"]


def without_slots(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts without their slots, which in a batch job count CPUs rather than workers."""
    return [replace(host, slots=None) for host in hosts]


def started_elsewhere(
    spec: JobSpec,
    *,
    cluster: str,
    nnodes: tuple[int, int],
    node_rank: int,
    hosts: tuple[str, ...] = (),
    addresses: tuple[str, ...],
    reason: str,
    port: tuple[int | None, str] = endpoints.RESERVED,
    ports: tuple[int, ...],
    coordinator: bool,
    task: Task | None = None,
    nproc_per_node: int | None = None,
    identity: str = "",
    notes: tuple[str, ...] = (),
) -> Allocation:
    """Return the allocation; the cluster's `addresses` of node 0 and its `port`, with their reasons, are overridden by flags.

    Agents try the address of a flag first. Of several addresses node 0 chooses the one that the others reach.
    """
    own = (addresses[0], reason) if len(addresses) == 1 else endpoints.BY_NODE_0
    endpoint = endpoints.of_workers(spec, address=own, port=port)
    tried = tuple(dict.fromkeys((spec.master_addr, *addresses) if spec.master_addr else addresses))
    return Allocation(
        cluster=cluster,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        endpoint=endpoint,
        rendezvous=Rendezvous(
            addresses=tried,
            ports=tuple(candidate for candidate in ports if candidate != endpoint.port),
            coordinator=coordinator,
            # not the public address of node 0, which may be that of a service in front of it
            listen=endpoints.LOOPBACK if tried == (endpoints.LOOPBACK,) else None,
        ),
        task=task,
        nproc_per_node=nproc_per_node,
        identity=identity,
        notes=(*notes, *checks.endpoint_unused(spec, f"{cluster} determines the endpoint")),
    )
