"""The accelerators and CPUs of this node. Refuses to import torch, to create a CUDA context and to change anything."""

from __future__ import annotations

from msgspec import Struct


class Device(Struct, frozen=True, kw_only=True):
    """One accelerator that a process started here could use."""

    kind: str  # torch's name: "cuda" (NVIDIA and ROCm) or "xpu"
    index: int  # torch's index for it in a process with our environment: cuda:INDEX
    visible_as: str  # what stands for it in the visibility variable: the outer index, or a GPU-/MIG- UUID
    uuid: str | None = None
    name: str | None = None
    memory: int | None = None  # bytes
    pci: str | None = None  # sysfs form in lower case, "0000:18:00.0"
    cpus: tuple[int, ...] = ()  # CPUs near it, by sysfs; empty: not known

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance: CUDA shows a process only one of these, so a worker must see its own alone."""
        return self.visible_as.startswith("MIG-")

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


class Core(Struct, frozen=True, kw_only=True):
    """One physical core: its hardware threads and its place in the topology."""

    cpus: tuple[int, ...]  # logical CPUs, lowest first
    numa_node: int
    package: int  # physical_package_id
    cache: int  # lowest CPU that shares its highest-level cache: names the core complex


class Hardware(Struct, frozen=True, kw_only=True):
    """What this node offers to the job."""

    devices: tuple[Device, ...] = ()
    device_source: str = "none found"  # "NVML", "CUDA_VISIBLE_DEVICES", "/proc/driver/nvidia", ...
    visible_variable: str = "CUDA_VISIBLE_DEVICES"  # the variable that narrows these devices down
    cpus: tuple[int, ...] = (0,)  # logical CPUs we may run on (affinity), ascending
    machine_cpus: int = 0  # all that are online, ours or not; 0: not known
    cpu_quota: float | None = None  # CPUs' worth of time that the cgroups allow; None: no quota
    granted: str = ""  # the variable that grants the job accelerators, "CUDA_VISIBLE_DEVICES=0,1"; "": none does
    notes: tuple[str, ...] = ()  # what was left out or is uncertain about the devices, one sentence each

    @property
    def usable_cpus(self) -> int:
        """How many CPUs the job can really use: affinity, cut by the cgroup quota, at least 1."""
        limit = len(self.cpus) if self.cpu_quota is None else min(len(self.cpus), int(self.cpu_quota))
        return max(1, limit)
