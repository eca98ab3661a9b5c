"""Reserves TCP ports of this host, listens on them, and says which process holds one. Accepts no connection."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.linux import of_open_files
from ddplaunch.system.process.tree import content, look
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import why_failed


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


def reserve(port: int = 0, origin: str = "", *, must_be_named: bool = False, again: bool = False) -> Reservation:
    """Reserve this port, or for 0 any free port; `origin` is the option, or the reason, for this very port.

    `must_be_named`: the user has to name a port, since nothing else tells the other nodes which port it is; the hint says so.
    `again`: the caller tries again if the port is taken, so PortTaken is raised, and nobody looks for the port's holder.

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
        raise _not_reserved(port, origin, must_be_named, error) from None
    return Reservation(bound)


def _not_reserved(port: int, origin: str, must_be_named: bool, error: OSError) -> LaunchError:
    """Return the error for a port that cannot be reserved, with what to type instead."""
    is_by_option = origin in ("", "--master-port", "launch()")  # else a cluster's variables or the like name the port
    written = f"--master-port {port}" if is_by_option else f"port {port} ({origin})"
    if not port or error.errno not in (errno.EACCES, errno.EADDRINUSE):
        what = written if port else "a free port"
        return LaunchError(f"{what} cannot be reserved: {why_failed(error)}{of_open_files(error.errno)}")
    if error.errno == errno.EACCES:
        hint = "`--master-port` with a port above 1023, or leave it out: ddplaunch then reserves a free one"
        return LaunchError(f"{written}: this user may not bind it", hint=hint)
    hint = "leave --master-port out, on each node that you start: ddplaunch then reserves a free one"
    if not is_by_option:
        hint = (
            "name another one there, or, where that is not yours, `--master-port` with another; the same for each node"
        )
    elif must_be_named:
        hint = "`--master-port` with another one, the same on each node"
    return LaunchError(f"{written} is taken{holder(port)}", hint=hint)


def check_loopback() -> None:
    """Check that processes of this host reach each other."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # sends nothing
    except OSError as error:
        raise LaunchError(
            f"the workers cannot reach each other at 127.0.0.1: {why_failed(error)}",
            hint="is the interface lo of this network namespace down? `ip link set lo up`; or name another address of "
            "this host: `--master-addr HOST`",
        ) from None


def for_all_addresses() -> socket.socket:
    """Return a socket for all addresses, "": both families where the kernel has IPv6, as torch's TCPStore binds it."""
    try:
        both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both


def bind(sock: socket.socket, address: str, port: int) -> None:
    """Bind a socket, then set SO_REUSEADDR: set before, it would let us bind a port that another job has reserved.

    Set afterwards, it lets sockets that set it, too, share the port, and the next job bind it despite sockets in TIME_WAIT.

    Raises OSError: the port is taken, or may not be bound.
    """
    try:
        sock.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Perhaps nothing but connections of an earlier job has the port, in TIME_WAIT: then it can be bound with the option set.
        # The kernel lists connections and listening sockets, but no port that another job has only bound, to reserve it.
        if not sockets(port):
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


_BACKLOG = 4096  # connections that wait to be accepted, if net.core.somaxconn allows for them


def listen(address: str | None, ports: Sequence[int]) -> socket.socket:
    """Listen for agents on the first of these ports that is free; 0 stands for any. `address` is numeric, None for all.

    Raises LaunchError: none is free, or the address is not this node's.
    """
    reasons: dict[int, str] = {}
    for port in ports:
        sock = None
        try:
            if address is None:
                sock = for_all_addresses()
            else:
                sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            bind(sock, address or "", port)
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


# --- who holds a port


_LISTENS = b"0A"  # TCP_LISTEN, include/net/tcp_states.h
# seconds to find who holds a port: a busy machine needs more than one; the command ends for it, and other nodes wait for its word
_TIMEOUT = 5.0
_LONGEST_COMMAND = 200  # characters that are shown


def sockets(port: int) -> dict[bytes, bool]:
    """Return the sockets with this local port: each inode, and whether that listens (proc_net_tcp in the kernel's documentation).

    A socket of no process, as in TIME_WAIT, has the inode 0. A socket that is bound and does not listen is not listed.
    """
    found: dict[bytes, bool] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):  # a kernel without IPv6
            for line in content(table).splitlines()[1:]:
                fields = line.split()
                local_address, state, inode = fields[1], fields[3], fields[9]
                if int(local_address.rpartition(b":")[2], 16) == port:
                    found[inode] = found.get(inode, False) or state == _LISTENS
    return found


def holder(port: int) -> str:
    """Return who holds a port, as it reads after "is taken": " by pid 4711 (python train.py)"; "" if that cannot be known."""
    from ddplaunch.system.process.ask import ask  # only an error needs it

    try:
        # it reads the memory of a process, which may wait for that process's disk
        return ask(partial(_look_for_holder, port), _TIMEOUT)
    except Exception:  # noqa: BLE001 - that the port is taken is to be said all the same
        return ""


def _look_for_holder(port: int) -> str:
    """Return which process holds a port, to follow "is taken"; "" if that cannot be seen."""
    listed = sockets(port)
    if not listed:
        return ": a process holds it without listening, as ddplaunch does for another job"
    listens_by_file = {f"socket:[{inode.decode()}]": listens for inode, listens in listed.items()}
    # a process that listens comes before one with a connection
    holders = [(not listens_by_file[file], task) for task, file in _open_files() if file in listens_by_file]
    if not holders:
        return ""
    _, task = min(holders)
    pid = int(task.split("/")[2])
    words = content(f"{task}/cmdline").decode(errors="replace").rstrip("\0").split("\0")
    command = " ".join(" ".join(Redactor().argv(words)).split())  # of `python -c` too it stays in one line
    process = look(pid)
    return f" by pid {pid} ({command[:_LONGEST_COMMAND] or (process.name if process else '?')})"


def _open_files() -> Iterator[tuple[str, str]]:
    """Yield each open file of each process: the thread that has it, as its folder in /proc, and the file, as /proc shows it.

    The first thread of a process may be dead while another one still has its files.
    """
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            for thread in os.listdir(f"/proc/{pid}/task"):
                task = f"/proc/{pid}/task/{thread}"
                if files := os.listdir(f"{task}/fd"):
                    for file in files:
                        with suppress(OSError):
                            yield task, os.readlink(f"{task}/fd/{file}")
                    break
