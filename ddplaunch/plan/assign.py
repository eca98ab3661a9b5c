"""How many workers a node has and which accelerators each of them owns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.cluster import Task
from ddplaunch.devices import Device, Hardware
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec

Owned = tuple[tuple[Device, ...], ...]


def count(spec: JobSpec, devices: Sequence[Device], hardware: Hardware) -> tuple[int, str]:
    """Give the number of workers of this node and where it came from.

    Raises:
        LaunchError: "gpu" on a node without any, or fewer devices than one worker needs.
    """
    asked = spec.nproc_per_node
    if isinstance(asked, int):
        return asked, spec.origin("nproc_per_node")
    origin = f"{spec.asked('nproc_per_node', asked)}: " if asked else ""
    if asked == "gpu" and not devices:
        raise LaunchError(
            f"{origin}this node has no accelerator ({hardware.device_source})", hint="--nproc-per-node cpu, or a number"
        )
    if asked == "cpu" or (asked == "auto" and not devices):
        return hardware.usable_cpus, f"{origin}{_many(hardware.usable_cpus, 'usable CPU')}"
    if not devices:
        return 1, "no accelerator, so one worker"
    workers = len(devices) * (spec.workers_per_gpu or 1) // (spec.gpus_per_worker or 1)
    if workers == 0:
        raise _too_few(spec, 1, devices)
    reason = f"{origin}{_many(len(devices), 'accelerator')}"
    if spec.gpus_per_worker:
        reason += f", {spec.gpus_per_worker} for each worker"
    if spec.workers_per_gpu:
        reason += f", {_many(spec.workers_per_gpu, 'worker')} on each"
    return workers, reason


def own(spec: JobSpec, workers: int, devices: Sequence[Device]) -> Owned:
    """Give each local worker its devices, by local rank.

    Raises:
        LaunchError: --gpus-per-worker or --workers-per-gpu cannot be met by these devices.
    """
    if each := spec.gpus_per_worker:
        if workers * each > len(devices):
            raise _too_few(spec, workers, devices)
        return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(workers))
    if sharing := spec.workers_per_gpu:
        if workers > sharing * len(devices):
            raise _too_many(spec, workers, devices)
        return tuple((devices[i // sharing],) for i in range(workers))
    # a job for the CPUs touches no accelerator
    if not devices or spec.nproc_per_node == "cpu":
        return ((),) * workers
    return tuple((devices[i % len(devices)],) for i in range(workers))


def of_task(task: Task, devices: Sequence[Device]) -> Owned:
    """Give the one worker of a command that was started for each rank its device.

    Where the cluster shows each command its own devices only, the local rank counts on and says nothing.
    """
    if not devices:
        return ((),)
    return ((devices[task.local_rank % len(devices)],),) if len(devices) > 1 else ((devices[0],),)


def _too_few(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    each = spec.gpus_per_worker or 1
    fit = len(devices) // each
    hint = f"--gpus-per-worker {len(devices)}" if devices else "leave --gpus-per-worker out"
    return LaunchError(
        f"{spec.asked('gpus_per_worker', each)}: {_need(workers, workers * each, devices)}",
        hint=f"--nproc-per-node {fit}" if fit else hint,
    )


def _too_many(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    sharing = spec.workers_per_gpu or 1
    return LaunchError(
        f"{spec.asked('workers_per_gpu', sharing)}: {_need(workers, -(-workers // sharing), devices)}",
        hint=f"--nproc-per-node {sharing * len(devices)}" if devices else "leave --workers-per-gpu out",
    )


def _need(workers: int, devices: int, there: Sequence[Device]) -> str:
    need = "needs" if workers == 1 else "need"
    have = f"only {len(there)}" if there else "none"
    return f"{_many(workers, 'worker')} {need} {_many(devices, 'GPU')}, but the job has {have}"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def simulated(devices: Sequence[Device], place: int, nodes: int, how: str | None) -> tuple[Device, ...]:
    """Give the devices of one of several simulated nodes: equal parts where there is one for each, else all of them."""
    size = len(devices) // nodes
    if how != "divide" or size == 0:
        return tuple(devices)
    return tuple(devices[place * size : (place + 1) * size])
