"""From what was asked to the status of the job: look around, plan, then run the job here or start agents elsewhere."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import agent, front, secret
from ddplaunch.cluster import Allocation
from ddplaunch.cluster.discover import discover
from ddplaunch.errors import LaunchError
from ddplaunch.plan import Plan, Seat
from ddplaunch.plan.make import Agreed, Node, make_plan
from ddplaunch.process import port, terminal
from ddplaunch.process.linux import raise_open_files
from ddplaunch.record import replace
from ddplaunch.spec import JobSpec
from ddplaunch.stage import Screen, Setting, Stage
from ddplaunch.supervise import Policy
from ddplaunch.surroundings import look_around, torch_build

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.nodes.nodes import Nodes
    from ddplaunch.slurmjob import WayBack


_UNAUTHENTICATED = (
    "unauthenticated: whoever reaches node 0 and knows the job's name and port can join or stop the job; "
    "to keep others out give all nodes the same DDPLAUNCH_TOKEN or --token-file"
)
_ONE_SCREEN = ("slurm", "mpi")  # clusters that show what all nodes say in one place


def show_plan(spec: JobSpec, env: Mapping[str, str], form: str) -> str:
    """Write the plan as a "table", as "json" or as "sh"; starts nothing.

    Raises:
        LaunchError: the job cannot be run here as asked.
    """
    from ddplaunch.report import plan_view  # only this command needs it

    allocation = _allocation(spec, env)
    decided = _of_all_nodes(spec, allocation, look_around(spec, secret.public(env)))
    match form:
        case "json":
            return plan_view.as_json(decided, spec.origins)
        case "sh":
            return plan_view.shell(decided)
    return plan_view.table(decided, spec)


def run(spec: JobSpec, env: Mapping[str, str], *, control: int | None = None) -> int:
    """Run the job and give its exit status.

    `control` is a descriptor on which whoever called for the job is told of its workers and how it ended.

    Raises:
        LaunchError: nothing was started.
    """
    _prepare_stdio()
    answers = control is not None
    serve = partial(front.run, control=control) if answers else front.run
    allocation = _allocation(spec, env)
    if allocation.starter == "srun":
        from ddplaunch.remote import slurm  # only jobs whose agents we start ourselves need it

        return slurm.lead(spec, env, allocation)
    if allocation.start:
        from ddplaunch import remote

        return remote.lead(spec, env, allocation, serve=serve, answers=answers)
    node = look_around(spec, secret.public(env))
    return carry_out(spec, env, allocation, node, tells=answers, answers=answers, serve=serve)


def carry_out(
    spec: JobSpec,
    env: Mapping[str, str],
    allocation: Allocation,
    node: Node,
    *,
    screen: Screen | None = None,
    speaks: bool | None = None,
    tells: bool = False,
    answers: bool = False,
    serve: Callable[..., int] = front.run,
) -> int:
    """Be the agent of this node, under a front of its own, and give the exit status.

    `screen` is what is written to, if that is not our stdout and stderr; `speaks` is whether this node tells how the job goes,
    `tells` whether it tells whoever started it of each worker, `answers` whether it tells them how the job ended, in place of
    the user.

    Raises:
        LaunchError: nothing was started.
    """
    draft = make_plan(spec, allocation, node, run_id=_run_id(spec))
    several = allocation.meeting is not None and not spec.no_control
    if draft.master_port and draft.workers[0].rank == 0:
        port.reserve(draft.master_port).release()
    if spec.debug_rank is not None and not (os.isatty(0) and os.isatty(1)):
        raise LaunchError(
            "--debug gives a worker the terminal, but stdin or stdout is none", hint="run it in a terminal"
        )
    signals = front.passed_on(spec.signals)
    raise_open_files()
    stage = Stage(
        Setting(
            spec=spec,
            env=secret.public(env),
            allocation=allocation,
            node=node,
            draft=draft,
            screen=screen or Screen.here(env),
            speaks=_speaks(allocation, draft) if speaks is None else speaks,
            tells=tells,
            answers=answers,
        )
    )
    if not several:
        stage.make_folder(draft)
    job = agent.Job(
        policy=_policy(spec, draft, coordinated=several),
        equip=stage.equip,
        output=stage.output,
        teller=stage.teller,
        signals=signals,
        sent_again=allocation.sent_again,
        nodes=_nodes(spec, allocation, draft, env) if several else None,
        way_back=_way_back(spec, env, draft),
    )
    # what takes time and nobody waits for is done while the workers start
    return serve(partial(agent.run, job), signals, spec.stop_signals, meanwhile=stage.tidy)


def _allocation(spec: JobSpec, env: Mapping[str, str]) -> Allocation:
    found = discover(spec, env, socket.gethostname(), read=_read)
    if found.meeting is None or secret.find(spec, env) is not None:
        return found
    return replace(found, notes=(*found.notes, _UNAUTHENTICATED))


def _speaks(allocation: Allocation, draft: Plan) -> bool:
    first = draft.workers[0].rank == 0
    return first or allocation.cluster not in _ONE_SCREEN


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _run_id(spec: JobSpec) -> str:
    return spec.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _of_all_nodes(spec: JobSpec, allocation: Allocation, node: Node) -> Plan:
    """Plan every node as if it were like this one, and put all workers into one plan."""
    run_id = _run_id(spec)
    here = make_plan(spec, allocation, node, run_id=run_id)
    if allocation.task is not None or len(here.seats) == 1:
        return here
    asked = [_for_host(spec, allocation, place) for place in range(len(here.seats))]
    drafts = [
        make_plan(one, replace(allocation, node_rank=place), node, run_id=run_id) for place, one in enumerate(asked)
    ]
    agreed = Agreed(
        seats=tuple(Seat(seat.host, len(plan.workers)) for seat, plan in zip(here.seats, drafts, strict=True)),
        backend=here.backend,
        backend_reason=here.reasons["backend"],
    )
    plans = [
        make_plan(one, replace(allocation, node_rank=place), node, run_id=run_id, agreed=agreed)
        for place, one in enumerate(asked)
    ]
    return replace(here, seats=agreed.seats, workers=tuple(worker for plan in plans for worker in plan.workers))


def _for_host(spec: JobSpec, allocation: Allocation, place: int) -> JobSpec:
    """The job as a host gets it that was given a number of workers of its own."""
    slots = allocation.start[place].slots if allocation.start else None
    return spec if slots is None else replace(spec, nproc_per_node=slots)


def _policy(spec: JobSpec, draft: Plan, *, coordinated: bool) -> Policy:
    return Policy(
        ranks=frozenset(worker.rank for worker in draft.workers),
        stop_signals=frozenset(spec.stop_signals) - frozenset(spec.forward_signals),
        grace_period=spec.grace_period,
        max_restarts=spec.max_restarts,
        # the coordinator's own agent watches the time for all
        timeout=spec.timeout if not coordinated or draft.node_rank == 0 else None,
        debug_rank=spec.debug_rank,
        notices=frozenset(spec.requeue_on),
        coordinated=coordinated,
    )


def _nodes(spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str]) -> Callable[..., Nodes]:
    from ddplaunch.nodes import meet  # only jobs of several nodes need it

    build = torch_build(spec)
    way = meet.way(spec, allocation, draft, env, torch=build.version if build else "")
    return partial(meet.join, way)


def _way_back(spec: JobSpec, env: Mapping[str, str], draft: Plan) -> WayBack | None:
    """Give the way back into the queue, if it is for this process to go: the one nearest to the batch script goes it."""
    if not spec.requeue_on or draft.workers[0].rank:
        return None
    from ddplaunch.slurmjob import WayBack  # few jobs need it

    return WayBack(secret.public(env), spec.max_requeues)


def _prepare_stdio() -> None:
    """Fill closed ones of the three standard descriptors, so that no file of ours becomes a worker's stdin or stdout.

    And leave the keys of the shell that has put this job into the background to the shell.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
            os.set_inheritable(fd, True)
    if terminal.belongs_to_another_job():
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
