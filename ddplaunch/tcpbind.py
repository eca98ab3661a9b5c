"""Binds a TCP socket to a port that is nobody's. Listens to nothing; the socket is the caller's."""

from __future__ import annotations

import errno
import socket


def for_all_addresses() -> socket.socket:
    """Give a socket for all addresses, "": both families where the kernel has IPv6, as torch's TCPStore binds it."""
    try:
        both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both


def bind(sock: socket.socket, address: str, port: int) -> None:
    """Bind, and set SO_REUSEADDR only then: with it we would sit down on a port that another job has reserved.

    Afterwards it lets in who is meant to share the port, and keeps what accepted sockets leave behind from the next job's way.

    Raises:
        OSError: the port is taken, or may not be bound.
    """
    try:
        sock.bind((address, port))
    except OSError as error:
        # connections of an earlier job that the kernel has not forgotten are nobody's; a reservation is not listed
        if error.errno != errno.EADDRINUSE or not is_listed(port):
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def is_listed(port: int) -> bool:
    """Whether any socket with this port listens, is connected or was (proc_net_tcp in the kernel's documentation)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, "rb") as file:
                next(file)
                if any(int(line.split()[1].rpartition(b":")[2], 16) == port for line in file):
                    return True
        except OSError:
            pass  # a kernel without IPv6
    return False
