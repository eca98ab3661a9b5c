"""How much CPU time the control groups of this process allow; reads limits, sets none."""

from __future__ import annotations

from collections.abc import Iterator

from ddplaunch.devices.sysfs import Mount, Root, mounts, read


def cpu_quota(root: Root) -> float | None:
    """Give the CPUs' worth of time that the tightest group on our path allows, None if none limits it.

    Looks at version 1 and 2 alike, since a hybrid system has the cpu controller in either. A group's limit
    holds for all groups below it, so every one up to the top of the mount counts.
    Formats: cgroups(7), the kernel's cgroup-v2.rst and sched-bwc.rst.
    """
    limits: list[float] = []
    mounted = list(mounts((read(root, "/proc/self/mountinfo") or "").splitlines()))
    for line in (read(root, "/proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            groups = [mount for mount in mounted if mount.kind == "cgroup2"]
            limits += (limit for folder in _folders(groups, path) if (limit := _of_v2(root, folder)))
        elif "cpu" in controllers.split(","):
            groups = [mount for mount in mounted if mount.kind == "cgroup" and "cpu" in mount.options]
            limits += (limit for folder in _folders(groups, path) if (limit := _of_v1(root, folder)))
    return min(limits, default=None)


def _folders(groups: list[Mount], path: str) -> Iterator[str]:
    """The folders of our group and of those above it, as far as they can be seen from here."""
    for mount in groups:
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
