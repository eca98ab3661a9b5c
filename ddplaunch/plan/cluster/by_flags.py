"""Jobs that flags alone describe: on this machine, on simulated nodes, or of agents that the user starts on each node.

The last have their rendezvous in flags, or in torchrun's PET_* variables, and torchrun has two kinds. With "static" each node is
given its rank, and the agents use a port beside MASTER_ADDR:MASTER_PORT. With "c10d" they use an endpoint, and get ranks in the
order of arrival. etcd is refused: ddplaunch has no client for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.plan.cluster import Allocation, Endpoint, Rendezvous, checks, endpoints
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.endpoints import LOOPBACK, of_workers
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError


def discover_local(spec: JobSpec, hostname: str) -> Allocation:
    """Return the allocation of a job where no cluster was found; LaunchError if the hosts of several nodes are not given."""
    checks.refuse_host_filters(spec, "the job runs on this machine")
    return _of_node_0(spec, hostname) if spec.nnodes[1] > 1 else of_one_node(spec, hostname)


def of_one_node(
    spec: JobSpec, host: str, *, cluster: str = "local", nproc_per_node: int | None = None, notes: Sequence[str] = ()
) -> Allocation:
    """Return the allocation of a job that has this node and no other."""
    if spec.node_rank:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)}: the job has one node, and its rank is 0",
            hint="leave --node-rank out",
        )
    # with torchrun's static rendezvous workers meet at --rdzv-endpoint; with its other kinds only agents do, and the agent
    # of a single node has no other to meet
    is_of_workers = spec.rdzv_backend in (None, "static") and not spec.standalone
    asked = spec.rdzv_endpoint if is_of_workers else None
    unused = [] if is_of_workers else checks.endpoint_unused(spec, "it is for a job of several nodes")
    return Allocation(
        cluster=cluster,
        hosts=(host,),
        node_rank=0,
        endpoint=of_workers(spec, asked=asked, address=(LOOPBACK, "a single node")),
        nproc_per_node=nproc_per_node,
        notes=(*notes, *unused),
    )


# --- simulated nodes, each with an agent of its own: a job to debug


def simulated(spec: JobSpec) -> Allocation:
    """Return the allocation of a simulated job: all its nodes are this host."""
    from ddplaunch.plan.cluster.hostlist import Host  # one node needs none of it

    checks.refuse_host_filters(spec, "simulated nodes are on this machine")
    nodes = tuple(Host(name=f"node-{index}") for index in range(spec.nnodes[1]))
    return Allocation(
        cluster="local",
        nnodes=spec.nnodes,
        hosts=tuple(node.name for node in nodes),
        endpoint=of_workers(spec, address=(LOOPBACK, "all nodes are on this machine")),
        hosts_to_start_on=nodes,
        starter="simulate",
        notes=tuple(checks.endpoint_unused(spec, "ddplaunch chooses the endpoint of simulated nodes")),
    )


# --- agents that the user starts on each node


def discover_static(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of a job whose nodes the user starts by hand; None for one node, or if flags leave something open.

    Flags are complete with an endpoint at which the nodes get their ranks, or with this node's rank and the address of node 0.
    """
    spec = facts.spec
    max_nodes = spec.nnodes[1]
    if max_nodes == 1:
        return None
    if spec.node_rank is not None and spec.node_rank >= max_nodes:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)}: ranks go from 0 to {max_nodes - 1}, "
            f"since {checks.nnodes_as_typed(spec)}",
            hint="give each node a rank of its own, from 0 on",
        )
    if spec.rdzv_endpoint and (spec.rdzv_backend or "").startswith("etcd"):
        raise LaunchError(
            f"{spec.typed('rdzv_backend', spec.rdzv_backend)}: etcd is not supported",
            hint="--rdzv-backend c10d --rdzv-endpoint HOST:PORT, with a host of the job",
        )
    # without a node rank, which torchrun's static rendezvous needs, an endpoint can only be meant for its c10d
    is_c10d = spec.rdzv_backend == "c10d" or (spec.rdzv_backend != "static" and spec.node_rank is None)
    if spec.rdzv_endpoint and is_c10d:
        allocation = _at_endpoint(spec, spec.rdzv_endpoint)
    elif spec.node_rank is not None and (spec.master_addr or spec.rdzv_endpoint):
        allocation = _static(spec, facts.hostname, spec.node_rank)
    else:
        return None
    checks.refuse_host_filters(spec, "each node is started by hand")
    return allocation


def _of_node_0(spec: JobSpec, hostname: str) -> Allocation:
    """Return the allocation of node 0 of several, which needs no address: its own is that of node 0.

    Raises LaunchError: this is another node, or no rank is given; it says which flags are missing.
    """
    if spec.node_rank == 0:
        return _static(spec, hostname, 0)
    if spec.node_rank is not None:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)}: the address of node 0 is not given",
            hint="add --master-addr HOST, the name or the address of node 0",
        )
    nodes = checks.nnodes_as_typed(spec)
    if spec.master_addr or spec.rdzv_endpoint:
        name = "master_addr" if spec.master_addr else "rdzv_endpoint"
        raise LaunchError(
            f"{nodes} and {spec.typed(name, getattr(spec, name))}: the rank of this node is not given",
            hint=f"add --node-rank: 0 on node 0, {spec.nnodes[1] - 1} on the last; or let node 0 assign the ranks: "
            f"--rdzv-backend c10d --rdzv-endpoint {spec.master_addr or spec.rdzv_endpoint}",
        )
    raise LaunchError(f"{nodes}: neither the hosts nor the rank of this node are given", hint=_ways_to_start(spec))


def _ways_to_start(spec: JobSpec) -> str:
    """Return the hint with four commands that start as many nodes as were asked for."""
    least, all_nodes = spec.nnodes
    most = all_nodes - spec.spares  # as --nnodes counts: without the spares
    hosts = ",".join("abcd"[:all_nodes]) + (",..." if all_nodes > 4 else "")
    spares = f" --spares {spec.spares}" if spec.spares else ""
    options = f"--nnodes {most if least == most else f'{least}:{most}'}{spares}"
    beside_hosts = spares if least == most else f" {options}"  # a list of hosts says how many nodes there are
    return "\n".join((
        "give them in one of four ways:",
        f"  over ssh:         ddplaunch --hosts {hosts}{beside_hosts} SCRIPT",
        f"  in a Slurm job:   srun --nodes {all_nodes} --ntasks-per-node 1 ddplaunch{beside_hosts} SCRIPT",
        f"  on each by hand:  ddplaunch {options} --node-rank 0 --master-addr HOST SCRIPT",
        f"  on this machine:  ddplaunch {options} --simulate SCRIPT",
    ))  # fmt: skip


def _at_endpoint(spec: JobSpec, rdzv_endpoint: str) -> Allocation:
    """Return the allocation of torchrun's c10d: agents meet at the endpoint, and node 0 chooses where workers do."""
    host, port = endpoints.split_endpoint(rdzv_endpoint)
    # torchrun ignores them, too; and MASTER_PORT is often the port of the endpoint, where the agents listen
    ignored = [spec.typed(name, value) for name in ("master_addr", "master_port") if (value := getattr(spec, name))]
    where = spec.typed("rdzv_endpoint", rdzv_endpoint)
    return Allocation(
        cluster="static",
        nnodes=spec.nnodes,
        node_rank=spec.node_rank,
        endpoint=Endpoint(*endpoints.ADDRESS_BY_NODE_0, *endpoints.PORT_AT_START),
        rendezvous=Rendezvous(
            addresses=(host,),
            ports=endpoints.ports_from(port or endpoints.C10D_PORT),
            coordinator=_is_coordinator(spec),
            listen=endpoints.listen_on(host),
        ),
        notes=tuple(f"{option} has no effect: with {where} node 0 chooses it" for option in ignored),
    )


def _is_coordinator(spec: JobSpec) -> bool | None:
    """Whether this node is node 0, by its rank or by torchrun's is_host; None: the host of the endpoint is."""
    by_rank = None if spec.node_rank is None else spec.node_rank == 0
    by_setting = {"1": True, "0": False}.get(spec.rdzv_conf.get("is_host", ""))
    if by_rank is not None and by_setting is not None and by_setting != by_rank:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)} and is_host={int(by_setting)} in {spec.origin('rdzv_conf')} contradict "
            "each other: the host of the endpoint is node 0",
            hint="leave one of them out",
        )
    return by_rank if by_setting is None else by_setting


def _static(spec: JobSpec, hostname: str, node_rank: int) -> Allocation:
    """Return the allocation of torchrun's static rendezvous: each node is given its rank, and the address of node 0."""
    # with torchrun's static rendezvous --rdzv-endpoint wins over --master-addr and --master-port
    endpoint = of_workers(spec, asked=spec.rdzv_endpoint, address=(None, "this is node 0"))
    rendezvous_address = endpoint.address or hostname  # no flag has to give an address on node 0 itself
    return Allocation(
        cluster="static",
        nnodes=spec.nnodes,
        node_rank=node_rank,
        endpoint=endpoint,
        rendezvous=Rendezvous(
            addresses=(rendezvous_address,),
            ports=endpoints.ports_beside(endpoint.port or endpoints.STATIC_PORT),
            coordinator=node_rank == 0,
            listen=endpoints.listen_on(rendezvous_address),
        ),
    )
