"""The entries of the trace of a run: what a viewer of Chrome traces shows of it. Pure; `record/trace.py` knows the format.

The job is a process with a track for its generations; each node is a process with a track for each of its ranks. Below all nodes
each has another process, with the curves of its ranks: viewers draw curves above the tracks of their process. All times are
microseconds since the start of the run. A worker's slice is split where its node did not run, so that suspensions are gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

from ddplaunch.record.folders import short
from ddplaunch.record.trace import Entry, Spans, Track, arrow, difference, moment, named, point, span, union
from ddplaunch.system.words import ranks_of
from ddplaunch.tools.page.collectives import Collective
from ddplaunch.tools.page.history import History, Life, read

_JOB = 1  # the process of the job
_JOB_TRACK: Track = (_JOB, 1)
_MOST_CALLS = 20_000  # of collectives by ranks, the last ones
_MOST_POINTS = 60_000  # of counters, but
_LEAST_POINTS = 8  # of each rank at least
_TICK = 2  # microseconds for which the last to come has a slice: an arrow must begin and end inside of slices
_LONGEST_MISSING = 1000  # characters of the ranks that are missing
_UNITS = {"%": (1, "%"), "B": (2**-20, "MiB"), "s": (1000, "ms")}  # of curves: a factor, and what is written


class _Piece(NamedTuple):
    """A time in which a worker ran without a gap, in microseconds since the start of the run."""

    began: int
    ended: int
    node: int  # index in History.nodes


_NEVER = _Piece(0, 0, 0)


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
    return _process(node), rank + 1


def _process(node: int) -> int:
    """Return the process of a node, by its index in History.nodes."""
    return _JOB + 1 + node


def _process_of_curves(run: History, node: int) -> int:
    """Return the process that has the curves of a node's ranks."""
    return _process(len(run.nodes) + node)


def _names(run: History) -> Iterator[Entry]:
    """Yield the names of processes and tracks, and their order from the top."""
    yield from named("process", (_JOB, 0), short(run.run_id), order=0)
    yield from named("thread", _JOB_TRACK, "generations", order=0)
    # run.nodes begins with the folder of a command that has started all agents: it has no workers, and is no node here
    begins_with_command = len(run.nodes) > 1 and run.nodes[0].folder == run.folder
    first = 1 if begins_with_command else 0
    for index in range(first, len(run.nodes)):
        node_rank = index - first
        name = f"node {node_rank}: {run.nodes[index].host}"
        yield from named("process", (_process(index), 0), name, order=node_rank + 1)
        if run.curves:
            order = len(run.nodes) + node_rank + 1
            yield from named("process", (_process_of_curves(run, index), 0), f"{name}, use of each rank", order=order)
    for node_index, rank in sorted({(life.node, life.rank) for life in run.lives}):
        yield from named("thread", _track(node_index, rank), f"rank {rank}", order=rank)


def _job(run: History) -> Iterator[Entry]:
    """Yield a slice for each generation, and one for the time from its end to the next."""
    ends: dict[int, float] = {}
    for life in run.lives:
        ends[life.generation] = max(ends.get(life.generation, 0.0), run.ended if life.ended is None else life.ended)
    next_began = [one.began for one in run.generations[1:]] + [run.ended]
    for one, next_at in zip(run.generations, next_began, strict=True):
        end = min(ends.get(one.number, next_at), next_at)  # without a worker in the events, it lasted until the next
        began, ended, following = (_microseconds(run, at) for at in (one.began, end, next_at))
        details = {"failed_rank": one.failed_rank}
        yield span(_JOB_TRACK, "ddplaunch", f"generation {one.number}", began, max(ended - began, 0), details)
        if one is not run.generations[-1]:
            yield span(_JOB_TRACK, "ddplaunch", "restart", ended, max(following - ended, 0), {"pause": one.wait})


def _workers(run: History) -> Iterator[Entry]:
    """Yield the slices of each worker, without the times in which its node did not run."""
    for life in run.lives:
        details: dict[str, Any] = {"pid": life.pid, "end": life.how or "running", "status": life.status}
        if life.reached is not None:
            details |= {"first_step": life.reached.first_step, "step": life.reached.step}
        for began, ended in _pieces(run, life):
            track = _track(life.node, life.rank)
            yield span(track, "ddplaunch", f"generation {life.generation}", began, ended - began, details)


def _pieces(run: History, life: Life) -> Spans:
    """Return the times in which a worker ran, in microseconds since the start of the run: at least the moment of its start."""
    began, ended = _microseconds(run, life.began), _microseconds(run, run.ended if life.ended is None else life.ended)
    gaps = union(
        (_microseconds(run, gap.began), _microseconds(run, gap.ended)) for gap in run.gaps if gap.node == life.node
    )
    return difference([(began, ended)], gaps) or [(began, began)]


def _collectives(run: History) -> Iterator[Entry]:
    """Yield who waited in which collective, on the track of each rank, and arrows from the last rank to those that waited.

    A slice ends when the last rank has come. If its rank calls the next collective before that, the slice ends there and has no
    arrow, because slices of a track must not overlap.
    """
    pieces, calls = _pieces_by_rank(run), _calls_by_rank(run)
    arrows = 0
    for one in _latest(run.collectives):
        waiting: dict[int, Track] = {}  # the ranks whose slice lasts until the last rank has come, that one included
        last_came = _microseconds(run, one.came[one.last])
        details = {"ranks": one.members, "last": one.last, "missing": one.missing_text(_LONGEST_MISSING)}
        for rank, came in one.came.items():
            at = _microseconds(run, came)
            piece = _piece_at(pieces.get(rank, []), at)
            if not piece.began <= at < piece.ended:  # no worker of the rank is known to have run then
                continue
            # Nobody ended the wait for a collective to which not all came: its slice ends with the worker. Any other slice ends
            # a tick after the last rank came, so that this rank has a slice as well: arrows begin and end in slices.
            end = piece.ended if one.is_open else min(piece.ended, last_came + _TICK)
            following = bisect_right(calls[rank], at)
            if following < len(calls[rank]):
                end = min(end, calls[rank][following])
            track = _track(piece.node, rank)
            yield span(track, "collective", str(one), at, end - at, details)
            if not one.is_open and end == last_came + _TICK:
                waiting[rank] = track
        start = waiting.pop(one.last, None)
        if start is None:
            continue
        for track in waiting.values():
            arrows += 1  # an arrow for each that waited: viewers take one end for each start
            # both ends lie within that tick
            yield from arrow(arrows, "collective", "last to come", (start, last_came), (track, last_came + 1))


def _pieces_by_rank(run: History) -> Mapping[int, list[_Piece]]:
    """Return for each rank the times in which one of its workers ran, in order."""
    pieces: dict[int, list[_Piece]] = {}
    for life in run.lives:
        pieces.setdefault(life.rank, []).extend(_Piece(*piece, life.node) for piece in _pieces(run, life))
    for of_rank in pieces.values():
        of_rank.sort()
    return pieces


def _calls_by_rank(run: History) -> Mapping[int, list[int]]:
    """Return for each rank when it came to a collective, in order."""
    calls: dict[int, list[int]] = {}
    for one in run.collectives:
        for rank, came in one.came.items():
            calls.setdefault(rank, []).append(_microseconds(run, came))
    for of_rank in calls.values():
        of_rank.sort()
    return calls


def _latest(collectives: Sequence[Collective]) -> Sequence[Collective]:
    """Return the last collectives, with about _MOST_CALLS slices."""
    first, room = len(collectives), _MOST_CALLS
    while first and room > 0:
        first -= 1
        room -= len(collectives[first].came)
    return collectives[first:]


def _piece_at(pieces: list[_Piece], at: int) -> _Piece:
    """Return the last piece that began by then; _NEVER, in which nothing happens, if there is none."""
    begun = bisect_right(pieces, at, key=itemgetter(0))
    return pieces[begun - 1] if begun else _NEVER


def _counters(run: History) -> Iterator[Entry]:
    """Yield what each rank used over time, as curves."""
    nodes = {life.rank: life.node for life in run.lives}
    for curve in run.curves:
        factor, unit = _UNITS[curve.unit]
        room = max(_LEAST_POINTS, _MOST_POINTS // max(1, len(nodes) * len(run.curves)))  # points of a rank
        for rank, points in curve.ranks.items():
            if rank not in nodes:  # its worker is not in the events, so that its node is not known
                continue
            name = f"rank {rank} {curve.name}, {unit}"
            for one in points[:: max(1, ceil(len(points) / room))]:
                yield point(
                    _process_of_curves(run, nodes[rank]), name, _microseconds(run, one.at), round(one.value * factor, 3)
                )


def _marks(run: History) -> Iterator[Entry]:
    """Yield what happened at a moment: on the tracks of the ranks that it concerns, else on that of the job."""
    tracks = {life.rank: life.node for life in run.lives}
    most = max(tracks, default=0) + 1
    for mark in run.marks:
        ranks = [rank for rank in ranks_of(mark.ranks, most) if tracks.get(rank) == mark.node]
        for track in [_track(mark.node, rank) for rank in ranks] or [_JOB_TRACK]:
            yield moment(track, mark.name, _microseconds(run, mark.at), {"text": mark.text})


def _microseconds(run: History, at: float) -> int:
    """Return a time (seconds since 1970) as microseconds since the start of the run."""
    return max(round((at - run.began) * 1e6), 0)
