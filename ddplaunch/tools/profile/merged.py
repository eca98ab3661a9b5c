"""Writes one Chrome trace of all ranks: their entries on one clock, collectives joined by arrows, our own events on top.

Every process of a rank's trace, which are the worker and its devices, becomes one of ours. Times are microseconds since the
first rank began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import IO, Any

import msgspec

from ddplaunch.tools.page.markup import clean
from ddplaunch.tools.profile.division import Joined
from ddplaunch.tools.profile.recorded import Event, Recorded, details

_FIRST = 1000  # processes below are those of the run
_EACH = 100  # processes of a rank, at most
_MOST_ARROWS = 200_000
_BATCH = 5000  # entries that are written at once
_LONGEST = 300  # characters of a text
_GAP = 100_000_000  # nanoseconds between samples that follow each other
_encode = msgspec.json.Encoder().encode


def write(
    file: IO[bytes],
    found: Sequence[Recorded],
    joined: Sequence[Joined],
    ours: Iterable[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> None:
    """Write the trace; `ours` are entries about the run, in microseconds since 1970, `about` is kept beside all entries."""
    file.write(b'{"displayTimeUnit":"ms","otherData":' + _encode(about) + b',"traceEvents":[\n')
    entries, separator = _entries(found, joined, ours), b""
    while batch := list(islice(entries, _BATCH)):
        file.write(separator + b",\n".join(map(_encode, batch)))
        separator = b",\n"
    file.write(b"\n]}\n")


def _entries(
    found: Sequence[Recorded], joined: Sequence[Joined], ours: Iterable[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Return all entries of the trace."""
    origin = min(one.began for one in found)
    yield from _of_run(ours, origin, max(one.ended for one in found))
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


def _names(one: Recorded, pids: Mapping[int | str, int]) -> Iterator[dict[str, Any]]:
    """Name the processes, and keep the names of threads."""
    for index, (pid, number) in enumerate(pids.items()):
        name = f"rank {one.rank} on {one.host}" + (f": device {pid}" if index else "")
        for what, value in (("name", {"name": clean(name)}), ("sort_index", {"sort_index": number})):
            yield {"ph": "M", "name": f"process_{what}", "pid": number, "tid": 0, "args": value}
    for event in one.events:
        if event.ph == "M" and event.name.startswith("thread_") and event.pid in pids:
            yield {"ph": "M", "name": event.name, "pid": pids[event.pid], "tid": event.tid, "args": event.args}


def _moved(event: Event, rank: int, pids: Mapping[int | str, int], origin: int) -> dict[str, Any]:
    """Return an entry of a rank's trace as it is in the trace of all ranks."""
    entry: dict[str, Any] = {
        "ph": event.ph,
        "name": event.name,
        "cat": event.cat or "",
        "pid": pids[event.pid],
        "tid": event.tid,
        "ts": round((event.ts - origin) / 1e3, 3),
    }
    if event.ph == "X":
        entry["dur"] = round(event.dur / 1e3, 3)
    if event.id is not None:
        entry["id"] = f"{rank}.{event.id}"
    entry |= {name: value for name, value in (("bp", event.bp), ("s", event.s)) if value is not None}
    if event.args != b"null":
        entry["args"] = event.args
    return entry


def _with_collective(event: Event, joined: Joined, rank: int) -> msgspec.Raw:
    """Return the details of a collective of a rank: with its group and number, and how long the last rank was awaited."""
    call = joined.calls[rank]
    told: dict[str, Any] = {"group": call.group, "number": call.number, "tensors": call.tensors}
    if joined.last >= 0:
        told["last rank"] = joined.last
        told["waited ms"] = round(max(0, joined.calls[joined.last].arrived - call.arrived) / 1e6, 3)
    return msgspec.Raw(_encode({**details(event), **told}))


def _samples(one: Recorded, pids: Mapping[int | str, int], origin: int) -> Iterator[dict[str, Any]]:
    """Yield where the main thread was, as a track of its own: from sample to sample, with gaps where none was taken."""
    pid = next(iter(pids.values()), _FIRST + one.rank * _EACH)
    if one.samples:
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": 0,
            "args": {"name": "line of the program (sampled)"},
        }
    for (begin, seen, where), (following, _, _) in pairwise([*one.samples, (one.ended, 0, "")]):
        end = following if 0 <= following - seen < _GAP else seen
        folder, _, name = where.rpartition("/")
        yield {
            "ph": "X",
            "name": clean(name[:_LONGEST]),
            "cat": "line",
            "pid": pid,
            "tid": 0,
            "ts": (begin - origin) / 1e3,
            "dur": max(1, end - begin) / 1e3,
            "args": {"folder": clean(folder[:_LONGEST])},
        }


def _arrows(
    joined: Sequence[Joined], pids: Mapping[int, Mapping[int | str, int]], origin: int
) -> Iterator[dict[str, Any]]:
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
            ends = (("s", each.last, start, start.event.ts), ("f", rank, call, call.event.ts + call.event.dur - 2))
            for phase, of_rank, one, at in ends:
                assert one.event is not None
                yield {
                    "ph": phase,
                    "bp": "e",
                    "name": f"{call.operation} #{call.number}",
                    "cat": "collective",
                    "id": f"c{number}.{rank}",
                    "pid": pids[of_rank][one.event.pid],
                    "tid": one.event.tid,
                    "ts": round((max(at, start.event.ts) - origin) / 1e3, 3),
                }


def _of_run(ours: Iterable[Mapping[str, Any]], origin: int, until: int) -> Iterator[dict[str, Any]]:
    """Return what happened to the run in the time of the profile: slices are cut, and the rest is left out."""
    end = (until - origin) / 1e3
    for entry in ours:
        if entry["ph"] == "M":
            yield dict(entry)
            continue
        if entry.get("cat") == "collective":  # those of the ranks tell more
            continue
        begin = entry["ts"] - origin / 1e3
        ended = begin + entry.get("dur", 0)
        if ended < 0 or begin > end:
            continue
        cut = {**entry, "ts": max(0.0, begin)}
        if "dur" in entry:
            cut["dur"] = min(ended, end) - cut["ts"]
        yield cut
