"""What a report says of where workers were when they had to end, and of a hang whom all wait for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.report.closing import Whereabouts
from ddplaunch.stacks import Sample
from ddplaunch.stacks.collectives import at_the_end, awaited, explain
from ddplaunch.stacks.merge import is_waiting, merge, where
from ddplaunch.words import these_ranks

_MOST = 16  # places that are named
_MOST_LINES = 80  # of RAS


def describe_end(samples: Sequence[Sample], cwd: str, *, of_hang: bool) -> Whereabouts:
    """Return what `describe` gives of a job that hangs; of others nothing is wrong but the failure, and who was where."""
    return describe(samples, cwd) if of_hang else Whereabouts(places=tuple(at_the_end(samples, cwd)))


def describe(samples: Sequence[Sample], cwd: str) -> Whereabouts:
    """Return where the workers of a job that hangs are, and for whom they wait."""
    workers = [sample for sample in samples if not (sample.child or sample.ended)]
    waits = explain(samples, cwd)
    first, head = awaited(samples)
    if not head and waits:
        head = waits[0]
    elif not head:
        # torch does not number the collectives, but the stacks show who is in one
        waiting = {sample.rank for sample in workers if is_waiting(sample)}
        first = frozenset(sample.rank for sample in workers) - waiting
        if first and waiting:
            are, wait = "is" if len(first) == 1 else "are", "waits" if len(waiting) == 1 else "wait"
            head = f"{these_ranks(first)} {are} in no collective, {these_ranks(waiting)} {wait} in one"
    groups = sorted(merge(workers), key=lambda group: first.isdisjoint(group.ranks))
    places = (f"{group.who}: {where(group.samples[0], cwd)}" for group in groups[:_MOST])
    told = (*places, *waits, *told_by_ras(samples))
    return Whereabouts(what=head, places=told, awaited=tuple(sorted(first)))


def told_by_ras(samples: Sequence[Sample]) -> list[str]:
    """Return what NCCL's RAS service says of the whole job, if a worker listens for it."""
    asked = next((sample for sample in samples if sample.ras), None)
    if asked is None:
        return []
    lines = [line.rstrip() for line in asked.ras.splitlines() if line.strip()][:_MOST_LINES]
    return [f"NCCL's RAS service, asked at rank {asked.rank}:", *(f"  {line}" for line in lines)]
