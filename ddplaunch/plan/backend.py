"""Which process-group backend suits the devices that the workers own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.devices import Device
from ddplaunch.errors import count

if TYPE_CHECKING:
    from ddplaunch.devices.torch_build import TorchBuild


def choose(owned: Sequence[Sequence[Device]], build: TorchBuild | None) -> tuple[str, str]:
    """Return the backend that `auto` stands for and the reason.

    `owned[i]` are the devices of local worker i; `build` is what the workers' torch was built with, None if unknown.
    """
    gpus = [{_gpu(device) for device in own} for own in owned]
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


def _gpu(device: Device) -> str:
    """What NCCL takes for the device: it sees only the GPU behind a MIG instance (issue 1716 of NVIDIA/nccl)."""
    return device.pci or device.token if device.is_mig else device.token
