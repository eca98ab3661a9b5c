"""When one worker came to its collectives, and how they repeat, by what its recorders answer. Pure; trusts nothing.

A step is the shortest sequence of collectives that repeats, by operation and sizes, or by operation where sizes change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ddplaunch.stacks.recorder import entries_of, number_of

_MOST_GROUPS = 64  # of a worker
_LEAST_REPEATS = 3  # of a sequence, or it is none that repeats
_RARE = 2  # times that a collective is called which belongs to no step: an evaluation's, or the first ones


class Arrivals(Struct, frozen=True, kw_only=True):
    """What one worker has called last in one process group."""

    group: str  # its name, and what carries it out: "nccl 0"
    members: str  # its ranks as ranges, "0-8191", which is as short as they are regular; "": not known
    numbers: tuple[int, ...]  # of its collectives, rising; of very many ranks those of some steps only
    times: tuple[int, ...]  # when it came to each: nanoseconds of the time of day
    newest: int  # number of the last one, whether it is among these or not
    newest_at: int  # its time
    length: int  # collectives of a step; 0: they do not repeat
    period: float  # seconds from step to step


def arrivals(bodies: Iterable[bytes], members: Mapping[str, str], every: int = 1) -> list[Arrivals]:
    """Return what the recorders of a worker tell; of the steps only every so many, but some of those that are known."""
    calls: dict[str, list[tuple[int, int, str, str]]] = {}
    for body in bodies:
        for fields in entries_of(body):
            group = _group(fields)
            number, at = number_of(fields.get("collective_seq_id")), number_of(fields.get("time_created_ns"))
            if number < 0 or at <= 0 or fields.get("is_p2p") is True:
                continue
            if group not in calls and len(calls) == _MOST_GROUPS:
                continue
            of_group = calls.setdefault(group, [])
            if of_group and number < of_group[-1][0]:
                of_group.clear()  # a group of this name was made again, and counts from the start
            if not of_group or number > of_group[-1][0]:  # collectives that are called as one share a number
                of_group.append((number, at, str(fields.get("profiling_name")), str(fields.get("input_sizes"))))
    return [_of_group(group, of_group, members, every) for group, of_group in calls.items()]


def _group(fields: Mapping[str, Any]) -> str:
    name = fields.get("process_group")
    carrier = str(fields.get("profiling_name")).partition(":")[0]
    return f"{carrier} {name[0] if isinstance(name, list) and name else ''}"[:160]


def _of_group(
    group: str, calls: Sequence[tuple[int, int, str, str]], members: Mapping[str, str], every: int
) -> Arrivals:
    kinds = [(name, sizes) for _, _, name, sizes in calls]
    length, period = step([(at, kind) for (_, at, *_), kind in zip(calls, kinds, strict=True)])
    # where there is one operation and its sizes change, a step may be one call or all of them
    if not length and len({name for name, _ in kinds}) > 1 and not _repeats_rarely(kinds):
        length, period = step([(at, name) for _, at, name, _ in calls])
    kept = [(number, at) for number, at, *_ in calls]
    if length and every > 1:
        steps = _kept(kept[0][0], kept[-1][0], length, every)
        kept = [(number, at) for number, at in kept if number // length in steps]
    return Arrivals(
        group=group,
        members=members.get(group.partition(" ")[2], ""),
        numbers=tuple(number for number, _ in kept),
        times=tuple(at for _, at in kept),
        newest=calls[-1][0],
        newest_at=calls[-1][1],
        length=length,
        period=period,
    )


def _kept(first: int, last: int, length: int, every: int) -> range:
    """Which steps are kept of those that are whole between these numbers: one of `every`, but two of them, if there are two.

    They are multiples of a power of two, so that ranks which know less than others keep the same ones, and some between.
    """
    begin, end = -(-first // length), (last + 1) // length
    whole = max(0, end - begin)
    apart = 1 << (max(1, min(every, whole // 2)).bit_length() - 1)
    return range(-(-begin // apart) * apart, end, apart)[-max(2, whole // every) :]


def step(calls: Sequence[tuple[int, Hashable]]) -> tuple[int, float]:
    """Return the length of what repeats in these calls, each with its time, and its period in seconds; 0 and 0.0 for nothing.

    Where not all of it repeats, as around an evaluation, the later half is looked at, and then the earlier one. Nothing is given
    where all of it repeats, but too few times: what repeats more often may be a part of the step, as the layers of a model are.
    """
    if _repeats_rarely([kind for _, kind in calls]):
        return 0, 0.0
    for part in (calls, calls[len(calls) // 2 :], calls[: len(calls) // 2]):
        how_often = Counter(kind for _, kind in part)
        regular = [(at, kind) for at, kind in part if how_often[kind] > _RARE]
        length = _shortest_repeat([kind for _, kind in regular])
        if length * _LEAST_REPEATS <= len(regular) and 2 * len(regular) > len(part) and length:
            times = [at for at, _ in regular]
            return length, middle(later - at for at, later in zip(times, times[length:], strict=False)) / 1e9
    return 0, 0.0


def _repeats_rarely(kinds: Sequence[Hashable]) -> bool:
    """Whether these are all seen to repeat, apart from those that are called once, but less often than a step has to."""
    how_often = Counter(kinds)
    again = [kind for kind in kinds if how_often[kind] > 1]
    length = _shortest_repeat(again)
    return 2 * length <= len(again) < _LEAST_REPEATS * length and 2 * len(again) > len(kinds)


def middle(values: Iterable[float]) -> float:
    """The median, of an even number the larger one of two; `statistics` takes 10 ms to import."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _shortest_repeat(kinds: Sequence[Hashable]) -> int:
    """The smallest distance at which all of these equal each other: by the borders of Knuth, Morris and Pratt."""
    borders = [0] * len(kinds)
    for end in range(1, len(kinds)):
        border = borders[end - 1]
        while border and kinds[border] != kinds[end]:
            border = borders[border - 1]
        borders[end] = border + (kinds[border] == kinds[end])
    return len(kinds) - borders[-1] if kinds else 0
