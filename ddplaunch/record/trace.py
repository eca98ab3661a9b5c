"""Writes Chrome traces, which Perfetto and chrome://tracing open, and has the sets of times that they are made of. Draws nothing.

A trace is a stream of entries in any order. Each entry lies on a track, which is a thread of a process to the viewers; the caller
chooses the numbers of both. Times are microseconds since a moment that all entries share. Texts come from programs: each is
cut, and cleaned of what does not print.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import IO, Any, Literal

import msgspec

from ddplaunch.system.fields import clean

_LONGEST_TEXT = 1000  # characters of a text
_BATCH = 5000  # entries that are in memory at once

Entry = Mapping[str, Any]
Track = tuple[int, int | str]  # the process, and the thread in it

encode = msgspec.json.Encoder().encode


def write(file: IO[bytes], entries: Iterable[Entry], about: Mapping[str, Any], *, packed: bool) -> None:
    """Write a trace as the entries come, `packed` by gzip; `about` is kept beside all entries."""
    remaining, separator = iter(entries), b""
    # mtime: the same run gives the same bytes
    target: Any = gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) if packed else nullcontext(file)
    with target as out:
        out.write(b'{"displayTimeUnit":"ms","otherData":' + encode(_with_clean_texts(about)) + b',"traceEvents":[\n')
        while batch := list(islice(remaining, _BATCH)):
            out.write(separator + b",\n".join(map(encode, batch)))
            separator = b",\n"
        out.write(b"\n]}\n")


def named(what: Literal["process", "thread"], track: Track, name: str, order: int) -> Iterator[Entry]:
    """Name a track or its process, and say as which one from the top the viewers show it."""
    pid, tid = track
    for field, value in (("name", _with_clean_texts(name)), ("sort_index", order)):
        yield {"ph": "M", "name": f"{what}_{field}", "pid": pid, "tid": tid, "args": {field: value}}


def span(track: Track, category: str, name: str, begin: float, length: float, details: Mapping[str, Any]) -> Entry:
    """Return a slice of a track. Slices of one track may lie in each other, but must not overlap otherwise."""
    return {**_entry("X", track, name, begin), "cat": category, "dur": length, "args": _with_clean_texts(details)}


def moment(track: Track, name: str, at: float, details: Mapping[str, Any]) -> Entry:
    """Return what happened on a track at one moment."""
    return {**_entry("i", track, name, at), "s": "t", "args": _with_clean_texts(details)}


def point(pid: int, name: str, at: float, value: float) -> Entry:
    """Return a point of the curve with this name, which viewers show above the tracks of the process."""
    return {"ph": "C", "name": _with_clean_texts(name), "pid": pid, "ts": at, "args": {"value": value}}


def arrow(
    number: int | str, category: str, name: str, begin: tuple[Track, float], end: tuple[Track, float]
) -> Iterator[Entry]:
    """Return both ends of an arrow; `number` is that of no other arrow. Each end lies in a slice of its track."""
    for phase, (track, at) in (("s", begin), ("f", end)):
        yield {**_entry(phase, track, name, at), "cat": category, "id": number, "bp": "e"}


def _entry(phase: str, track: Track, name: str, at: float) -> dict[str, Any]:
    pid, tid = track
    return {"ph": phase, "name": _with_clean_texts(name), "pid": pid, "tid": tid, "ts": at}


def _with_clean_texts(value: Any) -> Any:
    """Return a value with all texts in it cleaned and cut."""
    match value:
        case str():
            return clean(value[:_LONGEST_TEXT])
        case Mapping():
            return {name: _with_clean_texts(part) for name, part in value.items()}
        case list() | tuple():
            return [_with_clean_texts(part) for part in value]
    return value


Span = tuple[int, int]  # of one clock, in one unit
Spans = list[Span]  # in order, none empty, none touching the next


def union(spans: Iterable[Span]) -> Spans:
    """Return the times that lie in any of these spans, which may come in any order."""
    made: Spans = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((begin, end))
    return made


def intersection(ours: Spans, others: Spans) -> Spans:
    """Return the times that are in both."""
    overlaps = ((our, other) for our, overlapping in _with_overlapping(ours, others) for other in overlapping)
    return [(max(begin, other_begin), min(end, other_end)) for (begin, end), (other_begin, other_end) in overlaps]


def difference(ours: Spans, others: Spans) -> Spans:
    """Return the times that are in the first and not in the second."""
    made = []
    for (begin, end), overlapping in _with_overlapping(ours, others):
        free_from = begin
        for other_begin, other_end in overlapping:
            if free_from < other_begin:
                made.append((free_from, other_begin))
            free_from = max(free_from, other_end)
        if free_from < end:
            made.append((free_from, end))
    return made


def _with_overlapping(ours: Spans, others: Spans) -> Iterator[tuple[Span, Spans]]:
    """Yield each of our spans with the others that overlap it, in one pass over both."""
    first = 0  # index in `others`: all before it end before our span begins
    for begin, end in ours:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        after = first
        while after < len(others) and others[after][0] < end:
            after += 1
        yield (begin, end), others[first:after]


def total_length(spans: Iterable[Span]) -> int:
    """Return how long the spans are together."""
    return sum(end - begin for begin, end in spans)
