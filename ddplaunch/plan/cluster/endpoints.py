"""Endpoints of agents and workers: addresses, and ports that all agents compute to be the same. Binds and resolves nothing."""

from __future__ import annotations

from typing import TypeVar

from ddplaunch.plan.cluster import Allocation, Endpoint, Rendezvous
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options.parsers import is_numeric

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
C10D_PORT = 29400  # torchrun's defaults, of its two kinds of rendezvous
STATIC_PORT = 29500

# an address and a port that are decided later, and how
ADDRESS_BY_NODE_0 = (None, "chosen by node 0 when the nodes have joined")
PORT_AT_START = (None, "a free one is reserved at the start")

_CANDIDATES = 8
# below Linux's ephemeral ports (from 32768) and torchrun's defaults; a prime number of blocks of 8 ports
_FIRST, _BLOCKS = 20000, 1171


def first_given(spec: JobSpec, *candidates: tuple[T | None, str]) -> tuple[T, str] | None:
    """Return the first value that is set, and the origin of that field of the spec."""
    return next(((value, spec.origin(name)) for value, name in candidates if value), None)


def of_workers(
    spec: JobSpec,
    *,
    asked: str | None = None,
    address: tuple[str | None, str] = ADDRESS_BY_NODE_0,
    port: tuple[int | None, str] = PORT_AT_START,
) -> Endpoint:
    """Return the endpoint of the workers: what flags set, else `address` and `port`, each with its reason.

    `asked` is --rdzv-endpoint where that is meant for workers; then it wins over --master-addr and --master-port.
    """
    host, number = split_endpoint(asked or "")
    return Endpoint(
        *(first_given(spec, (host, "rdzv_endpoint"), (spec.master_addr, "master_addr")) or address),
        *(first_given(spec, (number, "rdzv_endpoint"), (spec.master_port, "master_port")) or port),
    )


def split_endpoint(endpoint: str) -> tuple[str, int | None]:
    """Split HOST, HOST:PORT or [V6]:PORT."""
    if endpoint.startswith("["):
        host, _, rest = endpoint[1:].partition("]")
        digits = rest.removeprefix(":")
    else:
        host, _, digits = endpoint.rpartition(":") if endpoint.count(":") == 1 else (endpoint, "", "")
    return host, int(digits) if digits else None


def ports_from(base: int) -> tuple[int, ...]:
    """Return `base` and the ports after it: the candidates of agents that were given one port."""
    return tuple(range(base, min(base + _CANDIDATES, 65536)))


def ports_beside(taken: int) -> tuple[int, ...]:
    """Return the ports after one that the workers will take; below it where there are none."""
    return ports_from(taken + 1) or tuple(range(taken - 1, taken - 1 - _CANDIDATES, -1))


def ports_of(number: int, part: int = 0) -> tuple[int, ...]:
    """Return the ports of a job that has a number: neighbours, and the parts of one job, get different ones."""
    return ports_from(_FIRST + _CANDIDATES * ((number + 389 * part) % _BLOCKS))


def ports_of_name(name: str) -> tuple[int, ...]:
    """Return the ports of a job that has a name."""
    import zlib  # only jobs without a number need it

    return ports_of(zlib.crc32(name.encode(errors="surrogateescape")))


def listen_on(address: str) -> str | None:
    """Return the address to listen on for what others know by `address`; None: all, since a name may mean any of them."""
    return address if is_numeric(address) else None


def is_same_host(name: str, hostname: str) -> bool:
    """Whether a cluster's name for a host is this host's own, with or without its domain."""
    if is_numeric(name) or is_numeric(hostname):
        return name == hostname
    return name.partition(".")[0].lower() == hostname.partition(".")[0].lower()


def of_agents(
    spec: JobSpec,
    addresses: tuple[str, ...],
    reason: str,
    *,
    ports: tuple[int, ...],
    coordinator: bool,
    port: tuple[int | None, str] = PORT_AT_START,
) -> tuple[Endpoint, Rendezvous]:
    """Return where workers meet, and where agents that a cluster has started meet.

    The cluster gives the `addresses` of node 0 with their `reason`, and a `port` for workers with its own; --master-addr and
    --master-port win over both. Agents meet at one of `ports`; `coordinator` says whether this agent listens there.
    """
    # of several addresses node 0 chooses the one that the others reach
    address = (addresses[0], reason) if len(addresses) == 1 else ADDRESS_BY_NODE_0
    endpoint = of_workers(spec, address=address, port=port)
    from_flag = (spec.master_addr,) if spec.master_addr else ()
    tried = tuple(dict.fromkeys((*from_flag, *addresses)))
    return endpoint, Rendezvous(
        addresses=tried,
        ports=tuple(candidate for candidate in ports if candidate != endpoint.port),  # rank 0 listens at that one
        coordinator=coordinator,
        # else all: an address of node 0 may belong to a service in front of it, so that node 0 cannot listen there
        listen=LOOPBACK if tried == (LOOPBACK,) else None,
    )


def job_name(spec: JobSpec, allocation: Allocation) -> str:
    """Return the name by which the agents of a job know each other.

    Without a token only that distinguishes it from another with the same rendezvous host; agents that we start have one.
    """
    rendezvous = allocation.rendezvous
    port = "" if allocation.hosts_to_start_on or rendezvous is None else str(rendezvous.ports[0])
    return "\0".join((allocation.identity, spec.rdzv_id or "", port))
