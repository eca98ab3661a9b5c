"""With whom a command shares its CPUs that was started once for each rank, beside others on its node. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.cluster import Task
from ddplaunch.devices import Device, Hardware
from ddplaunch.plan.assign import Owned, of_task
from ddplaunch.record import replace


def around(task: Task, hardware: Hardware, devices: Sequence[Device]) -> Owned | None:
    """Give the devices of all commands that share the CPUs of this one, by local rank; None: they are its own.

    A cluster that binds each to CPUs of its own leaves it fewer than all of them have together. A command that is not shown
    the devices of the others gives none to anybody.
    """
    together = min((number for number in (task.node_cpus, hardware.machine_cpus) if number), default=0)
    if len(hardware.cpus) < together:
        return None
    if len(devices) < 2:
        return ((),) * task.local_world_size
    return tuple(of_task(replace(task, local_rank=rank), devices)[0] for rank in range(task.local_world_size))
