"""Merges the traces of ranks into one: their entries on one clock, collectives joined by arrows, the run's events on top. Pure.

Every process of a rank's trace, which are the worker and its devices, gets a number of its own. Times in the merged trace are
microseconds since the first rank began. A `ph` is the kind of an entry in Chrome's format: "X" a slice, "M" a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ddplaunch.record.trace import Entry, Track, arrow, encode, named, span
from ddplaunch.tools.profile.division import Joined
from ddplaunch.tools.profile.recorded import Event, Recorded, details

_FIRST_PID = 1000  # number of the first process of rank 0 in the merged trace; those below are the run's
_PIDS_OF_RANK = 100  # processes of a rank, at most
_MOST_ARROWS = 200_000  # more make viewers slow
_INSIDE = 2  # nanoseconds before the end of a slice, in which an arrow to it has to end
_LONGEST_GAP = 100_000_000  # nanoseconds without a sample after which it is not known where the main thread was

_Pids = Mapping[int | str, int]  # of one rank: the number in the merged trace, by the process in the rank's trace


def entries(found: Sequence[Recorded], joined: Sequence[Joined], of_run: Iterable[Entry]) -> Iterator[Entry]:
    """Return the entries of the trace; `of_run` are those of the run, in microseconds since 1970."""
    origin = min(one.began for one in found)
    yield from _run_entries(of_run, origin / 1e3, max(one.ended for one in found) / 1e3)
    # an Event cannot be a key; its id is unique, since `found` keeps all of them
    collectives = {id(call.event): (each, rank) for each in joined for rank, call in each.calls.items()}
    pids_of = {one.rank: _processes(one) for one in found}
    for one in found:
        pids = pids_of[one.rank]
        yield from _name_entries(one, pids)
        for event in one.events:
            is_name = event.ph == "M"  # which `_name_entries` has yielded
            if is_name or event.pid not in pids:  # of very many processes the rest is left out
                continue
            collective = collectives.get(id(event))
            if collective is not None:
                event.args = _with_collective(event, *collective)
            yield _renumbered(event, one.rank, pids, origin)
        yield from _sample_entries(one, pids, origin)
    yield from _arrows(joined, pids_of, origin)


def _processes(one: Recorded) -> _Pids:
    """Return the number of each process of a rank that has entries; the worker is the first."""
    seen = dict.fromkeys(event.pid for event in one.events if event.ph != "M")
    workers = [event.pid for event in one.events if event.cat == "cpu_op"][:1]
    order = list(dict.fromkeys([*workers, *seen]))[:_PIDS_OF_RANK]
    return {pid: _FIRST_PID + one.rank * _PIDS_OF_RANK + index for index, pid in enumerate(order)}


def _name_entries(one: Recorded, pids: _Pids) -> Iterator[Entry]:
    """Name the processes, and keep the names of threads."""
    for index, (pid, number) in enumerate(pids.items()):
        name = f"rank {one.rank} on {one.host}" + (f": device {pid}" if index else "")
        yield from named("process", (number, 0), name, number)
    for event in one.events:
        if event.ph == "M" and event.name.startswith("thread_") and event.pid in pids:
            yield {"ph": "M", "name": event.name, "pid": pids[event.pid], "tid": event.tid, "args": event.args}


def _renumbered(event: Event, rank: int, pids: _Pids, origin: int) -> Entry:
    """Return an entry of a rank's trace as it is in the trace of all ranks: with other numbers and times."""
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
    if event.id is not None:  # the same id in two ranks would be one thing
        entry["id"] = f"{rank}.{event.id}"
    # only arrows and marks have these
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
    if joined.last is not None:
        told["last rank"] = joined.last
        told["waited ms"] = round(max(0, joined.calls[joined.last].arrived - call.arrived) / 1e6, 3)
    return msgspec.Raw(encode({**details(event), **told}))


def _sample_entries(one: Recorded, pids: _Pids, origin: int) -> Iterator[Entry]:
    """Yield where the main thread was, as a track of its own: from sample to sample, with gaps where none was taken."""
    # the worker, whose number is used also if the rank's trace is empty
    first_process = next(iter(pids.values()), _FIRST_PID + one.rank * _PIDS_OF_RANK)
    track: Track = first_process, 0
    if one.samples:
        yield from named("thread", track, "line of the program (sampled)", 0)
    for sample, began, next_began in one.sampled():
        is_gap = not 0 <= next_began - sample.seen < _LONGEST_GAP
        end = sample.seen if is_gap else next_began
        folder, _, name = sample.where.rpartition("/")
        length = max(1, end - began)
        yield span(track, "line", name, (began - origin) / 1e3, length / 1e3, {"folder": folder})


def _arrows(joined: Sequence[Joined], pids_of: Mapping[int, _Pids], origin: int) -> Iterator[Entry]:
    """Return arrows from the last rank of each collective, when it comes, to the others, which go on then."""
    drawn = 0
    for number, each in enumerate(joined):
        if each.last is None:
            continue
        last = each.calls[each.last].event
        if last is None or last.pid not in pids_of[each.last]:
            continue
        begin = (pids_of[each.last][last.pid], last.tid), _since(origin, last.ts)
        for rank, call in each.calls.items():
            event = call.event
            if rank == each.last or event is None or event.pid not in pids_of[rank] or drawn >= _MOST_ARROWS:
                continue
            drawn += 1
            goes_on = max(event.ts + event.dur - _INSIDE, last.ts)  # nanoseconds: an arrow ends inside its slice
            end = (pids_of[rank][event.pid], event.tid), _since(origin, goes_on)
            yield from arrow(f"c{number}.{rank}", "collective", f"{call.operation} #{call.number}", begin, end)


def _run_entries(of_run: Iterable[Entry], origin: float, until: float) -> Iterator[Entry]:
    """Return what happened to the run between two moments (microseconds since 1970): slices are cut, and the rest is left out."""
    for entry in of_run:
        if entry["ph"] == "M":  # a name
            yield entry
            continue
        if entry.get("cat") == "collective":  # those of the ranks tell more
            continue
        begin = entry["ts"] - origin
        end = begin + entry.get("dur", 0)
        if end < 0 or begin > until - origin:
            continue
        cut = {**entry, "ts": max(0.0, begin)}
        if "dur" in entry:
            cut["dur"] = min(end, until - origin) - cut["ts"]
        yield cut
