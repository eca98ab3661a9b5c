"""Facts of this node that explain a worker's end: OOM kills by the kernel, room in /dev/shm. Judges nothing."""

from __future__ import annotations

import os

SHM = "/dev/shm"


def oom_kills() -> int:
    """How many processes of our memory cgroup the kernel has killed for memory so far; 0 if that cannot be known.

    cgroup v2: memory.events (Documentation/admin-guide/cgroup-v2.rst); v1: memory.oom_control. When a machine as a whole
    ran out, no cgroup without a limit shows it, but /proc/vmstat does.
    """
    kills = [_number(path, b"oom_kill") for path in _cgroup_files()]
    return max([*kills, _number("/proc/vmstat", b"oom_kill")])


def shm_size_and_room() -> tuple[int, int] | None:
    """The size of /dev/shm and what is free of it, in bytes; None if there is none."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _cgroup_files() -> list[str]:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    return files


def _number(path: str, name: bytes) -> int:
    try:
        with open(path, "rb") as file:
            words = (line.split() for line in file)
            return next((int(word[1]) for word in words if len(word) == 2 and word[0] == name), 0)
    except OSError:
        return 0
