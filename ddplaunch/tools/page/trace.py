"""What a trace shows of a run. Pure; `record/trace.py` knows the format.

The job is a process with a track for its generations; each node is a process with a track for each of its ranks. All times are
microseconds since the start of the run. A worker's slice is split where its node did not run, so that suspensions are gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from ddplaunch.record.folders import short
from ddplaunch.record.spans import Spans, beyond, union
from ddplaunch.record.trace import Entry, Track, arrow, moment, named, point, span
from ddplaunch.system.words import ranks_of
from ddplaunch.tools.page.history import History, Life, read

_JOB = 1  # the process of the job; that of History.nodes[n] is n + 2
_OF_JOB: Track = (_JOB, 1)
_NOWHERE = 0, 0, 0  # a piece of the life of a worker in which nothing happens: from, until, node
_MOST_CALLS = 20_000  # of collectives by ranks, the last ones
_MOST_POINTS = 60_000  # of counters, but
_LEAST_POINTS = 8  # of each rank at least
_TICK = 2  # microseconds for which the last to come has a slice, at which arrows begin and end
_LONGEST = 1000  # characters of the ranks that are missing
_UNITS = {"%": (1, "%"), "B": (2**-20, "MiB"), "s": (1000, "ms")}  # of curves: a factor, and what is written


def about(run: History) -> Mapping[str, Any]:
    """Return what is kept of a run beside the entries of its trace."""
    return {"run": run.run_id, "program": run.program, "problems": run.problems}


def entries(run: History) -> Iterator[Entry]:
    """Return the entries of the trace of a run."""
    for part in (_names, _job, _workers, _collectives, _marks, _counters):
        yield from part(run)


def entries_of(folder: str) -> Iterator[Entry]:
    """Return the entries of the run in this folder, in microseconds since 1970; none if no run is there."""
    if (run := read(folder)) is not None:
        for entry in entries(run):
            yield {**entry, "ts": entry["ts"] + run.began * 1e6} if "ts" in entry else entry


def _track(node: int, rank: int) -> Track:
    """Return the track of a rank of a node. No thread is 0, which is the idle task to Perfetto."""
    return node + 2, rank + 1


def _names(run: History) -> Iterator[Entry]:
    """Name processes and tracks, and put them in order."""
    yield from named("process", (_JOB, 0), short(run.run_id), 0)
    yield from named("thread", _OF_JOB, "generations", 0)
    # a command that has started all agents has a folder before theirs, and no workers
    first = int(len(run.nodes) > 1 and run.nodes[0].folder == run.folder)
    for index, node in enumerate(run.nodes[first:]):
        yield from named("process", (index + first + 2, 0), f"node {index}: {node.host}", index + 1)
    for node_index, rank in sorted({(life.node, life.rank) for life in run.lives}):
        yield from named("thread", _track(node_index, rank), f"rank {rank}", rank)


def _job(run: History) -> Iterator[Entry]:
    """Return a slice for each generation, and one for the time from its end to the next."""
    ends: dict[int, float] = {}
    for life in run.lives:
        ends[life.generation] = max(ends.get(life.generation, 0.0), run.ended if life.ended is None else life.ended)
    next_began = [one.began for one in run.generations[1:]] + [run.ended]
    for one, then in zip(run.generations, next_began, strict=True):
        end = min(ends.get(one.number, then), then)
        began, ended, following = (_ts(run, at) for at in (one.began, end, then))
        details = {"failed_rank": one.failed_rank}
        yield span(_OF_JOB, "ddplaunch", f"generation {one.number}", began, max(ended - began, 0), details)
        if one is not run.generations[-1]:
            yield span(_OF_JOB, "ddplaunch", "restart", ended, max(following - ended, 0), {"pause": one.wait})


def _workers(run: History) -> Iterator[Entry]:
    """Return the slices of each worker, without the times in which its node did not run."""
    for life in run.lives:
        details: dict[str, Any] = {"pid": life.pid, "end": life.how or "running", "status": life.status}
        if life.reached is not None:
            details |= {"first_step": life.reached.first_step, "step": life.reached.step}
        for began, ended in _pieces(run, life):
            track = _track(life.node, life.rank)
            yield span(track, "ddplaunch", f"generation {life.generation}", began, ended - began, details)


def _pieces(run: History, life: Life) -> Spans:
    """Return the times in which a worker ran, in microseconds since the start of the run: at least the moment of its start."""
    began, ended = _ts(run, life.began), _ts(run, run.ended if life.ended is None else life.ended)
    gaps = union((_ts(run, gap.began), _ts(run, gap.ended)) for gap in run.gaps if gap.node == life.node)
    return beyond([(began, ended)], gaps) or [(began, began)]


def _collectives(run: History) -> Iterator[Entry]:
    """Return who waited in which collective, on the track of each rank, and arrows from the last rank to those that waited.

    A slice ends when the last rank has come. If its rank calls the next collective before that, the slice ends there and has no
    arrow, because slices of a track must not overlap.
    """
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # by rank: start, end, node
    for life in run.lives:
        pieces.setdefault(life.rank, []).extend((*piece, life.node) for piece in _pieces(run, life))
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
        waiting: dict[int, Track] = {}  # the ranks whose slice lasts until the last rank has come, that one included
        last_came = _ts(run, one.came[one.last])
        details = {"ranks": one.members, "last": one.last, "missing": one.missing_text(_LONGEST)}
        for rank, came in one.came.items():
            at = _ts(run, came)
            began, ended, node = _piece_at(pieces.get(rank, []), at)
            if not began <= at < ended:
                continue
            following = bisect_right(calls[rank], at)
            end = min(ended, ended if one.is_open else last_came + _TICK)
            if following < len(calls[rank]):
                end = min(end, calls[rank][following])
            yield span(_track(node, rank), "collective", str(one), at, end - at, details)
            if not one.is_open and end == last_came + _TICK:
                waiting[rank] = _track(node, rank)
        if (start := waiting.pop(one.last, None)) is not None:
            for track in waiting.values():
                number += 1  # viewers take one end for each start
                yield from arrow(number, "collective", "last to come", (start, last_came), (track, last_came + 1))


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
                for one in points[::every]:
                    yield point(pid, name, _ts(run, one.at), round(one.value * factor, 3))


def _marks(run: History) -> Iterator[Entry]:
    """Return what happened at a moment: on the tracks of the ranks that it concerns, else on that of the job."""
    tracks = {life.rank: life.node for life in run.lives}
    most = max(tracks, default=0) + 1
    for mark in run.marks:
        ranks = [rank for rank in ranks_of(mark.ranks, most) if tracks.get(rank) == mark.node]
        for track in [_track(mark.node, rank) for rank in ranks] or [_OF_JOB]:
            yield moment(track, mark.name, _ts(run, mark.at), {"text": mark.text})


def _ts(run: History, at: float) -> int:
    return max(round((at - run.began) * 1e6), 0)
