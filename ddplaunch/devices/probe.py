"""Finds what this node has for a job; imports no torch, creates no CUDA context and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.devices import Device, Hardware, amd, cpus, intel, nvidia
from ddplaunch.devices.sysfs import Root, read_cpulist
from ddplaunch.record import replace

_VARIABLES = (nvidia.VARIABLE, amd.VARIABLE, "ROCR_VISIBLE_DEVICES", intel.VARIABLE)


def probe(env: Mapping[str, str], *, root: Root = "/") -> Hardware:
    """Give the accelerators and CPUs that a process started with the variables `env` could use.

    A visibility variable alone proves no vendor: Slurm sets CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and
    ZE_AFFINITY_MASK at once on every node with GPUs. So what the kernel's drivers show decides, and the
    variables only narrow it down. The first vendor found wins: torch too is built for one.

    Raises:
        LaunchError: the variables name a GPU that is lost.
    """
    found = nvidia.find(env, root) or amd.find(env, root) or intel.find(env, root) or _nothing(env)
    allowed, quota = cpus.usable(root, os.sched_getaffinity(0))
    devices = tuple(replace(device, cpus=_near(root, device)) for device in found.devices)
    return replace(found, devices=devices, cpus=allowed, cpu_quota=quota)


def _near(root: Root, device: Device) -> tuple[int, ...]:
    return read_cpulist(root, f"/sys/bus/pci/devices/{device.pci}/local_cpulist") if device.pci else ()


def _nothing(env: Mapping[str, str]) -> Hardware:
    for name in _VARIABLES:
        if env.get(name):
            return Hardware(device_source=f"no GPU driver found, although {name}={env[name]}")
    return Hardware()
