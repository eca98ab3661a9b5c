"""Who decides which coordinator goes on when the nodes of a job lose each other, and with what. Pure.

The nodes that began the last generation decide, each for the one coordinator that it follows. A coordinator that began with them
needs as many as are unaccounted for, one that takes over needs more. Those whose agents are known to have ended count for nobody.
So of two coordinators, each unaccounted for by the other, one at most goes on.

Before a generation begins, its nodes acknowledge its electorate, and so do all others that have let the coordinator go on. Until
then a node that takes over with what it has acknowledged needs enough of both, the one before and the new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.system.fields import MAX_AGENTS, Duration, Line, Number, Term

MAX_SPENT = 1000  # restarts within the time of --max-restarts that are remembered


class Vote(Struct, frozen=True, array_like=True):
    """The right of a node to decide, as this rank of an electorate."""

    term: Number
    rank: Number


class Electorate(Struct, frozen=True, array_like=True):
    """The nodes of one generation."""

    term: Number  # ascends from one electorate to the next
    size: Number
    ended: Annotated[tuple[Number, ...], Meta(max_length=MAX_AGENTS)] = ()  # ranks of those known to have ended

    def without(self, votes: Iterable[Vote]) -> Electorate:
        """Return the electorate once the nodes with these votes are known to have ended."""
        return replace(self, ended=tuple(sorted({*self.ended, *self._ranks(votes)})))

    def count(self, votes: Iterable[Vote]) -> tuple[int, int]:
        """Return how many of its nodes have these votes, and how many others are unaccounted for."""
        present = self._ranks(votes)
        return len(present), self.size - len(present | set(self.ended))

    def _ranks(self, votes: Iterable[Vote]) -> set[int]:
        return {vote.rank for vote in votes if vote.term == self.term and vote.rank < self.size}


class History(Struct, frozen=True, kw_only=True):
    """What has become of the job until a generation begins, for a node that takes over."""

    generation: Number  # that begins
    term: Term  # of that generation, no number of an electorate
    restarts: Number
    spent: Annotated[tuple[Duration, ...], Meta(max_length=MAX_SPENT)]  # seconds ago
    time_left: Duration | None  # seconds of --timeout
    best_step: Annotated[int, Meta(ge=-1, le=2**63 - 1)]
    in_vain: Number
    short_lives: Number
    import_failure: Line
    failed_machine: Line
    same_exception: Line
