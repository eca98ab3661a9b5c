"""Makes the plan of a job. Pure: what the machine has comes in as `Node`, nothing is looked up here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddplaunch.cluster import Allocation
from ddplaunch.devices import Core, Device, Hardware
from ddplaunch.errors import LaunchError
from ddplaunch.plan import Plan, WorkerPlan, assign, backend, variables
from ddplaunch.plan.binding import bind
from ddplaunch.plan.threads import threads
from ddplaunch.record import record
from ddplaunch.spec import JobSpec, ProgramKind, Streams
from ddplaunch.torchbuild import TorchBuild


@record(kw_only=True)
class Node:
    """What this node is and has, as far as the job needs to know."""

    hardware: Hardware
    devices: tuple[Device, ...]  # of `hardware`, those that the job may use, in order
    cores: tuple[Core, ...] = ()  # read only if workers are to be bound
    build: TorchBuild | None = None  # of the workers' torch; None: not found, or not needed
    python: str  # the interpreter of this command
    bootstrap: str  # path of worker/bootstrap.py
    env: Mapping[str, str]  # of the caller


def make_plan(spec: JobSpec, allocation: Allocation, node: Node, *, run_id: str) -> Plan:
    """Decide everything about the job.

    Raises:
        LaunchError: what was asked for does not fit this node.
    """
    workers, workers_reason = assign.count(spec, node.devices, node.hardware)
    owned = assign.own(spec, workers, node.devices)
    chosen_backend, backend_reason = (
        backend.choose(owned, node.build) if spec.backend == "auto" else (spec.backend, spec.origin("backend"))
    )
    pin = _pin(spec, owned)
    binding = bind(spec.numa_binding or spec.cpu_bind, owned, node.cores, all_devices=node.hardware.devices)
    caller = {**node.env, **dict(spec.env)}
    # a worker bound to a share of its own cannot use more than that, however many CPUs the node has
    own_cpus = [len(cpus) for cpus in binding.cpus] if _exclusive(spec) else []
    usable = min([node.hardware.usable_cpus, *(workers * number for number in own_cpus)])
    omp, threads_reason = threads(usable, workers, asked=spec.threads, env_value=caller.get("OMP_NUM_THREADS"))
    if spec.threads is not None:
        threads_reason = spec.origin("threads")
    if spec.debug_rank is not None and spec.debug_rank >= workers:
        raise LaunchError(
            f"{spec.origin('debug_rank')} {spec.debug_rank}: the job has ranks 0 to {workers - 1}", hint="--debug 0"
        )
    common = _common(spec, caller, run_id=run_id, backend=chosen_backend, address=allocation.address, omp=omp)
    plans = []
    for local_rank in range(workers):
        mine, own = _device_variables(spec, node, owned[local_rank], pin)
        place = variables.of_place(
            rank=local_rank,
            local_rank=local_rank,
            world_size=workers,
            local_world_size=workers,
            node_rank=allocation.node_rank,
            nnodes=len(allocation.hosts),
            role=spec.role,
        )
        if spec.virtual_local_rank:
            place["LOCAL_RANK"] = "0"
        plans.append(
            WorkerPlan(
                rank=local_rank,
                local_rank=local_rank,
                node_rank=allocation.node_rank,
                host=allocation.hosts[allocation.node_rank],
                argv=_argv(spec, node, local_rank),
                variables={**common, **own, **place, "DDPLAUNCH_DEVICE": mine},
                device=mine,
                devices=tuple(device.uuid or str(device) for device in owned[local_rank]),
                cpus=binding.cpus[local_rank],
                terminal=_has_terminal(spec, local_rank, workers),
                stdin=local_rank == 0 and spec.debug_rank is None,
            )
        )
    return Plan(
        run_id=run_id,
        cluster=allocation.cluster,
        nnodes=len(allocation.hosts),
        node_rank=allocation.node_rank,
        master_addr=allocation.address,
        master_port=allocation.port or None,
        init_method=_init_method(spec),
        backend=chosen_backend,
        pin=pin,
        interpreter=None if spec.program.kind is ProgramKind.COMMAND else spec.program.python or node.python,
        workers=tuple(plans),
        reasons={
            "workers": workers_reason,
            "devices": node.hardware.device_source,
            "backend": backend_reason,
            "threads": threads_reason,
            "master_addr": _origin(spec, "rdzv_endpoint", "master_addr") or "one node needs no other",
            "master_port": _origin(spec, "rdzv_endpoint", "master_port") or "a free one is reserved at the start",
            "pin": spec.origin("pin"),
        },
        notes=(*spec.remarks, *node.hardware.notes, *binding.notes, *_notes(spec, owned, pin)),
    )


def _origin(spec: JobSpec, *names: str) -> str | None:
    """Where the first of these values that was given came from."""
    return next((spec.origin(name) for name in names if name in spec.origins), None)


def _exclusive(spec: JobSpec) -> bool:
    """Whether no two workers share a CPU."""
    return spec.cpu_bind == "cores" or spec.numa_binding == "exclusive"


def _common(
    spec: JobSpec, caller: Mapping[str, str], *, run_id: str, backend: str, address: str, omp: int | None
) -> dict[str, str]:
    common = {
        **dict(spec.env),
        "MASTER_ADDR": address,
        "TORCHELASTIC_RUN_ID": spec.rdzv_id or run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DDPLAUNCH_RUN_ID": run_id,
        "DDPLAUNCH_BACKEND": backend,
    }
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED"):
        if name not in caller:
            common[name] = "1"
    if omp is not None:
        common["OMP_NUM_THREADS"] = str(omp)
    return common


def _pin(spec: JobSpec, owned: assign.Owned) -> str:
    if spec.virtual_local_rank:
        return "visible"
    if spec.pin:
        return spec.pin
    if any(len(own) > 1 or any(device.is_mig for device in own) for own in owned):
        # several devices can be handed over only as a set, and CUDA shows a process no more than one MIG instance
        return "visible"
    # a command is most often a wrapper around a Python script that counts on seeing every device
    return "none" if spec.program.kind is ProgramKind.COMMAND else "device"


def _device_variables(
    spec: JobSpec, node: Node, own: tuple[Device, ...], pin: str
) -> tuple[str, dict[str, str]]:
    """The worker's device as it will call it, and the variables that make it so."""
    if not own:
        return "cpu", {}
    hidden = node.hardware.visible_variable
    if pin == "visible":
        return f"{own[0].kind}:0", {hidden: ",".join(device.token for device in own)}
    result = {}
    index = own[0].index
    # where the devices' order is CUDA's to choose, they are known by UUIDs, and only a list of these makes an index certain
    if spec.devices is not None or not all(device.token.isdigit() for device in node.devices):
        result[hidden] = ",".join(device.token for device in node.devices)
        index = node.devices.index(own[0])
    mine = f"{own[0].kind}:{index}"
    if pin == "device" and spec.program.kind is not ProgramKind.COMMAND:
        result["DDPLAUNCH_PIN_DEVICE"] = mine
    return mine, result


def _argv(spec: JobSpec, node: Node, local_rank: int) -> tuple[str, ...]:
    program = spec.program
    args = tuple(_substitute(argument, local_rank) for argument in program.args)
    if program.kind is ProgramKind.COMMAND:
        return (program.target, *args)
    return (program.python or node.python, node.bootstrap, program.kind.value, program.target, *args)


def _substitute(argument: str, local_rank: int) -> str:
    """torchrun's macro: ${local_rank} in an argument of the script (torch/distributed/elastic/multiprocessing/api.py)."""
    if "local_rank" not in argument or "$" not in argument:
        return argument
    import string  # compiles a pattern, and few arguments hold a macro

    return string.Template(argument).safe_substitute(local_rank=local_rank)


def _init_method(spec: JobSpec) -> str:
    if spec.init_method.startswith("file:"):
        return f"file:{os.path.abspath(spec.init_method.removeprefix('file:'))}"
    return spec.init_method


def _has_terminal(spec: JobSpec, local_rank: int, workers: int) -> bool:
    """One worker is passed through untouched, unless something about its output was asked for."""
    if spec.debug_rank is not None:
        return local_rank == spec.debug_rank
    asked = (
        "output" in spec.origins
        or spec.log_dir is not None
        or spec.local_ranks_filter is not None
        or any(choice.of(0) is not Streams.NONE for choice in (spec.redirects, spec.tee))
        or spec.duplicate_stdout_filters
        or spec.duplicate_stderr_filters
    )
    return workers == 1 and not asked


def _notes(spec: JobSpec, owned: assign.Owned, pin: str) -> list[str]:
    notes = []
    devices = {device.token for own in owned for device in own}
    if devices and len(owned) > len(devices) and pin == "device":
        notes.append(
            f"{len(owned)} workers on {len(devices)} devices: a script that calls set_device(LOCAL_RANK) "
            f"fails from local rank {len(devices)} on; use DDPLAUNCH_DEVICE or --virtual-local-rank"
        )
    if pin == "visible" and len(owned) > 1 and not spec.virtual_local_rank:
        notes.append("each worker sees only its own devices: LOCAL_RANK is no device index there, DDPLAUNCH_DEVICE is")
    return notes
