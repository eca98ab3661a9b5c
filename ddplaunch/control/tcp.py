"""Common to all sockets of the channel: options, addresses and errors as text. Knows no protocol."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from typing import Any

from ddplaunch.words import why_failed

CLOSED = "connection closed"
RESET = "connection reset"

TCP_RTO_MAX_MS = 44  # include/uapi/linux/tcp.h

Sockaddr = tuple[Any, ...]  # as getaddrinfo gives it: address, port, for IPv6 also flow and scope


def prepare(sock: socket.socket, user_timeout: float) -> None:
    """Never block; send at once; give up when sent data stays unacknowledged for `user_timeout` seconds.

    Lost segments are sent again each second, where the kernel can do that: else it doubles the pause each time, so that
    a connection which worked again after 7 of 10 seconds would send nothing for 12.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(user_timeout * 1000)))
    with suppress(OSError):  # Linux before 6.15
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)


def host_of(address: Sockaddr) -> str:
    """The address alone; an IPv4 one that came through an IPv6 socket as what it is."""
    return str(address[0]).removeprefix("::ffff:")


def endpoint_of(address: Sockaddr) -> str:
    """Address and port as they are usually written."""
    host = host_of(address)
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def describe(error: OSError) -> str:
    """Return the error of a connection as text."""
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return RESET
    return why_failed(error)


def error_of(sock: socket.socket) -> OSError | None:
    """The error of a connect() that could not finish at once; None: it is connected."""
    number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not number and sock.getsockname() == sock.getpeername():
            # where no socket listens, the kernel may assign the ephemeral port to the very socket that connects to it
            number = errno.ECONNREFUSED
            # release the port at once, or the process that is to listen there could not bind it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError as error:  # it is connected no more
        return error
    return OSError(number, os.strerror(number)) if number else None
