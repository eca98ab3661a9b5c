"""Hands the stdin of the command on to the agent of a step on this host, through a socket: srun's parent offers, the agent takes.

srun would read all of it ahead, although no worker asks for it: a loop of the shell over the lines of a file would end after one
round. With the descriptor itself, a worker takes what it reads, and nobody takes the rest.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from ddplaunch.record.run_socket import uid_of

_HANDED_OVER_WITHIN = 5.0  # seconds that the agent waits: srun's parent hands it over at once, unless it was stopped


def offer() -> socket.socket:
    """Return a socket, without a name in any folder, at which `hand_over` is to be called once it is readable."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(f"\0ddplaunch-stdin-{os.urandom(16).hex()}")
    listener.listen(1)
    return listener


def name_of(listener: socket.socket) -> str:
    """Return the name by which `take` finds this socket, for a variable."""
    name: bytes = listener.getsockname()
    return name[1:].decode()


def hand_over(listener: socket.socket) -> None:
    """Send our stdin to whoever has connected, if that is a process of this user."""
    with suppress(OSError):  # the other side has ended already
        connection, _ = listener.accept()
        with connection:
            if uid_of(connection) == os.getuid():
                socket.send_fds(connection, [b"."], [0])


def take(name: str) -> None:
    """Make the descriptor that is offered under this name our stdin; where there is none, stdin stays as it is."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_HANDED_OVER_WITHIN)
        connection.connect(f"\0{name}")
        if uid_of(connection) != os.getuid():
            return
        _, received, _, _ = socket.recv_fds(connection, 1, 1)  # a byte, and at most one descriptor
        for fd in received:
            os.dup2(fd, 0)
            os.close(fd)
