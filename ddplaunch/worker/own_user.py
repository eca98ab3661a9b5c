"""Keeps other users out of debugpy in a worker. Run as a program, it is debugpy's adapter, which accepts this user alone.

debugpy's adapter has no authentication, listens at ports of loopback, and runs any program that is asked for, so whoever connects
runs code as you. The kernel knows whose the socket at the other end of such a connection is.
"""

import sys

if __name__ == "__main__" and sys.path and __file__.startswith(sys.path[0] + "/"):
    del sys.path[0]  # our own files, which are no modules of debugpy's; where PYTHONSAFEPATH is set they are not there

import json
import os
import runpy
import socket
import struct
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# the variable that holds the adapter's arguments: one of these is a secret, which others could read in `ps`
ARGUMENTS = "DDPLAUNCH_ADAPTER"
MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in IPv6's terms begins so
LISTENS = "0A"  # TCP_LISTEN, include/net/tcp_states.h
LOOKS = 3  # readings of the kernel's table
_accept = socket.socket.accept


def admits(sock: socket.socket) -> bool:
    """Whether the other end of this TCP connection is a socket of this user, which is still open.

    A socket that its process has closed already belongs to nobody, so it is refused: whatever it has sent could be anybody's.
    """
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:  # it was reset
        return False
    for _ in range(LOOKS):  # a table that changes while it is read may lack a line
        for local, remote, _state, uid, inode in sockets():
            is_other_end = local in as_in_tables(there) and remote in as_in_tables(here)
            if is_other_end:
                return uid == os.geteuid() and inode != 0  # 0: its process has closed it
    return False


def is_listening_here(port: int) -> bool:
    """Whether a process of this user listens at this port of loopback."""
    wanted = as_in_tables(("127.0.0.1", port))
    return any(
        local in wanted and state == LISTENS and uid == os.geteuid() and inode != 0
        for local, _remote, state, uid, inode in sockets()
    )


def sockets() -> "Iterator[tuple[str, str, str, int, int]]":
    """Yield the TCP sockets of this network namespace: both addresses, state, user and inode (proc_net_tcp of the kernel)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            yield fields[1], fields[2], fields[3], int(fields[7]), int(fields[9])


def as_in_tables(address: "tuple[Any, ...]") -> "tuple[str, ...]":
    """Return an address as the kernel's tables write it, an IPv4 one in two forms: words in the machine's order, and the port."""
    host, port = str(address[0]).partition("%")[0], address[1]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    four = packed[-4:] if len(packed) == 4 or packed.startswith(MAPPED) else b""
    forms = (four, MAPPED + four) if four else (packed,)
    words = ("".join(f"{word:08X}" for word in struct.unpack(f"={len(form) // 4}I", form)) for form in forms)
    return tuple(f"{each}:{port:04X}" for each in words)


def accept(listener: socket.socket) -> "tuple[socket.socket, Any]":
    """Accept the next connection of this user; others are closed."""
    while True:
        sock, address = _accept(listener)
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or admits(sock):
            return sock, address
        sock.close()


class Adapter(subprocess.Popen):  # type: ignore[type-arg]
    """In place of Popen while debugpy starts its adapter, python and a folder: starts this file as a program, which runs that."""

    was_started = False

    def __init__(self, args: "list[str]", **more: "Any") -> None:
        env = {**(more.pop("env", None) or os.environ), ARGUMENTS: json.dumps(args[1:])}
        super().__init__([args[0], accept.__code__.co_filename], env=env, **more)
        Adapter.was_started = True


def listen(debugpy: "Any") -> int:
    """Start debugpy's adapter at a free port for processes of this user; return the port.

    Raises:
        RuntimeError: this debugpy starts it in another way, or somebody else listens at the port.
    """
    subprocess_module: Any = subprocess
    original, subprocess_module.Popen = subprocess_module.Popen, Adapter  # by which debugpy starts it
    try:
        _, port = debugpy.listen(("127.0.0.1", 0))
    finally:
        if subprocess_module.Popen is Adapter:
            subprocess_module.Popen = original
    if not (Adapter.was_started and is_listening_here(port)):
        raise RuntimeError(f"--debugpy: ddplaunch cannot keep other users out of debugpy {debugpy.__version__}")
    return int(port)


if __name__ == "__main__":
    folder, *rest = json.loads(os.environ.pop(ARGUMENTS))
    accepting: "Any" = socket.socket
    accepting.accept = accept
    sys.argv[:] = [folder, *rest]
    sys.path.insert(0, folder)  # as python does where a folder is named
    runpy.run_path(f"{folder}/__main__.py", run_name="__main__")
