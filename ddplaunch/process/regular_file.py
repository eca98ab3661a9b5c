"""Opens what may lie in a folder that others write to: regular files only, read up to a limit. A pipe or a device is an error."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

LONGEST_JSON = 32 << 20  # bytes: a plan of 65,536 workers is shorter


def open_regular(path: str, *, dir_fd: int | None = None) -> BinaryIO:
    """Open a regular file to read it, from `dir_fd` if the path is relative.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder; none of these is waited for.
    """
    # O_NONBLOCK: a pipe may have no writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(fd, "rb")


def read_json(path: str) -> object:
    """Return what a JSON file holds; None if it cannot be read, is longer than `LONGEST_JSON`, or holds something else."""
    import json  # no job needs it before it has something to write

    try:
        with open_regular(path) as file:
            content = file.read(LONGEST_JSON + 1)
        return json.loads(content) if len(content) <= LONGEST_JSON else None
    except (OSError, ValueError, RecursionError):
        return None
