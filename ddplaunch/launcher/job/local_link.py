"""The link of the coordinator's own agent, in one process with it; a job of one node has no other."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import Leased
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.launcher.tell.reporter import Reporter
from ddplaunch.plan import Plan
from ddplaunch.plan.variables import first_term
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.fork import debugger_follows_children

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import Report


# part of the heartbeat timeout: if the loop of node 0 does not come by for so long, the workers there are killed
_SILENT_PART = 0.8


class LocalLink(Link):
    """A link whose other end is in the same process."""

    coordinator: Coordinator

    def __init__(self, loop: Loop, coordinator: Coordinator, *, has_workers: bool = True) -> None:
        """Link an agent in this process to the coordinator; without `has_workers`, the command that has started all agents."""
        super().__init__(loop)
        self.coordinator = coordinator
        lease = coordinator.state.policy.lease if has_workers else 0.0
        self._silent_for = _SILENT_PART * (lease - job.KILLED_WITHIN)
        self._runs_at = loop.timer(loop.now() if lease else None, self._note_that_it_runs)

    def _note_that_it_runs(self) -> None:
        """Have the front kill the workers if this loop no longer comes by: the others lose node 0 then, and may find another."""
        self._loop.handle(Leased(self._silent_for))
        self._runs_at.set(self._loop.now() + self._silent_for / 4)

    def send(self, report: Report) -> None:
        """Report to the coordinator."""
        self.coordinator.on_report(SELF_ID, report)

    def close(self) -> None:
        """Close the coordinator."""
        if self._runs_at.is_set:
            self._runs_at.cancel()
            self._loop.handle(Leased(inf))
        self.coordinator.close()


def job_policy(
    spec: JobSpec,
    min_nodes: int,
    max_nodes: int,
    *,
    has_one_command: bool = False,
    names: tuple[str, ...] = (),
    has_lease: bool = False,
) -> job.Policy:
    """Return what the user decided about the job as a whole.

    `has_one_command`: one command starts all agents and coordinates them. `names` are the hosts by node rank, as far as known.
    `has_lease`: the job may go on without a node, once the workers there have been killed.
    """
    return job.Policy(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=spec.max_restarts,
        restart_window=spec.restart_window,
        restart_on=spec.restart_on,
        max_no_progress=spec.max_no_progress,
        rdzv_timeout=spec.rdzv_timeout,
        last_call=spec.last_call,
        timeout=spec.timeout,
        hang_timeout=spec.hang_timeout,
        # the last: this process itself runs in a debugger that gets into the workers
        debugs=spec.debug_on_error
        or spec.debug_rank is not None
        or bool(spec.debugpy_ranks)
        or debugger_follows_children(),
        straggler_check=spec.straggler_check,
        notices=frozenset(spec.notices),
        spares=spec.spares,
        has_one_command=has_one_command,
        host_names=names,
        lease=spec.heartbeat_timeout + job.KILLED_WITHIN if has_lease else 0.0,
    )


def coordinate_alone(spec: JobSpec, draft: Plan, loop: Loop, reporter: Reporter) -> Link:
    """Be the coordinator of a job of one node: no network, and its draft is its plan."""
    state = job.first_state(job_policy(spec, 1, 1), loop.now(), first_term(time.time()))
    coordinator = Coordinator(loop, state, draft, JobReporter(reporter))
    link = LocalLink(loop, coordinator)
    coordinator.add_own_agent(
        link.on_order, Member(id=SELF_ID, host=draft.workers[0].host, workers=len(draft.workers), requested_rank=0)
    )
    return link
