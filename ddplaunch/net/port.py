"""Reserves a TCP port until it is released. Never listens, never accepts."""

from __future__ import annotations

import errno
import socket

from ddplaunch.errors import LaunchError
from ddplaunch.process.linux import of_open_files
from ddplaunch.words import why_failed


class PortTaken(Exception):
    """Another process has the port, which may soon be free."""


class Reservation:
    """A port that is bound with SO_REUSEADDR but not listened on.

    Other processes do not bind it by accident, nor get it as an ephemeral port. One that sets SO_REUSEADDR on purpose can, as the
    TCPStore of rank 0 does, which listens there (checked with torch 2.13, its libuv and its legacy server).
    """

    def __init__(self, bound: socket.socket) -> None:
        self._bound = bound
        self.port: int = bound.getsockname()[1]

    def release(self) -> None:
        """Release the port."""
        self._bound.close()


def reserve(port: int = 0, origin: str = "", *, named: bool = False, again: bool = False) -> Reservation:
    """Reserve this port, or with 0 any free one; `origin` is the reason why it is this one, or the option that says so.

    `named`: it has to be named, since nothing else tells it to the other nodes.
    `again`: the caller tries again if the port is taken, so that nobody looks for its holder.

    Raises:
        PortTaken: the port is taken, with `again`.
        LaunchError: the port is taken, or may not be bound by this user.
    """
    bound: socket.socket | None = None
    try:
        bound = for_all_addresses()
        bind(bound, "", port)
    except OSError as error:
        if bound is not None:
            bound.close()
        if again and error.errno == errno.EADDRINUSE:
            raise PortTaken from None
        raise _not_reserved(port, origin, named, error) from None
    return Reservation(bound)


def _not_reserved(port: int, origin: str, named: bool, error: OSError) -> LaunchError:
    is_ours = origin in ("", "--master-port", "launch()")
    written = f"--master-port {port}" if is_ours else f"port {port} ({origin})"
    if not port or error.errno not in (errno.EACCES, errno.EADDRINUSE):
        what = written if port else "a free port"
        return LaunchError(f"{what} cannot be reserved: {why_failed(error)}{of_open_files(error.errno)}")
    if error.errno == errno.EACCES:
        hint = "`--master-port` with a port above 1023, or leave it out: ddplaunch then reserves a free one"
        return LaunchError(f"{written}: this user may not bind it", hint=hint)
    hint = "leave --master-port out, on each node that you start: ddplaunch then reserves a free one"
    if not is_ours:
        hint = (
            "name another one there, or, where that is not yours, `--master-port` with another; the same for each node"
        )
    elif named:
        hint = "`--master-port` with another one, the same on each node"
    from ddplaunch.net.port_holder import holder  # only this error needs it

    return LaunchError(f"{written} is taken{holder(port)}", hint=hint)


def check_loopback() -> None:
    """Check that processes of this host reach each other.

    Raises:
        LaunchError: its loopback interface is down, as in a new network namespace.
    """
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("127.0.0.1", 9))  # sends nothing
    except OSError as error:
        raise LaunchError(
            f"the workers cannot reach each other at 127.0.0.1: {why_failed(error)}",
            hint="is the interface lo of this network namespace down? `ip link set lo up`; or name another address of "
            "this host: `--master-addr HOST`",
        ) from None
    finally:
        probe.close()


def for_all_addresses() -> socket.socket:
    """Return a socket for all addresses, "": both families where the kernel has IPv6, as torch's TCPStore binds it."""
    try:
        both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both


def bind(sock: socket.socket, address: str, port: int) -> None:
    """Bind, and set SO_REUSEADDR only then: set before, it would bind a port that another job has reserved.

    Set afterwards, it lets sockets that set it too share the port, and the next job bind it despite sockets in TIME_WAIT.

    Raises:
        OSError: the port is taken, or may not be bound.
    """
    try:
        sock.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        from ddplaunch.net.port_holder import sockets  # most ports are free

        if not sockets(
            port
        ):  # connections of an earlier job, in TIME_WAIT, belong to no process; a reservation is not listed
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
