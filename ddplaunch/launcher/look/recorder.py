"""Asks the libraries in workers about their collectives: torch's flight recorder in each, and NCCL's RAS service about the job.

torch answers on the Unix socket that worker/distributed.py opens. A child of the agent asks; a function that returns an iterator
asks one worker, and each step says that the answer has not come yet.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from ddplaunch.record.seen import Arrivals, Group
from ddplaunch.record.seen.recorder import parse, parse_members

_LONGEST_ANSWER = 8 << 20  # bytes of an answer: 500 entries take 0.4 MB
# the recorder of gloo, since torch 2.13, and that of NCCL, where torch is built with it: each knows its own collectives only
_HANDLERS = (b"fr_trace_json", b"dump_nccl_trace_json")
WAITS = True  # what a question yields while it waits for its answer
_CHUNK = 1 << 18  # bytes that are read at a time
_PACE = 0.005  # seconds from one step of all questions to the next
_READINGS = 5  # of both clocks: the quickest counts
_RAS_PORT = 28028  # of RAS, unless NCCL_RAS_ADDR names another
_LONGEST_RAS_ANSWER = 20_000  # bytes of an answer
_LISTEN_STATE = "0A"  # the state of a socket in /proc/net/tcp


def ask_recorders(path: str, found: list[list[Group]]) -> Iterator[bool]:
    """Add the groups that a worker's recorders know to `found`, as one list, if any recorder answers; yield to wait."""

    def add(body: bytes) -> None:
        groups = parse(body, members_of(path))
        found[:] = [[*(found[0] if found else ()), *groups]]

    yield from ask_each_recorder(path, add)


def ask_each_recorder(path: str, on_answer: Callable[[bytes], None]) -> Iterator[bool]:
    """Ask each recorder of a worker by HTTP, and call `on_answer` with the body of each answer; yield to wait.

    A worker without a process group has no socket at `path`: it has no answer, and neither has one that fails.
    """
    for name in _HANDLERS:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as asked:
            try:
                asked.connect(path)
                asked.sendall(b"POST /handler/%s HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % name)
            except (OSError, ValueError):  # no process group yet; a path that is too long; a queue that is full
                return  # the socket is the same for all recorders
            received = bytearray()
            while len(received) <= _LONGEST_ANSWER:
                try:
                    data = asked.recv(_CHUNK)
                except BlockingIOError:
                    yield WAITS
                    continue
                except OSError:
                    return
                if not data:
                    break
                received += data
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        status_line = head.partition(b"\r\n")[0]
        if b" 200 " in status_line:  # else this torch has no recorder of that name
            on_answer(body)


def members_of(path: str) -> Mapping[str, str]:
    """Return which ranks each group has, by its name; `path` is that of the worker's socket."""
    try:
        fd = os.open(f"{path}.groups", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return parse_members(file.read(1 << 20).decode(errors="replace"))
    except OSError:
        return {}


# --- when workers came to their collectives


def read_arrivals(recorders: Mapping[int, str], *, until: float, every: int) -> list[Arrivals]:
    """Return when workers came to their collectives, as the recorders tell whose sockets exist (by rank, the path of each).

    Reads until the time `until` (CLOCK_MONOTONIC) at the latest. Of long series each `every`-th step is kept.
    """
    found: list[Arrivals] = []
    pending = [_read_worker(rank, path, every, found) for rank, path in recorders.items() if os.path.exists(path)]
    while pending := [asking for asking in pending if next(asking, None) is WAITS]:
        if time.monotonic() >= until:
            break
        time.sleep(_PACE)
    return found


def _read_worker(rank: int, path: str, every: int, found: list[Arrivals]) -> Iterator[bool]:
    """Add the arrivals in a worker's recorders to `found`; yield to wait. Any error drops this worker alone."""
    from ddplaunch.record.seen.arrivals import arrivals  # not needed to capture stacks

    def add(body: bytes) -> None:  # parses each answer as it comes: those of all workers together may be a gigabyte
        found.extend(arrivals(rank, [body], members_of(path), every))

    with suppress(Exception):
        yield from ask_each_recorder(path, add)


def wall_ahead() -> int:
    """Return the nanoseconds that the time of day is ahead of CLOCK_MONOTONIC."""
    readings = ((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_READINGS))
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2


# --- RAS knows the state of all communicators, where a worker listens for it: NCCL 2.24 and later. Its protocol is text
# (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html). Seen with one rank of NCCL 2.28.9.
# Its sockets are read from /proc here, without psutil: stacks are taken when things hang, maybe the disk that psutil lies on


class RasService(Struct, frozen=True):
    """A socket where a worker listens."""

    rank: int
    family: int
    host: str
    port: int


def ask_ras(pids: Mapping[int, int], found: dict[int, str], *, until: float, port: int | None = None) -> Iterator[bool]:
    """Add the state that RAS tells by the time `until` to `found`, under the rank that listens; yield to be called again.

    `pids` are those of our workers, by rank: no other process is asked. `port` is where RAS listens, if not at its usual one.
    """
    if (service := _ras_service(pids, port)) is None:
        return
    with socket.socket(service.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as asked:
        received = bytearray()
        with suppress(OSError):  # what was received before counts
            asked.connect_ex((service.host, service.port))
            unsent = b"verbose status\n"
            while len(received) < _LONGEST_RAS_ANSWER and time.monotonic() < until:
                try:
                    if unsent:
                        sent = asked.send(unsent)
                        unsent = unsent[sent:]
                    data = asked.recv(_LONGEST_RAS_ANSWER)
                except BlockingIOError:
                    yield WAITS
                    continue
                if not data:
                    break
                received += data
                found[service.rank] = received[:_LONGEST_RAS_ANSWER].decode(errors="replace").strip()


def _ras_service(pids: Mapping[int, int], port: int | None) -> RasService | None:
    """Return the socket where a worker listens for RAS; None if none does."""
    wanted = port or next(filter(None, map(_named_port, pids.values())), _RAS_PORT)
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for host, inode in _listeners(family, table, wanted):
            for rank, pid in pids.items():
                if _has_socket(pid, inode):
                    return RasService(rank, family, host, wanted)
    return None


def _named_port(pid: int) -> int | None:
    """Return the port in the worker's NCCL_RAS_ADDR; None if it has none."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        for variable in file.read(1 << 20).split(b"\0"):
            if variable.startswith(b"NCCL_RAS_ADDR="):
                return int(variable.rpartition(b":")[2])
    return None


def _listeners(family: int, table: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield the addresses at which processes of this user listen on this port, each with the socket's inode.

    `table` is "tcp" or "tcp6", with a line for each socket: proc(5).
    """
    with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTEN_STATE and int(number, 16) == port and int(uid) == os.getuid():
                # in hexadecimal, each word of four bytes in the order of a little-endian machine
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                packed = b"".join(words)
                listens_on_all = not any(packed)
                loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
                yield loopback if listens_on_all else socket.inet_ntop(family, packed), inode


def _has_socket(pid: int, inode: str) -> bool:
    """Whether a process has the socket with this inode."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == f"socket:[{inode}]":
                    return True
    return False
