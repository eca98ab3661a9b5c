"""The public record of a job: the events that there are, with their fields, and what `summary.json` holds. Writes nothing.

`events.jsonl` holds one JSON object a line: `v` (the schema's version), `event`, `at` (seconds since the epoch),
`mono` (CLOCK_MONOTONIC seconds, comparable between the workers of one node) and the fields of its kind.
A field may be added at any time; a field that changes its meaning makes a new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ddplaunch.spec.outcome import Progress

VERSION = 1

SCHEMA: Mapping[str, Mapping[str, str]] = {
    "job_started": {"run_id": "string", "program": "string: the script, module or command", "world_size": "integer",
        "host": "string", "backend": "string", "ddplaunch": "string: version"},
    "generation_started": {"generation": "integer, 0 for the first",
        "term": "integer or null: DDPLAUNCH_TERM of the workers, null if they have none",
        "master_addr": "string", "master_port": "integer"},
    "worker_started": {"rank": "integer", "pid": "integer"},
    "worker_start_failed": {"rank": "integer", "reason": "string", "status": "integer"},
    "worker_raised": {"rank": "integer", "type": "string", "message": "string",
        "where": "string or null, in the program, as FILE:LINE or FILE:LINE in FUNCTION",
        "follows": "boolean, whether it says only that another worker has ended or hangs, such as a connection that was closed",
        "raised_at": "number or null, CLOCK_MONOTONIC seconds"},
    "worker_exited": {"rank": "integer", "pid": "integer",
        "status": "integer, as a shell shows it, 128 + n for signal n", "how": "string: as in a sentence",
        "seconds": "number", "stopped_with": "integer or null: the last signal that ddplaunch had sent to end it",
        "error": "string or null, the exception that it recorded, as TYPE: MESSAGE",
        "where": "string or null, where it raised that, as in `worker_raised`",
        "follows": "boolean, as in `worker_raised`", "raised_at": "number or null, as in `worker_raised`",
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
    "generation_failed": {"generation": "integer", "rank": "integer or null", "wait": "number: seconds to the next",
        "text": "string, the first line of the failure summary"},
    "node_joined": {"host": "string", "workers": "integer",
        "node_rank": "integer or null: the node rank that it was started with"},
    "node_stopping": {"host": "string", "node_rank": "integer or null",
        "why": "string: failed, hung, signalled, timed_out, front_lost"},
    "node_left": {"host": "string",
        "node_rank": "integer or null: in the generation that ran, null if the node took no part",
        "reason": "string: as in a sentence"},
    "left_after_notice": {"signal": "string: name of the notice",
        "job": "string or null: the id of the Slurm job; empty outside of Slurm, null where another process requeues it",
        "sent": "boolean or null: whether it was requeued from here", "text": "string or null: why, as in a sentence"},
    "job_ended": {"status": "integer: the command's exit status",
        "why": "string: finished, failed, hung, signalled, timed_out, front_lost, node_lost, "
        "left_after_notice; with several nodes also not_met, "
        "not_reached, refused, left (this node alone), lost (the coordinator)",
        "seconds": "number", "text": "string: the same as in a sentence"},
}  # fmt: skip


class Event(Struct, frozen=True):
    """One thing that happened."""

    name: str  # a key of SCHEMA
    mono: float  # CLOCK_MONOTONIC seconds
    fields: Mapping[str, Any]


Reader = Callable[[Event], None]


# --- summary.json


def progress_data(progress: Progress | None) -> dict[str, Any] | None:
    """Return how far a worker is as plain data; None where nobody says."""
    return {**asdict(progress), "metrics": dict(progress.metrics)} if progress is not None else None
