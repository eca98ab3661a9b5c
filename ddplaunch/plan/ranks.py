"""How many workers each node has, and so the ranks of all workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ddplaunch.plan import PlannedAgent
from ddplaunch.plan.assign import too_few_devices
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.devices.node import Node
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count


def count_workers(spec: JobSpec, allocation: Allocation, node: Node) -> tuple[int, str]:
    """Return how many workers this agent has, and what decided that: the cluster, an option or the number of devices.

    --nproc-per-node is a number, "gpu" (by the devices), "cpu" (one for each), or "auto": "gpu" if there are devices, else "cpu".
    Without it, the cluster decides if it says how many; else it is as "auto", but one worker on a node without devices.

    Raises:
        LaunchError: "gpu" on a node without accelerators, or fewer devices than one worker needs.
    """
    asked, devices, hardware = spec.nproc_per_node, node.devices, node.hardware
    if allocation.task is not None:
        return 1, f"{allocation.cluster} has started a command for each rank"
    if asked is None and allocation.nproc_per_node is not None:
        return allocation.nproc_per_node, allocation.cluster
    if asked is None and allocation.tasks_per_node and not devices:
        return allocation.tasks_per_node, f"no accelerator: as many as tasks per node in {allocation.cluster}"
    if isinstance(asked, int):
        return asked, spec.origin("nproc_per_node")
    origin = f"{spec.typed('nproc_per_node', asked)}: " if asked else ""  # "--nproc-per-node auto: "
    if asked == "gpu" and not devices:
        raise LaunchError(
            f"{origin}this node has no accelerator ({hardware.device_source})", hint="--nproc-per-node cpu, or a number"
        )
    if asked == "cpu" or (asked == "auto" and not devices):
        return hardware.usable_cpus, f"{origin}{count(hardware.usable_cpus, 'usable CPU')}"
    if not devices:
        return 1, "no accelerator, so one worker"
    workers = len(devices) * (spec.workers_per_gpu or 1) // (spec.gpus_per_worker or 1)
    if workers == 0:
        raise too_few_devices(spec, 1, devices)
    reason = f"{origin}{count(len(devices), 'accelerator')}"
    if spec.gpus_per_worker:
        reason += f", {spec.gpus_per_worker} for each worker"
    if spec.workers_per_gpu:
        reason += f", {count(spec.workers_per_gpu, 'worker')} on each"
    return workers, reason


def agent_index(allocation: Allocation) -> int:
    """Return the index of this agent among those of the job, in order of their ranks."""
    if allocation.task is not None:
        return allocation.task.rank
    return allocation.node_rank or 0  # assigned later by the coordinator


def host_of(allocation: Allocation, own: str) -> str:
    """Return the name of this host: as the user or the cluster has it, else its own."""
    index, hosts = allocation.node_rank, allocation.hosts
    return hosts[index] if index is not None and len(hosts) == allocation.nnodes[1] else own


def ranks_of_all(agents: Sequence[PlannedAgent]) -> list[range]:
    """Return the ranks of each agent: they are node-major, those of the agents before it come first."""
    ends = accumulate(agent.workers for agent in agents)
    return [range(end - agent.workers, end) for agent, end in zip(agents, ends, strict=True)]


def agents_like(allocation: Allocation, own_index: int, node: Node, workers: int) -> tuple[PlannedAgent, ...]:
    """Return the agents of a job whose nodes are all assumed to be like this one."""
    number = allocation.task.world_size if allocation.task is not None else allocation.nnodes[1]
    hosts = allocation.hosts if len(allocation.hosts) == number else ()
    return tuple(
        PlannedAgent(hosts[index] if hosts else node.host if index == own_index else f"node-{index}", workers)
        for index in range(number)
    )
