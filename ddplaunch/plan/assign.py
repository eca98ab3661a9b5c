"""How many workers a node has and which accelerators each of them owns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
    by_devices = len(devices) * (spec.workers_per_gpu or 1) // (spec.gpus_per_worker or 1)
    if asked == "cpu" or (asked == "auto" and not devices):
        return hardware.usable_cpus, f"{hardware.usable_cpus} usable CPUs"
    if asked == "gpu" and not devices:
        raise LaunchError(
            f"{spec.origin('nproc_per_node')} gpu: this node has no accelerator ({hardware.device_source})",
            hint="--nproc-per-node cpu, or a number",
        )
    if devices and by_devices == 0:
        raise _too_few(spec, 1, devices)
    if devices:
        return by_devices, f"{len(devices)} accelerators ({hardware.device_source})"
    return 1, "no accelerator, so one worker"


def own(spec: JobSpec, workers: int, devices: Sequence[Device]) -> Owned:
    """Give each local worker its devices, by local rank.

    Raises:
        LaunchError: --gpus-per-worker or --workers-per-gpu cannot be met by these devices.
    """
    if spec.gpus_per_worker:
        each = spec.gpus_per_worker
        if workers * each > len(devices):
            raise _too_few(spec, workers, devices)
        return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(workers))
    if spec.workers_per_gpu:
        if workers > spec.workers_per_gpu * len(devices):
            raise LaunchError(
                f"{workers} workers with {spec.origin('workers_per_gpu')} {spec.workers_per_gpu} need "
                f"{-(-workers // spec.workers_per_gpu)} GPUs, but this node has {len(devices)}",
                hint=f"--nproc-per-node {spec.workers_per_gpu * len(devices)}" if devices else "--nproc-per-node alone",
            )
        return tuple((devices[i // spec.workers_per_gpu],) for i in range(workers))
    # a job for the CPUs touches no accelerator
    if not devices or spec.nproc_per_node == "cpu":
        return ((),) * workers
    return tuple((devices[i % len(devices)],) for i in range(workers))


def _too_few(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    each = spec.gpus_per_worker or 1
    fit = len(devices) // each
    return LaunchError(
        f"{workers} worker{'s' * (workers != 1)} with {spec.origin('gpus_per_worker')} {each} "
        f"need{'s' * (workers == 1)} {workers * each} GPUs, but this node has {len(devices)}",
        hint=f"--nproc-per-node {fit}" if fit else "leave --gpus-per-worker out",
    )
