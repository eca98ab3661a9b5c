"""How the steps of each rank divide, and which rank the others wait for. Pure.

Each moment of a rank's steps is one of: computing, communicating, waiting for the last rank to come to a collective, loading
data, or something else. What overlaps counts once: on a device the kernels that compute hide everything else, then those of
collectives; on the CPU the loading of data and the operations of torch hide the collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from ddplaunch.record.spans import Span, Spans, beyond, common, length, union
from ddplaunch.tools.profile.recorded import Collective, Recorded

_NAMED = 3  # lines of the program
_LEAST = 0.02  # of the time: less is not worth a sentence


class Division(Struct, frozen=True, kw_only=True):
    """How the time of one rank divides; nanoseconds."""

    rank: int
    whole: int
    steps: int  # whole ones in that time; 0: not known, or less than one
    computes: int
    communicates: int
    waits: int
    loads: int

    @property
    def other(self) -> int:
        """What torch records nothing of: Python, files, other libraries."""
        return self.whole - self.computes - self.communicates - self.waits - self.loads


class Last(Struct, frozen=True, kw_only=True):
    """The rank that the others wait for most."""

    rank: int
    share: float  # of the time of the others that they wait for it
    per_step: int  # nanoseconds of that, of each other rank; 0: steps are not known
    times: int  # how often it was the last,
    of: int  # of so many collectives
    meanwhile: Mapping[str, float]  # what it did while others waited, as shares
    lines: Sequence[tuple[str, float]]  # of its program, where its main thread was then, as shares


class Joined(Struct, frozen=True, kw_only=True):
    """A collective that several ranks came to."""

    last: int  # rank
    calls: Mapping[int, Collective]  # by rank


def join(found: Sequence[Recorded], *, aligned: Collection[int]) -> list[Joined]:
    """Join the calls of ranks whose clocks are `aligned` by group and number; `last` is -1 where a rank is missing."""
    calls: dict[tuple[str, int], dict[int, Collective]] = {}
    for one in found:
        for call in one.collectives if one.rank in aligned else ():
            calls.setdefault((call.group, call.number), {})[one.rank] = call
    sizes: dict[str, int] = {}
    for one in found:
        for name, number in one.groups.items():
            sizes[name] = max(number, sizes.get(name, 0))
    made = []
    for (group, _), ranks in sorted(calls.items(), key=lambda item: min(call.arrived for call in item[1].values())):
        if len(ranks) > 1 and len({call.operation for call in ranks.values()}) == 1:
            # without one of them the last may be another
            is_whole = len(ranks) >= sizes.get(group, 0)
            last = max(ranks, key=lambda rank: ranks[rank].arrived) if is_whole else -1
            made.append(Joined(last=last, calls=ranks))
    return made


def divide(found: Sequence[Recorded], joined: Sequence[Joined]) -> tuple[list[Division], Last | None]:
    """Divide the steps of each rank that ended while all ranks recorded, and find the rank that the others wait for.

    Of a rank with fewer than two such ends, the whole profile is divided.
    """
    waits = _waits(joined)
    # ranks that record for longer do so while another begins, or makes its trace
    recorded = max((one.began for one in found), default=0), min((one.ended for one in found), default=0)
    steps = {one.rank: [end for end in one.steps if recorded[0] <= end <= recorded[1]] for one in found}
    windows = {
        one.rank: (ends[0], ends[-1]) if len(ends := steps[one.rank]) > 1 else (one.began, one.ended) for one in found
    }
    divisions = []
    for one in found:
        window = [windows[one.rank]]
        communicates = common(one.communicates, window)
        waiting = common(communicates, union(span for spans in waits.get(one.rank, {}).values() for span in spans))
        divisions.append(
            Division(
                rank=one.rank,
                whole=length(window),
                steps=max(0, len(steps[one.rank]) - 1),
                computes=length(common(one.computes, window)),
                communicates=length(communicates) - length(waiting),
                waits=length(waiting),
                loads=length(common(one.loads, window)),
            )
        )
    per_step = [one.whole / one.steps for one in divisions if one.steps]
    return divisions, _last(found, joined, waits, windows, statistics.median(per_step) if per_step else 0.0)


def _waits(joined: Sequence[Joined]) -> dict[int, dict[int, list[Span]]]:
    """Return when each rank waited for which other rank to come, by rank and by that other rank."""
    waits: dict[int, dict[int, list[Span]]] = {}
    for each in joined:
        if each.last < 0:
            continue
        came = each.calls[each.last].arrived
        for rank, call in each.calls.items():
            if call.arrived < came:
                until = min(came, max(call.ended, call.arrived))
                waits.setdefault(rank, {}).setdefault(each.last, []).append((call.arrived, until))
    return waits


def _last(
    found: Sequence[Recorded],
    joined: Sequence[Joined],
    waits: Mapping[int, Mapping[int, list[Span]]],
    windows: Mapping[int, Span],
    step: float,
) -> Last | None:
    """Return the rank for which the others wait most; None if nobody waits for long. `step`: nanoseconds of a step, or 0."""
    of_rank = {one.rank: one for one in found}
    costs: dict[int, list[float]] = {}
    for rank, others in waits.items():
        for last, spans in others.items():
            one = of_rank[rank]
            waited = length(common(common(union(spans), one.communicates), [windows[rank]]))
            costs.setdefault(last, []).append(waited / max(1, length([windows[rank]])))
    if not costs:
        return None
    worst = max(costs, key=lambda rank: sum(costs[rank]))
    share = sum(costs[worst]) / max(1, len(found) - 1)
    if share < _LEAST:
        return None
    one = of_rank[worst]
    missed = union(
        (min(call.arrived for call in each.calls.values()), each.calls[worst].arrived)
        for each in joined
        if each.last == worst
    )
    missed = common(missed, [windows[worst]])
    return Last(
        rank=worst,
        share=share,
        per_step=round(share * step),
        times=sum(each.last == worst for each in joined),
        of=sum(each.last >= 0 and worst in each.calls for each in joined),
        meanwhile=_meanwhile(one, missed),
        lines=_lines(one, missed),
    )


def _meanwhile(one: Recorded, missed: Spans) -> dict[str, float]:
    """Return what a rank did in this time, as shares of it, the largest first."""
    whole = max(1, length(missed))
    kinds = {"computes": one.computes, "loads data": one.loads, "is in another collective": one.communicates}
    shares = {name: length(common(missed, spans)) / whole for name, spans in kinds.items()}
    known = union([*one.computes, *one.loads, *one.communicates])
    shares["is in Python, or elsewhere outside torch"] = length(beyond(missed, known)) / whole
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _lines(one: Recorded, missed: Spans) -> list[tuple[str, float]]:
    """Return the lines of the program where its main thread was mostly in this time."""
    at: dict[str, int] = {}
    for (begin, _, where), (until, _, _) in pairwise([*one.samples, (one.ended, 0, "")]):
        if begin < until and (inside := length(common([(begin, until)], missed))):
            at[where] = at.get(where, 0) + inside
    whole = max(1, sum(at.values()))
    return [(where, spent / whole) for where, spent in sorted(at.items(), key=lambda item: -item[1])[:_NAMED]]
