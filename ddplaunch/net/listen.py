"""Listens where the coordinator is looked for. Accepts nothing and knows no protocol: it is done before that is imported."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from ddplaunch.errors import LaunchError
from ddplaunch.net.port import bind, for_all_addresses
from ddplaunch.words import why_failed

_BACKLOG = 4096  # connections that wait to be accepted, if net.core.somaxconn allows for them


def listen(address: str | None, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of these ports that is free; 0 stands for any. `address` is numeric, None for all.

    Raises:
        LaunchError: none of them is free, or the address is not of this node.
    """
    reasons: dict[int, str] = {}
    for port in ports:
        sock = None
        try:
            sock, at = _socket(address)
            bind(sock, at, port)
            sock.listen(_BACKLOG)
        except OSError as error:
            if sock is not None:
                sock.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # the latter of a kernel without IPv6
                raise LaunchError(
                    f"{address} is not an address of this node, which is to be node 0 and waits there for the others",
                    hint="`ip address` lists the addresses of this node; on any other node, give its own --node-rank",
                ) from None
            reasons[port] = "is taken" if error.errno == errno.EADDRINUSE else why_failed(error)
        else:
            sock.setblocking(False)
            return sock
    where = "" if address is None else f" at {address}"
    raise LaunchError(
        f"no free port{where} for the agents: {', '.join(f'{port} {reason}' for port, reason in reasons.items())}",
        hint="choose another with --rdzv-endpoint HOST:PORT, or with --master-port",
    )


def _socket(address: str | None) -> tuple[socket.socket, str]:
    """A socket of the right family, and the address in its terms."""
    if address is not None:
        return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET), address
    return for_all_addresses(), ""
