"""The NVIDIA devices that a process started here could use: from NVML or /proc, narrowed by CUDA_VISIBLE_DEVICES.

The only module that imports pynvml, which takes 20 ms: import this one only where there is an NVIDIA driver.
"""

from __future__ import annotations

import marshal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pynvml  # type: ignore[import-untyped]  # it ships no annotations
from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.choose import listed
from ddplaunch.plan.devices.sysfs import Root, exists, names, number, read
from ddplaunch.system.errors import LaunchError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_PROC = "/proc/driver/nvidia"
_TIMEOUT = 60.0  # seconds; without persistence mode the first answer takes some for each GPU


class Instance(Struct, frozen=True, kw_only=True):
    """One MIG instance of a GPU."""

    uuid: str  # "MIG-..."
    alias: str | None = None  # as drivers before R470 wrote it: MIG-<GPU UUID>/<GPU instance>/<compute instance>
    name: str | None = None
    memory: int | None = None  # bytes


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU before CUDA_VISIBLE_DEVICES is applied: one that this process may open, or could open if it were not lost."""

    uuid: str | None = None  # "GPU-..."
    name: str | None = None
    memory: int | None = None  # bytes
    pci: str | None = None  # sysfs form in lower case
    instances: tuple[Instance, ...] | None = None  # None: MIG is off
    lost: bool = False  # fell off the bus; needs a reset


class NvmlError(Exception):
    """NVML cannot be used; the text is the reason."""


class NvmlMissingError(NvmlError):
    """There is no NVML library, as in a container that was given only NVIDIA's "compute" capability."""


def find(env: Mapping[str, str], root: Root) -> Hardware | None:
    """Return the devices in torch's order, None if there is no NVIDIA GPU.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names a GPU that is lost.
    """
    try:
        gpus = _ask_driver()
        return narrowed_by_variable(gpus, env) if gpus else None
    except NvmlMissingError:
        gpus = gpus_in_proc(root)
        return narrowed_by_variable(gpus, env, source=_PROC) if gpus else None
    except NvmlError as error:
        gpus = gpus_in_proc(root)
        note = f"NVML does not work ({error}), so CUDA most likely does not either"
        return (
            narrowed_by_variable(gpus, env, source=_PROC, notes=(note,))
            if gpus
            else Hardware(device_source=f"NVML: {error}")
        )


def _ask_driver() -> tuple[Gpu, ...]:
    """Read NVML in a child process: a process that asks a driver which hangs is in uninterruptible sleep."""
    from ddplaunch.system.process.ask import AskedEnded, ask  # few machines need it

    try:
        return ask(read_nvml, _TIMEOUT)
    except AskedEnded as error:  # a driver may end who asks it
        raise NvmlError(str(error)) from None
    except TimeoutError:
        raise NvmlError(f"it does not answer for {_TIMEOUT:g} s") from None


def gpus_in_proc(root: Root) -> tuple[Gpu, ...]:
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


def narrowed_by_variable(
    gpus: Sequence[Gpu], env: Mapping[str, str], *, source: str = "NVML", notes: tuple[str, ...] = ()
) -> Hardware:
    """Return what CUDA_VISIBLE_DEVICES leaves of the machine's `gpus`.

    CUDA counts from the fastest GPU unless CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML by PCI address. So an index stands
    for a known GPU only where all are of one model, or the order is asked for, and none is lost or in MIG mode;
    else a device is visible as its UUID, and one that was named by index keeps the index and has no other facts.

    With MIG on, a GPU's instances are the devices, also where the variable names the GPU. CUDA shows a process
    only one instance at a time ("only single MIG instance enumeration is supported", CUDA programming guide).

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names a GPU that is lost.
    """
    same_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if not gpu.lost}) <= 1
    index_is_certain = same_order and not any(gpu.lost for gpu in gpus)
    value = env.get(VARIABLE)
    if value is None:
        none_is_in_mig_mode = all(gpu.instances is None for gpu in gpus)
        devices, left_out = _all_devices(gpus, by_index=index_is_certain and none_is_in_mig_mode)
        notes += left_out
    else:
        devices, problem = _named_devices(value, gpus, index_is_certain=index_is_certain)
        source = VARIABLE if devices else f"{VARIABLE}={value}"  # the value shows why there is none
        notes += (f"{VARIABLE}={value}: {problem}",) if problem else ()
    if len(devices) > 1 and not same_order:
        notes += (
            "the GPUs are of different models, which CUDA counts from the fastest: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID if the order matters",
        )
    numbered = tuple(replace(device, index=index) for index, device in enumerate(devices))
    return Hardware(devices=numbered, device_source=source, visible_variable=VARIABLE, notes=notes)


def _all_devices(gpus: Sequence[Gpu], *, by_index: bool) -> tuple[list[Device], tuple[str, ...]]:
    """Return the devices of all GPUs, and a note about each GPU that has none; `by_index`: visible as indices, not UUIDs."""
    found: list[Device] = []
    notes = []
    for index, gpu in enumerate(gpus):
        if gpu.lost:
            notes.append(f"GPU {index} is left out: NVML reports it as lost (nvidia-smi --gpu-reset, or reboot)")
        elif gpu.instances == ():  # None: MIG is off
            notes.append(f"GPU {index} is left out: it is in MIG mode and has no instance")
        elif gpu.instances is not None:
            found += (_of_instance(gpu, instance) for instance in gpu.instances)
        else:
            found.append(_of_gpu(gpu, str(index) if by_index or gpu.uuid is None else gpu.uuid))
    return found, tuple(notes)


def _named_devices(value: str, gpus: Sequence[Gpu], *, index_is_certain: bool) -> tuple[list[Device], str | None]:
    """Return the devices that `value` names and what is wrong with it; `index_is_certain`: CUDA counts the GPUs as NVML does."""
    instances = [(gpu, instance) for gpu in gpus for instance in gpu.instances or ()]
    uuids: list[tuple[str, ...]] = [(gpu.uuid,) if gpu.uuid else () for gpu in gpus]
    uuids += [(instance.uuid, instance.alias or instance.uuid) for _, instance in instances]
    positions, entries, problem = listed(value, uuids, len(gpus))
    found: list[Device] = []
    for position, entry in zip(positions, entries, strict=True):
        if position >= len(gpus):  # behind the GPUs stand the MIG instances of all
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
        elif index_is_certain:
            found.append(_of_gpu(gpu, str(position)))
        else:  # which GPU that is, is not known
            found.append(Device(kind="cuda", index=0, visible_as=str(position)))  # the caller numbers them
    return list(dict.fromkeys(found)), problem


def _of_gpu(gpu: Gpu, visible_as: str) -> Device:
    return Device(
        kind="cuda", index=0, visible_as=visible_as, uuid=gpu.uuid, name=gpu.name, memory=gpu.memory, pci=gpu.pci
    )


def _of_instance(gpu: Gpu, instance: Instance) -> Device:
    """Return a MIG instance as a device: visible as its UUID."""
    name, uuid = instance.name or gpu.name, instance.uuid
    return Device(kind="cuda", index=0, visible_as=uuid, uuid=uuid, name=name, memory=instance.memory, pci=gpu.pci)


# --- NVIDIA's management library (NVML), which knows nothing of CUDA_VISIBLE_DEVICES


def read_nvml() -> tuple[Gpu, ...]:
    """Return the GPUs in NVML's order, which is that of their PCI addresses.

    A GPU that a device cgroup denies is left out without a gap: CUDA does not count it either.

    Raises:
        NvmlError: the library or the driver is missing or does not work.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        kind = NvmlMissingError if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND else NvmlError
        raise kind(str(error).rstrip(".")) from None
    try:
        found = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise NvmlError(str(error).rstrip(".")) from None
    finally:
        pynvml.nvmlShutdown()
    return tuple(gpu for gpu in found if gpu is not None)


def _gpu(index: int) -> Gpu | None:
    """Return what NVML knows of a GPU; None if this user may not use it."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            return None
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            return Gpu(lost=True)
        raise
    mig_mode, _mode_after_reset = ask_nvml(pynvml.nvmlDeviceGetMigMode, handle) or (None, None)
    instances = None
    if mig_mode == pynvml.NVML_DEVICE_MIG_ENABLE:
        slots = range(ask_nvml(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
        found = (ask_nvml(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot) for slot in slots)
        # the slot of an instance that was not created is empty
        instances = tuple(_instance(instance, uuid) for instance in found if instance is not None)
    name = ask_nvml(pynvml.nvmlDeviceGetName, handle)
    return Gpu(uuid=uuid, name=name, memory=_memory(handle), pci=pci_address(handle), instances=instances)


def pci_address(handle: Any) -> str | None:
    """Return the PCI address of a GPU as sysfs writes it ("0000:18:00.0"); NVML writes the domain with eight digits."""
    pci = ask_nvml(pynvml.nvmlDeviceGetPciInfo, handle)
    if pci is None:
        return None
    domain, _, rest = pci.busId.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _instance(handle: Any, gpu_uuid: str) -> Instance:
    """Return a MIG instance as NVML knows it; its alias is the name that older drivers gave."""
    gpu_instance = ask_nvml(pynvml.nvmlDeviceGetGpuInstanceId, handle)
    compute_instance = ask_nvml(pynvml.nvmlDeviceGetComputeInstanceId, handle)
    return Instance(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        alias=f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}",
        name=ask_nvml(pynvml.nvmlDeviceGetName, handle),
        memory=_memory(handle),
    )


def _memory(handle: Any) -> int | None:
    memory = ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return memory.total if memory else None


def serve_use(fd: int, devices: Sequence[Device]) -> None:
    """Answer each message that comes to the socket `fd` with the use of these devices, until the other end is closed.

    For each device: the percent of the time in which it computed, and the bytes of its memory in use; None if not known.
    """
    with socket.socket(fileno=fd) as sock, suppress(pynvml.NVMLError, OSError):
        pynvml.nvmlInit()
        handles = [_handle(device) for device in devices]
        while sock.recv(1):
            sock.send(marshal.dumps([_use(handle) for handle in handles]))


def _handle(device: Device) -> Any:
    if device.uuid:
        return ask_nvml(pynvml.nvmlDeviceGetHandleByUUID, device.uuid)
    return ask_nvml(pynvml.nvmlDeviceGetHandleByPciBusId, device.pci) if device.pci else None


def _use(handle: Any) -> tuple[int | None, int | None]:
    if handle is None:
        return None, None
    rates, memory = (
        ask_nvml(question, handle)
        for question in (pynvml.nvmlDeviceGetUtilizationRates, pynvml.nvmlDeviceGetMemoryInfo)
    )
    return (rates.gpu if rates else None), (memory.used if memory else None)


def ask_nvml(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a query, None if it fails: a missing detail must not hide the GPU."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
