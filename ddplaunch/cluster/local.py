"""This machine alone: the cluster that is always there. Looks nothing up; the host name is an argument."""

from __future__ import annotations

from typing import TypeVar

from ddplaunch.cluster import Allocation
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec

LOOPBACK = "127.0.0.1"

T = TypeVar("T")


def discover(spec: JobSpec, hostname: str) -> Allocation:
    """Give the one-node allocation that `spec` asks for.

    Raises:
        LaunchError: the job wants several nodes, or to be another node than the first.
    """
    least, most = spec.nnodes
    if most > 1:
        nodes = most if least == most else f"{least}:{most}"
        raise LaunchError(
            f"{spec.asked('nnodes', nodes)}: this version of ddplaunch runs a job on one node",
            hint="leave --nnodes out, or set it to 1",
        )
    if spec.node_rank:
        raise LaunchError(
            f"{spec.asked('node_rank', spec.node_rank)}: the job has one node, and its rank is 0",
            hint="leave --node-rank out",
        )
    # torchrun's static rendezvous meets at the endpoint itself; its other endpoints are only meeting places of agents,
    # which one node does not need
    static = spec.rdzv_backend in (None, "static") and not spec.standalone
    host, port = split_endpoint(spec.rdzv_endpoint or "") if static else ("", None)
    address = _first(spec, (host, "rdzv_endpoint"), (spec.master_addr, "master_addr"))
    meeting_port = _first(spec, (port, "rdzv_endpoint"), (spec.master_port, "master_port"))
    notes = []
    if spec.rdzv_endpoint and not static:
        asked = spec.asked("rdzv_endpoint", spec.rdzv_endpoint)
        notes.append(f"{asked} has no effect: it is where several nodes would meet")
    return Allocation(
        cluster="local",
        hosts=(hostname,),
        node_rank=0,
        address=address[0] if address else LOOPBACK,
        address_reason=address[1] if address else "one node needs no other",
        port=meeting_port[0] if meeting_port else None,
        port_reason=meeting_port[1] if meeting_port else "a free one is reserved at the start",
        notes=tuple(notes),
    )


def _first(spec: JobSpec, *candidates: tuple[T | None, str]) -> tuple[T, str] | None:
    """The first value that says something, and where that field came from."""
    return next(((value, spec.origin(name)) for value, name in candidates if value), None)


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Split HOST, HOST:PORT or [V6]:PORT."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = endpoint.rpartition(":") if endpoint.count(":") == 1 else (endpoint, "", "")
    return host, int(port) if port else None
