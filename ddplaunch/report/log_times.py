"""When what was written to a log: `log-times` in the folder of a run, since the logs hold what workers write and nothing else.

A line is "SECONDS OFFSET NAME": at this time, since 1970, the log NAME had OFFSET bytes. Read by `ddplaunch logs --since`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

from ddplaunch.process.regular_file import open_regular

NAME = "log-times"
INTERVAL = 10.0  # seconds between two lines about one log, at first
_MOST = 64 << 20  # bytes that are read: far more than a run of months has
_DOUBLES = 4 << 20  # bytes of the file after each of which that doubles, so that it stays small in a run of months


class LogTimes:
    """The writing side; what it cannot write is missing, and `--since` shows more than was asked for."""

    def __init__(self, folder: int) -> None:
        """In the folder of this descriptor."""
        self._size = 0
        self._noted: dict[str, float] = {}  # when each log was noted last
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(NAME, flags, 0o600, dir_fd=folder)
        except OSError:
            self._fd = -1

    def note(self, name: str, offset: int, at: float) -> None:
        """Note, unless that was done not long ago, that this log is written to."""
        interval = INTERVAL * 2 ** (self._size // _DOUBLES)
        if self._fd < 0 or 0 <= at - self._noted.get(name, -1e12) < interval:
            return
        self._noted[name] = at
        try:
            self._size += os.write(self._fd, b"%d %d %b\n" % (at, offset, os.fsencode(name)))
        except OSError:  # a full disk is reported where the logs themselves are written
            self._fd = -1


def offset_at(folder: str, name: str, at: float) -> int:
    """Return an offset in a log before which all was written before this time; 0 if that is not known."""
    return _offsets_at(folder, at).get(os.fsencode(name), 0)


@cache  # there may be thousands of logs, and lines of all of them in one file; what was written before that time stays
def _offsets_at(folder: str, at: float) -> Mapping[bytes, int]:
    offsets: dict[bytes, int] = {}
    try:
        with open_regular(f"{folder}/{NAME}") as file:
            for line in file.read(_MOST).split(b"\n"):
                match line.split(b" ", 2):
                    case [when, size, name] if when.isdigit() and size.isdigit() and int(when) <= at:
                        offsets[name] = max(offsets.get(name, 0), int(size))
    except (OSError, ValueError):  # ValueError: a number of thousands of digits
        pass
    return offsets
