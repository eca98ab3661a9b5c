"""The lines of collectives.jsonl joined: when ranks came to the same collectives, and who kept the others waiting. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.system.fields import Piece, Seconds, Size
from ddplaunch.system.words import ranges_of
from ddplaunch.tools.page.samples import MOST_RANKS, first_ranks

_MOST = 200_000  # times of ranks that are kept, the later ones
_MOST_NUMBERS = 10_000  # of a line

_Came = Annotated[tuple[Size | None, ...], Meta(max_length=MOST_RANKS)]


class Collective(Struct, frozen=True, kw_only=True):
    """One collective, and when each rank came to it: seconds since 1970."""

    group: str  # its name
    members: str  # the ranks of the group, as 0-3; "": not known
    number: int
    operation: str = ""  # "all_reduce"; "": not known
    generation: int
    came: dict[int, float]
    is_open: bool = False  # the last one of a generation that had to end, to which not all are known to have come

    @property
    def missing(self) -> list[range]:
        """The ranks of the group that are not known to have come, as ascending ranges."""
        return list(self._gaps())

    def _gaps(self) -> Iterator[range]:
        came = sorted(self.came)
        for members in _members(self.members):
            low = members.start
            for rank in came[bisect_left(came, low) : bisect_left(came, members.stop)]:
                if low < rank:
                    yield range(low, rank)
                low = rank + 1
            if low < members.stop:
                yield range(low, members.stop)

    def missing_text(self, longest: int) -> str:
        """Write them as "0-2,4", not much longer than so many characters."""
        written, length = [], 0
        for each in self._gaps():
            written.append(str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}")
            length += len(written[-1]) + 1
            if length > longest:
                break
        return ",".join(written)[:longest]

    @property
    def last(self) -> int:
        """The rank that came last of those that came."""
        return max(self.came, key=lambda rank: (self.came[rank], rank))

    def __str__(self) -> str:
        return f"{self.operation or 'collective'} #{self.number}" + (
            f" of group {self.group}" if self.group not in ("", "0") else ""
        )


@lru_cache(maxsize=1024)  # all collectives of a line share them
def _members(text: str) -> Sequence[range]:
    return ranges_of(text, MOST_RANKS)


class Waits(Struct, frozen=True):
    """What the collectives of one group show of a rank."""

    rank: int
    seen: int  # collectives to which it came
    last: int  # of these, those to which it came last
    kept: float  # seconds for which it kept the median of the others waiting, in sum
    waited: float  # seconds for which it waited for the last one, in sum


class CallsRow(Struct):
    """A line of collectives.jsonl: when ranks of a group came to some of its collectives."""

    mono: Seconds
    group: Piece
    ranks: Annotated[str, Meta(max_length=MOST_RANKS)]
    numbers: Annotated[tuple[Size, ...], Meta(max_length=_MOST_NUMBERS)]
    came: Annotated[tuple[_Came, ...], Meta(max_length=_MOST_NUMBERS)]
    members: Annotated[str, Meta(max_length=MOST_RANKS)] = ""
    operations: Annotated[tuple[Piece, ...], Meta(max_length=_MOST_NUMBERS)] = ()


class _Gathered(Struct):
    """What is known of one collective so far; a rank came when it was first seen to have."""

    came: dict[int, float]
    operation: str = ""


def collectives(
    read: Iterable[tuple[Iterable[CallsRow], float]], began: Sequence[tuple[float, int]]
) -> list[Collective]:
    """Return the collectives in the order of their times.

    `read` are the lines of the nodes, each with what is to be added to its clock to give seconds since 1970. `began` says when
    each generation began, in its order: the numbers of collectives start again with each.
    """
    found: OrderedDict[tuple[int, str, str, int], _Gathered] = OrderedDict()  # the first ones leave first
    moments = [at for at, _ in began]
    times = 0
    for rows, offset in read:
        for row in rows:
            base = row.mono + offset
            ranks = first_ranks(row.ranks, max(map(len, row.came), default=0))
            place = bisect_right(moments, base) - 1
            generation = began[place][1] if place >= 0 else 0
            for index, (number, came) in enumerate(zip(row.numbers, row.came, strict=False)):
                key = generation, row.group, row.members, number
                at = {rank: base + one / 1e6 for rank, one in zip(ranks, came, strict=False) if one is not None}
                if not at:
                    continue
                known = found.pop(key, None) or _Gathered({})
                times -= len(known.came)
                for rank, moment in at.items():
                    known.came.setdefault(rank, moment)
                times += len(known.came)
                known.operation = (row.operations[index] if index < len(row.operations) else "") or known.operation
                found[key] = known
            while times > _MOST:
                times -= len(found.popitem(last=False)[1].came)
    last = {key[:3]: key[3] for key in sorted(found)}
    made = []
    for (generation, group, members, number), one in found.items():
        each = Collective(
            group=group, members=members, number=number, operation=one.operation, generation=generation, came=one.came
        )
        # operations are known of workers that had to end; a look while they run may come before some ranks do
        is_last = last[generation, group, members] == number
        made.append(replace(each, is_open=True) if one.operation and is_last and each.missing else each)
    return sorted(made, key=lambda one: min(one.came.values()))


def waits(seen: Sequence[Collective]) -> dict[tuple[str, str], list[Waits]]:
    """Return for each group how often each rank came last, kept others and waited; the rank that cost most comes first."""
    by_group: dict[tuple[str, str], list[Collective]] = {}
    for one in seen:
        if len(one.came) > 1:
            by_group.setdefault((one.group, one.members), []).append(one)
    made = {}
    for group, of_group in by_group.items():
        count, last = Counter[int](), Counter[int]()
        kept, waited = defaultdict[int, float](float), defaultdict[int, float](float)
        for one in of_group:
            times = sorted(one.came.values())
            median, latest = times[(len(times) - 1) // 2], times[-1]
            last[one.last] += 1
            kept[one.last] += latest - median
            for rank, at in one.came.items():
                count[rank] += 1
                waited[rank] += latest - at
        every = (Waits(rank, count[rank], last[rank], kept[rank], waited[rank]) for rank in count)
        made[group] = sorted(every, key=lambda each: (-each.kept, each.rank))
    return made
