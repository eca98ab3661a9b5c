"""Divides the steps of profiled ranks into what they did, and finds the rank that the others wait for. Pure.

Each moment of a rank's steps is one of: computing, communicating, waiting for the last rank to come to a collective, loading
data, or something else. What overlaps counts once: on a device the kernels that compute hide everything else, then those of
collectives; on the CPU the loading of data and the operations of torch hide the collectives.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ddplaunch.record.seen.stragglers import LEAST_LAST_IN, middle
from ddplaunch.record.trace import Span, Spans, difference, intersection, total_length, union
from ddplaunch.tools.profile.recorded import Collective, Recorded

_MOST_LINES = 3  # of the program that are named
_WORTH_SAYING = 0.02  # of the time that others wait


class Division(Struct, frozen=True, kw_only=True):
    """How the time of one rank divides; nanoseconds."""

    rank: int
    whole: int  # of the steps, or of the profile where they are not known
    steps: int  # whole ones in that time; 0: not known, or less than one
    computes: int
    communicates: int  # without waiting
    waits: int  # in a collective for the last rank to come
    loads_data: int

    @property
    def other(self) -> int:
        """What torch records nothing of: Python, files, other libraries."""
        return self.whole - self.computes - self.communicates - self.waits - self.loads_data


class Last(Struct, frozen=True, kw_only=True):
    """The rank that the others wait for most."""

    rank: int
    share: float  # of the time of the others that they wait for it, on average
    per_step: int  # nanoseconds of that, of each other rank; 0: steps are not known
    times: int  # in how many steps it was the last; where steps are not known, in how many collectives
    compared: int  # of so many of its groups
    by_step: bool  # whether these are steps
    meanwhile: Mapping[str, float]  # what it did while others waited, as shares
    lines: Sequence[tuple[str, float]]  # of its program, where its main thread was then, as shares


class Joined(Struct, frozen=True, kw_only=True):
    """A collective that several ranks came to."""

    last: int | None  # the rank that came last; None: not all ranks of the group are known here
    calls: Mapping[int, Collective]  # by rank


def join_collectives(found: Sequence[Recorded], *, aligned: Collection[int]) -> list[Joined]:
    """Return the collectives to which several ranks with comparable clocks (`aligned`) came, in the order of time.

    The calls of one collective have the same group and number; where their operations differ, the numbers do not fit.
    """
    calls: dict[tuple[str, int], dict[int, Collective]] = {}  # by group and number, then by rank
    for one in found:
        if one.rank in aligned:
            for call in one.collectives:
                calls.setdefault((call.group, call.number), {})[one.rank] = call
    sizes: dict[str, int] = {}
    for one in found:
        for group, size in one.groups.items():
            sizes[group] = max(size, sizes.get(group, 0))
    joined = []
    for (group, _), by_rank in sorted(calls.items(), key=lambda item: _first_arrival(item[1])):
        is_same_operation = len({call.operation for call in by_rank.values()}) == 1
        if len(by_rank) > 1 and is_same_operation:
            is_whole = len(by_rank) >= sizes.get(group, 0)  # else a rank that is not here may be the last
            last = max(by_rank, key=lambda rank: by_rank[rank].arrived) if is_whole else None
            joined.append(Joined(last=last, calls=by_rank))
    return joined


def _first_arrival(calls: Mapping[int, Collective]) -> int:
    return min(call.arrived for call in calls.values())


class _Window(NamedTuple):
    """The part of a rank's profile that is divided."""

    span: Span
    ends: Sequence[int] = ()  # of steps, the first one where it begins; empty: not known, and it is the whole profile

    @property
    def steps(self) -> int:
        """The whole steps in it; 0: not known."""
        return max(0, len(self.ends) - 1)


def _window(one: Recorded, begin: int, end: int) -> _Window:
    """Return the time from the first to the last end of a step between two moments; the whole profile if there are not two."""
    step_ends = [at for at in one.steps if begin <= at <= end]
    if len(step_ends) < 2:
        return _Window((one.began, one.ended))
    return _Window((step_ends[0], step_ends[-1]), step_ends)


def divide(found: Sequence[Recorded], joined: Sequence[Joined]) -> tuple[list[Division], Last | None]:
    """Divide the steps of each rank that ended while all ranks recorded, and find the rank that the others wait for.

    `joined` are the collectives to which several of them came. Of a rank with fewer than two such ends, the whole profile is
    divided. None: the others wait for no rank in particular.
    """
    # a rank that records for longer does so while another begins, or makes its trace: those steps are left out
    all_began = max((one.began for one in found), default=0)
    first_ended = min((one.ended for one in found), default=0)
    windows = {one.rank: _window(one, all_began, first_ended) for one in found}
    waits = _waits(joined)
    divisions = []
    for one in found:
        window = [windows[one.rank].span]
        communicates = intersection(one.communicates, window)
        waited_for_others = union(span for spans in waits.get(one.rank, {}).values() for span in spans)
        waiting = intersection(communicates, waited_for_others)
        divisions.append(
            Division(
                rank=one.rank,
                whole=total_length(window),
                steps=windows[one.rank].steps,
                computes=total_length(intersection(one.computes, window)),
                communicates=total_length(communicates) - total_length(waiting),
                waits=total_length(waiting),
                loads_data=total_length(intersection(one.loads_data, window)),
            )
        )
    step_times = [one.whole / one.steps for one in divisions if one.steps]
    step_time = statistics.median(step_times) if step_times else 0.0
    return divisions, _find_last(found, joined, waits, windows, step_time)


def _waits(joined: Sequence[Joined]) -> dict[int, dict[int, list[Span]]]:
    """Return when each rank waited for which other rank to come, by rank and by that other rank."""
    waits: dict[int, dict[int, list[Span]]] = {}
    for each in joined:
        if each.last is None:
            continue
        last_came = each.calls[each.last].arrived
        for rank, call in each.calls.items():
            if call.arrived < last_came:
                # a call may end before the last rank comes, as that of the rank that broadcasts
                until = min(last_came, max(call.ended, call.arrived))
                waits.setdefault(rank, {}).setdefault(each.last, []).append((call.arrived, until))
    return waits


def _find_last(
    found: Sequence[Recorded],
    joined: Sequence[Joined],
    waits: Mapping[int, Mapping[int, list[Span]]],
    windows: Mapping[int, _Window],
    step_time: float,
) -> Last | None:
    """Return the rank for which the others wait most; None if nobody waits for long, or if that is chance.

    It is chance if ranks take turns: of two equal ranks each is the last in half of the steps. `waits` says when each rank waited
    for which other; `step_time` is in nanoseconds, 0: not known.
    """
    by_rank = {one.rank: one for one in found}
    waited_for: dict[int, float] = {}  # by rank: the shares of the others' windows that they waited for it, added up
    for rank, spans_by_last in waits.items():
        window = [windows[rank].span]
        for last, spans in spans_by_last.items():
            # what a rank computed meanwhile was no wait
            in_calls = intersection(union(spans), by_rank[rank].communicates)
            waited = total_length(intersection(in_calls, window))
            waited_for[last] = waited_for.get(last, 0.0) + waited / max(1, total_length(window))
    if not waited_for:
        return None
    worst = max(waited_for, key=lambda rank: waited_for[rank])
    others = max(1, len(found) - 1)
    share = waited_for[worst] / others
    last_in = _last_in(joined, worst, windows[worst].ends)
    if share < _WORTH_SAYING or sum(last_in) < LEAST_LAST_IN * len(last_in):
        return None
    # from when the first rank came to a collective until this one did
    awaited = union((_first_arrival(each.calls), each.calls[worst].arrived) for each in joined if each.last == worst)
    awaited = intersection(awaited, [windows[worst].span])
    return Last(
        rank=worst,
        share=share,
        per_step=round(share * step_time),
        times=sum(last_in),
        compared=len(last_in),
        by_step=windows[worst].steps > 0,
        meanwhile=_meanwhile(by_rank[worst], awaited),
        lines=_lines(by_rank[worst], awaited),
    )


def _last_in(joined: Sequence[Joined], rank: int, ends: Sequence[int]) -> list[bool]:
    """Return for each step whether this rank was the last; for each collective, if no ends of steps are known.

    Of the collectives of a step the one counts to which its last rank came latest: in the others the ranks may take turns.
    """
    # by step: the nanoseconds by which its last rank came after the median of the others, and whether that was this rank
    latest: dict[int, tuple[int, bool]] = {}
    for number, each in enumerate(joined):
        if each.last is None or rank not in each.calls:
            continue
        at = each.calls[each.last].arrived
        step = bisect_right(ends, at) if ends else number
        if ends and not 0 < step < len(ends):  # in no whole step
            continue
        median = middle(call.arrived for other, call in each.calls.items() if other != each.last)
        of_collective = round(at - median), each.last == rank
        latest[step] = max(of_collective, latest.get(step, of_collective))
    return [is_this for _, is_this in latest.values()]


def _meanwhile(one: Recorded, awaited: Spans) -> dict[str, float]:
    """Return what a rank did while the others `awaited` it, as shares of that time, the largest first."""
    whole = max(1, total_length(awaited))
    kinds = {"computes": one.computes, "loads data": one.loads_data, "is in another collective": one.communicates}
    shares = {name: total_length(intersection(awaited, spans)) / whole for name, spans in kinds.items()}
    known = union([*one.computes, *one.loads_data, *one.communicates])
    shares["is in Python, or elsewhere outside torch"] = total_length(difference(awaited, known)) / whole
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _lines(one: Recorded, awaited: Spans) -> list[tuple[str, float]]:
    """Return where in the program its main thread mostly was while the others `awaited` it: lines, with shares of that time."""
    spent_at: dict[str, int] = {}
    for sample, begin, end in one.sampled():
        spent = total_length(intersection([(begin, end)], awaited)) if begin < end else 0
        if spent:
            spent_at[sample.where] = spent_at.get(sample.where, 0) + spent
    whole = max(1, sum(spent_at.values()))
    longest_first = sorted(spent_at.items(), key=lambda item: -item[1])
    return [(where, spent / whole) for where, spent in longest_first[:_MOST_LINES]]
