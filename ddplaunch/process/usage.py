"""What a process uses at this moment, by /proc. Waits for no lock that the process may hold."""

from __future__ import annotations

import os

from ddplaunch.record import record

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@record
class Usage:
    """What /proc/PID/stat says (proc(5))."""

    state: str
    cpu_seconds: float  # user and system, of it and the children that it waited for
    rss: int  # bytes


def usage(pid: int) -> Usage | None:
    """Look at a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Usage(fields[0].decode(), sum(map(int, fields[11:15])) / _TICK, int(fields[21]) * _PAGE)
