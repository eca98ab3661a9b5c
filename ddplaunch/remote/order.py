"""Writes the order for each host from the job, and on the host reads the job from the order. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from ddplaunch.cluster import Allocation, Endpoint, Rendezvous
from ddplaunch.cluster.endpoints import LOOPBACK
from ddplaunch.cluster.hostlist import Host
from ddplaunch.control.fields import line
from ddplaunch.devices.node import Node
from ddplaunch.options.argv import to_argv
from ddplaunch.output.streams import Screen, Stream
from ddplaunch.plan.ranks import workers_of_node
from ddplaunch.remote.messages import CoordinatorAddress, Order
from ddplaunch.spec import Fault, JobSpec

# fields of JobSpec that concern only the host where the command was typed, or that have a field of their own in an order
_NOT_SENT = frozenset((
    "nnodes", "cluster", "hosts", "hostfile", "include", "exclude", "simulate", "chaos", "node_rank", "master_addr",
    "master_port", "local_addr", "rdzv_backend", "rdzv_endpoint", "standalone", "token_file", "no_control",
    "remote_python", "debug_rank", "debug_on_error",
))  # fmt: skip


def order(
    spec: JobSpec,
    allocation: Allocation,
    node_rank: int,
    *,
    env: Mapping[str, str],
    cwd: str,
    run_id: str,
    token: str,
    screen: Screen,
    reports_to_caller: bool = False,
) -> Order:
    """Write the order for the host with this rank; `env` are the variables that are sent."""
    host = allocation.start[node_rank]
    alone = len(allocation.start) == 1
    return Order(
        token=token,
        arguments=tuple(map(os.fsencode, to_argv(_for_host(spec, host, run_id), without=_NOT_SENT))),
        env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in env.items()),
        from_files=tuple(
            (os.fsencode(name), os.fsencode(value), os.fsencode(spec.secret[name]))
            for name, value in spec.env
            if name in spec.secret
        ),
        cwd=os.fsencode(cwd),
        node_rank=node_rank,
        hosts=tuple(host.address for host in allocation.start),
        cluster=allocation.cluster,
        min_nodes=allocation.nnodes[0],
        port=allocation.endpoint.port,
        port_reason=line(allocation.endpoint.port_reason),
        address=spec.master_addr or (LOOPBACK if alone or spec.simulate else None),
        address_reason=line(allocation.endpoint.address_reason),
        terminals=tuple(stream.name for stream in screen.terminals),
        colour=tuple(stream.name for stream in screen.colour),
        live=tuple(stream.name for stream in screen.live),
        heartbeat_timeout=spec.heartbeat_timeout,
        simulated=spec.simulate,
        killed=tuple(fault.target for fault in spec.chaos if fault.kind == "kill"),
        reports_to_caller=reports_to_caller,
    )


def _for_host(spec: JobSpec, host: Host, run_id: str) -> JobSpec:
    changes: dict[str, object] = {"run_id": run_id}
    if host.slots is not None:
        changes["nproc_per_node"] = host.slots
    if host.devices is not None:
        changes["devices"] = host.devices
    return replace(spec, **changes)


def arguments(order: Order) -> list[str]:
    """Return the command-line arguments of an order."""
    return list(map(os.fsdecode, order.arguments))


def from_files(order: Order) -> list[tuple[str, str, str]]:
    """Return the workers' variables from files that came with an order: the name, the value and the origin of each."""
    return [(os.fsdecode(name), os.fsdecode(value), os.fsdecode(origin)) for name, value, origin in order.from_files]


def variables(order: Order) -> dict[str, str]:
    """Return the variables of an order."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in order.env}


def screen(order: Order) -> Screen:
    """Return the screen of an order."""
    return Screen(
        terminals=frozenset(Stream[name] for name in order.terminals),
        colour=frozenset(Stream[name] for name in order.colour),
        live=frozenset(Stream[name] for name in order.live),
    )


def allocation(order: Order, coordinator: CoordinatorAddress | None) -> Allocation:
    """Return the allocation of a host from its order; `coordinator` is None for the first host and for an only one."""
    return Allocation(
        cluster=order.cluster,
        nnodes=(order.min_nodes, len(order.hosts)),
        node_rank=order.node_rank,
        hosts=order.hosts,
        endpoint=Endpoint(order.address, order.address_reason, order.port, order.port_reason),
        rendezvous=_rendezvous(order, coordinator) if len(order.hosts) > 1 else None,
        start=tuple(Host(name=name) for name in order.hosts),
    )


def _rendezvous(order: Order, coordinator: CoordinatorAddress | None) -> Rendezvous:
    simulated, number = order.simulated is not None, order.node_rank + 1
    return Rendezvous(
        addresses=coordinator.addresses if coordinator else (LOOPBACK if simulated else order.hosts[0],),
        ports=(coordinator.port,) if coordinator else (0,),
        coordinator=coordinator is None,
        listen=LOOPBACK if simulated else None,
        source=f"127.0.{number // 256}.{number % 256}" if simulated and coordinator else None,
    )


def faults(order: Order) -> tuple[Fault, ...]:
    """Return what a failure report has to know of --chaos."""
    return tuple(Fault(kind="kill", target=rank, after=0.0) for rank in order.killed)


def without_terminal(spec: JobSpec, node: Node, *, alone: bool) -> JobSpec:
    """Return the job as it runs without a terminal to pass through: the output of an only worker is shown raw."""
    if "output" in spec.origins:
        return spec
    single = alone and spec.debug_rank is None and workers_of_node(spec, node.devices, node.hardware)[0] == 1
    return replace(spec, output="raw" if single else spec.output, origins={**spec.origins, "output": "default"})
