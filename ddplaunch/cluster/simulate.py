"""Simulated nodes, all on this machine, each with an agent and an address of its own: a job to debug. Starts nothing."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, checks, endpoints
from ddplaunch.cluster.hostlist import Host
from ddplaunch.spec import JobSpec


def allocate(spec: JobSpec) -> Allocation:
    """Return a job as many nodes as it asks for."""
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
