"""What `ddplaunch plan` shows: the plan of every node, as if each were like this one. Starts nothing.

If the job runs on other hosts alone, as from a login node, what they will find is unknown: no GPU here says nothing of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from ddplaunch.launcher.tell import plan_view
from ddplaunch.plan import Agreed, Plan, PlannedAgent, agent_runs, assign
from ddplaunch.plan.cluster import AllocatedJob, Allocation
from ddplaunch.plan.devices.node import Node, inspect
from ddplaunch.plan.make import make_plan
from ddplaunch.plan.ranks import count_workers, ranks_of_all
from ddplaunch.record.folders import run_id_of
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.console.tables import Look, written
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.redaction import literals


def show(allocated: AllocatedJob, form: str) -> str:
    """Write the plan as a "table", as "json" or as "sh".

    Raises LaunchError: the job cannot be run here as asked.
    """
    spec, env = allocated.spec, allocated.env
    plan, secrets = plan_all_nodes(allocated), literals({**env, **dict(spec.env)})
    match form:
        case "json":
            return plan_view.as_json(plan, spec.origins, secrets)
        case "sh":
            return plan_view.shell(plan)
    warm = _describe_warm(plan, allocated.public_env)
    return written(plan_view.table(plan, spec, warm, secrets), Look.of_stdout(env))


def plan_all_nodes(allocated: AllocatedJob) -> Plan:
    """Return the plan of all nodes: all of its workers.

    Raises LaunchError: the job cannot be run here as asked, or lacks a rank that --chaos names.
    """
    spec, allocation = allocated.spec, allocated.allocation
    remote_host = _first_host_if_all_are_remote(spec, allocation)
    if remote_host is not None:
        return _plan_of_unknown_hosts(allocated, remote_host)
    on_this_machine = len(allocation.hosts_to_start_on) if spec.simulate else 1  # nodes, which share its devices
    plan = _of_all_nodes(spec, allocation, inspect(spec, allocated.public_env, shared_by=on_this_machine))
    for fault in spec.chaos:
        is_of_rank = fault.kind != "node"  # nodes that the job lacks were refused with the options
        if is_of_rank and fault.target >= plan.world_size:
            raise LaunchError(
                f"{spec.origin('chaos')}: there is no rank {fault.target}, since the job has {plan.world_size}",
                hint="ranks count from 0; --nnodes and --nproc-per-node say how many there are",
            )
    return plan


def _first_host_if_all_are_remote(spec: JobSpec, allocation: Allocation) -> str | None:
    """Return the first host of a job that runs over ssh on other hosts alone: `ddplaunch plan` asks none of them; else None."""
    hosts = [host.name for host in allocation.hosts_to_start_on]
    if spec.simulate or not hosts or allocation.task is not None or os.uname().nodename in allocation.hosts:
        return None
    return hosts[0]


def _plan_of_unknown_hosts(allocated: AllocatedJob, first: str) -> Plan:
    """Return the plan of hosts of which nothing is known: what the user has given, and for the rest a reason why it is unknown.

    `first` is the name of one of them: "unknown until HOST is reached".
    """
    spec, allocation = allocated.spec, allocated.allocation
    unknown = f"{plan_view.UNKNOWN}{first} is reached"
    # of workers; slots: those of one host, as given in a list of hosts
    is_number_given = isinstance(spec.nproc_per_node, int) or all(host.slots for host in allocation.hosts_to_start_on)
    # one worker of each host stands for those to come; the devices that it is to have are there, not here
    stand_in = replace(
        spec,
        nproc_per_node=spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else 1,
        devices=("cpu",),
        gpus_per_worker=None,
        workers_per_gpu=None,
        mps=False,
        backend="auto",
        cpu_bind="none",
        numa_binding=None,
    )
    plan = _of_all_nodes(stand_in, allocation, inspect(stand_in, allocated.public_env))
    reasons = {**plan.reasons, "devices": unknown, "backend": unknown, "threads": unknown}
    is_backend_given = spec.backend != "auto"
    if is_backend_given:
        reasons["backend"] = spec.origin("backend")
    if spec.threads is not None:
        reasons["threads"] = spec.origin("threads")
    if not is_number_given:
        reasons["workers"] = f"{unknown}, and each host is shown with one"
    unknown_variables = plan_view.unknown_variables(reasons)  # which depend on what is found there
    backend = {"DDPLAUNCH_BACKEND": spec.backend} if is_backend_given else {}
    workers = []
    for worker in plan.workers:
        variables = {**worker.variables, **backend}
        known = {name: value for name, value in variables.items() if name not in unknown_variables}
        workers.append(replace(worker, variables=known))
    note = "no host was asked: each finds its own devices at the start, and sets the variables that depend on them"
    backend_name = spec.backend if is_backend_given else plan.backend
    return replace(plan, backend=backend_name, workers=tuple(workers), reasons=reasons, notes=(note,))


def _describe_warm(plan: Plan, env: Mapping[str, str]) -> str:
    """Say which interpreter is kept warm for this job, or why none is; "" if none was asked for."""
    if plan.keep_warm is None:
        return f"nothing: {why}" if (why := plan.reasons.get("warm")) else ""
    from ddplaunch.launcher.workers import show, warm

    raise_open_files()  # as the job would: an interpreter with another limit does not fit
    try:
        found = show.state_of(warm.interpreter_for(plan, env).name)
    except warm.CannotKeep as error:
        return f"nothing: {error}"
    except OSError:
        return "one that does not answer"
    return "nothing yet" if found is None else f"process {found.pid}"


def _of_all_nodes(spec: JobSpec, allocation: Allocation, node: Node) -> Plan:
    """Plan every node as if it were like this one, `node`, and put all workers into one plan."""
    run_id, nnodes = run_id_of(spec), allocation.nnodes[1] - spec.spares
    nodes = [assign.simulated(node, node_rank, nnodes, spec.simulate) for node_rank in range(nnodes)]
    # workers, as given for each host; None: no number was given
    slots = [host.slots for host in allocation.hosts_to_start_on[:nnodes]] or [None] * nnodes
    specs = [spec if given is None else replace(spec, nproc_per_node=given) for given in slots]
    here = make_plan(specs[0], allocation, nodes[0], run_id=run_id)
    if any(given is not None for given in slots):
        here = replace(here, reasons={**here.reasons, "workers": "as given for each host"})
    if not spec.simulate:
        here = replace(here, notes=(*here.notes, *_note_of_assumption(allocation, node.host)))
    is_per_rank = allocation.task is not None  # other ranks are other commands, of which this one knows nothing
    if is_per_rank or allocation.nnodes[1] == 1:
        return here
    counted = [count_workers(one, allocation, there) for one, there in zip(specs, nodes, strict=True)]
    workers = [number for number, _decided_by in counted]
    hosts = [agent.host for agent in here.agents[:nnodes]]
    agents = tuple(PlannedAgent(host, number) for host, number in zip(hosts, workers, strict=True))
    # what the coordinator of the job would tell each agent
    agreed = Agreed(
        run_id=run_id,
        index=0,
        address=here.master_addr,
        agent_runs=agent_runs(agents),  # how many agents in a row have how many workers
        backend=here.backend,
        backend_reason=here.reasons["backend"],
    )
    ranks = ranks_of_all(agents)
    plans = [
        make_plan(
            one,
            allocation,
            nodes[index],
            run_id=run_id,
            agreed=replace(agreed, index=index),
            agents=agents,
            ranks=ranks,
        )
        for index, one in enumerate(specs)
    ]
    return replace(
        here,
        nnodes=nnodes,
        agents=agents,
        workers=tuple(worker for plan in plans for worker in plan.workers),
    )


def _note_of_assumption(allocation: Allocation, own: str) -> tuple[str, ...]:
    """Return a note about the hosts that are planned without having been asked; none if this is the only host."""
    others = [host for host in allocation.hosts or (("",) * allocation.nnodes[1]) if host != own]
    if allocation.task is not None or (allocation.nnodes[1] == 1 and not (allocation.hosts_to_start_on and others)):
        return ()
    return (f"no other host was asked: each is planned like this one, {own}, and finds its own devices at the start",)
