"""From what the agents have agreed on to the plan of this node."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.cluster import Allocation
from ddplaunch.devices.node import Node
from ddplaunch.net.addresses import interface_of
from ddplaunch.plan import Agreed, Plan
from ddplaunch.plan.make import make_plan
from ddplaunch.spec import JobSpec


def agreed_plan(
    agreed: Agreed, port: int, address: str | None, spec: JobSpec, allocation: Allocation, node: Node
) -> Plan:
    """Make the plan of this node for the generation that begins; `address` is this node's, as the others reach it.

    Raises:
        LaunchError: what was agreed on does not fit this node.
    """
    chosen = interface_of(spec.local_addr) if spec.local_addr else None
    interface = chosen or (interface_of(address) if address is not None else None)
    reason = allocation.endpoint.port_reason if allocation.endpoint.port else "reserved on node 0"
    known = replace(allocation.endpoint, port=port, port_reason=reason)
    return make_plan(
        spec, replace(allocation, endpoint=known), node, run_id=agreed.run_id, agreed=agreed, interface=interface
    )
