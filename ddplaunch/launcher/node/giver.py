"""Who has put a file where it is: one that stops a job counts only from this user or root. Reads no content."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ddplaunch.record.folders import replaceable_by, unknown_owners

_ONLY = "and only you or root can give the notice"
_AT_ONCE = 2.0  # seconds from the last write to the last change of a file that is where it was written


def why_not_ours(path: str, found: os.stat_result) -> str:
    """Return why the file at an absolute path, `found` there, may be another user's doing; "" if this user or root put it there.

    The owner tells who wrote it, of a link who made the link. Where another user may rename files, one of ours that was
    written elsewhere may be theirs to have moved, so that only a file that was just written there counts.

    Raises OSError.
    """
    above = path
    while above != os.path.dirname(above):
        link = os.lstat(above)
        if stat.S_ISLNK(link.st_mode) and not _is_own(link.st_uid, os.path.dirname(above)):
            return f"{'it' if above == path else above} is a link of user {link.st_uid}, {_ONLY}"
        above = os.path.dirname(above)
    if not _is_own(found.st_uid, os.path.dirname(path)):
        return f"it belongs to user {found.st_uid}, {_ONLY}"
    was_written_there = found.st_nlink == 1 and abs(found.st_ctime - found.st_mtime) < _AT_ONCE
    if not was_written_there and (who := replaceable_by(path)):
        return f"it was moved or linked there, which another user can do: {who.partition(': ')[2] or who}"
    return ""


def _is_own(uid: int, folder: str) -> bool:
    """Whether a file of this owner in a folder is one of this user or root, or of whom a server takes for this user there."""
    if uid in (os.geteuid(), 0):
        return True
    if uid in unknown_owners():  # in a container, as all are that it does not know, the root of the host among them
        above = os.stat(folder)
        return above.st_uid == uid and not above.st_mode & stat.S_IWOTH
    return uid == _owner_of_new_file(folder)


def _owner_of_new_file(folder: str) -> int:
    """Return who owns what we make in a folder, since a server may map root or all to another user; -1: we can make nothing."""
    path = f"{folder}/.ddplaunch-{os.urandom(8).hex()}"
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(descriptor).st_uid
        finally:
            os.close(descriptor)
            os.unlink(path)
    return -1
