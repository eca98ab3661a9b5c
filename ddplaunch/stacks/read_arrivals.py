"""Asks the recorders of a node's workers when they came to their collectives, all at once, in a child of the agent.

What is sent of it to the coordinator and what that receives are pure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from msgspec.structs import asdict

from ddplaunch.control.questions import MAX_ENTRIES, MAX_MEMBERS, MAX_SERIES, MAX_SETS, NodeArrivals, SentArrivals
from ddplaunch.fields import duration, number, piece, size
from ddplaunch.stacks.arrivals import Arrivals, arrivals
from ddplaunch.stacks.recorder import answers, members_of
from ddplaunch.words import compress

_PACE = 0.005  # seconds between two looks
_LOOKS = 5  # at both clocks: the quickest counts


def read(recorders: Mapping[int, str], *, until: float, every: int) -> NodeArrivals:
    """Ask those of these recorders that are there, until this time (CLOCK_MONOTONIC) at the latest."""
    recorders = {rank: path for rank, path in recorders.items() if os.path.exists(path)}
    found: dict[int, list[Arrivals]] = {rank: [] for rank in recorders}
    pending = [_of_worker(path, every, found[rank]) for rank, path in recorders.items()]
    while (pending := [one for one in pending if next(one, None) is not None]) and time.monotonic() < until:
        time.sleep(_PACE)
    return sent(found, _wall())


def _of_worker(path: str, every: int, found: list[Arrivals]) -> Iterator[bool]:
    """Add what a worker's recorders tell to `found`; yields to wait. What fails with one worker concerns no other."""

    def take(
        body: bytes,
    ) -> None:  # taken apart at once: kept whole, the answers of a node's workers would be a gigabyte
        members = {name: compress(ranks) for name, ranks in members_of(path).items()}
        found.extend(arrivals([body], members, every))

    with suppress(Exception):
        yield from answers(path, take)


def _wall() -> int:
    """Nanoseconds that the time of day is ahead of CLOCK_MONOTONIC."""
    looks = ((time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_LOOKS))
    before, wall, after = min(looks, key=lambda look: look[2] - look[0])
    return wall - (before + after) // 2


def sent(found: Mapping[int, Sequence[Arrivals]], wall: int) -> NodeArrivals:
    """Return what was read as it is sent: whatever that is, the result is valid."""
    members: dict[str, int] = {"": 0}  # and their places
    series = []
    for rank, each, most in (
        (rank, each, MAX_ENTRIES // len(of_rank)) for rank, of_rank in found.items() for each in of_rank
    ):
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


def received(node: NodeArrivals) -> dict[int, list[Arrivals]]:
    """Return what a node has sent, by rank."""
    found: dict[int, list[Arrivals]] = {}
    for each in node.series:
        numbers, times = tuple(accumulate(each.numbers)), tuple(accumulate(each.times))
        if len(numbers) == len(times):
            members = node.members[each.members] if each.members < len(node.members) else ""
            known = {**asdict(each), "members": members, "numbers": numbers, "times": times}
            found.setdefault(known.pop("rank"), []).append(Arrivals(**known))
    return found
