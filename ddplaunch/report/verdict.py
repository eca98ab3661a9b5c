"""From the first failure to its report: adds the facts of the node, has it classified and written."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.outcome import OUT_OF_WALLTIME, PREEMPTED, WorkerExit
from ddplaunch.report.causes import classify
from ddplaunch.report.evidence import Facts
from ddplaunch.report.failure import FailureReport, render
from ddplaunch.report.traces import Traces


def verdict(
    first: WorkerExit,
    exits: Sequence[WorkerExit],
    traces: Traces,
    *,
    interpreter: str | None,
    debugging: bool,
    cwd: str,
    restarts: int,
    max_restarts: int,
    colour: bool,
    ended_by: str = "",
) -> str:
    """Write the failure report of a generation.

    `traces` are those of the node where the first failure was, `ended_by` is why the cluster is ending the job, if it is.
    """
    size, room = traces.shm or (None, None)
    facts = Facts(
        oom_kills=traces.oom_kills,
        shm_size=size,
        shm_free=room,
        interpreter=interpreter,
        debugging=debugging,
        preempted=ended_by == PREEMPTED,
        walltime_over=ended_by == OUT_OF_WALLTIME,
    )
    report = FailureReport(
        first=first,
        exits=tuple(exits),
        cause=classify(first, facts),
        ended_by=ended_by,
        cwd=cwd,
        restarts=restarts,
        max_restarts=max_restarts,
        log_folder=traces.log_folder,
    )
    return render(report, colour=colour)
