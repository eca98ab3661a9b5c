"""What a node decides and does, as events of the public record and as `summary.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGWINCH
from typing import Any

from ddplaunch.launcher.decide import node
from ddplaunch.record.events import progress_data
from ddplaunch.spec.outcome import Intent, StartFailure, Why, WorkerExit
from ddplaunch.system.words import compress, signal_name

Named = tuple[str, Mapping[str, "Any"]]  # the name of an event and its fields


def of_event(event: node.Event) -> Named | None:
    """Return the public event for an event of the decision; None if other parts report that event."""
    match event:
        case node.WorkerRaised(rank, error, _):
            return "worker_raised", {"rank": rank, "type": error.type, "message": error.message}
        case node.StartFailed(failure, _):
            return "worker_start_failed", {"rank": failure.rank, "reason": failure.reason, "status": failure.status}
        case node.WorkerExited(exit, _):
            return "worker_exited", {
                "rank": exit.rank,
                "pid": exit.pid,
                "status": exit.status,
                "how": exit.how,
                "seconds": round(exit.seconds, 3),
                "stopped_with": exit.stopped_with,
                "progress": progress_data(exit.progress),
            }
        case node.SignalReceived(signum, _, _) if signum != SIGWINCH:
            return "signal_received", {"signal": int(signum), "name": signal_name(signum)}
        case node.FrontLost():
            return "front_lost", {}
    return None


def of_action(action: node.Action) -> Named | None:
    """Return the public event of what is being done."""
    match action:
        case node.ForwardSignal(signum, ranks) if signum != SIGWINCH:
            return "signal_forwarded", {"signal": int(signum), "name": signal_name(signum), "ranks": compress(ranks)}
        case node.StopWorkers(signum, ranks):
            return "stop_sent", {"signal": int(signum), "name": signal_name(signum), "ranks": compress(ranks)}
        case node.KillWorkers(ranks):
            return "kill_sent", {"ranks": compress(ranks)}
        case node.Suspend():
            return "job_suspended", {}
        case node.Resume():
            return "job_resumed", {}
        case node.Print(text):
            return "notice", {"text": text}
    return None


def summary(
    state: node.State,
    exits: Sequence[WorkerExit],
    seconds: float,
    why: str,
    first: WorkerExit | StartFailure | None = None,
    left_after: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the summary as plain data.

    `exits`: the workers of the last generation. `seconds`: how long the job took. `first`: the first failure, if it was on
    another node. `left_after`: the notice after which the job left, for the field of that name.
    """
    if first is None and why == "failed" and left_after is None and state.why is Why.FAILED:
        first = state.start_failure or state.failure
    return {
        "v": 1,
        "status": state.end.status,
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
                "progress": progress_data(exit.progress),
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
    """Return the first failure as the event `job_ended` holds it; None if no worker failed."""
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
