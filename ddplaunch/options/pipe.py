"""Opens a file that the user names, which may be a pipe, as of `<(...)`. Reads nothing."""

from __future__ import annotations

import os
import select
import stat

from ddplaunch.errors import visible, write_stderr

_SLOW = 3.0  # seconds after which a line says what is waited for


def opener(path: str, flags: int) -> int:
    """Be the `opener` of `open`: a pipe is waited for until something is written to it, and that is said if it takes long.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    # a pipe without a writer would have the open wait, silently
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # the end of those who write counts, too
        if not poll.poll(_SLOW * 1000):
            write_stderr(visible(f"ddplaunch: waiting for {path}: it is a pipe, and nothing was written to it yet\n"))
            poll.poll()
    os.set_blocking(fd, True)
    return fd
