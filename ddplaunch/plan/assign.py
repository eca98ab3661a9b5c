"""The accelerators of the workers: which each owns and how it is bound to them, and what its torch can do with them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.plan.cluster import Allocation, Task
from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count

if TYPE_CHECKING:
    from ddplaunch.plan.devices.interpreter import TorchBuild

# --- which devices each worker owns


Owned = tuple[tuple[Device, ...], ...]  # the devices of each local worker, by local rank


def divide_devices(spec: JobSpec, workers: int, devices: Sequence[Device]) -> Owned:
    """Return the devices of each local worker, by local rank: one device in turn, unless options say otherwise.

    Raises:
        LaunchError: --gpus-per-worker or --workers-per-gpu cannot be met by these devices.
    """
    if each := spec.gpus_per_worker:
        if workers * each > len(devices):
            raise too_few_devices(spec, workers, devices)
        return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(workers))
    if sharing := spec.workers_per_gpu:
        if workers > sharing * len(devices):
            raise too_few_devices(spec, workers, devices)
        return tuple((devices[i // sharing],) for i in range(workers))
    # a job for the CPUs touches no accelerator
    if not devices or spec.nproc_per_node == "cpu":
        return ((),) * workers
    return tuple((devices[i % len(devices)],) for i in range(workers))


def of_task(task: Task, devices: Sequence[Device]) -> Owned:
    """Return the one worker of a command that was started for each rank its device.

    Where the cluster shows each command its own devices only, the local rank is not an index of them.
    """
    return ((devices[task.local_rank % len(devices)],),) if devices else ((),)


def too_few_devices(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    """Return the error that there are not enough devices for --gpus-per-worker or --workers-per-gpu."""
    if each := spec.gpus_per_worker:
        asked, needed, fit = spec.typed("gpus_per_worker", each), workers * each, len(devices) // each
        instead = f"--gpus-per-worker {len(devices)}" if devices else "leave --gpus-per-worker out"
    else:
        sharing = spec.workers_per_gpu or 1
        asked, needed, fit = spec.typed("workers_per_gpu", sharing), -(-workers // sharing), sharing * len(devices)
        instead = "leave --workers-per-gpu out"
    need = "needs" if workers == 1 else "need"
    have = f"only {len(devices)}" if devices else "none"
    return LaunchError(
        f"{asked}: {count(workers, 'worker')} {need} {count(needed, 'GPU')}, but the job has {have}",
        hint=f"--nproc-per-node {fit}" if fit else instead,
    )


def simulated(here: Node, node_rank: int, nodes: int, how: str | None) -> Node:
    """Return one of several nodes simulated here: with an equal part of the devices if there is one for each, else with all."""
    if how is None or nodes == 1:
        return here
    size = len(here.devices) // nodes
    if how != "divide" or size == 0:
        return replace(here, shared=True)
    return replace(here, devices=here.devices[node_rank * size : (node_rank + 1) * size])


def sharing_workers(task: Task, hardware: Hardware, devices: Sequence[Device]) -> Owned | None:
    """Return the devices of all commands that share the CPUs of this one, by local rank; None: they are its own.

    A cluster that binds each to CPUs of its own leaves it fewer than all of them have together. A command that is not shown
    the devices of the others assigns none.
    """
    together = min((number for number in (task.node_cpus, hardware.machine_cpus) if number), default=0)
    if len(hardware.cpus) < together:
        return None
    if len(devices) < 2:
        return ((),) * task.local_world_size
    return tuple(of_task(replace(task, local_rank=rank), devices)[0] for rank in range(task.local_world_size))


# --- how a worker is bound to its devices, and their names inside it; `worker/imports.py` binds it


_ONE_MIG_INSTANCE_ONLY = "CUDA shows a process no more than one MIG instance"  # CUDA programming guide


def choose_pin(spec: JobSpec, owned: Owned) -> tuple[str, str]:
    """Return how workers are kept to their devices, and the reason.

    "device": all are visible, and the worker's own is torch's current one; "visible": the worker sees no other; "none": nothing.

    Raises:
        LaunchError: --pin device where it cannot work.
    """
    devices = {device for own in owned for device in own}
    has_mig = any(device.is_mig for device in devices)
    is_command = spec.program.kind is ProgramKind.COMMAND
    if spec.virtual_local_rank:
        return "visible", spec.origin("virtual_local_rank")
    if spec.pin == "device" and is_command:
        raise LaunchError(
            f"{spec.typed('pin', spec.pin)}: it works inside python, but --no-python runs a command",
            hint="--pin visible",
        )
    if spec.pin == "device" and has_mig and len(devices) > 1:
        raise LaunchError(f"{spec.typed('pin', spec.pin)}: {_ONE_MIG_INSTANCE_ONLY}", hint="--pin visible")
    if spec.pin:
        return spec.pin, spec.origin("pin")
    if any(len(own) > 1 for own in owned):
        return "visible", "each worker has several devices"  # these can be handed over only as a set
    if has_mig:
        return "visible", _ONE_MIG_INSTANCE_ONLY
    # a command is most often a wrapper around a Python script that counts on seeing every device
    return ("none", "default for a command") if is_command else ("device", "default")


def bind_device(
    spec: JobSpec, pin: str, own: tuple[Device, ...], devices: Sequence[Device], hardware: Hardware
) -> tuple[str, dict[str, str]]:
    """Return the name of a worker's device inside the worker, and the variables that bind it.

    `own` are the worker's devices, `devices` those of the job on this node, `hardware` is all that it has.
    """
    if not own:
        return "cpu", {}
    visibility = hardware.visible_variable  # "CUDA_VISIBLE_DEVICES"
    if pin == "visible":
        return f"{own[0].kind}:0", {visibility: ",".join(device.visible_as for device in own)}
    variables = {}
    index = own[0].index
    # where CUDA chooses the order, devices are visible as UUIDs, and only a list of these makes an index certain
    if spec.devices is not None or not all(device.visible_as.isdigit() for device in devices):
        variables[visibility] = ",".join(device.visible_as for device in devices)
        index = devices.index(own[0])
    name = f"{own[0].kind}:{index}"
    if pin == "device":
        variables["DDPLAUNCH_PIN_DEVICE"] = name
    return name, variables


def pin_notes(spec: JobSpec, pin: str, owned: Owned) -> list[str]:
    """Return a note for scripts that take LOCAL_RANK for an index, where it is none; `pin`: how workers are kept to them."""
    workers = len(owned)
    devices = len({device for own in owned for device in own})
    if not devices or spec.virtual_local_rank:
        return []
    if pin == "visible" and workers > 1:
        return ["each worker sees only its own devices, so LOCAL_RANK is not a device index: use DDPLAUNCH_DEVICE"]
    if pin != "visible" and workers > devices:
        return [
            f"{workers} workers on {count(devices, 'device')}: set_device(LOCAL_RANK) fails from local rank "
            f"{devices} on; use DDPLAUNCH_DEVICE, or --virtual-local-rank"
        ]
    return []


# --- which process-group backend suits the devices


def choose_backend(owned: Sequence[Sequence[Device]], build: TorchBuild | None) -> tuple[str, str]:
    """Return the backend that `auto` stands for and the reason.

    `owned[i]` are the devices of local worker i; `build` is what the workers' torch was built with, None if unknown.
    """
    gpus = [{_gpu_as_nccl_counts(device) for device in own} for own in owned]  # of each worker
    different = len(set().union(*gpus))
    if not different:
        return "gloo", "no accelerator"
    if not all(owned):
        return "gloo", "some workers have no accelerator"
    kind = owned[0][0].kind
    if build is not None and (missing := cannot_use(build, kind)):
        return "gloo", missing
    if sum(map(len, gpus)) > different:
        sharing = f"{len(owned)} workers share {count(different, 'GPU' if kind == 'cuda' else 'device')}"
        return "gloo", f"{sharing}, which NCCL refuses" if kind == "cuda" else sharing
    if kind == "xpu":
        return "xccl", "every worker has an Intel GPU of its own"
    if build is not None and not build.nccl:
        return "gloo", f"torch {build.version} was built without NCCL"
    return "nccl", "every worker has a GPU of its own"


def cannot_use(build: TorchBuild, kind: str) -> str | None:
    """Return the reason why a torch that was built so cannot use devices of this kind; None if it can."""
    if not (build.cuda or build.hip or build.xpu):
        return f"torch {build.version} is a CPU build"
    if not (build.xpu if kind == "xpu" else build.cuda or build.hip):
        return f"torch {build.version} is a build for other accelerators"
    return None


def _gpu_as_nccl_counts(device: Device) -> str:
    """Return what NCCL takes for the device: it sees only the GPU behind a MIG instance (issue 1716 of NVIDIA/nccl)."""
    return device.pci or device.visible_as if device.is_mig else device.visible_as


# --- whether the workers can use the devices that the job was granted, or that its backend needs


def check_granted(spec: JobSpec, allocation: Allocation, node: Node, owned: Owned) -> str:
    """Return a warning if the job asks for no accelerator, but was granted some that cannot be used; "" if all is well.

    Raises:
        LaunchError: it does not ask for the CPUs, so that it would train there unnoticed; or its backend needs devices.
    """
    granted, needs_devices = node.hardware.granted, spec.backend in ("nccl", "xccl")  # "CUDA_VISIBLE_DEVICES=0,1"
    why_unusable = _why_unusable(spec, node) if granted or needs_devices else None
    if needs_devices and (why_unusable or not all(owned)):
        reason = why_unusable or f"there is no accelerator for {'some workers' if any(owned) else 'the workers'}"
        raise LaunchError(f"{spec.typed('backend', spec.backend)}: {reason}", hint="--backend gloo")
    if not granted or not why_unusable:
        return ""
    text = why_unusable if granted in why_unusable else f"{why_unusable}, although {granted}"
    workers = allocation.nproc_per_node if spec.nproc_per_node is None else spec.nproc_per_node
    # the user has said how many workers there are, or what they use, so that this depends on no accelerator
    may_use_cpus = isinstance(workers, int) or workers == "cpu" or spec.devices == ("cpu",) or spec.backend != "auto"
    if not may_use_cpus:
        install = "install a torch that is built for these devices; " if node.hardware.devices else ""
        raise LaunchError(text, hint=f"{install}to train on the CPUs all the same: --devices cpu")
    return text


def _why_unusable(spec: JobSpec, node: Node) -> str | None:
    """Return why workers cannot use accelerators here: "torch 2.13.0+cpu is a CPU build"; None if they can."""
    found = node.hardware.devices
    if not found:
        source, notes = node.hardware.device_source, node.hardware.notes
        # else the source is a sentence, such as "no GPU driver found, although CUDA_VISIBLE_DEVICES=0,1"
        none_found = "this node has no accelerator" if source == "none found" else source
        return notes[0] if notes else none_found  # a note says which were left out
    # a command may bring another torch, as a container does
    if node.build is None or spec.program.kind is ProgramKind.COMMAND:
        return None
    if why := cannot_use(node.build, found[0].kind):
        return why
    lacks_nccl = spec.backend == "nccl" and not node.build.nccl
    return f"torch {node.build.version} was built without NCCL" if lacks_nccl else None


# --- NVIDIA's MPS: which workers share a GPU, and how much of it each may use


MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def check_mps(spec: JobSpec, owned: Owned, control: str | None, *, started_per_rank: bool) -> None:
    """Refuse --mps (NVIDIA's Multi-Process Service) where it cannot work; `control` is the path of NVIDIA's command, or None.

    Raises:
        LaunchError: there is no NVIDIA GPU, no such command, or no agent that serves all workers of the node.
    """
    asked = spec.origin("mps")
    if not all(own and own[0].kind == "cuda" for own in owned):
        raise LaunchError(f"{asked}: the workers have no NVIDIA GPU to share", hint="leave --mps out")
    if started_per_rank:
        raise LaunchError(
            f"{asked}: a command was started for each rank, but MPS needs one for the whole node",
            hint="start one command on each node, as `srun --ntasks-per-node=1 ddplaunch --workers-per-gpu 2 ...`",
        )
    if control is None:
        raise LaunchError(
            f"{asked}: nvidia-cuda-mps-control was not found on PATH",
            hint="it comes with NVIDIA's driver; in a container mount it, or leave --mps out",
        )


def mps_shares(owned: Owned, caller: Mapping[str, str]) -> list[dict[str, str]]:
    """Return for each worker the variable that limits its part of the GPU, unless the caller has set it.

    What the number limits: "Active Thread Percentage" in NVIDIA's documentation of MPS.
    """
    if MPS_SHARE in caller:
        return [{} for _ in owned]
    users = Counter(device for own in owned for device in own)
    return [{MPS_SHARE: str(max(1, 100 // max(users[device] for device in own)))} for own in owned]
