"""Facts of this node that explain a worker's end: OOM kills by the kernel, room in /dev/shm. Judges nothing."""

from __future__ import annotations

import os

from msgspec import Struct

from ddplaunch.devices.cgroup import groups
from ddplaunch.devices.sysfs import Root, number, read

SHM = "/dev/shm"


class OomKills(Struct, frozen=True):
    """How many processes the kernel has killed for memory since it began to count."""

    number: int
    of_machine: bool  # not of our cgroup alone, which does not tell

    def since(self, before: OomKills) -> OomKills:
        """Count those after `before`."""
        return OomKills(max(self.number - before.number, 0), self.of_machine)


def oom_kills(root: Root) -> OomKills:
    """Count them for our memory cgroup, whether its limit was reached or the machine ran out; else for the machine.

    memory.events of version 2 is missing at the top, and memory.oom_control of version 1 has no count before Linux 4.13: the
    kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    for group in groups(root, "memory"):
        file = f"{group.folders[0]}/{'memory.events' if group.is_v2 else 'memory.oom_control'}"
        if (counted := _counted(root, file)) is not None:
            return OomKills(counted, of_machine=False)
    return OomKills(_counted(root, "/proc/vmstat") or 0, of_machine=True)


def shm_size_and_room() -> tuple[int, int] | None:
    """The size of /dev/shm and what is free of it, in bytes; None if there is none."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _counted(root: Root, path: str) -> int | None:
    words = (line.split() for line in (read(root, path) or "").splitlines())
    return next((number(word[1], 0) for word in words if len(word) == 2 and word[0] == "oom_kill"), None)
