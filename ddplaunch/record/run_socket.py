"""The socket at which a run answers: where it lies (in the run's folder, or in this user's in /tmp), how it is made and found.

It is there, and answers, from the moment that it has its name; a socket that refuses connections is of a run that was killed.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

from msgspec import Struct

from ddplaunch.system.errors import LaunchError

NAME = "socket"  # in the folder of a run
_BACKLOG = 64
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: unix(7), SO_PEERCRED


class SocketPath(Struct, frozen=True):
    """Where the socket of a run lies."""

    folder: str  # "": nowhere, the socket has an abstract name (unix(7))
    name: str

    @property
    def path(self) -> str:
        """The path, for people."""
        return f"{self.folder}/{self.name}"

    def connect(self) -> socket.socket:
        """Connect to the run; see `connect` for what that raises."""
        return connect(self.folder, self.name)


def runtime_folder(uid: int) -> str:
    """Return the folder of the sockets that lie in no run folder; independent of variables, so that every command finds them."""
    return f"/tmp/ddplaunch-{uid}"


def open_runtime_folder(*, make: bool = False) -> int:
    """Open the runtime folder, with `make` after making it, and return its descriptor.

    Raises OSError: there is none, or what is there belongs to another user, or others may write to it.
    """
    path, uid = runtime_folder(os.getuid()), os.getuid()
    if make:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid != uid or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(folder)
        raise PermissionError(f"{path} belongs to another user, or others may write to it")
    return folder


def why_unsafe() -> str:
    """Say why the runtime folder takes no sockets of ours, if it is another's, as any user can have arranged; "" if it is not."""
    try:
        os.close(open_runtime_folder())
    except FileNotFoundError:
        return ""
    except OSError:
        return f"{runtime_folder(os.getuid())} belongs to another user, or others may write to it"
    return ""


def address(folder: int, name: str) -> str:
    """Return the address of a socket in an open folder: short enough, wherever that lies (107 bytes, unix(7))."""
    return f"/proc/self/fd/{folder}/{name}"


def listen(sock: socket.socket, folder: int, name: str) -> None:
    """Listen in this folder (a descriptor) under this name, for this user alone; a socket with the name is replaced.

    Raises OSError: the file system has no sockets, or takes no more files.
    """
    new = f".{name}"
    before = os.umask(0o177)
    try:
        sock.bind(address(folder, new))
        sock.listen(_BACKLOG)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)  # so a socket with this name always listens already
    except OSError:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise
    finally:
        os.umask(before)


def connect(folder: str, name: str) -> socket.socket:
    """Connect to the socket of a run; one without a folder has an abstract name (unix(7)), in which a null byte stands first.

    Raises:
        BlockingIOError: a process listens there, and takes no connections.
        OSError: no process listens there.
        LaunchError: it is another user's.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if folder else -1
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)  # else connect() would wait where too many wait already
        sock.connect(address(opened, name) if folder else f"\0{name}")
        sock.setblocking(True)
        uid, own = uid_of(sock), os.getuid()
        is_trusted = uid in (own, 0) or own == 0
        if not is_trusted:
            raise LaunchError(f"{folder}/{name} belongs to another user ({uid})")
    except BaseException:
        sock.close()
        raise
    finally:
        if folder:
            os.close(opened)
    return sock


def remove_refusing(path: str, name: str) -> None:
    """Remove a socket that refuses connections, as a killed run leaves it, if it lies in the runtime folder.

    A socket in a run's folder stays: the run may go on on another host that shares the disk.
    """
    if path == runtime_folder(os.getuid()):
        with suppress(OSError):
            os.unlink(f"{path}/{name}")


def uid_of(sock: socket.socket) -> int:
    """Return the user at the other side of a connection, as it was made."""
    return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def pid_of(sock: socket.socket) -> int:
    """Return the process that had called listen(2) for the other side of a connection."""
    return int(_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0])
