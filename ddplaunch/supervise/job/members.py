"""The agents of a job, and mappings that never change: thousands of nodes join and end one by one, each in a new state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

V = TypeVar("V")

SELF_ID = 0  # the id of the coordinator's own agent
_SHARD = 128  # keys of a part: of ten thousand items, one more copies these and the list of some eighty parts


class FrozenMap(Mapping[int, "V"]):
    """A mapping that never changes: one with another item is a new one, which shares all but a small part with it.

    Close keys are in the same part, and each part is in the order in which its items came.
    """

    def __init__(self, parts: Mapping[int, dict[int, V]], length: int) -> None:
        self._parts = parts
        self._length = length

    @classmethod
    def of(cls, items: Mapping[int, V]) -> FrozenMap[V]:
        """Return a frozen map of these items."""
        parts: dict[int, dict[int, V]] = {}
        for key, value in items.items():
            parts.setdefault(key // _SHARD, {})[key] = value
        return cls(parts, len(items))

    def __getitem__(self, key: int) -> V:
        return self._parts[key // _SHARD][key]

    def __iter__(self) -> Iterator[int]:
        for part in self._parts.values():
            yield from part

    def __len__(self) -> int:
        return self._length

    def with_item(self, key: int, value: V) -> FrozenMap[V]:
        """Return a map in which `key` has this value."""
        part = self._parts.get(key // _SHARD, {})
        return FrozenMap({**self._parts, key // _SHARD: {**part, key: value}}, self._length + (key not in part))

    def without(self, key: int) -> FrozenMap[V]:
        """Return a map without `key`."""
        part = self._parts[key // _SHARD].copy()
        del part[key]
        return FrozenMap({**self._parts, key // _SHARD: part}, self._length - 1)


class Member(Struct, frozen=True, kw_only=True):
    """An agent, as the coordinator knows it."""

    id: int
    host: str
    workers: int
    wanted: int | None  # the node rank that its user gave it; None: any
    agreed: tuple[tuple[str, str], ...] = ()  # what all nodes should have in common: (what, value)
    place: int | None = None  # its node rank in the generation that runs; None: it joined later
    has_ended: bool = False  # no process of this generation is left there
    is_leaving: bool = False  # it ends when none of this generation is left there, and the others go on

    @property
    def runs(self) -> bool:
        """Whether its node takes part in the generation, and has not ended yet."""
        return self.place is not None and not self.has_ended

    @property
    def fixed_rank(self) -> int | None:
        """The node rank that it has in every generation; None: any. The coordinator's own agent is always node 0."""
        return 0 if self.id == SELF_ID else self.wanted

    def __str__(self) -> str:
        return self.host if self.place is None else f"node {self.place} ({self.host})"


class Members(Mapping[int, Member]):
    """The members by id; frozen. One more or less costs no look at all others, nor a copy of them."""

    def __init__(self, by_id: FrozenMap[Member], id_by_rank: FrozenMap[int], running: int) -> None:
        self._by_id = by_id
        self._id_by_rank = id_by_rank  # of the members with a fixed node rank
        self._running = running  # how many of them run

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """Return these members."""
        by_id = {member.id: member for member in members}
        id_by_rank = {rank: member.id for member in by_id.values() if (rank := member.fixed_rank) is not None}
        return cls(FrozenMap.of(by_id), FrozenMap.of(id_by_rank), sum(member.runs for member in by_id.values()))

    def __getitem__(self, id: int) -> Member:
        return self._by_id[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def with_member(self, member: Member) -> Members:
        """Return the members with one that is new, or has changed."""
        before, rank = self._by_id.get(member.id), member.fixed_rank
        running = self._running + member.runs - (before is not None and before.runs)
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.with_item(rank, member.id)
        return Members(self._by_id.with_item(member.id, member), id_by_rank, running)

    def without(self, id: int) -> Members:
        """Return the members without one of them."""
        member = self._by_id[id]
        rank = member.fixed_rank
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.without(rank)
        return Members(self._by_id.without(id), id_by_rank, self._running - member.runs)

    @property
    def have_ended(self) -> bool:
        """Whether no process of the generation is left on any node."""
        return self._running == 0

    def with_fixed_rank(self, node_rank: int) -> Member | None:
        """Return the member whose user gave it this node rank; the coordinator's own agent for 0."""
        id = self._id_by_rank.get(node_rank)
        return None if id is None else self._by_id[id]
