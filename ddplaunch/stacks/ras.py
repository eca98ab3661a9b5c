"""Asks NCCL's RAS service, which knows the state of all communicators, where a worker listens for it: NCCL 2.24 and later.

Its protocol is text (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html). Never tried with NCCL.
Its sockets are read from /proc here, without psutil: stacks are taken when things hang, maybe the disk that psutil lies on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

_PORT = 28028  # unless NCCL_RAS_ADDR names another
_LIMIT = 20_000  # bytes of an answer
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


class Service(Struct, frozen=True):
    """A socket where a worker listens."""

    rank: int
    family: int
    host: str
    port: int


def ask(pids: Mapping[int, int], found: dict[int, str], *, until: float, port: int | None = None) -> Iterator[bool]:
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
            while len(received) < _LIMIT and time.monotonic() < until:
                try:
                    question = question[asked.send(question) :] if question else b""
                    if not (data := asked.recv(_LIMIT)):
                        break
                    received += data
                    found[service.rank] = received[:_LIMIT].decode(errors="replace").strip()
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
    """The addresses at which something of this user listens on this port, each with the number of its socket (proc(5))."""
    with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port and int(uid) == os.getuid():
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                packed = b"".join(words)
                loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
                yield socket.inet_ntop(family, packed) if any(packed) else loopback, inode


def _holds(pid: int, inode: str) -> bool:
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == f"socket:[{inode}]":
                    return True
    return False
