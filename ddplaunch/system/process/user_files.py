"""Reads and writes files that the user names. Each may be a pipe, as of `<(...)`."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.process.files import replaced
from ddplaunch.system.words import size, why_failed

_SLOW = 3.0  # seconds after which a line says what is waited for


def read_text(path: str, limit: int, *, errors: str = "strict") -> str:
    """Return the text of the file or pipe, which has `limit` characters at most; `errors` is that of `open`.

    Raises:
        OSError: there is no such file, it cannot be read, or is longer.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode):
        from ddplaunch.system.process.apart import disk_watch_paused  # few files are pipes

        with disk_watch_paused():  # for the program that writes
            text = _read(path, limit + 1, errors)
    else:
        text = _read(path, limit + 1, errors)
    if len(text) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {size(limit)}")
    return text


def _read(path: str, most: int, errors: str) -> str:
    """Return the first `most` characters of a file."""
    with open(path, encoding="utf-8", errors=errors, opener=_opener) as file:
        return file.read(most)


def _opener(path: str, flags: int) -> int:
    """Open a file, as `open` calls its `opener`. Wait until something was written to a pipe, and say so if that takes long."""
    # a pipe without a writer would have the open wait, silently
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # it is ready, too, when the last writer has gone
        if not poll.poll(_SLOW * 1000):  # ms
            say(f"waiting for {path}: it is a pipe, and nothing was written to it yet")
            poll.poll()
    os.set_blocking(fd, True)
    return fd


@contextmanager
def result_file(path: str, hint: str, *, private: bool = False, may_be_pipe: bool = False) -> Iterator[BinaryIO]:
    """Open the file for the result of a command, which takes the place of `path` at the end, whole.

    `private`: only the user may read it, and a link is not followed. `may_be_pipe`: a pipe or terminal at `path` is written to.

    Raises LaunchError, with this hint: the file cannot be written.
    """
    # a folder counts as a file, since it cannot be replaced, which is an error
    is_file = not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path)
    try:
        if private and os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if may_be_pipe and not is_file:
            from ddplaunch.system.process.apart import disk_watch_paused

            with disk_watch_paused(), open(path, "wb") as pipe:  # its reader may come late
                yield pipe
            return
        with replaced(path, 0o600 if private else 0o666) as file:
            yield file
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {why_failed(error)}", hint=hint) from None
