"""Simulated nodes, all on this machine, each with an agent and an address of its own: a job to debug. Starts nothing."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, checks, endpoints
from ddplaunch.cluster.hostlist import Host
from ddplaunch.spec import JobSpec


def allocate(spec: JobSpec) -> Allocation:
    """Give a job as many nodes as it asks for."""
    checks.refuse_host_filters(spec, "simulated nodes are on this machine")
    max_nodes = spec.nnodes[1]
    nodes = tuple(Host(name=f"node-{index}") for index in range(max_nodes))
    own = (endpoints.LOOPBACK, "all nodes are on this machine")
    address, address_reason = endpoints.first(spec, (spec.master_addr, "master_addr")) or own
    port, port_reason = endpoints.port(spec)
    return Allocation(
        cluster="local",
        nnodes=spec.nnodes,
        hosts=tuple(node.name for node in nodes),
        address=address,
        address_reason=address_reason,
        port=port,
        port_reason=port_reason,
        start=nodes,
        starter="simulate",
        notes=tuple(checks.endpoint_unused(spec, "ddplaunch chooses the endpoint of simulated nodes")),
    )
