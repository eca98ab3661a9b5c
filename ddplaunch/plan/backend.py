"""Which process-group backend suits the devices that the workers own. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.devices import Device
from ddplaunch.torchbuild import TorchBuild


def choose(owned: Sequence[Sequence[Device]], build: TorchBuild | None) -> tuple[str, str]:
    """Give the backend that `auto` stands for and the reason in words.

    `owned[i]` are the devices of local worker i; `build` is what the workers' torch was built with, None if unknown.
    """
    devices = {device.token for own in owned for device in own}
    if not devices:
        return "gloo", "no accelerator"
    if any(not own for own in owned):
        return "gloo", "some workers have no accelerator"
    kind = owned[0][0].kind
    if sum(len(own) for own in owned) > len(devices):
        sharing = f"{len(owned)} workers share {_count(len(devices), kind)}"
        return "gloo", f"{sharing}, which NCCL refuses" if kind == "cuda" else sharing
    if kind == "xpu":
        return "xccl", "every worker has an Intel GPU of its own"
    if build is not None and build.cuda is None and build.hip is None:
        return "gloo", f"torch {build.version} is a CPU build"
    if build is not None and not build.nccl:
        return "gloo", f"torch {build.version} was built without NCCL"
    return "nccl", "every worker has a GPU of its own"


def _count(number: int, kind: str) -> str:
    noun = "GPU" if kind == "cuda" else "device"
    return f"{number} {noun}{'s' * (number != 1)}"
