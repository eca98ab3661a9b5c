"""Which CPUs each worker of this node is bound to. Pure: it reads no sysfs, binds nothing and sets no memory policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain, pairwise

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.devices import Core, Device
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count

TORCHRUN_MODES = ("node", "socket", "exclusive", "core-complex")

Owned = Sequence[Sequence[Device]]
NumaNodes = Mapping[Device, int]  # of each device, by device index; without devices that are near no allowed CPU
Share = list[Core]  # the cores of one worker or device; a core of one CPU may stand for one hardware thread


class Binding(Struct, frozen=True, kw_only=True):
    """The CPUs of each local worker, by local rank."""

    cpus: tuple[tuple[int, ...], ...]  # ascending; empty: not bound
    notes: tuple[str, ...] = ()  # what a reader of the plan should know


def bind(mode: str, owned: Owned, cores: Sequence[Core], *, all_devices: Sequence[Device]) -> Binding:
    """Return the CPUs of each local worker.

    `owned[i]` are the devices of local worker i; `cores` hold only the CPUs that we are allowed to use.

    none          not bound
    cores         an equal, disjoint share of the cores near its devices: whole cores if there are enough
    numa, node    all CPUs of the NUMA nodes near its devices
    socket        all CPUs of the sockets of these nodes
    exclusive     as cores, but a node is divided among all of `all_devices` near it, used by the job or not
    core-complex  all CPUs that share one last-level cache on that node, another one for each device

    Under node, socket, exclusive and core-complex a worker with one device gets what torchrun gives it
    (torch/numa/binding.py of torch 2.13). Where torchrun fails, we go on: workers without a device are spread evenly
    over the nodes, sockets, cores (exclusive) or core complexes; so are those near whose devices no CPU is allowed.

    Raises:
        LaunchError: fewer CPUs than workers that need their own, or the cores are not known.
    """
    if mode == "none":
        return Binding(cpus=((),) * len(owned))
    flag = f"--numa-binding {mode}" if mode in TORCHRUN_MODES else f"--cpu-bind {mode}"
    if not cores:
        raise LaunchError(f"{flag}: the cores of this node are not known", hint=_hint_without(flag))
    # caches stay together: some firmware numbers the CPUs of several caches in turn
    cores = sorted(cores, key=lambda core: (core.numa_node, core.package, core.cache, core.cpus))
    used = set(chain.from_iterable(owned))
    devices = sorted(used | set(all_devices), key=lambda device: device.index)
    numa_nodes, notes = _find_numa_nodes(devices, cores, used, assume_node_0=mode in TORCHRUN_MODES)
    if mode == "exclusive" and all(owned):
        shares = _divide_among_devices(flag, owned, cores, numa_nodes)
    elif mode in ("cores", "exclusive"):
        shares, more = _divide_among_workers(flag, owned, cores, numa_nodes)
        notes += more
    else:
        shares = _share_parts(mode, owned, cores, numa_nodes)
    cpus = tuple(tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares)
    return Binding(cpus=cpus, notes=tuple(notes))


def _find_numa_nodes(
    devices: Iterable[Device], cores: Sequence[Core], used: Container[Device], *, assume_node_0: bool
) -> tuple[NumaNodes, list[str]]:
    """Return the NUMA node near each device that has allowed CPUs, and notes on those of the devices that are `used`.

    `assume_node_0`: take node 0 where the node of a device is not known, as torchrun does, if CPUs of node 0 are allowed.
    """
    nodes = {core.numa_node for core in cores}
    assume_node_0 = assume_node_0 and 0 in nodes
    numa_nodes: dict[Device, int] = {}
    without_cpus, unknown = [], []
    for device in devices:
        near = {core.numa_node for core in cores if not set(device.cpus).isdisjoint(core.cpus)}
        if device.cpus and not near:
            without_cpus.append(device)
            continue
        # Linux lists all CPUs for a device whose node it does not know (pci_dev_show_local_cpu in pci-sysfs.c)
        candidates = near or nodes
        if len(candidates) == 1:
            (numa_nodes[device],) = candidates
            continue
        unknown.append(device)
        if assume_node_0:
            numa_nodes[device] = 0
    notes = []
    if names := _names(without_cpus, used):
        allowed = count(_count_cpus(cores), "CPU")
        notes.append(f"no CPU near {names} is among the {allowed} allowed here: others are used")
    if names := _names(unknown, used):
        instead = "NUMA node 0 is used, as torchrun does" if assume_node_0 else "any of the allowed are used"
        notes.append(f"which CPUs are near {names} is not known: {instead}")
    return numa_nodes, notes


def _names(devices: Iterable[Device], used: Container[Device]) -> str:
    return ", ".join(str(device) for device in devices if device in used)


def _hint_without(flag: str) -> str:
    return "--cpu-bind none" if flag.startswith("--cpu-bind") else "leave --numa-binding out"


# whole NUMA nodes, sockets, core complexes


def _share_parts(mode: str, owned: Owned, cores: Sequence[Core], numa_nodes: NumaNodes) -> list[Share]:
    """Give each worker all cores of the NUMA node, socket or core complex near its devices; workers may share them."""

    def part(core: Core) -> tuple[int, ...]:
        """Return what identifies the part of the machine that holds this core."""
        match mode:
            case "numa" | "node":
                return (core.numa_node,)
            case "socket":
                return (core.package,)
            case "core-complex":
                # with sub-NUMA clustering a cache belongs to several nodes
                return (core.numa_node, core.cache)
            case _:
                raise ValueError(f"no such binding: {mode!r}")

    shares = []
    for local_rank, own in enumerate(owned):
        placed = [device for device in own if device in numa_nodes]
        if not placed:
            # spread over the machine: the workers' first cores are equally far apart
            parts = {part(cores[local_rank * len(cores) // len(owned)])}
        elif mode == "core-complex":
            parts = {_core_complex(device, cores, numa_nodes) for device in placed}
        else:
            nodes = {numa_nodes[device] for device in placed}
            parts = {part(core) for core in cores if core.numa_node in nodes}
        shares.append([core for core in cores if part(core) in parts])
    return shares


def _core_complex(device: Device, cores: Iterable[Core], numa_nodes: NumaNodes) -> tuple[int, int]:
    """Return the core complex of a device: the NUMA node near it, and a last-level cache there.

    The i-th device of a node gets the node's i-th largest cache, by allowed CPUs; after the last cache comes the first again.
    """
    node = numa_nodes[device]
    neighbours = [other for other, numa_node in numa_nodes.items() if numa_node == node]
    sizes: Counter[int] = Counter()  # allowed CPUs of each cache
    for core in cores:
        if core.numa_node == node:
            sizes[core.cache] += len(core.cpus)
    ranked = sorted(sizes, key=lambda cache: (-sizes[cache], cache))
    return node, ranked[neighbours.index(device) % len(ranked)]


# disjoint shares


def _divide_among_workers(
    flag: str, owned: Owned, cores: Sequence[Core], numa_nodes: NumaNodes
) -> tuple[list[Share], list[str]]:
    """Divide each NUMA node among the workers with a device near it; without devices, all cores among all workers."""
    near = [{numa_nodes[device] for device in own if device in numa_nodes} for own in owned]
    if not any(near):
        return _divide_evenly(flag, cores, len(owned)), []
    near = _with_nodes_for_all(near, cores)
    for node, workers in Counter(chain.from_iterable(near)).items():
        cpus = _count_cpus(core for core in cores if core.numa_node == node)
        if cpus < workers:
            note = (
                f"{workers} workers share NUMA node {node}, of which the job may use only {count(cpus, 'CPU')}: "
                "all allowed cores are divided evenly instead"
            )
            return _divide_evenly(flag, cores, len(owned)), [note]
    return _divide_nodes(near, cores), []


def _divide_among_devices(flag: str, owned: Owned, cores: Sequence[Core], numa_nodes: NumaNodes) -> list[Share]:
    """Divide each NUMA node among the devices near it, then each device's share among the workers that own the device."""
    # a device near no allowed CPU gets nothing unless a worker uses it
    devices = list(dict.fromkeys(chain(numa_nodes, *owned)))
    near: list[set[int]] = [{numa_nodes[device]} if device in numa_nodes else set() for device in devices]
    near = _with_nodes_for_all(near, cores)
    # torchrun cuts a node in the order of its CPU numbers
    cores = sorted(cores, key=lambda core: core.cpus)
    shares: list[Share] = [[] for _ in owned]
    for device, share in zip(devices, _divide_nodes(near, cores), strict=True):
        owners = [local_rank for local_rank, own in enumerate(owned) if device in own]
        if _count_cpus(share) < len(owners):
            raise LaunchError(
                f"{flag}: {device} gets {count(_count_cpus(share), 'CPU')} of those near it, "
                f"too few for its {count(len(owners), 'worker')}",
                hint="--numa-binding node",
            )
        if owners:
            for local_rank, part in zip(owners, _cut(share, len(owners)), strict=True):
                shares[local_rank] += part
    return shares


def _with_nodes_for_all(near: Sequence[set[int]], cores: Iterable[Core]) -> list[set[int]]:
    """Return these sets of NUMA nodes, each empty one filled with a node: that with the most cores for each of its users."""
    sizes = Counter(core.numa_node for core in cores)
    users = Counter(chain.from_iterable(near))
    completed = []
    for nodes in near:
        chosen = nodes or {max(sizes, key=lambda node: sizes[node] / (users[node] + 1))}
        if not nodes:
            users.update(chosen)
        completed.append(chosen)
    return completed


def _divide_nodes(near: Sequence[set[int]], cores: Sequence[Core]) -> list[Share]:
    """Divide each NUMA node among those near it: `near[i]` are the nodes of which the i-th share has a part."""
    shares: list[Share] = [[] for _ in near]
    for node in sorted(set().union(*near)):
        sharing = [i for i, nodes in enumerate(near) if node in nodes]
        pool = [core for core in cores if core.numa_node == node]
        for i, part in zip(sharing, _cut(pool, len(sharing)), strict=True):
            shares[i] += part
    return shares


def _divide_evenly(flag: str, cores: Sequence[Core], workers: int) -> list[Share]:
    """Cut all cores into equal shares; each share is on one NUMA node if sizes then differ by at most one core."""
    cpus = _count_cpus(cores)
    if cpus < workers:
        raise LaunchError(
            f"{flag}: {workers} workers need CPUs of their own, but the job may use only {count(cpus, 'CPU')}",
            hint=_hint_without(flag),
        )
    units = _cores_or_threads(cores, workers)  # threads if there are fewer cores than workers
    nodes = sorted({unit.numa_node for unit in units})
    pools = [[unit for unit in units if unit.numa_node == node] for node in nodes]
    size = len(units) // workers  # of a share; some may have one unit more
    # how many workers the units of a node can be cut for: the fewest if all shares are large, the most if all are small
    fewest = [-(-len(pool) // (size + 1)) for pool in pools]
    most = [len(pool) // size for pool in pools]
    each_node_can = all(low <= high for low, high in zip(fewest, most, strict=True))
    if not each_node_can or not sum(fewest) <= workers <= sum(most):
        return _cut(units, workers)
    unplaced = workers - sum(fewest)
    shares = []
    for pool, low, high in zip(pools, fewest, most, strict=True):
        further = min(unplaced, high - low)
        unplaced -= further
        shares += _cut(pool, low + further)
    return shares


def _cut(cores: Sequence[Core], parts: int) -> list[Share]:
    """Cut into neighbouring parts; the first ones get what is left over, as in torchrun."""
    units = _cores_or_threads(cores, parts)
    each, extra = divmod(len(units), parts)
    starts = [i * each + min(i, extra) for i in range(parts + 1)]
    return [units[start:end] for start, end in pairwise(starts)]


def _cores_or_threads(cores: Sequence[Core], parts: int) -> list[Core]:
    """Return the units to divide: whole cores, or single hardware threads if there are fewer cores than parts."""
    if len(cores) >= parts:
        return list(cores)
    return [replace(core, cpus=(cpu,)) for core in cores for cpu in core.cpus]


def _count_cpus(cores: Iterable[Core]) -> int:
    return sum(len(core.cpus) for core in cores)
