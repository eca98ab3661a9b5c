"""Sets of times as sorted spans that do not touch: what two have in common, and what one has beyond the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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


def common(ours: Spans, others: Spans) -> Spans:
    """Return the times that are in both."""
    made, at = [], 0
    for begin, end in ours:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            made.append((max(begin, others[here][0]), min(end, others[here][1])))
            here += 1
    return made


def beyond(ours: Spans, others: Spans) -> Spans:
    """Return the times that are in the first and not in the second."""
    made, at = [], 0
    for begin, end in ours:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        left, here = begin, at
        while here < len(others) and others[here][0] < end:
            if left < others[here][0]:
                made.append((left, others[here][0]))
            left = max(left, others[here][1])
            here += 1
        if left < end:
            made.append((left, end))
    return made


def length(spans: Iterable[Span]) -> int:
    """Return how long they are together."""
    return sum(end - begin for begin, end in spans)
