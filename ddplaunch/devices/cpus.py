"""The topology of the CPUs that this process may use; binds nothing."""

from __future__ import annotations

from collections.abc import Collection

from ddplaunch.devices import Core
from ddplaunch.devices.sysfs import Root, names, number, read, read_cpulist

_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"


def cores(root: Root, cpus: Collection[int]) -> tuple[Core, ...]:
    """Return the physical cores that hold `cpus`, each with only those of its threads, in the order of their lowest one.

    Defaults for what sysfs does not tell: no sibling threads, package 0, NUMA node 0, one cache per package.
    """
    numa_nodes = {
        cpu: number(node.removeprefix("node"), 0)
        for node in names(root, _NODES, prefix="node")
        for cpu in read_cpulist(root, f"{_NODES}/{node}/cpulist")
    }
    found: list[Core] = []
    placed: set[int] = set()
    caches: dict[int, int] = {}
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
            sharing = _sharing_cache(root, cpu) or (first_of_package.setdefault(package, cpu), cpu)
            caches.update(dict.fromkeys(sharing, sharing[0]))
        found.append(Core(cpus=threads, numa_node=numa_nodes.get(cpu, 0), package=package, cache=caches[cpu]))
    return tuple(found)


def _sharing_cache(root: Root, cpu: int) -> tuple[int, ...]:
    """The CPUs behind this one's highest-level cache; () if not known."""
    highest = 0
    sharing: tuple[int, ...] = ()
    for index in names(root, f"{_CPUS}/cpu{cpu}/cache", prefix="index"):
        folder = f"{_CPUS}/cpu{cpu}/cache/{index}"
        level = number(read(root, f"{folder}/level"), 0)
        if level > highest and read(root, f"{folder}/type") != "Instruction":
            highest, sharing = level, read_cpulist(root, f"{folder}/shared_cpu_list")
    return sharing
