"""Finds what this node has for a job; imports no torch, creates no CUDA context and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from ddplaunch.devices import Device, Hardware
from ddplaunch.devices.cgroup import cpu_quota
from ddplaunch.devices.sysfs import Root, exists, read_cpulist

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NVIDIA = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")  # the last one is WSL's
_AMD = "/sys/class/kfd"
_INTEL = "/sys/class/drm"  # cards of other vendors are listed there too


def probe(env: Mapping[str, str], *, root: Root = "/") -> Hardware:
    """Return the accelerators and CPUs that a process started with the variables `env` could use.

    A visibility variable alone proves no vendor: Slurm sets CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and
    ZE_AFFINITY_MASK at once on every node with GPUs. So what the kernel's drivers show decides, and the
    variables only narrow it down. The first vendor found wins: torch too is built for one.

    Raises:
        LaunchError: the variables name a GPU that is lost.
    """
    granted = _granted(env)
    found = _accelerators(env, root) or Hardware(
        device_source=f"no GPU driver found, although {granted}" if granted else "none found"
    )
    return replace(
        found,
        devices=tuple(replace(device, cpus=_near(root, device)) for device in found.devices),
        granted=granted,
        cpus=tuple(sorted(os.sched_getaffinity(0))),  # which the kernel has restricted to our cpuset
        machine_cpus=os.cpu_count() or 0,
        cpu_quota=cpu_quota(root),
    )


def _accelerators(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Probe for the vendors whose drivers are present; the modules of the others are not imported."""
    found = None
    if _nvidia_is_here(env, root):
        from ddplaunch.devices import nvidia

        found = nvidia.find(env, root)
    if found is None and exists(root, _AMD):
        from ddplaunch.devices import amd

        found = amd.find(env, root)
    if found is None and exists(root, _INTEL):
        from ddplaunch.devices import intel

        found = intel.find(env, root)
    return found


def _nvidia_is_here(env: Mapping[str, str], root: Root) -> bool:
    """Whether a driver is present: without one, importing pynvml and a failing dlopen would take milliseconds."""
    folders = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return any(exists(root, path) for path in _NVIDIA) or any(
        exists("/", f"{folder}/libnvidia-ml.so.1") for folder in folders
    )


def _near(root: Root, device: Device) -> tuple[int, ...]:
    return read_cpulist(root, f"/sys/bus/pci/devices/{device.pci}/local_cpulist") if device.pci else ()


def _granted(env: Mapping[str, str]) -> str:
    """The variable that grants accelerators; "" if none does, or if one hides them all, which is how a user says so."""
    # a step may have fewer than its job, or none
    of_slurm = "SLURM_STEP_GPUS" if "SLURM_STEP_ID" in env else "SLURM_JOB_GPUS"
    given = [name for name in (*_VARIABLES, of_slurm) if name in env]
    if not given:
        return ""
    from ddplaunch.devices.visible import HIDES_ALL

    hidden = any(env[name].strip() in HIDES_ALL for name in given)
    return "" if hidden else f"{given[0]}={env[given[0]]}"
