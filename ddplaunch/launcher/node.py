"""The job's part on this node: it is planned, equipped and handed to an agent, behind a front of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent import front, loop
from ddplaunch.agent.setup import AgentSetup, JobInputs
from ddplaunch.cluster import Allocation
from ddplaunch.devices.node import Node, torch_build
from ddplaunch.errors import LaunchError
from ddplaunch.net import port
from ddplaunch.options import token
from ddplaunch.output.streams import Screen
from ddplaunch.plan import Plan
from ddplaunch.plan.make import make_plan
from ddplaunch.process.linux import raise_open_files
from ddplaunch.report.run_folder import run_id_of
from ddplaunch.spec import JobSpec
from ddplaunch.supervise.node import Policy

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.coordinator.link import Nodes
    from ddplaunch.slurm.requeue import SlurmRequeue
    from ddplaunch.supervise.outcome import ClusterEnding


_ONE_SCREEN = ("slurm", "mpi")  # clusters that show what all nodes say in one place


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
    draft = make_plan(spec, allocation, node, run_id=run_id_of(spec))
    several = allocation.meeting is not None and not spec.no_control
    if draft.master_port and draft.workers[0].rank == 0:
        port.reserve(draft.master_port).release()
    if spec.debug_rank is not None and not (os.isatty(0) and os.isatty(1)):
        raise LaunchError(
            "--debug gives a worker the terminal, but stdin or stdout is none", hint="run it in a terminal"
        )
    signals = front.passed_on(spec.signals)
    raise_open_files()
    stage = AgentSetup(
        JobInputs(
            spec=spec,
            env=token.public(env),
            allocation=allocation,
            node=node,
            draft=draft,
            screen=screen or Screen.here(env),
            speaks=_speaks(allocation, draft) if speaks is None else speaks,
            tells=tells,
            answers=answers,
            why_ending=_why_ending(spec, env, allocation),
        )
    )
    if not several:
        stage.make_folder(draft)
    job = loop.AgentJob(
        policy=_policy(spec, draft, coordinated=several),
        equip=stage.equip,
        output=stage.output,
        reporter=stage.reporter,
        signals=signals,
        sent_again=allocation.sent_again,
        nodes=_nodes(spec, allocation, draft, env) if several else None,
        requeue=_requeue(spec, env, draft),
    )
    # what takes time and nobody waits for is done while the workers start
    return serve(partial(loop.run, job), signals, spec.stop_signals, meanwhile=stage.tidy)


def _speaks(allocation: Allocation, draft: Plan) -> bool:
    first = draft.workers[0].rank == 0
    return first or allocation.cluster not in _ONE_SCREEN


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


def _why_ending(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> Callable[[], ClusterEnding] | None:
    """Give what asks Slurm, which takes at most two answers, while the agent says nothing to the other nodes."""
    if allocation.cluster != "slurm":
        return None

    def why_ending() -> ClusterEnding:
        from ddplaunch.slurm import ending  # only a signal needs it

        return ending.why_ending(token.public(env), min(ending.CONTROLLER, spec.heartbeat_timeout / 4))

    return why_ending


def _nodes(spec: JobSpec, allocation: Allocation, draft: Plan, env: Mapping[str, str]) -> Callable[..., Nodes]:
    from ddplaunch.coordinator import join  # only jobs of several nodes need it

    build = torch_build(spec)
    way = join.way(spec, allocation, draft, env, torch=build.version if build else "")
    return partial(join.join, way)


def _requeue(spec: JobSpec, env: Mapping[str, str], draft: Plan) -> SlurmRequeue | None:
    """Give the way back into the queue, if it is for this process to go: the one nearest to the batch script goes it."""
    if not spec.requeue_on or draft.workers[0].rank:
        return None
    from ddplaunch.slurm.requeue import SlurmRequeue  # few jobs need it

    return SlurmRequeue(token.public(env), spec.max_requeues)
