"""The NVIDIA devices that a process started here could use: from NVML or /proc, narrowed by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.devices import Device, Hardware, nvml
from ddplaunch.devices.choose import listed
from ddplaunch.devices.nvml import Gpu, Instance
from ddplaunch.devices.sysfs import Root, exists, names, number, read
from ddplaunch.errors import LaunchError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_PROC = "/proc/driver/nvidia"
_TIMEOUT = 60.0  # seconds; without persistence mode the first answer takes some for each GPU


def find(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Return the devices in torch's order, None if there is no NVIDIA GPU.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names a GPU that is lost.
    """
    try:
        gpus = _ask_driver()
        return through(gpus, env) if gpus else None
    except nvml.NvmlMissingError:
        gpus = in_proc(root)
        return through(gpus, env, source=_PROC) if gpus else None
    except nvml.NvmlError as error:
        gpus = in_proc(root)
        note = f"NVML does not work ({error}), so CUDA most likely does not either"
        return through(gpus, env, source=_PROC, notes=(note,)) if gpus else Hardware(device_source=f"NVML: {error}")


def _ask_driver() -> tuple[Gpu, ...]:
    """Read NVML in a child: who asks a driver that hangs is in uninterruptible sleep.

    Raises:
        NvmlError: it does not work, or does not answer.
    """
    from ddplaunch.process.ask import AskedEnded, ask  # few machines need it

    try:
        return ask(nvml.read, _TIMEOUT)
    except AskedEnded as error:  # a driver may end who asks it
        raise nvml.NvmlError(str(error)) from None
    except TimeoutError:
        raise nvml.NvmlError(f"it does not answer for {_TIMEOUT:g} s") from None


def in_proc(root: Root) -> tuple[Gpu, ...]:
    """Return the GPUs as the driver lists them in /proc, by PCI address; MIG and memory cannot be seen there."""
    found = []
    for address in names(root, f"{_PROC}/gpus"):
        lines = (read(root, f"{_PROC}/gpus/{address}/information") or "").splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = number(facts.get("Device Minor"), -1)
        # a container sees every GPU of its host in /proc, but has device files only for its own
        if exists(root, f"/dev/nvidia{minor}") and facts.get("GPU Excluded") != "Yes":
            uuid = facts.get("GPU UUID", "?")
            # the driver writes "GPU-????????-..." until a GPU is first used
            found.append(Gpu(uuid=None if "?" in uuid else uuid, name=facts.get("Model"), pci=address.lower()))
    return tuple(found)


def through(
    gpus: Sequence[Gpu], env: Mapping[str, str], *, source: str = "NVML", notes: tuple[str, ...] = ()
) -> Hardware:
    """Return what CUDA_VISIBLE_DEVICES leaves of the machine's `gpus`.

    CUDA counts from the fastest GPU unless CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML by PCI address. So an index stands
    for a known GPU only where all are of one model, or the order is asked for, and none is lost or in MIG mode;
    else a device's token is its UUID, and one that was named by index keeps the index and has no other facts.

    With MIG on, a GPU's instances are the devices, also where the variable names the GPU. CUDA shows a process
    only one instance at a time ("only single MIG instance enumeration is supported", CUDA programming guide).

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names a GPU that is lost.
    """
    same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if not gpu.lost}) <= 1
    known = same_order and not any(gpu.lost for gpu in gpus)
    value = env.get(VARIABLE)
    if value is None:
        devices = _all(gpus, by_index=known and all(gpu.instances is None for gpu in gpus))
        notes += _left_out(gpus)
    else:
        devices, problem = _named(value, gpus, known)
        source = VARIABLE if devices else f"{VARIABLE}={value}"
        notes += (f"{VARIABLE}={value}: {problem}",) if problem else ()
    if len(devices) > 1 and not same_order:
        notes += (
            "the GPUs are of different models, which CUDA counts from the fastest: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID if the order matters",
        )
    numbered = tuple(replace(device, index=index) for index, device in enumerate(devices))
    return Hardware(devices=numbered, device_source=source, visible_variable=VARIABLE, notes=notes)


def _all(gpus: Sequence[Gpu], *, by_index: bool) -> list[Device]:
    found: list[Device] = []
    for index, gpu in enumerate(gpus):
        if gpu.instances is not None:
            found += (_of_instance(gpu, instance) for instance in gpu.instances)
        elif not gpu.lost:
            found.append(_of_gpu(gpu, str(index) if by_index or gpu.uuid is None else gpu.uuid))
    return found


def _named(value: str, gpus: Sequence[Gpu], known: bool) -> tuple[list[Device], str | None]:
    """The devices that `value` names and what is wrong with it; `known`: an index stands for a GPU that we know."""
    instances = [(gpu, instance) for gpu in gpus for instance in gpu.instances or ()]
    uuids: list[tuple[str, ...]] = [(gpu.uuid,) if gpu.uuid else () for gpu in gpus]
    uuids += [(instance.uuid, instance.alias or instance.uuid) for _, instance in instances]
    positions, entries, problem = listed(value, uuids, len(gpus))
    found: list[Device] = []
    for position, entry in zip(positions, entries, strict=True):
        if position >= len(gpus):
            found.append(_of_instance(*instances[position - len(gpus)]))
            continue
        gpu = gpus[position]
        if gpu.lost:
            others = ",".join(other for other in entries if other != entry)
            raise LaunchError(
                f"{VARIABLE}={value}: GPU {entry} is lost, as NVML calls one that fell off the bus",
                hint=f"{VARIABLE}={others}, or `nvidia-smi --gpu-reset`, or a reboot",
            )
        if gpu.instances is not None:
            found += (_of_instance(gpu, instance) for instance in gpu.instances)
        elif gpu.uuid and entry.startswith("GPU-"):
            found.append(_of_gpu(gpu, gpu.uuid))
        elif known:
            found.append(_of_gpu(gpu, str(position)))
        else:
            found.append(Device(kind="cuda", index=0, token=str(position)))
    return list(dict.fromkeys(found)), problem


def _of_gpu(gpu: Gpu, token: str) -> Device:
    return Device(kind="cuda", index=0, token=token, uuid=gpu.uuid, name=gpu.name, memory=gpu.memory, pci=gpu.pci)


def _of_instance(gpu: Gpu, instance: Instance) -> Device:
    return Device(
        kind="cuda",
        index=0,
        token=instance.uuid,
        uuid=instance.uuid,
        name=instance.name or gpu.name,
        memory=instance.memory,
        pci=gpu.pci,
    )


def _left_out(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    notes = []
    for index, gpu in enumerate(gpus):
        if gpu.lost:
            notes.append(f"GPU {index} is left out: NVML reports it as lost (nvidia-smi --gpu-reset, or reboot)")
        elif gpu.instances == ():
            notes.append(f"GPU {index} is left out: it is in MIG mode and has no instance")
    return tuple(notes)
