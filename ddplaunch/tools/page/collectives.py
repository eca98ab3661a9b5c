"""The lines of collectives.jsonl joined: when ranks came to the same collectives, and who kept the others waiting. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.system.fields import Piece, Seconds, Size
from ddplaunch.system.words import ranges_of
from ddplaunch.tools.page.samples import MOST_RANKS, parse_first_ranks

_MOST_TIMES = 200_000  # times of ranks that are kept, the later ones
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
    def is_complete(self) -> bool:
        """Whether all ranks of the group are known to have come, as far as the group's ranks are known."""
        return next(self.missing(), None) is None

    def missing(self) -> Iterator[range]:
        """Yield the ranks of the group that are not known to have come, as ascending ranges."""
        came = sorted(self.came)
        for members in _members(self.members):
            expected = members.start  # the lowest of these members that was not looked for yet
            for rank in came[bisect_left(came, members.start) : bisect_left(came, members.stop)]:
                if expected < rank:
                    yield range(expected, rank)
                expected = rank + 1
            if expected < members.stop:
                yield range(expected, members.stop)

    def missing_text(self, longest: int) -> str:
        """Write the missing ranks as "0-2,4", in at most so many characters."""
        written, length = [], 0
        for each in self.missing():
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
    came_to: int  # collectives
    came_last: int  # to so many of these
    kept_waiting: float  # seconds for which it kept the median rank waiting where it came last, in sum
    waited: float  # seconds for which it waited for the last rank, in sum


class CallsRow(Struct):
    """A line of collectives.jsonl: when ranks of a group came to some of its collectives."""

    mono: Seconds
    group: Piece
    ranks: Annotated[str, Meta(max_length=MOST_RANKS)]
    numbers: Annotated[tuple[Size, ...], Meta(max_length=_MOST_NUMBERS)]
    came: Annotated[tuple[_Came, ...], Meta(max_length=_MOST_NUMBERS)]
    members: Annotated[str, Meta(max_length=MOST_RANKS)] = ""
    operations: Annotated[tuple[Piece, ...], Meta(max_length=_MOST_NUMBERS)] = ()


class _Key(NamedTuple):
    """Which collective is meant; keys sort by generation and group, then by number."""

    generation: int
    group: str
    members: str
    number: int

    @property
    def group_of_generation(self) -> tuple[int, str, str]:
        """The group in its generation, whose collectives are numbered."""
        return self[:3]


class _Gathered(Struct):
    """What is known of one collective so far; a rank came when it was first seen to have."""

    came: dict[int, float]
    operation: str = ""


class _Gathering:
    """What the lines have told of each collective so far; beyond _MOST_TIMES times, what was told longest ago is dropped."""

    def __init__(self) -> None:
        self.found: OrderedDict[_Key, _Gathered] = OrderedDict()  # by when a line told of it last
        self._times = 0  # of ranks, in all of them

    def add(self, key: _Key, came: dict[int, float], operation: str) -> None:
        """Add what a line tells of a collective: when ranks came to it; "" for an operation that the line does not name."""
        known = self.found.pop(key, None) or _Gathered({})
        self.found[key] = known
        times_before = len(known.came)
        for rank, at in came.items():
            known.came.setdefault(rank, at)
        known.operation = operation or known.operation
        self._times += len(known.came) - times_before

    def drop_oldest(self) -> None:
        """Keep no more than _MOST_TIMES times: drop the collectives of which a line told longest ago."""
        while self._times > _MOST_TIMES:
            _, dropped = self.found.popitem(last=False)
            self._times -= len(dropped.came)


def collectives(
    rows_of_nodes: Iterable[tuple[Iterable[CallsRow], float]], generation_starts: Sequence[tuple[float, int]]
) -> list[Collective]:
    """Return the collectives in the order of their times.

    `rows_of_nodes` are the lines of each node, with what is to be added to its clock to give seconds since 1970;
    `generation_starts` says when each generation began, and its number: the numbers of collectives start again with each. The
    last collective of a generation that had to end is open, unless all had come to it.
    """
    gathering = _Gathering()
    starts = [at for at, _ in generation_starts]
    for rows, offset in rows_of_nodes:
        for row in rows:
            base = row.mono + offset  # the moment of the line, to which its times are relative
            most_times = max(map(len, row.came), default=0)  # of one collective, one for each of the first ranks
            ranks = parse_first_ranks(row.ranks, most_times)
            started = bisect_right(starts, base)  # generations by then
            generation = generation_starts[started - 1][1] if started else 0
            for index, (number, microseconds) in enumerate(zip(row.numbers, row.came, strict=False)):
                moments = zip(ranks, microseconds, strict=False)
                came = {rank: base + after_base / 1e6 for rank, after_base in moments if after_base is not None}
                if came:
                    operation = row.operations[index] if index < len(row.operations) else ""
                    gathering.add(_Key(generation, row.group, row.members, number), came, operation)
            gathering.drop_oldest()
    # of the numbers of a group the last one stays
    last_of_group = {key.group_of_generation: key.number for key in sorted(gathering.found)}
    made = []
    for key, gathered in gathering.found.items():
        each = Collective(**key._asdict(), operation=gathered.operation, came=gathered.came)
        # a line names operations only if its workers had to end; one that is written while they run may be too early for some
        was_at_the_end = bool(gathered.operation) and last_of_group[key.group_of_generation] == key.number
        made.append(replace(each, is_open=True) if was_at_the_end and not each.is_complete else each)
    return sorted(made, key=lambda one: min(one.came.values()))


def waits(seen: Sequence[Collective]) -> dict[tuple[str, str], list[Waits]]:
    """Return for each group (name and members) how often each rank came last, kept others and waited.

    The rank that kept the median rank waiting for most seconds comes first.
    """
    by_group: dict[tuple[str, str], list[Collective]] = {}
    for one in seen:
        if len(one.came) > 1:
            by_group.setdefault((one.group, one.members), []).append(one)
    result = {}
    for group, of_group in by_group.items():
        came_to, came_last = Counter[int](), Counter[int]()
        kept_waiting, waited = defaultdict[int, float](float), defaultdict[int, float](float)
        for one in of_group:
            times = sorted(one.came.values())
            median, latest = times[(len(times) - 1) // 2], times[-1]  # of two ranks, the one that is kept waiting
            came_last[one.last] += 1
            kept_waiting[one.last] += latest - median
            for rank, at in one.came.items():
                came_to[rank] += 1
                waited[rank] += latest - at
        every = (Waits(rank, came_to[rank], came_last[rank], kept_waiting[rank], waited[rank]) for rank in came_to)
        result[group] = sorted(every, key=lambda each: (-each.kept_waiting, each.rank))
    return result
