"""This machine alone: the cluster that is always there. Looks nothing up; the host name is an argument."""

from __future__ import annotations

from ddplaunch.cluster import Allocation
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec

LOOPBACK = "127.0.0.1"


def discover(spec: JobSpec, hostname: str) -> Allocation:
    """Give the one-node allocation that `spec` asks for.

    Raises:
        LaunchError: the job wants several nodes, or to be another node than the first.
    """
    if spec.nnodes[1] > 1:
        asked = f"{spec.nnodes[0]}:{spec.nnodes[1]}" if spec.nnodes[0] != spec.nnodes[1] else str(spec.nnodes[1])
        raise LaunchError(
            f"{spec.origin('nnodes')} {asked}: this version of ddplaunch runs a job on one node",
            hint="leave --nnodes out, or set it to 1",
        )
    if spec.node_rank not in (None, 0):
        raise LaunchError(
            f"{spec.origin('node_rank')} {spec.node_rank}: the job has one node, and its rank is 0",
            hint="leave --node-rank out",
        )
    address, port = _meeting_point(spec)
    return Allocation(cluster="local", hosts=(hostname,), node_rank=0, address=address, port=port)


def _meeting_point(spec: JobSpec) -> tuple[str, int | None]:
    # torchrun's static rendezvous meets at the endpoint itself; its c10d endpoint is only a meeting place of agents,
    # which one node does not need
    if spec.rdzv_endpoint and spec.rdzv_backend in (None, "static"):
        host, port = split_endpoint(spec.rdzv_endpoint)
        return host or LOOPBACK, port or spec.master_port
    return spec.master_addr or LOOPBACK, spec.master_port


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Split HOST, HOST:PORT or [V6]:PORT."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = endpoint.rpartition(":") if endpoint.count(":") == 1 else (endpoint, "", "")
    return host, int(port) if port else None
