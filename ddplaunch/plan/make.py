"""Makes the plan of a job, on each node for its workers. Pure: what the machine has comes in as `Node`, nothing is inspected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ddplaunch.plan import Agreed, Plan, PlannedAgent, WorkerPlan, assign, variables
from ddplaunch.plan.cluster import Allocation, Task
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.ranks import agent_index, agents_like, count_workers, host_of, ranks_of_all
from ddplaunch.plan.variables import threads
from ddplaunch.spec.job import JobSpec, ProgramKind, Streams
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.redaction import is_secret
from ddplaunch.system.words import count

_MOST_ON_A_CPU = 16  # workers, before that is worth a note


def make_plan(
    spec: JobSpec,
    allocation: Allocation,
    node: Node,
    *,
    run_id: str,
    agreed: Agreed | None = None,
    interface: str | None = None,
    agents: tuple[PlannedAgent, ...] | None = None,
    ranks: Sequence[range] | None = None,
) -> Plan:
    """Decide everything about the job. Until it is known what the nodes `agreed` on, all others count as equal to this one.

    `interface` is the network interface that leads to the other nodes; None: it is not chosen. `agents` are all that were
    agreed on, and `ranks` theirs, from a caller that makes the plans of many nodes and counts them once; None: they are counted.

    Raises:
        LaunchError: what was asked for does not fit this node.
    """
    workers, workers_reason = count_workers(spec, allocation, node)
    task = allocation.task  # None unless a command was started for each rank
    owned = assign.divide_devices(spec, workers, node.devices) if task is None else assign.of_task(task, node.devices)
    backend, backend_reason = _choose_backend(spec, allocation, node, owned, agreed)
    here = _decide_here(spec, allocation, node, owned, agreed, agents, ranks)
    omp, threads_reason = threads(spec, here.cpus.usable, here.cpus.sharers, here.caller.get("OMP_NUM_THREADS"))
    common = variables.common(spec, here.caller, run_id=run_id, backend=backend, address=here.address, omp=omp)
    if interface is not None:
        common.update(variables.socket_interface_variables(interface, here.caller))
    of_each: Sequence[Mapping[str, str]] = [{}] * workers
    if spec.mps:
        assign.check_mps(spec, owned, node.mps_control, started_per_rank=task is not None)
        of_each = assign.mps_shares(owned, here.caller)
    plans = tuple(_plan_worker(here, index, {**common, **own}) for index, own in enumerate(of_each))
    start = _choose_start(here, plans)
    init_method = spec.init_method
    if init_method.startswith("file:"):
        init_method = f"file:{os.path.abspath(init_method.removeprefix('file:'))}"
    return Plan(
        run_id=run_id,
        cluster=allocation.cluster,
        nnodes=here.nnodes,
        node_rank=here.node_rank,
        agents=here.agents,
        master_addr=here.address,
        master_port=allocation.endpoint.port or None,
        init_method=init_method,
        backend=backend,
        pin=here.pin,
        interpreter=None if spec.program.kind is ProgramKind.COMMAND else spec.program.python or node.python,
        workers=plans,
        preload=start.preload,
        keep_warm=start.keep_warm,
        secret=frozenset(name for name, _ in spec.env if name in spec.origins_of_secrets or is_secret(name)),
        preload_is_asked=spec.start_method != "auto",
        authenticated=allocation.authenticated,
        requeues=allocation.requeues,
        reasons=_reasons(here, start, workers=workers_reason, backend=backend_reason, threads=threads_reason),
        notes=(*_notes(here), *start.notes),
    )


def plan_of_job(
    spec: JobSpec, allocation: Allocation, *, run_id: str, python: str, agreed: Agreed | None = None
) -> Plan:
    """Return the plan of a job as the command has it that starts all agents: without workers, for these are on the hosts.

    `python` runs the program there. Until it is known what the nodes `agreed` on, each host counts for one worker.
    """
    hosts, endpoint = [host.address for host in allocation.hosts_to_start_on], allocation.endpoint
    agents = tuple(PlannedAgent(host, 1) for host in hosts) if agreed is None else agreed.agents
    return Plan(
        run_id=run_id,
        cluster=allocation.cluster,
        nnodes=len(agents),
        node_rank=0,
        agents=agents,
        master_addr=hosts[0] if agreed is None else agreed.address,
        master_port=endpoint.port or None,
        init_method="env",  # matters to workers alone
        backend=spec.backend if agreed is None else agreed.backend,
        pin=spec.pin or "auto",
        interpreter=None if spec.program.kind is ProgramKind.COMMAND else spec.program.python or python,
        workers=(),
        authenticated=allocation.authenticated,
        requeues=allocation.requeues,
        reasons={"backend": "" if agreed is None else agreed.backend_reason, "master_port": endpoint.port_reason},
    )


def _reasons(here: _Here, start: _Start, *, workers: str, backend: str, threads: str) -> dict[str, str]:
    """Return why each value of the plan is as it is, in the order in which `ddplaunch plan` shows the values."""
    spec, endpoint, hardware = here.spec, here.allocation.endpoint, here.node.hardware
    used, found = len({device for own in here.owned for device in own}), len(hardware.devices)
    # shown behind the number of devices that are used
    devices = hardware.device_source if used == found else f"of {found} ({hardware.device_source})"
    return {
        "workers": workers,
        **({"python": spec.origins["python"]} if "python" in spec.origins else {}),
        "devices": devices if spec.devices is None else f"{spec.origin('devices')}, {devices}",
        "backend": backend,
        "threads": threads,
        "master_addr": endpoint.address_reason,
        "master_port": endpoint.port_reason,
        "pin": here.pin_reason,
        **start.reasons,  # of the fork server
    }


def _choose_backend(
    spec: JobSpec, allocation: Allocation, node: Node, owned: assign.Owned, agreed: Agreed | None
) -> tuple[str, str]:
    """Return the backend and the reason: what the nodes agreed on, else what was asked for, else what suits the devices.

    Raises:
        LaunchError: the workers of this node cannot use its accelerators, though the job needs them; agreed or not.
    """
    warning = assign.check_granted(spec, allocation, node, owned)
    if agreed is not None:
        return agreed.backend, agreed.backend_reason
    if spec.backend != "auto":
        chosen, reason = spec.backend, spec.origin("backend")
    else:
        chosen, reason = assign.choose_backend(owned, node.build)
        if node.shared and chosen in ("nccl", "xccl"):
            chosen, reason = "gloo", "the simulated nodes share their devices, which NCCL refuses"
    if warning:  # which may give the same reason
        reason = f"warning: {warning}" if reason in warning else f"{reason}; warning: {warning}"
    return chosen, reason


def _check_named_ranks(spec: JobSpec, *, world_size: int) -> None:
    """Refuse to debug or wrap a rank that the job does not have."""
    has = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 alone"
    for flag, ranks in (("--debugpy", spec.debugpy_ranks), ("--wrap-ranks", spec.wrap_ranks)):
        if ranks and max(ranks) >= world_size:
            raise LaunchError(f"{flag}: there is no rank {max(ranks)}, the job has {has}", hint=f"{flag} 0")
    if spec.debug_rank is not None and spec.debug_rank >= world_size:
        raise LaunchError(f"{spec.typed('debug_rank', spec.debug_rank)}: the job has {has}", hint="--debug 0")


class _Cpus(Struct, frozen=True):
    """The CPUs of the workers of this node."""

    of_workers: Sequence[tuple[int, ...]]  # by local index; () for a worker that is not bound
    usable: int  # how many CPUs the workers can use that share those of the node
    sharers: int  # how many workers these are
    notes: tuple[str, ...]


def _bind_to_cpus(spec: JobSpec, task: Task | None, node: Node, owned: assign.Owned) -> _Cpus:
    """Bind the workers to CPUs, and count the CPUs that they can use together; `owned` are their devices."""
    # where a command was started for each rank, all commands share the CPUs of the node, and each binds its own worker only
    of_all_commands = assign.sharing_workers(task, node.hardware, node.devices) if task is not None else None
    owned_by_sharers = of_all_commands or owned
    mode, notes = spec.numa_binding or spec.cpu_bind, tuple[str, ...]()
    bound: tuple[tuple[int, ...], ...] = ((),) * len(owned_by_sharers)
    if mode != "none":
        from ddplaunch.plan.binding import bind  # most jobs bind nothing

        binding = bind(mode, owned_by_sharers, node.cores, all_devices=node.hardware.devices)
        bound, notes = binding.cpus, binding.notes
    usable = node.hardware.usable_cpus
    if spec.cpu_bind == "cores" or spec.numa_binding == "exclusive":
        # each worker has CPUs of its own, and cannot use more than the smallest share has, however many the node has
        usable = min([usable, *(len(owned_by_sharers) * len(share) for share in bound)])
    own = (bound[task.local_rank],) if task is not None and of_all_commands else bound
    return _Cpus(of_workers=own, usable=usable, sharers=len(owned_by_sharers), notes=notes)


class _Here(Struct, frozen=True, kw_only=True):
    """What is decided about this node before its workers."""

    spec: JobSpec
    allocation: Allocation
    node: Node
    agents: tuple[PlannedAgent, ...]  # of the whole job
    ranks: range  # of the workers of this agent
    owned: assign.Owned  # their devices
    cpus: _Cpus
    world_size: int
    node_rank: int
    nnodes: int
    host: str
    address: str  # MASTER_ADDR
    pin: str
    pin_reason: str
    caller: Mapping[str, str]  # the variables that workers would have without ddplaunch


def _decide_here(
    spec: JobSpec,
    allocation: Allocation,
    node: Node,
    owned: assign.Owned,
    agreed: Agreed | None,
    agents: tuple[PlannedAgent, ...] | None,
    ranks: Sequence[range] | None,
) -> _Here:
    """Decide where this node is in the job, and how its workers are bound to devices and CPUs.

    `agents` are all of the job, and `ranks` those of the workers of each; None: they follow from what is given.
    """
    task = allocation.task  # None unless a command was started for each rank
    own_index = agreed.index if agreed is not None else agent_index(allocation)  # of this node's agent
    if agents is None:
        agents = agreed.agents if agreed is not None else agents_like(allocation, own_index, node, len(owned))
    if ranks is None:
        ranks = ranks_of_all(agents)
    _check_named_ranks(spec, world_size=ranks[-1].stop)
    pin, pin_reason = assign.choose_pin(spec, owned)
    return _Here(
        spec=spec,
        allocation=allocation,
        node=node,
        agents=agents,
        ranks=ranks[own_index],
        owned=owned,
        cpus=_bind_to_cpus(spec, task, node, owned),
        world_size=ranks[-1].stop,  # the ranks of the last agent are the highest
        node_rank=own_index if task is None else task.node_rank,
        nnodes=len(agents) if task is None else task.nnodes,
        # agents that were agreed on have no names here
        host=agents[own_index].host or host_of(allocation, node.host),
        address=agreed.address if agreed is not None else allocation.endpoint.address or agents[0].host,
        pin=pin,
        pin_reason=pin_reason,
        caller={**node.env, **dict(spec.env)},
    )


def _plan_worker(here: _Here, index: int, common: Mapping[str, str]) -> WorkerPlan:
    """Return the plan of the worker with this index on this node; `common` are the variables that all workers get."""
    spec, node, task = here.spec, here.node, here.allocation.task
    rank, owned = here.ranks[index], here.owned[index]
    local_rank = index if task is None else task.local_rank
    another_is_debugged = spec.debug_rank not in (None, rank)
    ignores_breakpoints = another_is_debugged and "PYTHONBREAKPOINT" not in here.caller
    debugging = {"PYTHONBREAKPOINT": "0"} if ignores_breakpoints else {}  # breakpoint() stops only the rank of --debug
    device, pinned = assign.bind_device(spec, here.pin, owned, node.devices, node.hardware)
    identity = variables.of_place(
        rank=rank,
        local_rank=0 if spec.virtual_local_rank else local_rank,
        world_size=here.world_size,
        local_world_size=len(here.ranks) if task is None else task.local_world_size,
        node_rank=here.node_rank,
        nnodes=here.nnodes,
        role=spec.role,
    )
    return WorkerPlan(
        rank=rank,
        local_rank=local_rank,
        node_rank=here.node_rank,
        host=here.host,
        argv=argv(spec, node, local_rank),
        wrap=spec.wrap if spec.wrap_ranks is None or rank in spec.wrap_ranks else (),
        variables={**common, **pinned, **identity, **debugging, "DDPLAUNCH_DEVICE": device},
        device=device,
        devices=tuple(device.uuid or str(device) for device in owned),
        cpus=here.cpus.of_workers[index],
        terminal=_has_terminal(spec, node, rank, here.world_size),
        # else stdin is the debugger's, or for the keys of --live
        stdin=rank == 0 and spec.debug_rank is None and not spec.debug_on_error and not spec.live,
    )


class _Start(Struct, frozen=True, kw_only=True):
    """How the workers are started: as fresh processes, or by a fork server."""

    preload: tuple[str, ...] | None = None  # what the fork server imports; None: workers are fresh processes
    keep_warm: int | None = None  # seconds for which it is kept for the next run
    reasons: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


def _choose_start(here: _Here, plans: Sequence[WorkerPlan]) -> _Start:
    """Decide whether a fork server starts the workers, and whether that server stays for the next run."""
    spec, node, usable = here.spec, here.node, here.cpus.usable
    # a fork saves the import of torch, but no time where each worker has a CPU for that. With GPUs, none is tried
    has_gpus = bool(node.hardware.devices or node.hardware.granted)
    fork_may_help = len(plans) > usable and b"torch" in node.script and not has_gpus
    is_considered = spec.start_method == "forkserver" or (spec.start_method == "auto" and fork_may_help)
    if not is_considered and spec.keep_warm is None:
        return _Start()
    from ddplaunch.plan import start_method  # few jobs need it

    preload, why_fresh = start_method.Preload(None)  # no fork server; "": none was asked for, so that nothing says why
    if is_considered:
        preload, why_fresh = start_method.choose_preload(
            spec, plans, here.caller, node.script, debugger_follows_children=node.debugger_follows_children
        )
    warm = start_method.choose_keep_warm(spec, preload, here.allocation, here.caller)
    why_cold = why_fresh or warm.why_not
    reasons = {}
    if preload is not None:
        shared = f"{len(plans)} workers share {count(usable, 'CPU')}"
        reasons["start"] = shared if spec.start_method == "auto" else spec.origin("start_method")
    elif why_fresh:
        reasons["start"] = why_fresh
    if spec.keep_warm is not None and why_cold:
        reasons["warm"] = why_cold
    notes = (f"{start_method.option_that_asks(spec)} has no effect: {why_fresh}",) if why_fresh else ()
    return _Start(preload=preload, keep_warm=warm.seconds, reasons=reasons, notes=notes)


def _notes(here: _Here) -> tuple[str, ...]:
    """Return what a reader of the plan should know."""
    spec, workers, usable = here.spec, len(here.ranks), here.cpus.usable
    build, unusable = here.node.build, []  # the workers' torch
    device = next((device for own in here.owned for device in own), None)  # all are of one kind
    why_unusable = assign.cannot_use(build, device.kind) if build is not None and device is not None else None
    if why_unusable:
        unusable = [f"{why_unusable}, so it cannot use the accelerators: install another, or use --nproc-per-node cpu"]
    is_crowded = workers > _MOST_ON_A_CPU * usable  # a number that was hardly meant
    crowded = f"{workers} workers share {count(usable, 'CPU')}; `--nproc-per-node cpu` starts one for each"
    return (
        *spec.remarks,
        *here.allocation.notes,
        *here.allocation.warnings,
        *here.node.hardware.notes,
        *unusable,
        *here.cpus.notes,
        *([crowded] if is_crowded else []),
        *assign.pin_notes(spec, here.pin, here.owned),
    )


def argv(spec: JobSpec, node: Node, local_rank: int) -> tuple[str, ...]:
    """Return the command of a worker; torchrun's macro ${local_rank} in an argument of the script is replaced.

    The macro: torch/distributed/elastic/multiprocessing/api.py.
    """
    program, args = spec.program, spec.program.args
    if any("local_rank" in argument and "$" in argument for argument in args):
        import string  # compiles a pattern, and few arguments hold a macro

        args = tuple(string.Template(argument).safe_substitute(local_rank=local_rank) for argument in args)
    if program.kind is ProgramKind.COMMAND:
        return (program.target, *args)
    return (program.python or node.python, node.bootstrap, program.kind.value, program.target, *args)


def _has_terminal(spec: JobSpec, node: Node, rank: int, world_size: int) -> bool:
    if spec.debug_rank is not None:
        return rank == spec.debug_rank
    return node.has_terminal and is_shown_as_it_is(spec, world_size)


def is_shown_as_it_is(spec: JobSpec, world_size: int) -> bool:
    """Whether the output of a worker is shown unchanged: that of a single worker is, unless options ask otherwise.

    So the single worker has the terminal itself, if there is one.
    """
    local_rank = 0  # of a single worker
    asks_otherwise = (
        "output" in spec.origins
        or spec.timestamps
        or spec.live
        or spec.log_dir is not None
        or spec.local_ranks_filter is not None
        or any(choice.of(local_rank) is not Streams.NONE for choice in (spec.redirects, spec.tee))
        or spec.duplicate_stdout_filters
        or spec.duplicate_stderr_filters
    )
    return world_size == 1 and not asks_otherwise
