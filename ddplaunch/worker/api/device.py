"""Chooses the device of this worker. Refuses one that does not exist; initialises no device, so that a fork after it is safe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from ddplaunch.worker.api.ranks import number

COUNTED = ("cuda", "xpu")  # kinds of which a machine has several; ROCm's are called cuda too


def device() -> torch.device:
    """Return the device that this worker should use.

    That is `DDPLAUNCH_DEVICE`, which ddplaunch sets. Without it, under torchrun or plain `python`, it is the
    accelerator (CUDA, ROCm or Intel) with the number `LOCAL_RANK`; the only one, if torch sees one; or else the CPU.
    Apple's MPS is never chosen by itself, since no backend of torch.distributed carries its tensors.

    Raises:
        ValueError: the variables name a device that torch does not have here.
    """
    return torch.device(choose(os.environ, visible))


def choose(env: Mapping[str, str], count: Callable[[str], int]) -> str:
    """Return the name of the device from the variables; `count` gives the number of a kind. Pure.

    Raises: ValueError: there is no such device.
    """
    name = env.get("DDPLAUNCH_DEVICE", "")
    if not name:
        kind = next((kind for kind in COUNTED if count(kind)), "cpu")
        return kind if kind == "cpu" else _by_local_rank(kind, env, count(kind))
    kind, colon, index = name.partition(":")
    if not _is_known(name):
        raise ValueError(f"DDPLAUNCH_DEVICE is {name!r}, which is no device of torch; use cpu, cuda:0 or xpu:0")
    if kind not in COUNTED:
        return name
    there = count(kind)
    if there == 0 or (colon and int(index) >= there):
        seen = f"only {there} of that kind" if there else "none of that kind"
        raise ValueError(f"DDPLAUNCH_DEVICE is {name!r}, but torch {torch.__version__} sees {seen} here{_hidden(env)}")
    return name if colon else _by_local_rank(kind, env, there)


def visible(kind: str) -> int:
    """Count the devices of a kind that torch can use, without starting CUDA where NVML can tell."""
    return int(torch.cuda.device_count() if kind == "cuda" else torch.xpu.device_count())


def _by_local_rank(kind: str, env: Mapping[str, str], there: int) -> str:
    """Return the device with the number LOCAL_RANK, of `there` devices of this kind."""
    if there == 1:  # the scheduler hides the others from this worker, or all share this one
        return f"{kind}:0"
    local_rank = number("LOCAL_RANK", env)
    if local_rank >= there:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but torch sees only {there} {kind} devices here{_hidden(env)}: "
            f"start at most {there} workers on this node, or set DDPLAUNCH_DEVICE to the one to share"
        )
    return f"{kind}:{local_rank}"


def _is_known(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _hidden(env: Mapping[str, str]) -> str:
    """Name the variables that may hide devices."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    hiding = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    return f" ({hiding})" if hiding else ""
