"""What the report of a hang says: whom all wait for, where everybody is, who waits in which collective. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.report.words import these_ranks
from ddplaunch.stacks import Sample
from ddplaunch.stacks.collectives import awaited, explain
from ddplaunch.stacks.merge import is_waiting, merge, where

_MOST = 16  # places that are told of


def told(samples: Sequence[Sample], cwd: str) -> tuple[str, list[str]]:
    """Give in a sentence what is wrong, "" if that is not known, and who is where, those that others wait for first."""
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
            head = f"{_are(first)} in no collective, {these_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in one"
    groups = sorted(merge(workers), key=lambda group: first.isdisjoint(group.ranks))
    return head, [*(f"{group.who}: {where(group.samples[0], cwd)}" for group in groups[:_MOST]), *waits]


def _are(ranks: frozenset[int]) -> str:
    return f"{these_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"
