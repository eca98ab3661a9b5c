"""Reads the small text files of /sys and /proc: control groups, their limits and counts, and the topology of CPUs.

A file that is missing or forbidden is None, never an error. Sets no limit and binds nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

from ddplaunch.plan.devices import Core

Root: TypeAlias = str | os.PathLike[str]  # the top of the file system that is looked at, "/" except in tests

_RANGE = r"(\d{1,5})(?:-(\d{1,5}))?"  # Linux has fewer than 100,000 CPUs; a malformed range must not fill the memory


def read(root: Root, path: str) -> str | None:
    """Return the text of `path` (absolute, below `root`) without surrounding white space, None if it cannot be read."""
    try:
        with open(under(root, path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def names(root: Root, path: str, *, prefix: str = "") -> list[str]:
    """Return what a folder holds under `prefix`, in the order of the numbers in the names; [] if it cannot be read."""
    try:
        found = [name for name in os.listdir(under(root, path)) if name.startswith(prefix)]
    except OSError:
        return []
    return sorted(found, key=lambda name: (int(digits) if (digits := name[len(prefix) :]).isdigit() else 0, name))


def exists(root: Root, path: str) -> bool:
    """Whether there is such a path."""
    return os.path.exists(under(root, path))


def under(root: Root, path: str) -> str:
    """Return the absolute `path` as it lies below `root`."""
    return os.path.join(root, path.lstrip("/"))


def number(text: str | None, default: int) -> int:
    """Return the number a file holds, `default` if it holds none."""
    try:
        return int(text or "")
    except ValueError:
        return default


def cpulist(text: str) -> tuple[int, ...]:
    """Return the numbers in the kernel's list format, ascending: "0-3,8" gives 0, 1, 2, 3, 8. () for any other text."""
    found: set[int] = set()
    for part in text.strip().split(","):
        matched = re.fullmatch(_RANGE, part, re.ASCII)
        numbers = range(int(matched[1]), int(matched[2] or matched[1]) + 1) if matched else range(0)
        if not numbers:
            return ()
        found.update(numbers)
    return tuple(sorted(found))


def read_cpulist(root: Root, path: str) -> tuple[int, ...]:
    """Return the CPUs that a file lists; () if it cannot be read or is no list."""
    return cpulist(read(root, path) or "")


class Mount(Struct, frozen=True):
    """A line of /proc/self/mountinfo: proc_pid_mountinfo(5)."""

    top: str  # what of the file system is mounted there
    point: str  # where
    kind: str  # "cgroup2", "nfs4"
    options: tuple[str, ...]  # of the file system


def mounts(lines: Iterable[str]) -> Iterator[Mount]:
    """Read lines of that file; what is no such line is left out."""
    for line in lines:
        mount, separator, file_system = line.strip("\n").partition(" - ")
        fields, (kind, *rest) = mount.split(" "), file_system.split(" ")
        if separator and len(fields) > 4:
            yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), kind, tuple(rest[-1].split(",")) if rest else ())


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text) if "\\" in text else text


# --- control groups


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
            shows_v2 = is_v2 and mount.kind == "cgroup2"
            is_of_v1 = not is_v2 and mount.kind == "cgroup"
            shows_v1 = is_of_v1 and controller in mount.options and controller in controllers.split(",")
            if shows_v1 or shows_v2:
                yield Group(is_v2=is_v2, folders=tuple(_folders_upwards(mount, path)))


def cpu_quota(root: Root) -> float | None:
    """Return how many CPUs' worth of time the tightest control group on our path allows; None if no group limits it.

    A group's limit holds for all groups below it, so every one up to the top of the mount counts.
    Formats: the kernel's cgroup-v2.rst and sched-bwc.rst.
    """
    limits = []
    for group in groups(root, "cpu"):
        for folder in group.folders:
            if group.is_v2:
                quota, _, period = (read(root, f"{folder}/cpu.max") or "").partition(" ")
            else:
                quota, period = (read(root, f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
            # "max" (v2) and -1 (v1) mean no limit
            if quota.isdigit() and period.isdigit() and int(quota) and int(period):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


class GroupLimit(Struct, frozen=True):
    """A limit of a control group, and what the group uses of it."""

    limit: int
    used: int


# the files of the limit and the use, of version 2 and of version 1
_LIMITS = {
    "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    "pids": (("pids.max", "pids.current"), ("pids.max", "pids.current")),
}
_UNLIMITED = 1 << 60  # version 1 writes the largest multiple of a page for no limit


def group_limit(root: Root, controller: str) -> GroupLimit | None:
    """Return the limit of "memory" (bytes) or "pids" with the least room on our path; None if no group has one."""
    found = []
    for group in groups(root, controller):
        limit_file, use_file = _LIMITS[controller][0 if group.is_v2 else 1]
        for folder in group.folders:
            limit = number(read(root, f"{folder}/{limit_file}"), _UNLIMITED)  # "max" is no number
            if limit < _UNLIMITED:
                found.append(GroupLimit(limit, number(read(root, f"{folder}/{use_file}"), 0)))
    return min(found, key=lambda one: one.limit - one.used, default=None)


def _folders_upwards(mount: Mount, path: str) -> Iterator[str]:
    """Yield the folder of a control group, then the folders of the groups above it, up to the mount."""
    top = mount.top.rstrip("/")
    inside = path == mount.top or path.startswith(f"{top}/")
    # a mount of another part of the tree: its top is all that is visible of our ancestors
    parts = [part for part in path[len(top) :].split("/") if part] if inside else []
    for length in range(len(parts), -1, -1):
        yield "/".join((mount.point.rstrip("/"), *parts[:length]))


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
    """Return the size of /dev/shm and what is free of it, in bytes; None if there is none."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _counted(root: Root, path: str) -> int | None:
    words = (line.split() for line in (read(root, path) or "").splitlines())
    return next((number(word[1], 0) for word in words if len(word) == 2 and word[0] == "oom_kill"), None)


# --- the topology of CPUs


_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"


def cores(root: Root, cpus: Collection[int]) -> tuple[Core, ...]:
    """Return the physical cores of `cpus`, each with those of its threads that are in `cpus`, in the order of the lowest thread.

    Defaults for what sysfs does not tell: no sibling threads, package 0, NUMA node 0, one cache per package.
    """
    numa_nodes = {
        cpu: number(node.removeprefix("node"), 0)
        for node in names(root, _NODES, prefix="node")
        for cpu in read_cpulist(root, f"{_NODES}/{node}/cpulist")
    }
    found: list[Core] = []
    placed: set[int] = set()
    caches: dict[int, int] = {}  # of each CPU, by the lowest CPU that shares its highest-level cache
    first_of_package: dict[int, int] = {}
    for cpu in sorted(cpus):
        if cpu in placed:
            continue
        topology = f"{_CPUS}/cpu{cpu}/topology"
        siblings = read_cpulist(root, f"{topology}/thread_siblings_list")
        threads = tuple(thread for thread in siblings if thread in cpus) or (cpu,)
        placed.update(threads)
        # -1: the firmware does not tell
        package = max(0, number(read(root, f"{topology}/physical_package_id"), 0))
        if cpu not in caches:
            sharing = _sharing_cache(root, cpu)
            if not sharing:  # not known: the package counts as one cache
                sharing = first_of_package.setdefault(package, cpu), cpu
            caches.update(dict.fromkeys(sharing, sharing[0]))
        found.append(Core(cpus=threads, numa_node=numa_nodes.get(cpu, 0), package=package, cache=caches[cpu]))
    return tuple(found)


def _sharing_cache(root: Root, cpu: int) -> tuple[int, ...]:
    """Return the CPUs behind this one's highest-level cache; () if not known."""
    highest = 0
    sharing: tuple[int, ...] = ()
    for index in names(root, f"{_CPUS}/cpu{cpu}/cache", prefix="index"):
        folder = f"{_CPUS}/cpu{cpu}/cache/{index}"
        level = number(read(root, f"{folder}/level"), 0)
        if level > highest and read(root, f"{folder}/type") != "Instruction":
            highest, sharing = level, read_cpulist(root, f"{folder}/shared_cpu_list")
    return sharing
