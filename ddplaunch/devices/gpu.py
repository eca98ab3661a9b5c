"""An NVIDIA GPU as the machine has it, before CUDA_VISIBLE_DEVICES is applied. Pure data."""

from __future__ import annotations

from ddplaunch.record import record


@record(kw_only=True)
class Instance:
    """One MIG instance of a GPU."""

    uuid: str  # "MIG-..."
    alias: str | None = None  # as drivers before R470 wrote it: MIG-<GPU UUID>/<GPU instance>/<compute instance>
    name: str | None = None
    memory: int | None = None  # bytes


@record(kw_only=True)
class Gpu:
    """One GPU that this process may open, or could open if it were not lost."""

    uuid: str | None = None  # "GPU-..."
    name: str | None = None
    memory: int | None = None  # bytes
    pci: str | None = None  # sysfs form in lower case
    instances: tuple[Instance, ...] | None = None  # None: MIG is off
    lost: bool = False  # fell off the bus; only a reset brings it back
