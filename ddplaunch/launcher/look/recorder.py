"""Asks the libraries in workers about their collectives: torch's flight recorder in each, and NCCL's RAS service about the job.

torch answers on the Unix socket that worker/distributed.py opens.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from ddplaunch.record.seen import Group
from ddplaunch.record.seen.recorder import _holds, members_of, parse

_LIMIT = 8 << 20  # bytes of an answer: 500 entries take 0.4 MB


# that of gloo, since 2.13, and that of NCCL, where torch is built with it: each knows its own collectives only
_NAMES = (b"fr_trace_json", b"dump_nccl_trace_json")


_PORT = 28028  # unless NCCL_RAS_ADDR names another


_RAS_LIMIT = 20_000  # bytes of an answer


_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def ask(path: str, found: list[list[Group]]) -> Iterator[bool]:
    """Add what a worker's recorders know to `found`, as one; yields to wait. Nothing where there is none, or no answer."""

    def take(body: bytes) -> None:
        groups = parse(body, members_of(path))
        found[:] = [[*(found[0] if found else ()), *groups]]

    yield from answers(path, take)


def answers(path: str, take: Callable[[bytes], None]) -> Iterator[bool]:
    """Ask each recorder of a worker, and call `take` with each answer; yield to wait."""
    for name in _NAMES:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as asked:
            try:
                asked.connect(path)
                asked.sendall(b"POST /handler/%s HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % name)
            except (OSError, ValueError):  # no process group yet; a path that is too long; a queue that is full
                return
            received = bytearray()
            while len(received) <= _LIMIT:
                try:
                    data = asked.recv(1 << 18)
                except BlockingIOError:
                    yield True
                    continue
                except OSError:
                    return
                if not data:
                    break
                received += data
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        if b" 200 " in head[:16]:
            take(body)


class Service(Struct, frozen=True):
    """A socket where a worker listens."""

    rank: int
    family: int
    host: str
    port: int


def ask_ras(pids: Mapping[int, int], found: dict[int, str], *, until: float, port: int | None = None) -> Iterator[bool]:
    """Add the state that RAS tells until then to `found`, by the rank that listens; yields to wait. `pids` are those of ranks.

    Nobody is asked but a worker of ours. An answer that does not come to its end counts as far as it has come.
    """
    if (service := _service(pids, port)) is None:
        return
    with socket.socket(service.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as asked:
        received = bytearray()
        with suppress(OSError):
            asked.connect_ex((service.host, service.port))
            question = b"verbose status\n"
            while len(received) < _RAS_LIMIT and time.monotonic() < until:
                try:
                    question = question[asked.send(question) :] if question else b""
                    if not (data := asked.recv(_RAS_LIMIT)):
                        break
                    received += data
                    found[service.rank] = received[:_RAS_LIMIT].decode(errors="replace").strip()
                except BlockingIOError:
                    yield True


def _service(pids: Mapping[int, int], port: int | None) -> Service | None:
    """Find the worker that listens for RAS."""
    wanted = port or next((named for pid in pids.values() if (named := _named_port(pid))), _PORT)
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for host, inode in _listeners(family, table, wanted):
            for rank, pid in pids.items():
                if _holds(pid, inode):
                    return Service(rank, family, host, wanted)
    return None


def _named_port(pid: int) -> int | None:
    with suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        for variable in file.read(1 << 20).split(b"\0"):
            if variable.startswith(b"NCCL_RAS_ADDR="):
                return int(variable.rpartition(b":")[2])
    return None


def _listeners(family: int, table: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield the addresses at which a process of this user listens on this port, each with the socket's inode (proc(5))."""
    with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and int(uid) == os.getuid():
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                packed = b"".join(words)
                loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
                yield socket.inet_ntop(family, packed) if any(packed) else loopback, inode
