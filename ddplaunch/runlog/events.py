"""The public record of a job: the events that there are, with their fields, and what `summary.json` holds. Writes nothing.

`events.jsonl` holds one JSON object a line: `v` (the schema's version), `event`, `at` (seconds since the epoch),
`mono` (CLOCK_MONOTONIC seconds, comparable between the workers of one node) and the fields of its kind.
A field may be added at any time; a field that changes its meaning makes a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from signal import SIGWINCH
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import Intent, Progress, StartFailure, Why, WorkerExit
from ddplaunch.words import compress, signal_name

VERSION = 1

SCHEMA: Mapping[str, Mapping[str, str]] = {
    "job_started": {"run_id": "string", "program": "string: the script, module or command", "world_size": "integer",
        "host": "string", "backend": "string", "ddplaunch": "string: version"},
    "generation_started": {"generation": "integer, 0 for the first", "master_addr": "string", "master_port": "integer"},
    "worker_started": {"rank": "integer", "pid": "integer"},
    "worker_start_failed": {"rank": "integer", "reason": "string", "status": "integer"},
    "worker_raised": {"rank": "integer", "type": "string", "message": "string"},
    "worker_exited": {"rank": "integer", "pid": "integer",
        "status": "integer: as a shell shows it, 128 + n for signal n", "how": "string: as in a sentence",
        "seconds": "number", "stopped_with": "integer or null: the last signal that ddplaunch had sent to end it",
        "progress": "object or null: how far it was, with the fields of `workers[].progress` in summary.json"},
    "signal_received": {"signal": "integer", "name": "string"},
    "signal_forwarded": {"signal": "integer", "name": "string", "ranks": "string: as 0-3,7"},
    "stop_sent": {"signal": "integer", "name": "string", "ranks": "string"},
    "kill_sent": {"ranks": "string"},
    "swept": {"signal": "integer", "left": "list of strings: processes that workers left behind"},
    "job_suspended": {},
    "job_resumed": {},
    "paused": {"seconds": "number"},
    "front_lost": {},
    "output_dropped": {"bytes": "integer: not shown because the command's stdout was not read; the logs have them"},
    "notice": {"text": "string"},
    "straggler": {"rank": "integer", "host": "string, empty in a job of one node",
        "last_in": "number: share of the steps in which it came last to a collective",
        "steps": "integer: how many were compared",
        "seconds": "number: how long after the median of the other ranks it came",
        "share": "number: that as a share of a step", "steps_per_second": "number or null"},
    "generation_failed": {"generation": "integer", "rank": "integer or null", "wait": "number: seconds to the next"},
    "node_joined": {"host": "string", "workers": "integer",
        "node_rank": "integer or null: the node rank that it was started with"},
    "node_stopping": {"host": "string", "node_rank": "integer or null",
        "why": "string: failed, hung, signalled, timed_out, front_lost"},
    "node_left": {"host": "string",
        "node_rank": "integer or null: in the generation that ran, null if the node took no part",
        "reason": "string: as in a sentence"},
    "took_over": {"text": "string"},
    "left_after_notice": {"signal": "string: name of the notice",
        "job": "string or null: the id of the Slurm job; empty outside of Slurm, null where another process requeues it",
        "sent": "boolean or null: whether it was requeued from here", "text": "string or null: why, as in a sentence"},
    "job_ended": {"status": "integer: the command's exit status",
        "why": "string: finished, failed, hung, signalled, timed_out, front_lost, node_lost, "
        "left_after_notice; with several nodes also not_met, "
        "not_reached, refused, left (this node alone), lost (node 0)",
        "seconds": "number", "text": "string: the same as in a sentence"},
}  # fmt: skip


class Event(Struct, frozen=True):
    """One thing that happened."""

    name: str  # a key of SCHEMA
    mono: float  # CLOCK_MONOTONIC seconds
    fields: Mapping[str, Any]


Reader = Callable[[Event], None]


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


# --- summary.json


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


def progress_data(progress: Progress | None) -> dict[str, Any] | None:
    """Return how far a worker is as plain data; None where nobody says."""
    return {**asdict(progress), "metrics": dict(progress.metrics)} if progress is not None else None


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
