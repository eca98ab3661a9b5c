"""The secret of agents that a cluster has started together, where the user has given them none: a file in the home they share.

Whichever comes first makes it; only its user can read it. A home counts as shared if all agents are on one host, or if it is on
a network file system. Where it is not, there is no secret: files of their own would keep the agents from each other.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress

from ddplaunch.plan.devices.sysfs import mounts
from ddplaunch.record.folders import make_all
from ddplaunch.system.process.files import time_of_disk

# of proc_pid_mountinfo(5); not those that are as often one host's own: 9p, virtiofs, most of fuse
_SHARED_FILE_SYSTEMS = frozenset((
    "afs", "beegfs", "ceph", "dvs", "fuse.ceph", "fuse.glusterfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs",
    "panfs", "wekafs",
))  # fmt: skip
_HEX_DIGITS = 64  # bytes, as hexadecimal digits
_KEPT_FOR = 90 * 24 * 3600.0  # seconds, longer than jobs run: a node that joins again needs it again


def find(state: str, identity: str, *, on_one_host: bool) -> str | None:
    """Return the secret of the job with this name, from a folder below `state`; None if it cannot be shared or kept safely.

    `state` is the user's folder for programs' state, which is in the home.
    """
    folder = f"{state}/ddplaunch/tokens"
    # a name may have 255 bytes, and a draft of the file has some more than the file
    path = f"{folder}/{re.sub(r'[^0-9A-Za-z@._-]', '_', identity)[:200]}"
    try:
        make_all(folder)
        if not on_one_host:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                kind = file_system(os.path.realpath(folder), file)
            if kind not in _SHARED_FILE_SYSTEMS:
                return None
        if not _is_ours_alone(os.lstat(folder), stat.S_IFDIR, forbidden=0o022):  # others may look, but not write
            return None
        if not os.path.lexists(path):
            _remove_old(folder)
            _make(path)
        return _read(path)
    except (OSError, UnicodeDecodeError):
        return None


def file_system(path: str, lines: Iterable[str]) -> str:
    """Return the type of the file system that holds an absolute path without links; `lines` are those of mountinfo."""
    # the last one lies above those before it
    holding = [one for one in mounts(lines) if path == one.point or path.startswith(f"{one.point.rstrip('/')}/")]
    return max(reversed(holding), key=lambda one: len(one.point)).kind if holding else ""


def _is_ours_alone(found: os.stat_result, kind: int, *, forbidden: int) -> bool:
    """Whether this is a file of that kind (as of `stat`) of this user, with none of the `forbidden` bits in its mode."""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & forbidden


def _make(path: str) -> None:
    """Make the file, whole or not at all, unless another agent was faster."""
    draft = f"{path}.{os.urandom(8).hex()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(os.urandom(_HEX_DIGITS // 2).hex())
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read(path: str) -> str | None:
    """Return what the file holds, if no other user can have read or written it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not _is_ours_alone(os.fstat(descriptor), stat.S_IFREG, forbidden=0o077):
            return None
        content = file.read(_HEX_DIGITS + 1)
    return content.decode() if len(content) == _HEX_DIGITS else None


def _remove_old(folder: str) -> None:
    """Remove what jobs have left that began long ago, by the clocks of both this node and the disk: one may be wrong."""
    before = min(time.time(), time_of_disk(folder)) - _KEPT_FOR
    for entry in os.scandir(folder):
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(entry.path)
