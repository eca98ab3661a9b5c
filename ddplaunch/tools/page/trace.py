"""A run as a Chrome trace, which Perfetto and chrome://tracing open: JSON in the Trace Event Format. Pure.

The job is a process with a track for its generations; each node is a process with a track for each of its ranks. All times are
microseconds since the start of the run. A worker's slice is split where its node did not run, so that suspensions are gaps.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from ddplaunch.record.folders import short
from ddplaunch.system.words import ranks_of
from ddplaunch.tools.page.history import Gap, History, Life, read
from ddplaunch.tools.page.markup import clean

_JOB = 1  # the process of the job; that of node n is n + 2
_TRACK = 1  # of the job's process; in a node rank r has track r + 1, because 0 is the idle task to Perfetto
_LONGEST = 1000  # characters of a text
_NOWHERE = 0, 0, 0  # a piece of the life of a worker in which nothing happens: from, until, node
_MOST_CALLS = 20_000  # of collectives by ranks, the last ones
_MOST_POINTS = 60_000  # of counters, but
_LEAST_POINTS = 8  # of each rank at least
_TICK = 2  # microseconds for which the last to come has a slice, at which arrows begin and end
_UNITS = {"%": (1, "%"), "B": (2**-20, "MiB"), "s": (1000, "ms")}  # of curves: a factor, and what is written

Entry = Mapping[str, Any]


def trace(run: History) -> str:
    """Return the trace of a run."""
    about = {"run": run.run_id, "program": clean(run.program), "problems": list(map(clean, run.problems))}
    lines = ",\n".join(json.dumps(entry) for entry in entries(run))
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def entries(run: History) -> list[Entry]:
    """Return the entries of the trace of a run."""
    return [*_names(run), *_job(run), *_workers(run), *_collectives(run), *_marks(run), *_counters(run)]


def entries_of(folder: str) -> list[Entry]:
    """Return the entries of the trace of the run in this folder, in microseconds since 1970; none if that holds no run."""
    run = read(folder)
    began = run.began * 1e6 if run is not None else 0.0
    made = entries(run) if run is not None else []
    return [{**entry, "ts": entry["ts"] + began} if "ts" in entry else entry for entry in made]


def _names(run: History) -> Iterator[Entry]:
    """Name processes and tracks, and put them in order."""
    yield from _named("process", short(run.run_id), 0, pid=_JOB, tid=_TRACK)
    yield from _named("thread", "generations", 0, pid=_JOB, tid=_TRACK)
    for index, node in enumerate(run.nodes):
        yield from _named("process", f"node {index}: {node.host}", index + 1, pid=index + 2, tid=0)
    for node_index, rank in sorted({(life.node, life.rank) for life in run.lives}):
        yield from _named("thread", f"rank {rank}", rank, pid=node_index + 2, tid=rank + 1)


def _named(what: str, name: str, order: int, *, pid: int, tid: int) -> Iterator[Entry]:
    yield {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": clean(name[:_LONGEST])}}
    yield {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _job(run: History) -> Iterator[Entry]:
    """Return a slice for each generation, and one for the time from its end to the next."""
    ends: dict[int, float] = {}
    for life in run.lives:
        ends[life.generation] = max(ends.get(life.generation, 0.0), run.ended if life.ended is None else life.ended)
    following = [one.began for one in run.generations[1:]] + [run.ended]
    for one, then in zip(run.generations, following, strict=True):
        end = min(ends.get(one.number, then), then)
        yield _slice(run, f"generation {one.number}", one.began, end, _JOB, _TRACK, {"failed_rank": one.failed_rank})
        if one is not run.generations[-1]:
            yield _slice(run, "restart", end, then, _JOB, _TRACK, {"pause": one.wait})


def _workers(run: History) -> Iterator[Entry]:
    """Return the slices of each worker, without the times in which its node did not run."""
    for life in run.lives:
        about: dict[str, Any] = {"pid": life.pid, "end": clean(life.how[:_LONGEST]) or "running", "status": life.status}
        if life.reached is not None:
            about |= {"first_step": life.reached.first_step, "step": life.reached.step}
        for began, ended in _life_pieces(run, life):
            yield _slice(run, f"generation {life.generation}", began, ended, life.node + 2, life.rank + 1, about)


def _life_pieces(run: History, life: Life) -> Iterator[tuple[float, float]]:
    return _pieces(life, run.ended, [gap for gap in run.gaps if gap.node == life.node])


def _pieces(life: Life, until: float, gaps: Sequence[Gap]) -> Iterator[tuple[float, float]]:
    """Return the times in which a worker ran."""
    at, end = life.began, until if life.ended is None else life.ended
    for gap in sorted(gaps, key=lambda gap: gap.began):
        if at <= gap.began < end:
            yield at, gap.began
        if gap.began < end:
            at = max(at, min(gap.ended, end))
    yield at, max(at, end)


def _collectives(run: History) -> Iterator[Entry]:
    """Return who waited in which collective, on the track of each rank, and arrows from the last rank to those that waited.

    A slice ends when the last rank has come. If its rank calls the next collective before that, the slice ends there and has no
    arrow, because slices of a track must not overlap.
    """
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # by rank: start, end, node
    for life in run.lives:
        for began, ended in _life_pieces(run, life):
            pieces.setdefault(life.rank, []).append((_ts(run, began), _ts(run, ended), life.node))
    for of_rank in pieces.values():
        of_rank.sort()
    calls: dict[int, list[int]] = {}
    for one in run.collectives:
        for rank, came in one.came.items():
            calls.setdefault(rank, []).append(_ts(run, came))
    for moments in calls.values():
        moments.sort()
    room, shown = _MOST_CALLS, len(run.collectives)
    while shown and room > 0:
        shown -= 1
        room -= len(run.collectives[shown].came)
    number = 0  # of an arrow
    for one in run.collectives[shown:]:
        ends: dict[int, dict[str, int]] = {}  # of arrows: the tracks, by rank
        last_came = _ts(run, one.came[one.last])
        about = {"ranks": one.members[:_LONGEST], "last": one.last, "missing": one.missing_text(_LONGEST)}
        for rank, came in one.came.items():
            at = _ts(run, came)
            began, ended, node = _piece_at(pieces.get(rank, []), at)
            if not began <= at < ended:
                continue
            following = bisect_right(calls[rank], at)
            end = min(ended, ended if one.is_open else last_came + _TICK)
            if following < len(calls[rank]):
                end = min(end, calls[rank][following])
            track = {"pid": node + 2, "tid": rank + 1}
            name = clean(str(one)[:_LONGEST])
            yield {"ph": "X", "name": name, "cat": "collective", "ts": at, "dur": end - at, "args": about, **track}
            if not one.is_open and end == last_came + _TICK:
                ends[rank] = track
        if (start := ends.pop(one.last, None)) is not None:
            for waits in ends.values():
                number += 1  # viewers take one end for each start
                arrow = {"cat": "collective", "name": "last to come", "id": number}
                yield {"ph": "s", "ts": last_came, **arrow, **start}
                yield {"ph": "f", "bp": "e", "ts": last_came + 1, **arrow, **waits}


def _piece_at(pieces: list[tuple[int, int, int]], at: int) -> tuple[int, int, int]:
    """Return the last piece that began by then; one in which nothing happens if there is none."""
    before = bisect_right(pieces, at, key=itemgetter(0))
    return pieces[before - 1] if before else _NOWHERE


def _counters(run: History) -> Iterator[Entry]:
    """Return what each rank used over time."""
    nodes = {life.rank: life.node for life in run.lives}
    for curve in run.curves:
        factor, unit = _UNITS[curve.unit]
        for rank, points in curve.ranks.items():
            if rank in nodes:
                name, pid = f"rank {rank} {curve.name}, {unit}", nodes[rank] + 2
                every = max(1, -(-len(points) // max(_LEAST_POINTS, _MOST_POINTS // (len(nodes) * len(run.curves)))))
                for point in points[::every]:
                    value = {"value": round(point.value * factor, 3)}
                    yield {"ph": "C", "name": name, "ts": _ts(run, point.at), "pid": pid, "args": value}


def _marks(run: History) -> Iterator[Entry]:
    """Return what happened at a moment: on the tracks of the ranks that it concerns, else on that of the job."""
    tracks = {life.rank: life.node for life in run.lives}
    most = max(tracks, default=0) + 1
    for mark in run.marks:
        ranks = [rank for rank in ranks_of(mark.ranks, most) if tracks.get(rank) == mark.node]
        places = [(mark.node + 2, rank + 1) for rank in ranks] or [(_JOB, _TRACK)]
        for pid, tid in places:
            about, at = {"text": clean(mark.text[:_LONGEST])}, _ts(run, mark.at)
            yield {"ph": "i", "s": "t", "name": mark.name, "ts": at, "pid": pid, "tid": tid, "args": about}


def _slice(run: History, name: str, began: float, ended: float, pid: int, tid: int, about: Mapping[str, Any]) -> Entry:
    """Return a slice of the trace from `began` to `ended`, on the track `tid` of the process `pid`."""
    start = _ts(run, began)
    length = max(_ts(run, ended) - start, 0)
    track = {"pid": pid, "tid": tid}
    return {"ph": "X", "name": name, "cat": "ddplaunch", "ts": start, "dur": length, "args": about, **track}


def _ts(run: History, at: float) -> int:
    return max(round((at - run.began) * 1e6), 0)
