"""The GPUs of this machine as NVIDIA's management library (NVML) reports them; creates no CUDA context.

The only module that imports pynvml: import it only where there is an NVIDIA driver, since pynvml takes 20 ms.
It knows nothing of CUDA_VISIBLE_DEVICES, as NVML itself does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]  # it ships no annotations
from msgspec import Struct


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


def read() -> tuple[Gpu, ...]:
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
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            return None
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            return Gpu(lost=True)
        raise
    mig, _pending = _answer(pynvml.nvmlDeviceGetMigMode, handle) or (None, None)
    pci = _answer(pynvml.nvmlDeviceGetPciInfo, handle)
    return Gpu(
        uuid=uuid,
        name=_answer(pynvml.nvmlDeviceGetName, handle),
        memory=_memory(handle),
        pci=sysfs_address(pci.busId) if pci else None,
        instances=_instances(handle, uuid) if mig == pynvml.NVML_DEVICE_MIG_ENABLE else None,
    )


def _instances(gpu: Any, gpu_uuid: str) -> tuple[Instance, ...]:
    slots = range(_answer(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0)
    handles = (_answer(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, slot) for slot in slots)
    # the slot of an instance that was not created is empty
    return tuple(_instance(handle, gpu_uuid) for handle in handles if handle is not None)


def _instance(handle: Any, gpu_uuid: str) -> Instance:
    gpu_instance = _answer(pynvml.nvmlDeviceGetGpuInstanceId, handle)
    compute_instance = _answer(pynvml.nvmlDeviceGetComputeInstanceId, handle)
    return Instance(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        alias=f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}",
        name=_answer(pynvml.nvmlDeviceGetName, handle),
        memory=_memory(handle),
    )


def _memory(handle: Any) -> int | None:
    memory = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return memory.total if memory else None


def _answer(question: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a query, None if it fails: a missing detail must not hide the GPU."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def sysfs_address(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it ("0000:18:00.0"); NVML writes the domain with eight digits."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
