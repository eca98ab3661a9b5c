"""From the coordinator's word to the plan of this node."""

from __future__ import annotations

from ddplaunch.cluster import Allocation
from ddplaunch.control.messages import Begin
from ddplaunch.devices.node import Node
from ddplaunch.net.addresses import interface_of
from ddplaunch.plan import Agreed, Plan, Seat
from ddplaunch.plan.make import make_plan
from ddplaunch.plan.variables import socket_interface_variables
from ddplaunch.record import replace
from ddplaunch.spec import JobSpec


def agreed_plan(begin: Begin, address: str | None, spec: JobSpec, allocation: Allocation, node: Node) -> Plan:
    """Make the plan of this node for the generation that begins; `address` is this node's, as the others reach it.

    Raises:
        LaunchError: what was agreed on does not fit this node.
    """
    told = interface_of(spec.local_addr) if spec.local_addr else None
    interface = told or (interface_of(address) if address is not None else None)
    caller = {**node.env, **dict(spec.env)}
    agreed = Agreed(
        seats=tuple(Seat(seat.host, seat.workers) for seat in begin.seats),
        backend=begin.backend,
        backend_reason=begin.backend_reason,
        variables=socket_interface_variables(interface, caller) if interface else {},
    )
    known = replace(
        allocation,
        node_rank=begin.place,
        address=begin.address,
        port=begin.port,
        port_reason=allocation.port_reason if allocation.port else "reserved on node 0",
    )
    return make_plan(spec, known, node, run_id=begin.run_id, agreed=agreed)
