"""From the job as it was asked for to what each host is told to do, and back there to a job. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ddplaunch.cluster import Allocation, Rendezvous
from ddplaunch.cluster.hostlist import Host
from ddplaunch.devices import Device
from ddplaunch.devices.node import Node
from ddplaunch.options.argv import to_argv
from ddplaunch.output.display import Stream
from ddplaunch.output.streams import Screen
from ddplaunch.plan import assign
from ddplaunch.plan.ranks import workers_of_node
from ddplaunch.record import replace
from ddplaunch.remote.messages import Meet, Order
from ddplaunch.spec import JobSpec

LOOPBACK = "127.0.0.1"

# fields of JobSpec that concern only the place where the command was typed, or that an order says in a way of its own
_OF_HERE = frozenset((
    "nnodes", "cluster", "hosts", "hostfile", "include", "exclude", "simulate", "chaos", "node_rank", "master_addr",
    "master_port", "local_addr", "rdzv_backend", "rdzv_endpoint", "standalone", "token_file", "no_control",
    "remote_python", "debug_rank",
))  # fmt: skip


def order(
    spec: JobSpec,
    allocation: Allocation,
    place: int,
    *,
    env: Mapping[str, str],
    cwd: str,
    run_id: str,
    token: str,
    screen: Screen,
    answers: bool = False,
) -> Order:
    """Write what the host at this place is to do; `env` are the variables that go there."""
    host = allocation.start[place]
    alone = len(allocation.start) == 1
    return Order(
        token=token,
        words=tuple(map(os.fsencode, to_argv(_for_host(spec, host, run_id), without=_OF_HERE))),
        env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items()),
        cwd=os.fsencode(cwd),
        place=place,
        hosts=tuple(host.address for host in allocation.start),
        cluster=allocation.cluster,
        least=allocation.nnodes[0],
        port=allocation.port,
        port_reason=allocation.port_reason,
        address=spec.master_addr or (LOOPBACK if alone or spec.simulate else None),
        address_reason=allocation.address_reason,
        terminals=tuple(stream.name for stream in screen.terminals),
        colour=tuple(stream.name for stream in screen.colour),
        silence=spec.heartbeat_timeout,
        simulated=spec.simulate,
        answers=answers,
    )


def _for_host(spec: JobSpec, host: Host, run_id: str) -> JobSpec:
    changes: dict[str, object] = {"run_id": run_id}
    if host.slots is not None:
        changes["nproc_per_node"] = host.slots
    if host.devices is not None:
        changes["devices"] = host.devices
    return replace(spec, **changes)


def words(order: Order) -> list[str]:
    """Give the words of an order."""
    return list(map(os.fsdecode, order.words))


def variables(order: Order) -> dict[str, str]:
    """Give the variables of an order."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in order.env}


def screen(order: Order) -> Screen:
    """Give the screen of an order."""
    return Screen(
        terminals=frozenset(Stream[name] for name in order.terminals),
        colour=frozenset(Stream[name] for name in order.colour),
    )


def allocation(order: Order, meet: Meet | None) -> Allocation:
    """Give the allocation of the host that got this order; `meet` is None for the first and for an only one."""
    return Allocation(
        cluster=order.cluster,
        nnodes=(order.least, len(order.hosts)),
        node_rank=order.place,
        hosts=order.hosts,
        address=order.address,
        address_reason=order.address_reason,
        port=order.port,
        port_reason=order.port_reason,
        rendezvous=_rendezvous(order, meet) if len(order.hosts) > 1 else None,
        start=tuple(Host(name=name) for name in order.hosts),
    )


def _rendezvous(order: Order, meet: Meet | None) -> Rendezvous:
    simulated = order.simulated is not None
    return Rendezvous(
        addresses=meet.addresses if meet else (LOOPBACK if simulated else order.hosts[0],),
        ports=(meet.port,) if meet else (0,),
        coordinator=meet is None,
        listen=LOOPBACK if simulated else None,
        source=f"127.0.{(order.place + 1) // 256}.{(order.place + 1) % 256}" if simulated and meet else None,
    )


def share(devices: Sequence[Device], order: Order) -> tuple[Device, ...]:
    """Give the devices of the node that an order is for: those that are there, or a simulated one's part of them."""
    return assign.simulated(devices, order.place, len(order.hosts), order.simulated)


def without_terminal(spec: JobSpec, node: Node, *, alone: bool) -> JobSpec:
    """Give the job as it runs where there is no terminal to be passed through: an only worker is shown as it is, in pipes."""
    if "output" in spec.origins:
        return spec
    single = alone and spec.debug_rank is None and workers_of_node(spec, node.devices, node.hardware)[0] == 1
    return replace(spec, output="raw" if single else spec.output, origins={**spec.origins, "output": "default"})
