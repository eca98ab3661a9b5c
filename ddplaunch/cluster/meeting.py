"""The allocation of agents that somebody else started on each node, and that know of each other by their cluster."""

from __future__ import annotations

from ddplaunch.cluster import Allocation, Meeting, Task, agree, meet
from ddplaunch.spec import JobSpec


def met(
    spec: JobSpec,
    *,
    cluster: str,
    nnodes: tuple[int, int],
    node_rank: int,
    hosts: tuple[str, ...] = (),
    addresses: tuple[str, ...],
    reason: str,
    port: tuple[int | None, str] | None = None,
    ports: tuple[int, ...],
    coordinator: bool,
    task: Task | None = None,
    nproc_per_node: int | None = None,
    identity: str = "",
    notes: tuple[str, ...] = (),
) -> Allocation:
    """Give the allocation; `addresses` of node 0 and `port` are what the cluster says and why, and flags beat them.

    Agents try an address that was asked for first. Of several addresses, node 0 says which the others reach.
    """
    asked = meet.first(spec, (spec.master_addr, "master_addr"))
    own = (addresses[0], reason) if len(addresses) == 1 else (None, "node 0 says how the others reach it")
    address, address_reason = asked or own
    master_port, port_reason = meet.port(spec)
    if master_port is None and port is not None:
        master_port, port_reason = port
    tried = tuple(dict.fromkeys((*asked[:1], *addresses) if asked else addresses))
    return Allocation(
        cluster=cluster,
        nnodes=nnodes,
        node_rank=node_rank,
        hosts=hosts,
        address=address,
        address_reason=address_reason,
        port=master_port,
        port_reason=port_reason,
        meeting=Meeting(
            addresses=tried,
            ports=tuple(candidate for candidate in ports if candidate != master_port),
            coordinator=coordinator,
            # not what node 0 is known by outside: that may be the address of a service before it
            listen=meet.LOOPBACK if tried == (meet.LOOPBACK,) else None,
        ),
        task=task,
        nproc_per_node=nproc_per_node,
        identity=identity,
        notes=(*notes, *agree.endpoint_unused(spec, f"the nodes meet as {cluster} says")),
    )
