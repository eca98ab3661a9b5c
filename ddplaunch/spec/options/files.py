"""Reads a file that the user names, which may be a pipe, as of `<(...)`."""

from __future__ import annotations

import errno
import os
import select
import stat

from ddplaunch.system.errors import tell
from ddplaunch.system.words import size

_SLOW = 3.0  # seconds after which a line says what is waited for


def read_text(path: str, limit: int, *, errors: str = "strict") -> str:
    """Return what the file holds, at most `limit` characters; `errors` are those of its decoding.

    Raises:
        OSError: there is no such file, it cannot be read, or is longer.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode):
        from ddplaunch.system.process.apart import waiting  # few files are pipes

        with waiting():  # for the program that writes
            text = _read(path, limit + 1, errors)
    else:
        text = _read(path, limit + 1, errors)
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {size(limit)}")
    return text


def _read(path: str, most: int, errors: str) -> str:
    with open(path, encoding="utf-8", errors=errors, opener=_opener) as file:
        return file.read(most)


def _opener(path: str, flags: int) -> int:
    """Open a file for `open(opener=...)`. Wait until a pipe has a writer, and say so if that takes long."""
    # a pipe without a writer would have the open wait, silently
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # the end of those who write counts, too
        if not poll.poll(_SLOW * 1000):
            tell(f"ddplaunch: waiting for {path}: it is a pipe, and nothing was written to it yet\n")
            poll.poll()
    os.set_blocking(fd, True)
    return fd
