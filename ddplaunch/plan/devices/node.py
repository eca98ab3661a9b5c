"""What this node has for a job: inspected once, before anything is decided.

Imports no torch, creates no CUDA context, starts nothing and changes nothing.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.devices import Core, Device, Hardware
from ddplaunch.plan.devices.choose import HIDES_ALL, choose
from ddplaunch.plan.devices.interpreter import TorchBuild, find_torch
from ddplaunch.plan.devices.sysfs import Root, cores, cpu_quota, exists, read_cpulist
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.system.own_files import worker_program
from ddplaunch.system.process.fork import debugger_follows_children

# --- its accelerators and CPUs


_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NVIDIA = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")  # the last one is WSL's
AMD = "/sys/class/kfd"
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
        devices=tuple(
            replace(device, cpus=read_cpulist(root, f"/sys/bus/pci/devices/{device.pci}/local_cpulist"))
            for device in found.devices
        ),
        granted=granted,
        cpus=tuple(sorted(os.sched_getaffinity(0))),  # which the kernel has restricted to our cpuset
        machine_cpus=os.cpu_count() or 0,
        cpu_quota=cpu_quota(root),
    )


def _accelerators(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Ask the drivers that are present for their devices; import no module of another vendor. None: no device is found."""
    found = None
    if has_nvidia(env, root):
        from ddplaunch.plan.devices import nvidia

        found = nvidia.find(env, root)
    if found is None and exists(root, AMD):
        from ddplaunch.plan.devices import amd

        found = amd.find(env, root)
    if found is None and exists(root, _INTEL):
        from ddplaunch.plan.devices import intel

        found = intel.find(env, root)
    return found


def has_nvidia(env: Mapping[str, str], root: Root) -> bool:
    """Whether a driver is present: without one, importing pynvml and a failing dlopen would take milliseconds."""
    nvml = [f"{folder}/libnvidia-ml.so.1" for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return any(exists(root, path) for path in _NVIDIA) or any(map(os.path.exists, nvml))


def _granted(env: Mapping[str, str]) -> str:
    """Return the variable that grants accelerators; "" if none does, or if one hides them all, which is how a user says so."""
    # a step may have fewer than its job, or none
    of_slurm = "SLURM_STEP_GPUS" if "SLURM_STEP_ID" in env else "SLURM_JOB_GPUS"
    given = [name for name in (*_VARIABLES, of_slurm) if name in env]
    if not given:
        return ""
    hidden = any(env[name].strip() in HIDES_ALL for name in given)
    return "" if hidden else f"{given[0]}={env[given[0]]}"


# --- all that a plan is made of


_LONGEST_SCRIPT = 1 << 18  # bytes; to parse more takes a notable time


def inspect(spec: JobSpec, env: Mapping[str, str], *, shared_by: int = 1) -> Node:
    """Inspect this node. Where nodes are simulated (--simulate), `shared_by` is how many of them share this machine.

    Raises:
        LaunchError: a device that was asked for is not there.
    """
    hardware = probe({**env, **dict(spec.env)})  # the workers' variables determine what they will see
    if shared_by > 1:
        hardware = replace(hardware, cpu_quota=hardware.usable_cpus / shared_by)
    devices = choose(hardware, spec.devices, spec.typed("devices", ",".join(spec.devices or ())))
    mps_control = None
    if spec.mps:
        import shutil  # 5 ms, and few jobs need it

        mps_control = shutil.which("nvidia-cuda-mps-control", path=env.get("PATH"))
    return Node(
        host=os.uname().nodename,
        hardware=hardware,
        devices=devices,
        # only what the job needs is looked for: each takes milliseconds
        cores=() if spec.cpu_bind == "none" and spec.numa_binding is None else cores("/", hardware.cpus),
        build=torch_build(spec) if devices else None,
        python=sys.executable,
        mps_control=mps_control,
        bootstrap=worker_program("bootstrap.py"),
        script=_script_text(spec.program) if spec.start_method == "auto" else b"",
        env=env,
        debugger_follows_children=debugger_follows_children(),  # into each Python program that is started from here
    )


def torch_build(spec: JobSpec) -> TorchBuild | None:
    """Return the torch that the workers would import, as its files describe it."""
    return find_torch(spec.program.python or sys.executable)


def _script_text(program: Program) -> bytes:
    """Return the source of the script; empty if the program is no script, or too long."""
    try:
        if program.kind is not ProgramKind.SCRIPT or not stat.S_ISREG(os.stat(program.target).st_mode):
            return b""
        with open(program.target, "rb") as file:
            text = file.read(_LONGEST_SCRIPT + 1)
    except (OSError, ValueError):
        return b""
    return text if len(text) <= _LONGEST_SCRIPT else b""


class Node(Struct, frozen=True, kw_only=True):
    """What this node is and has, as far as the job needs to know."""

    host: str
    hardware: Hardware
    devices: tuple[Device, ...]  # of `hardware`, those that the job may use, in order
    shared: bool = False  # by other, simulated nodes
    cores: tuple[Core, ...] = ()  # read only if workers are to be bound
    build: TorchBuild | None = None  # of the workers' torch; None: not found, or there are no devices
    python: str  # the interpreter of this command
    bootstrap: str  # path of worker/bootstrap.py
    mps_control: str | None = None  # path of nvidia-cuda-mps-control; looked for only if it was asked for
    script: bytes = b""  # the text of the program, if that decides how workers are started
    env: Mapping[str, str]  # of the caller
    has_terminal: bool = True  # the command has one, which a worker can be given
    debugger_follows_children: bool = False  # a debugger around the command gets into the workers, too
