"""This machine alone, where no cluster is found, or several simulated nodes on it. The host name is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.cluster import Allocation, checks, endpoints
from ddplaunch.cluster.endpoints import LOOPBACK, of_workers
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec


def discover(spec: JobSpec, hostname: str) -> Allocation:
    """Return the allocation of a job where no cluster was found.

    Raises:
        LaunchError: it has several nodes, and their hosts are not given.
    """
    checks.refuse_host_filters(spec, "the job runs on this machine")
    if checks.several(spec):
        from ddplaunch.cluster import static  # one node needs none of it

        return static.incomplete(spec, hostname)
    return alone(spec, hostname)


def alone(
    spec: JobSpec,
    host: str,
    *,
    cluster: str = "local",
    nproc_per_node: int | None = None,
    notes: Sequence[str] = (),
) -> Allocation:
    """Return the allocation of a job that has this node and no other.

    Raises:
        LaunchError: --node-rank is not 0.
    """
    if spec.node_rank:
        raise LaunchError(
            f"{spec.asked('node_rank', spec.node_rank)}: the job has one node, and its rank is 0",
            hint="leave --node-rank out",
        )
    # the endpoint of torchrun's static rendezvous is that of the workers; its others are for agents only, which one node
    # does not need
    static_one = spec.rdzv_backend in (None, "static") and not spec.standalone
    asked = spec.rdzv_endpoint if static_one else None
    unused = [] if static_one else checks.endpoint_unused(spec, "it is for a job of several nodes")
    return Allocation(
        cluster=cluster,
        hosts=(host,),
        node_rank=0,
        endpoint=of_workers(spec, asked=asked, address=(LOOPBACK, "a single node")),
        nproc_per_node=nproc_per_node,
        notes=(*notes, *unused),
    )


# --- simulated nodes, each with an agent and an address of its own: a job to debug


def simulated(spec: JobSpec) -> Allocation:
    """Return a job as many nodes as it asks for."""
    from ddplaunch.cluster.hostlist import Host  # one node needs none of it

    checks.refuse_host_filters(spec, "simulated nodes are on this machine")
    max_nodes = spec.nnodes[1]
    nodes = tuple(Host(name=f"node-{index}") for index in range(max_nodes))
    return Allocation(
        cluster="local",
        nnodes=spec.nnodes,
        hosts=tuple(node.name for node in nodes),
        endpoint=endpoints.of_workers(spec, address=(endpoints.LOOPBACK, "all nodes are on this machine")),
        start=nodes,
        starter="simulate",
        notes=tuple(checks.endpoint_unused(spec, "ddplaunch chooses the endpoint of simulated nodes")),
    )
