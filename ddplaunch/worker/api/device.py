"""Chooses the device of this worker. Refuses one that is not there; touches no device, so that a fork after it is safe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from ddplaunch.worker.api.place import number

COUNTED = ("cuda", "xpu")  # kinds of which a machine has several; ROCm's are called cuda too


def device() -> torch.device:
    """Return the device that this worker should use.

    That is what `DDPLAUNCH_DEVICE` says, which ddplaunch sets. Without it, under torchrun or plain `python`, it is the
    accelerator (CUDA, ROCm or Intel) with the number `LOCAL_RANK`; the only one, if torch sees one; or else the CPU.
    Apple's MPS is never chosen by itself, since no backend of torch.distributed carries its tensors.

    Raises:
        ValueError: the variables name a device that torch does not have here.
    """
    return torch.device(choose(os.environ, visible))


def choose(env: Mapping[str, str], count: Callable[[str], int]) -> str:
    """Give the name of the device that the variables mean; `count` says how many of a kind there are. Pure.

    Raises: ValueError: there is no such device.
    """
    told = env.get("DDPLAUNCH_DEVICE", "")
    if not told:
        kind = next((kind for kind in COUNTED if count(kind)), "cpu")
        return kind if kind == "cpu" else _by_local_rank(kind, env, count(kind))
    kind, colon, index = told.partition(":")
    if not _is_known(told):
        raise ValueError(f"DDPLAUNCH_DEVICE is {told!r}, which is no device of torch; say cpu, cuda:0 or xpu:0")
    if kind not in COUNTED:
        return told
    there = count(kind)
    if there == 0 or (colon and int(index) >= there):
        seen = f"only {there} of that kind" if there else "none of that kind"
        raise ValueError(f"DDPLAUNCH_DEVICE is {told!r}, but torch {torch.__version__} sees {seen} here{_hidden(env)}")
    return told if colon else _by_local_rank(kind, env, there)


def visible(kind: str) -> int:
    """Count the devices of a kind that torch can use, without starting CUDA where NVML can tell."""
    return int(torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count())


def _by_local_rank(kind: str, env: Mapping[str, str], there: int) -> str:
    if there == 1:  # bound by the scheduler, which hides the others, or shared
        return f"{kind}:0"
    local_rank = number("LOCAL_RANK", env)
    if local_rank >= there:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but torch sees only {there} {kind} devices here{_hidden(env)}: "
            f"start at most {there} workers on this node, or say in DDPLAUNCH_DEVICE which one to share"
        )
    return f"{kind}:{local_rank}"


def _is_known(told: str) -> bool:
    try:
        torch.device(told)
    except RuntimeError:
        return False
    return True


def _hidden(env: Mapping[str, str]) -> str:
    """Name the variables that may be why there are so few."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    said = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    return f" ({said})" if said else ""
