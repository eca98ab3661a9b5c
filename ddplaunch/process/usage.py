"""What a process uses at this moment, by /proc. Waits for no lock that the process may hold.

psutil takes 5 times as long, and the agent's loop waits meanwhile.
"""

from __future__ import annotations

import os
from contextlib import suppress

from msgspec import Struct

from ddplaunch.process.tree import content, descendants

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(Struct, frozen=True):
    """What /proc/PID/stat says (proc(5))."""

    state: str
    cpu_seconds: float  # user and system, of it and the children that it waited for
    rss: int  # bytes


def usage(pid: int) -> ProcessUsage | None:
    """Look at a process; None if it is gone."""
    try:
        fields = content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return ProcessUsage(fields[0].decode(), sum(map(int, fields[11:15])) / _TICK, int(fields[21]) * _PAGE)


class Footprint(Struct, frozen=True):
    """What a process and all below it have done so far."""

    pids: frozenset[int]
    cpu_seconds: float
    transferred: int  # bytes that they have read and written, by read(2), write(2) and their kin
    is_held: bool  # the process itself is stopped, by a signal or a debugger


def footprint(pid: int) -> Footprint:
    """Look at a process and all below it; of one that is gone, nothing is left."""
    pids = frozenset({pid, *(process.pid for process in descendants(pid))})
    used = {each: found for each in pids if (found := usage(each)) is not None}
    return Footprint(
        pids=pids,
        cpu_seconds=sum(each.cpu_seconds for each in used.values()),
        transferred=sum(map(_transferred, pids)),
        is_held=pid in used and used[pid].state in "Tt",
    )


def _transferred(pid: int) -> int:
    with suppress(OSError, ValueError):
        # "rchar: 1948", "wchar: 12", ...: what was asked of the kernel, from wherever it came
        return sum(int(line.split()[1]) for line in content(f"/proc/{pid}/io").splitlines()[:2])
    return 0  # gone, or another user's
