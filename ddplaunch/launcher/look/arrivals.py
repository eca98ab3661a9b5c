"""When each worker of a node came to its collectives, and how they repeat: a child of the agent asks their recorders.

A step is the shortest sequence of collectives that repeats, by operation and sizes, or by operation where sizes change. All but
`read_arrivals` is pure; an answer of a worker is not trusted.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

from msgspec.structs import asdict

from ddplaunch.launcher.look.recorder import answers
from ddplaunch.launcher.look.stragglers import Arrivals, middle
from ddplaunch.record.seen.recorder import entries_of, members_of, number_of
from ddplaunch.record.window.questions import (
    MAX_ENTRIES,
    MAX_MEMBERS,
    MAX_SERIES,
    MAX_SETS,
    NodeArrivals,
    SentArrivals,
)
from ddplaunch.system.fields import duration, number, piece, size
from ddplaunch.system.words import compress

_MOST_GROUPS = 64  # of a worker
_LEAST_REPEATS = 3  # of a sequence, or it is none that repeats
_RARE = 2  # times that a collective is called which belongs to no step: an evaluation's, or the first ones
_PACE = 0.005  # seconds between two looks
_LOOKS = 5  # at both clocks: the quickest counts


def arrivals(bodies: Iterable[bytes], members: Mapping[str, str], every: int = 1) -> list[Arrivals]:
    """Return when a worker came to the collectives of each group, as its recorders tell; of the steps, only one in `every`."""
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
    """Return when a rank came to the collectives of a group, for every `every`-th step, and how long a step is."""
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
    """Return the steps to keep of those that are whole between these numbers: one in `every`, but two if there are two.

    The steps are multiples of a power of two, so that ranks which know fewer steps keep the same steps, and some between.
    """
    begin, end = -(-first // length), (last + 1) // length
    whole = max(0, end - begin)
    apart = 1 << (max(1, min(every, whole // 2)).bit_length() - 1)
    return range(-(-begin // apart) * apart, end, apart)[-max(2, whole // every) :]


def step(calls: Sequence[tuple[int, Hashable]]) -> tuple[int, float]:
    """Return how many calls make a step, and the seconds of a step; 0 and 0.0 if no step is seen. A call is a time and a kind.

    If not all calls repeat, as around an evaluation, look at the later half, then at the earlier half. If all repeat, but too few
    times, no step is seen: what repeats more often within them may be a part of a step, such as a layer.
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
    """Whether all calls repeat, apart from kinds that are called once, but fewer times than a step has to."""
    how_often = Counter(kinds)
    again = [kind for kind in kinds if how_often[kind] > 1]
    length = _shortest_repeat(again)
    return 2 * length <= len(again) < _LEAST_REPEATS * length and 2 * len(again) > len(kinds)


def _shortest_repeat(kinds: Sequence[Hashable]) -> int:
    """The smallest distance at which all of these equal each other: by the borders of Knuth, Morris and Pratt."""
    borders = [0] * len(kinds)
    for end in range(1, len(kinds)):
        border = borders[end - 1]
        while border and kinds[border] != kinds[end]:
            border = borders[border - 1]
        borders[end] = border + (kinds[border] == kinds[end])
    return len(kinds) - borders[-1] if kinds else 0


def read_arrivals(recorders: Mapping[int, str], *, until: float, every: int) -> NodeArrivals:
    """Ask the recorders whose sockets exist, until the time `until` (CLOCK_MONOTONIC) at the latest."""
    recorders = {rank: path for rank, path in recorders.items() if os.path.exists(path)}
    found: dict[int, list[Arrivals]] = {rank: [] for rank in recorders}
    pending = [_of_worker(path, every, found[rank]) for rank, path in recorders.items()]
    while (pending := [one for one in pending if next(one, None) is not None]) and time.monotonic() < until:
        time.sleep(_PACE)
    return sent_arrivals(found, _wall())


def _of_worker(path: str, every: int, found: list[Arrivals]) -> Iterator[bool]:
    """Add the arrivals in a worker's recorders to `found`; yield to wait. Any error drops this worker alone."""

    # parses at once: kept whole, the answers of a node's workers would be a gigabyte
    def take(body: bytes) -> None:
        members = {name: compress(ranks) for name, ranks in members_of(path).items()}
        found.extend(arrivals([body], members, every))

    with suppress(Exception):
        yield from answers(path, take)


def _wall() -> int:
    """Nanoseconds that the time of day is ahead of CLOCK_MONOTONIC."""
    looks = ((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_LOOKS))
    before, wall, after = min(looks, key=lambda look: look[2] - look[0])
    return wall - (before + after) // 2


def sent_arrivals(found: Mapping[int, Sequence[Arrivals]], wall: int) -> NodeArrivals:
    """Return the answer with these arrivals, by rank. Whatever the recorders have said, the answer keeps its limits."""
    members: dict[str, int] = {"": 0}  # the members of a group, and their index in the answer
    series = []
    for rank, each in ((rank, each) for rank, of_rank in found.items() for each in of_rank):
        most = MAX_ENTRIES // len(found[rank])
        known = each.members if len(each.members) <= MAX_MEMBERS else ""
        if known not in members and len(members) < MAX_SETS:
            members[known] = len(members)
        series.append(
            SentArrivals(
                rank=number(rank),
                group=piece(each.group),
                members=members.get(known, 0),
                numbers=_gaps(each.numbers[-most:]),
                times=_gaps(each.times[-most:]),
                newest=size(each.newest),
                newest_at=size(each.newest_at),
                length=number(each.length),
                period=duration(each.period),
            )
        )
    return NodeArrivals(wall=wall, members=tuple(members), series=tuple(series[:MAX_SERIES]))


def _gaps(values: Sequence[int]) -> tuple[int, ...]:
    # a clock that was set back would make a gap that cannot be sent
    return tuple(size(after - before) for before, after in pairwise((0, *values)))


def received_arrivals(node: NodeArrivals) -> dict[int, list[Arrivals]]:
    """Return what a node has sent, by rank."""
    found: dict[int, list[Arrivals]] = {}
    for each in node.series:
        numbers, times = tuple(accumulate(each.numbers)), tuple(accumulate(each.times))
        if len(numbers) == len(times):
            members = node.members[each.members] if each.members < len(node.members) else ""
            known = {**asdict(each), "members": members, "numbers": numbers, "times": times}
            found.setdefault(known.pop("rank"), []).append(Arrivals(**known))
    return found
