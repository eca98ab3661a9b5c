"""Sets of times as sorted spans that do not touch, with the operations of sets: union, intersection, difference. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
