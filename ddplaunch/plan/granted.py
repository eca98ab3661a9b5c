"""Whether the workers can use the accelerators that the job was granted, or that its backend needs. Pure."""

from __future__ import annotations

from ddplaunch.cluster import Allocation
from ddplaunch.devices.node import Node
from ddplaunch.errors import LaunchError
from ddplaunch.plan import backend
from ddplaunch.plan.assign import Owned
from ddplaunch.spec import JobSpec, ProgramKind

_ON_CPUS = "to train on the CPUs all the same: --devices cpu"


def check(spec: JobSpec, allocation: Allocation, node: Node, owned: Owned) -> str:
    """Return a warning if the job asks for no accelerator, but was granted some that cannot be used; "" if all is well.

    Raises:
        LaunchError: it does not ask for the CPUs, so that it would train there unnoticed; or its backend needs devices.
    """
    why = _why_not(spec, node)
    if spec.backend in ("nccl", "xccl") and (why or not all(owned)):
        reason = why or f"there is no accelerator for {'some workers' if any(owned) else 'the workers'}"
        raise LaunchError(f"{spec.asked('backend', spec.backend)}: {reason}", hint="--backend gloo")
    granted = node.hardware.granted
    if not granted or not why:
        return ""
    text = why if granted in why else f"{why}, although {granted}"
    if not _asks_for_cpus(spec, allocation):
        install = "install a torch that is built for these devices; " if node.hardware.devices else ""
        raise LaunchError(text, hint=install + _ON_CPUS)
    return text


def _asks_for_cpus(spec: JobSpec, allocation: Allocation) -> bool:
    """Whether the user has said how many workers there are, or what they use, so that it depends on no accelerator."""
    workers = allocation.nproc_per_node if spec.nproc_per_node is None else spec.nproc_per_node
    return isinstance(workers, int) or workers == "cpu" or spec.devices == ("cpu",) or spec.backend != "auto"


def _why_not(spec: JobSpec, node: Node) -> str | None:
    """Why workers cannot use accelerators here, "torch 2.13.0+cpu is a CPU build"; None if they can."""
    found = node.hardware.devices
    if not found:
        return node.hardware.notes[0] if node.hardware.notes else _without(node)
    # a command may bring another torch, as a container does
    if node.build is None or spec.program.kind is ProgramKind.COMMAND:
        return None
    if why := backend.cannot_use(node.build, found[0].kind):
        return why
    lacks_nccl = spec.backend == "nccl" and not node.build.nccl
    return f"torch {node.build.version} was built without NCCL" if lacks_nccl else None


def _without(node: Node) -> str:
    source = node.hardware.device_source
    return "this node has no accelerator" if source == "none found" else source
