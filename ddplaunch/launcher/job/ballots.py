"""How a node shows that a vote is its own: by a secret that the coordinator has given to it with the vote, and to nobody else.

Nodes that may take over get a seal of each secret, by which they know it when it is shown, and from which it cannot be found.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.launcher.decide.electorate import Vote
from ddplaunch.system.fields import MAX_AGENTS, Number

_SECRET = 16  # bytes
_SEAL = 8  # bytes: a job does not last long enough to find one, and those of 65,536 nodes fit into a message
Secret = Annotated[str, Meta(pattern=rf"\A(?:[0-9a-f]{{{2 * _SECRET}}})?\Z")]  # "": none
Seal = Annotated[str, Meta(pattern=rf"\A[0-9a-f]{{{2 * _SEAL}}}\Z")]


class Seals(Struct, frozen=True, array_like=True):
    """The seals of an electorate, by rank."""

    term: Number
    by_rank: Annotated[tuple[Seal, ...], Meta(max_length=MAX_AGENTS)]


def seal_of(secret: str) -> str:
    """Return the seal of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()[: 2 * _SEAL]


class Ballots:
    """The secrets and seals that a coordinator knows."""

    def __init__(self, seals: Iterable[Seals] = ()) -> None:
        """Begin with the seals of a coordinator from which this one takes over."""
        self._seals = {one.term: one.by_rank for one in seals}
        self._secrets: dict[Vote, str] = {}  # that were made here, or shown

    def issue(self, term: int, size: int, kept: Collection[int]) -> None:
        """Make the secrets of a new electorate; of earlier ones only these terms still count."""
        self._seals = {old: by_rank for old, by_rank in self._seals.items() if old in kept}
        self._secrets = {vote: secret for vote, secret in self._secrets.items() if vote.term in kept}
        secrets = [os.urandom(_SECRET).hex() for _ in range(size)]
        self._seals[term] = tuple(map(seal_of, secrets))
        self._secrets.update({Vote(term, rank): secret for rank, secret in enumerate(secrets)})

    def secrets_of(self, votes: Iterable[Vote]) -> tuple[str, ...]:
        """Return the secret of each vote, "" of one that is not known."""
        return tuple(self._secrets.get(vote, "") for vote in votes)

    def seals_of(self, terms: Iterable[int]) -> tuple[Seals, ...]:
        """Return the seals of these terms, for a node that may take over."""
        return tuple(Seals(term, self._seals[term]) for term in terms if term in self._seals)

    def take(self, votes: Sequence[Vote], secrets: Sequence[str]) -> bool:
        """Return whether a node shows that its votes are its own, one in a term. Those of unknown terms do not count here."""
        shown = {**dict.fromkeys(votes, ""), **dict(zip(votes, secrets, strict=False))}
        if len({vote.term for vote in votes}) < len(votes):
            return False
        if not all(self._is_shown(vote, secret) for vote, secret in shown.items()):
            return False
        self._secrets = {**shown, **self._secrets}
        return True

    def _is_shown(self, vote: Vote, secret: str) -> bool:
        seals = self._seals.get(vote.term)
        return seals is None or (vote.rank < len(seals) and seals[vote.rank] == seal_of(secret))
