"""When workers came to their collectives, and how these repeat: read from what torch's recorders answer, and kept as lines. Pure.

A step is the shortest sequence of collectives that repeats, by operation and sizes, or by operation where sizes change. An answer
of a worker is not trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from ddplaunch.record.events import VERSION
from ddplaunch.record.seen import LONGEST_REPEATED_MEMBERS, MAX_ENTRIES, Arrivals, Sample
from ddplaunch.record.seen.recorder import entries_of, number_of
from ddplaunch.record.seen.stragglers import Clock, middle
from ddplaunch.system.fields import bounded_duration, bounded_number, bounded_size, piece
from ddplaunch.system.words import compress

_MOST_GROUPS = 64  # of a recorder
_MOST_ENTRIES = MAX_ENTRIES // 2  # of a recorder: a worker has two
_LEAST_REPEATS = 3  # of a sequence, or it is none that repeats
_LONGEST_GROUP = 160  # characters of the name of a group
_RARE = 2  # times that a collective is called which belongs to no step: an evaluation's, or the first ones
_MOST_TIMES = 512  # times in a line: the last collectives, but
_LEAST_TIMES = 4  # of those at least

_Group: TypeAlias = "tuple[str, str]"  # its name and its ranks
# by group, number and rank: nanoseconds of CLOCK_MONOTONIC
_Came: TypeAlias = "dict[_Group, dict[int, dict[int, int]]]"


class _Call(NamedTuple):
    """A collective of one group."""

    number: int
    at: int  # nanoseconds of the time of day
    name: str  # of the operation
    sizes: str  # of its tensors


def arrivals(rank: int, bodies: Iterable[bytes], members: Mapping[str, str], every: int = 1) -> list[Arrivals]:
    """Return when a worker came to the collectives of each group, as its recorders tell; of the steps, only one in `every`.

    `bodies` are the answers of its recorders (torch has one for NCCL, one for the rest), `members` the ranks of groups by name.
    """
    calls: dict[str, list[_Call]] = {}
    for body in bodies:
        for fields in entries_of(body):
            group = _named_group(fields)
            index, at = number_of(fields.get("collective_seq_id")), number_of(fields.get("time_created_ns"))
            is_collective = index >= 0 and at > 0 and fields.get("is_p2p") is not True
            if not is_collective or (group not in calls and len(calls) == _MOST_GROUPS):
                continue
            of_group = calls.setdefault(group, [])
            if of_group and index < of_group[-1].number:
                of_group.clear()  # a group of this name was made again, and counts from the start
            if not of_group or index > of_group[-1].number:  # collectives that are called as one share a number
                name, sizes = str(fields.get("profiling_name")), str(fields.get("input_sizes"))
                of_group.append(_Call(index, at, name, sizes))
    is_too_much = sum(map(len, calls.values())) > _MOST_ENTRIES
    most_of_group = _MOST_ENTRIES // len(calls) if is_too_much else _MOST_ENTRIES
    made = []
    for group, of_group in calls.items():
        _, _, own_name = group.partition(" ")  # behind the backend, see `_named_group`
        ranks = members.get(own_name, "")
        named_ranks = ranks if len(ranks) <= LONGEST_REPEATED_MEMBERS else ""  # all workers send them, again and again
        made.append(_arrivals_in(group, named_ranks, of_group, every, most_of_group, rank))
    return made


def _named_group(fields: Mapping[str, Any]) -> str:
    """Return the backend and the name of a call's group: "nccl default_pg"."""
    name = fields.get("process_group")
    backend = str(fields.get("profiling_name")).partition(":")[0]
    return piece(f"{backend} {name[0] if isinstance(name, list) and name else ''}", _LONGEST_GROUP)


def _arrivals_in(group: str, members: str, calls: Sequence[_Call], every: int, most: int, rank: int) -> Arrivals:
    """Return when a rank came to the last `most` collectives of a group, for every `every`-th step, and how long a step is."""
    kinds = [(call.name, call.sizes) for call in calls]
    length, period = find_step([(call.at, kind) for call, kind in zip(calls, kinds, strict=True)])
    # if all are one operation, a step may be one call of any size, or all of them
    has_one_operation = len({call.name for call in calls}) == 1
    sizes_may_change = not length and not has_one_operation and not _repeats_too_rarely(kinds)  # from step to step
    if sizes_may_change:
        length, period = find_step([(call.at, call.name) for call in calls])
    kept = calls
    if length and every > 1:
        steps = _steps_to_keep(calls[0].number, calls[-1].number, length, every)
        kept = [call for call in calls if call.number // length in steps]
    return Arrivals(
        rank=rank,
        group=group,
        members=members,
        numbers=increments(call.number for call in kept[-most:]),
        times=increments(call.at for call in kept[-most:]),
        newest=calls[-1].number,
        newest_at=calls[-1].at,
        length=bounded_number(length),  # what torch's recorder tells may be more than a message takes
        period=bounded_duration(period),
    )


def increments(values: Iterable[int]) -> tuple[int, ...]:
    """Return each value less the one before, the first one as it is; where the clock was set back between two times, 0."""
    return tuple(bounded_size(after - before) for before, after in pairwise((0, *values)))


def _steps_to_keep(first: int, last: int, length: int, every: int) -> range:
    """Return the steps to keep of those that are whole between these numbers: one in `every`, but two if there are two.

    The steps are multiples of a power of two, so that ranks which know fewer steps keep the same steps, and some between.
    """
    begin, end = -(-first // length), (last + 1) // length  # the whole steps: `begin` rounded up, `end` not included
    whole = max(0, end - begin)
    apart = 1 << (max(1, min(every, whole // 2)).bit_length() - 1)  # the largest power of two that is not above
    return range(-(-begin // apart) * apart, end, apart)[-max(2, whole // every) :]


def find_step(calls: Sequence[tuple[int, Hashable]]) -> tuple[int, float]:
    """Return how many calls make a step, and the seconds of a step; 0 and 0.0 if no step is seen.

    A call is a time in nanoseconds and a kind: a step is the shortest sequence of kinds that repeats, without rare kinds.

    If not all calls repeat, as around an evaluation, look at the later half, then at the earlier half. If all repeat, but too few
    times, no step is seen: what repeats more often within them may be a part of a step, such as a layer.
    """
    if _repeats_too_rarely([kind for _, kind in calls]):
        return 0, 0.0
    half = len(calls) // 2
    for part in (calls, calls[half:], calls[:half]):
        how_often = Counter(kind for _, kind in part)
        regular = [(at, kind) for at, kind in part if how_often[kind] > _RARE]
        length = _shortest_repeat([kind for _, kind in regular])
        is_most_of_part = 2 * len(regular) > len(part)
        if length and length * _LEAST_REPEATS <= len(regular) and is_most_of_part:
            times = [at for at, _ in regular]
            return length, middle(later - at for at, later in zip(times, times[length:], strict=False)) / 1e9
    return 0, 0.0


def _repeats_too_rarely(kinds: Sequence[Hashable]) -> bool:
    """Whether all calls repeat, apart from kinds that are called once, but fewer times than a step has to."""
    how_often = Counter(kinds)
    repeated = [kind for kind in kinds if how_often[kind] > 1]
    length = _shortest_repeat(repeated)
    is_most_of_them = 2 * len(repeated) > len(kinds)
    return 2 * length <= len(repeated) < _LEAST_REPEATS * length and is_most_of_them


def _shortest_repeat(kinds: Sequence[Hashable]) -> int:
    """The smallest distance at which all of these equal each other: by the borders of Knuth, Morris and Pratt."""
    borders = [0] * len(kinds)
    for end in range(1, len(kinds)):
        border = borders[end - 1]
        while border and kinds[border] != kinds[end]:
            border = borders[border - 1]
        borders[end] = border + (kinds[border] == kinds[end])
    return len(kinds) - borders[-1] if kinds else 0


# --- lines of collectives.jsonl, for the page and the trace of a run; their times are those of CLOCK_MONOTONIC of the node that
# writes them


def rows_of_arrivals(found: Iterable[Arrivals], clocks: Mapping[int, Clock]) -> list[dict[str, Any]]:
    """Return the lines of one reading of all ranks; `clocks` are those of their nodes, by rank."""
    came: _Came = {}
    for each in found:
        _, _, own_name = each.group.partition(" ")  # behind the backend
        by_number = came.setdefault((own_name, each.members), {})
        for index, at in each.calls[-_MOST_TIMES:]:
            by_number.setdefault(index, {})[each.rank] = at - clocks[each.rank].ahead
    return _rows(came, {})


def rows_of_samples(samples: Iterable[Sample], ahead: int) -> list[dict[str, Any]]:
    """Return the lines of the workers of a node that had to end, with the operations of their collectives.

    `ahead`: nanoseconds that the time of day is ahead of CLOCK_MONOTONIC. Children of workers are left out.
    """
    came: _Came = {}
    operations: dict[_Group, dict[int, str]] = {}  # by number
    for sample in samples:
        for group in (sample.groups or ()) if not sample.child else ():
            key = group.name, group.members
            for call in group.calls:
                if not call.is_p2p and call.at:
                    came.setdefault(key, {}).setdefault(call.number, {})[sample.rank] = call.at - ahead
                    operations.setdefault(key, {})[call.number] = call.operation
    return _rows(came, operations)


def _rows(came: _Came, operations: Mapping[_Group, Mapping[int, str]]) -> list[dict[str, Any]]:
    """Return a row of collectives.jsonl for each group: its ranks, and when each came to each of the latest collectives.

    In "came", each number has a time for each rank: microseconds after "mono", None where it is not known that the rank came.
    """
    rows = []
    for (name, members), by_number in came.items():
        ranks = sorted({rank for of_number in by_number.values() for rank in of_number})
        numbers = sorted(by_number)[-max(_LEAST_TIMES, _MOST_TIMES // len(ranks)) :]
        base = min(at for number in numbers for at in by_number[number].values())
        row = {
            "v": VERSION,
            "mono": base / 1e9,
            "group": name,
            "members": members,
            "ranks": compress(ranks),
            "numbers": numbers,
            "came": [
                [(times[rank] - base) // 1000 if rank in times else None for rank in ranks]
                for times in (by_number[number] for number in numbers)
            ],
        }
        if named := operations.get((name, members)):
            row["operations"] = [named[number] for number in numbers]
        rows.append(row)
    return rows
