"""Names the cause of a worker's end by the table of causes. Pure: `first_failure` picks the worker, the agent finds the facts."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.report.causes import CAUSES
from ddplaunch.report.evidence import Evidence
from ddplaunch.supervise.outcome import WorkerExit
from ddplaunch.words import count, signal_name, size


class Cause(Struct, frozen=True, kw_only=True):
    """The cause of a failure, and what to do about it."""

    name: str
    advice: str  # one line
    line: str = ""  # of what the worker said, as evidence; "" if that is a fact of the node


def classify(end: WorkerExit, facts: Evidence) -> Cause | None:
    """Name the cause of a failure by the first row that fits; None if none does."""
    general = {
        "device": end.device,
        "rank": end.rank,
        "full": end.device if end.device != "cpu" else "a GPU, which ddplaunch gave no worker,",
        "signal": signal_name(end.signal or 0),
        "memory": size(end.peak_rss),
        "kills": count(facts.oom_kills, "kill"),
        "interpreter": facts.interpreter or "the workers' Python",
        "shm": f"{size(facts.shm_free or 0)} of {size(facts.shm_size or 0)} free",
    }
    for row in CAUSES:
        if (found := row.predicate(end, facts)) is not None:
            return Cause(name=row.name, advice=row.advice.format(**general | dict(found)), line=found.get("line", ""))
    return None
