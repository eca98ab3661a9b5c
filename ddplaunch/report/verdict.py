"""From a job's end to its failure report: picks the root cause, adds the facts of the node, has it classified and written."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.first_failure import first_failure
from ddplaunch.outcome import WorkerExit
from ddplaunch.plan import Plan
from ddplaunch.process.node_facts import shm_size_and_room
from ddplaunch.report.causes import Facts, classify
from ddplaunch.report.failure import FailureReport, render
from ddplaunch.supervise import State


def verdict(
    plan: Plan,
    state: State,
    exits: Sequence[WorkerExit],
    *,
    cwd: str,
    oom_kills: int,
    logs: str | None,
    colour: bool,
) -> str:
    """Write the failure report of a generation; `oom_kills` happened while the job ran."""
    first = first_failure(exits, dict(state.raised))
    assert first is not None
    size, room = shm_size_and_room() or (None, None)
    facts = Facts(
        oom_kills=oom_kills,
        shm_size=size,
        shm_free=room,
        interpreter=plan.interpreter,
        debugging=state.policy.debug_rank is not None,
    )
    report = FailureReport(
        first=first,
        exits=tuple(exits),
        cause=classify(first, facts),
        cwd=cwd,
        restarts=state.generation,
        max_restarts=state.policy.max_restarts,
        log_folder=logs,
    )
    return render(report, colour=colour)
