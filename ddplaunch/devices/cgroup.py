"""The control groups of this process: how much CPU time they allow, what the kernel killed in them for memory; room in /dev/shm.

Reads limits and counts, sets none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.devices.sysfs import Mount, Root, mounts, number, read


class Group(Struct, frozen=True, kw_only=True):
    """A control group of this process, by a mount that shows it."""

    is_v2: bool
    folders: tuple[str, ...]  # its own, then those of the groups above it, as far as they can be seen from here


def groups(root: Root, controller: str) -> Iterator[Group]:
    """Return our groups of version 1 and 2 alike, since a hybrid system has a controller in either. Format: cgroups(7)."""
    mounted = list(mounts((read(root, "/proc/self/mountinfo") or "").splitlines()))
    for line in (read(root, "/proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        is_v2 = hierarchy == "0" and not controllers
        for mount in mounted:
            shows_v1 = mount.kind == "cgroup" and controller in mount.options and controller in controllers.split(",")
            if mount.kind == "cgroup2" if is_v2 else shows_v1:
                yield Group(is_v2=is_v2, folders=tuple(_folders(mount, path)))


def cpu_quota(root: Root) -> float | None:
    """Return the CPUs' worth of time that the tightest group on our path allows, None if none limits it.

    A group's limit holds for all groups below it, so every one up to the top of the mount counts.
    Formats: the kernel's cgroup-v2.rst and sched-bwc.rst.
    """
    limits = (
        _of_v2(root, folder) if group.is_v2 else _of_v1(root, folder)
        for group in groups(root, "cpu")
        for folder in group.folders
    )
    return min((limit for limit in limits if limit), default=None)


def _folders(mount: Mount, path: str) -> Iterator[str]:
    top = mount.top.rstrip("/")
    inside = path == mount.top or path.startswith(f"{top}/")
    # a mount of another part of the tree: its top is all that is visible of our ancestors
    below = path[len(top) :].strip("/") if inside else ""
    parts = below.split("/") if below else []
    for length in range(len(parts), -1, -1):
        yield "/".join((mount.point.rstrip("/"), *parts[:length]))


def _of_v2(root: Root, folder: str) -> float | None:
    quota, _, period = (read(root, f"{folder}/cpu.max") or "max").partition(" ")
    return _share(quota, period)


def _of_v1(root: Root, folder: str) -> float | None:
    return _share(read(root, f"{folder}/cpu.cfs_quota_us") or "-1", read(root, f"{folder}/cpu.cfs_period_us") or "")


def _share(quota: str, period: str) -> float | None:
    # "max" (v2) and -1 (v1) mean no limit
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None
    return int(quota) / int(period)


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
