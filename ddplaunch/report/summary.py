"""What `summary.json` holds of a job that has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.report.words import signal_name
from ddplaunch.supervise.node import State
from ddplaunch.supervise.outcome import StartFailure, Why, WorkerExit

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.supervise.outcome import Intent


def summary(
    state: State,
    exits: Sequence[WorkerExit],
    seconds: float,
    why: str,
    first: WorkerExit | StartFailure | None = None,
    left_after: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary as plain data.

    `exits` are those of the last generation, `seconds` the job's, `first` its first failure if that is known to have been
    on another node, `left_after` what it holds about a notice.
    """
    if first is None and why == "failed" and left_after is None and state.why is Why.FAILED:
        first = state.start_failure or state.failure
    return {
        "v": 1,
        "status": state.status,
        "why": why,
        "seconds": round(seconds, 3),
        "restarts": state.generation,
        "first_failure": _first_failure(first),
        "left_after": left_after,
        "workers": [
            {
                "rank": exit.rank,
                "pid": exit.pid,
                "status": exit.status,
                "how": exit.how,
                "seconds": round(exit.seconds, 3),
                "peak_rss": exit.peak_rss,
                "cpu_seconds": round(exit.cpu_seconds, 3),
            }
            for exit in sorted(exits, key=lambda exit: exit.rank)
        ],
    }


def left_after(notice: int, intent: Intent | None, failed: str | None) -> dict[str, Any]:
    """Return what the summary holds about a notice after which all workers left, and about the requeue."""
    return {
        "signal": signal_name(notice),
        "job": intent.job if intent else None,
        "sent": intent.requeues and failed is None if intent else None,
        "text": (failed or intent.text) if intent else None,
    }


def _first_failure(first: WorkerExit | StartFailure | None) -> dict[str, Any] | None:
    if first is None:
        return None
    if isinstance(first, StartFailure):
        how = f"could not be started: {first.reason}"
        return {"rank": first.rank, "host": None, "local_rank": None, "pid": None, "status": first.status, "signal": None,
                "how": how, "error": None}  # fmt: skip
    error = f"{first.error.type}: {first.error.message}" if first.error else None
    return {
        "rank": first.rank,
        "host": first.host,
        "local_rank": first.local_rank,
        "pid": first.pid,
        "status": first.status,
        "signal": first.signal,
        "how": first.how,
        "error": error,
    }
