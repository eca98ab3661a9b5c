"""How many workers a node has and which accelerators each of them owns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.cluster import Task
from ddplaunch.devices import Device, Hardware
from ddplaunch.devices.node import Node
from ddplaunch.errors import LaunchError, count
from ddplaunch.spec import JobSpec

Owned = tuple[tuple[Device, ...], ...]


def own(spec: JobSpec, workers: int, devices: Sequence[Device]) -> Owned:
    """Return each local worker its devices, by local rank.

    Raises:
        LaunchError: --gpus-per-worker or --workers-per-gpu cannot be met by these devices.
    """
    if each := spec.gpus_per_worker:
        if workers * each > len(devices):
            raise too_few_devices(spec, workers, devices)
        return tuple(tuple(devices[i * each : (i + 1) * each]) for i in range(workers))
    if sharing := spec.workers_per_gpu:
        if workers > sharing * len(devices):
            raise _too_many_workers(spec, workers, devices)
        return tuple((devices[i // sharing],) for i in range(workers))
    # a job for the CPUs touches no accelerator
    if not devices or spec.nproc_per_node == "cpu":
        return ((),) * workers
    return tuple((devices[i % len(devices)],) for i in range(workers))


def of_task(task: Task, devices: Sequence[Device]) -> Owned:
    """Return the one worker of a command that was started for each rank its device.

    Where the cluster shows each command its own devices only, the local rank is not an index of them.
    """
    if not devices:
        return ((),)
    return ((devices[task.local_rank % len(devices)],),) if len(devices) > 1 else ((devices[0],),)


def too_few_devices(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    """Make the error that there are not enough devices for --gpus-per-worker."""
    each = spec.gpus_per_worker or 1
    fit = len(devices) // each
    hint = f"--gpus-per-worker {len(devices)}" if devices else "leave --gpus-per-worker out"
    return LaunchError(
        f"{spec.asked('gpus_per_worker', each)}: {_need(workers, workers * each, devices)}",
        hint=f"--nproc-per-node {fit}" if fit else hint,
    )


def _too_many_workers(spec: JobSpec, workers: int, devices: Sequence[Device]) -> LaunchError:
    sharing = spec.workers_per_gpu or 1
    return LaunchError(
        f"{spec.asked('workers_per_gpu', sharing)}: {_need(workers, -(-workers // sharing), devices)}",
        hint=f"--nproc-per-node {sharing * len(devices)}" if devices else "leave --workers-per-gpu out",
    )


def _need(workers: int, needed: int, devices: Sequence[Device]) -> str:
    need = "needs" if workers == 1 else "need"
    have = f"only {len(devices)}" if devices else "none"
    return f"{count(workers, 'worker')} {need} {count(needed, 'GPU')}, but the job has {have}"


def simulated(here: Node, place: int, nodes: int, how: str | None) -> Node:
    """Return one of several nodes simulated here: with an equal part of the devices if there is one for each, else with all."""
    if how is None or nodes == 1:
        return here
    size = len(here.devices) // nodes
    if how != "divide" or size == 0:
        return replace(here, shared=True)
    return replace(here, devices=here.devices[place * size : (place + 1) * size])


def sharing_workers(task: Task, hardware: Hardware, devices: Sequence[Device]) -> Owned | None:
    """Return the devices of all commands that share the CPUs of this one, by local rank; None: they are its own.

    A cluster that binds each to CPUs of its own leaves it fewer than all of them have together. A command that is not shown
    the devices of the others assigns none.
    """
    together = min((number for number in (task.node_cpus, hardware.machine_cpus) if number), default=0)
    if len(hardware.cpus) < together:
        return None
    if len(devices) < 2:
        return ((),) * task.local_world_size
    return tuple(of_task(replace(task, local_rank=rank), devices)[0] for rank in range(task.local_world_size))
