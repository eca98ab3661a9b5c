"""The state of all NVIDIA GPUs of this machine, for the doctor: errors, brakes, links, who uses them. Asks NVML, changes nothing.

No job imports this module. A question that a driver does not know has None for its answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import byref
from itertools import combinations
from typing import Any

import pynvml  # type: ignore[import-untyped]  # it ships no annotations
from msgspec import Struct

from ddplaunch.plan.devices.nvidia import NvmlError, ask_nvml, pci_address

_READ = 0  # NVML_P2P_CAPS_INDEX_*: pynvml 12 and 13 have a tuple for the first


class Holder(Struct, frozen=True):
    """A process with memory on a GPU."""

    pid: int  # of the machine, which a container may not see
    memory: int | None  # bytes


class Health(Struct, frozen=True, kw_only=True):
    """The state of one GPU."""

    index: int  # NVML's, which nvidia-smi shows
    uuid: str | None = None
    name: str | None = None
    pci: str | None = None  # sysfs form in lower case
    lost: bool = False  # fell off the bus
    memory: int = 0  # bytes
    used: int = 0
    capability: tuple[int, int] | None = None
    persistence: bool | None = None
    exclusive: bool = False  # it takes one process only
    prohibited: bool = False  # it takes none
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remap_pending: bool = False  # rows or pages are to be replaced at the next reset
    remap_failed: bool = False  # and could not be replaced
    brakes: tuple[str, ...] = ()  # why its clocks are low, unless that is idleness or a setting
    pci_width: tuple[int, int] | None = None  # lanes now, and at most
    links: tuple[int, int] | None = None  # NVLinks that are up, and all
    fabric_starts: bool = False  # the fabric manager has not finished, and CUDA waits for that
    holders: tuple[Holder, ...] = ()


class Pair(Struct, frozen=True):
    """How two GPUs reach each other."""

    first: int
    second: int
    peer_to_peer: bool | None  # whether one reads the other's memory; None: not known


class Machine(Struct, frozen=True, kw_only=True):
    """All GPUs, and their driver."""

    driver: str = ""  # "580.95.05"
    cuda: tuple[int, int] = (0, 0)  # the newest that the driver runs
    gpus: tuple[Health, ...] = ()
    pairs: tuple[Pair, ...] = ()


def read() -> Machine:
    """Ask NVML about all GPUs.

    Raises:
        NvmlError: the library or the driver is missing or does not work.
    """
    try:
        pynvml.nvmlInit()
        handles = {index: _handle(index) for index in range(pynvml.nvmlDeviceGetCount())}
        version = ask_nvml(pynvml.nvmlSystemGetCudaDriverVersion) or 0  # 13000
        known = {index: handle for index, handle in handles.items() if handle is not None}  # None: not this user's
        return Machine(
            driver=ask_nvml(pynvml.nvmlSystemGetDriverVersion) or "",
            cuda=(version // 1000, version % 1000 // 10),
            gpus=tuple(
                Health(index=index, lost=True) if handle is _LOST else _health(index, handle)
                for index, handle in known.items()
            ),
            pairs=tuple(
                _pair(one, other, known[one], known[other])
                for one, other in combinations([index for index, handle in known.items() if handle is not _LOST], 2)
            ),
        )
    except pynvml.NVMLError as error:
        raise NvmlError(str(error).rstrip(".")) from None


_LOST = object()


def _handle(index: int) -> Any:
    """Return NVML's handle of a GPU, `_LOST`, or None if this user may not use it."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            return None
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            return _LOST
        raise


def _health(index: int, handle: Any) -> Health:
    """Return the state of a GPU; what its driver does not know is None or 0."""
    memory = ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mode = ask_nvml(pynvml.nvmlDeviceGetComputeMode, handle)
    # rows of memory that were replaced after correctable and uncorrectable errors, and two flags
    _, _, is_remap_pending, has_remap_failed = ask_nvml(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    persistence = ask_nvml(pynvml.nvmlDeviceGetPersistenceMode, handle)
    width, most_width = (
        ask_nvml(question, handle)
        for question in (pynvml.nvmlDeviceGetCurrPcieLinkWidth, pynvml.nvmlDeviceGetMaxPcieLinkWidth)
    )
    return Health(
        index=index,
        uuid=ask_nvml(pynvml.nvmlDeviceGetUUID, handle),
        name=ask_nvml(pynvml.nvmlDeviceGetName, handle),
        pci=pci_address(handle),
        memory=memory.total if memory else 0,
        used=memory.used if memory else 0,
        capability=ask_nvml(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        persistence=None if persistence is None else bool(persistence),
        exclusive=mode in (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD),
        prohibited=mode == pynvml.NVML_COMPUTEMODE_PROHIBITED,
        uncorrected=ask_nvml(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        # older GPUs retire pages instead of remapping rows
        remap_pending=bool(is_remap_pending or ask_nvml(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)),
        remap_failed=bool(has_remap_failed),
        brakes=_throttle_reasons(ask_nvml(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
        pci_width=(width, most_width) if width and most_width else None,
        links=_count_nvlinks(handle),
        fabric_starts=_is_fabric_starting(handle),
        holders=tuple(Holder(one.pid, one.usedGpuMemory) for one in _processes(handle)),
    )


def _processes(handle: Any) -> Iterable[Any]:
    """Return the processes on a GPU; drivers before R510 have version 2 of the call alone."""
    calls = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
    return next((found for call in calls if (found := ask_nvml(call, handle)) is not None), ())


def _throttle_reasons(reasons: int) -> tuple[str, ...]:
    named = {
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "heat (hardware)",
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "heat (driver)",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "the power supply",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "heat or power (hardware)",
    }
    return tuple(name for bit, name in named.items() if reasons & bit)


def _count_nvlinks(handle: Any) -> tuple[int, int] | None:
    """Count the NVLinks that are up, and all; None if the GPU has none."""
    states = [ask_nvml(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    known = [state for state in states if state is not None]
    return (sum(map(bool, known)), len(known)) if known else None


def _is_fabric_starting(handle: Any) -> bool:
    """Whether the GPU belongs to an NVSwitch whose manager has not finished: cudaErrorSystemNotReady until then."""
    if not hasattr(pynvml, "c_nvmlGpuFabricInfo_t"):
        return False
    info = pynvml.c_nvmlGpuFabricInfo_t()
    # by reference: pynvml passes the argument on as it is, and the library would crash on a structure
    if ask_nvml(pynvml.nvmlDeviceGetGpuFabricInfo, handle, byref(info)) is None:
        return False
    return info.state in (pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)


def _pair(one: int, other: int, first: Any, second: Any) -> Pair:
    read_status = ask_nvml(pynvml.nvmlDeviceGetP2PStatus, first, second, _READ)
    return Pair(
        one,
        other,
        peer_to_peer=None if read_status is None else read_status == pynvml.NVML_P2P_STATUS_OK,
    )
