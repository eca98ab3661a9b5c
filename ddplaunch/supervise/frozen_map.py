"""A mapping that never changes: one with another item is a new one, which shares all but a small part with it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


_SHARD = 128  # keys of a part: of ten thousand items, one more copies these and the list of some eighty parts


class FrozenMap(Mapping[int, "V"]):
    """Values by number; close numbers are kept together, each part in the order in which they came."""

    def __init__(self, parts: Mapping[int, dict[int, V]], length: int) -> None:
        self._parts = parts
        self._length = length

    @classmethod
    def of(cls, items: Mapping[int, V]) -> FrozenMap[V]:
        """Return these items."""
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
        """Return these with one that is new, or has another value."""
        part = self._parts.get(key // _SHARD, {})
        return FrozenMap({**self._parts, key // _SHARD: {**part, key: value}}, self._length + (key not in part))

    def without(self, key: int) -> FrozenMap[V]:
        """Return these without one of them."""
        part = self._parts[key // _SHARD].copy()
        del part[key]
        return FrozenMap({**self._parts, key // _SHARD: part}, self._length - 1)
