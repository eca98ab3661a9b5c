"""What a trace shows of all ranks: their entries on one clock, collectives joined by arrows, our own events on top. Pure.

Every process of a rank's trace, which are the worker and its devices, becomes one of ours. Times are microseconds since the
first rank began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ddplaunch.record.trace import Entry, Track, arrow, encode, named, span
from ddplaunch.tools.profile.division import Joined
from ddplaunch.tools.profile.recorded import Event, Recorded, details

_FIRST = 1000  # processes below are those of the run
_EACH = 100  # processes of a rank, at most
_MOST_ARROWS = 200_000
_INSIDE = 2  # nanoseconds: an arrow ends inside its slice
_GAP = 100_000_000  # nanoseconds between samples that follow each other


def entries(found: Sequence[Recorded], joined: Sequence[Joined], ours: Iterable[Entry]) -> Iterator[Entry]:
    """Return the entries of the trace; `ours` are those of the run, in microseconds since 1970."""
    origin = min(one.began for one in found)
    yield from _of_run(ours, origin / 1e3, max(one.ended for one in found) / 1e3)
    calls = {id(call.event): (each, rank) for each in joined for rank, call in each.calls.items()}
    pids_of = {one.rank: _processes(one) for one in found}
    for one in found:
        pids = pids_of[one.rank]
        yield from _names(one, pids)
        for event in one.events:
            if event.ph != "M" and event.pid in pids:
                if (call := calls.get(id(event))) is not None:
                    event.args = _with_collective(event, *call)
                yield _moved(event, one.rank, pids, origin)
        yield from _samples(one, pids, origin)
    yield from _arrows(joined, pids_of, origin)


def _processes(one: Recorded) -> dict[int | str, int]:
    """Return the number of each process of a rank that has entries; the worker is the first."""
    seen = dict.fromkeys(event.pid for event in one.events if event.ph != "M")
    workers = [event.pid for event in one.events if event.cat == "cpu_op"][:1]
    order = list(dict.fromkeys([*workers, *seen]))[:_EACH]
    return {pid: _FIRST + one.rank * _EACH + index for index, pid in enumerate(order)}


def _names(one: Recorded, pids: Mapping[int | str, int]) -> Iterator[Entry]:
    """Name the processes, and keep the names of threads."""
    for index, (pid, number) in enumerate(pids.items()):
        name = f"rank {one.rank} on {one.host}" + (f": device {pid}" if index else "")
        yield from named("process", (number, 0), name, number)
    for event in one.events:
        if event.ph == "M" and event.name.startswith("thread_") and event.pid in pids:
            yield {"ph": "M", "name": event.name, "pid": pids[event.pid], "tid": event.tid, "args": event.args}


def _moved(event: Event, rank: int, pids: Mapping[int | str, int], origin: int) -> Entry:
    """Return an entry of a rank's trace as it is in the trace of all ranks."""
    entry: dict[str, Any] = {
        "ph": event.ph,
        "name": event.name,
        "cat": event.cat or "",
        "pid": pids[event.pid],
        "tid": event.tid,
        "ts": _since(origin, event.ts),
    }
    if event.ph == "X":
        entry["dur"] = round(event.dur / 1e3, 3)
    if event.id is not None:
        entry["id"] = f"{rank}.{event.id}"
    entry |= {name: value for name, value in (("bp", event.bp), ("s", event.s)) if value is not None}
    if event.args != b"null":
        entry["args"] = event.args
    return entry


def _since(origin: int, at: float) -> float:
    """Return microseconds, from nanoseconds on the common clock."""
    return round((at - origin) / 1e3, 3)


def _with_collective(event: Event, joined: Joined, rank: int) -> msgspec.Raw:
    """Return the details of a collective of a rank: with its group and number, and how long the last rank was awaited."""
    call = joined.calls[rank]
    told: dict[str, Any] = {"group": call.group, "number": call.number, "tensors": call.tensors}
    if joined.last >= 0:
        told["last rank"] = joined.last
        told["waited ms"] = round(max(0, joined.calls[joined.last].arrived - call.arrived) / 1e6, 3)
    return msgspec.Raw(encode({**details(event), **told}))


def _samples(one: Recorded, pids: Mapping[int | str, int], origin: int) -> Iterator[Entry]:
    """Yield where the main thread was, as a track of its own: from sample to sample, with gaps where none was taken."""
    track: Track = next(iter(pids.values()), _FIRST + one.rank * _EACH), 0
    if one.samples:
        yield from named("thread", track, "line of the program (sampled)", 0)
    for (begin, seen, where), (following, _, _) in pairwise([*one.samples, (one.ended, 0, "")]):
        end = following if 0 <= following - seen < _GAP else seen
        folder, _, name = where.rpartition("/")
        length = max(1, end - begin)
        yield span(track, "line", name, (begin - origin) / 1e3, length / 1e3, {"folder": folder})


def _arrows(joined: Sequence[Joined], pids: Mapping[int, Mapping[int | str, int]], origin: int) -> Iterator[Entry]:
    """Return arrows from the last rank of each collective, when it comes, to the others, which go on then."""
    drawn = 0
    for number, each in enumerate(joined):
        start = each.calls.get(each.last)
        if start is None or start.event is None or start.event.pid not in pids[each.last]:
            continue
        for rank, call in each.calls.items():
            if rank == each.last or call.event is None or call.event.pid not in pids[rank] or drawn >= _MOST_ARROWS:
                continue
            drawn += 1
            goes_on = max(call.event.ts + call.event.dur - _INSIDE, start.event.ts)
            begin = (pids[each.last][start.event.pid], start.event.tid), _since(origin, start.event.ts)
            end = (pids[rank][call.event.pid], call.event.tid), _since(origin, goes_on)
            yield from arrow(f"c{number}.{rank}", "collective", f"{call.operation} #{call.number}", begin, end)


def _of_run(ours: Iterable[Entry], origin: float, until: float) -> Iterator[Entry]:
    """Return what happened to the run in the time of the profile: slices are cut, and the rest is left out."""
    for entry in ours:
        if entry["ph"] == "M":
            yield entry
            continue
        if entry.get("cat") == "collective":  # those of the ranks tell more
            continue
        begin = entry["ts"] - origin
        ended = begin + entry.get("dur", 0)
        if ended < 0 or begin > until - origin:
            continue
        cut = {**entry, "ts": max(0.0, begin)}
        if "dur" in entry:
            cut["dur"] = min(ended, until - origin) - cut["ts"]
        yield cut
