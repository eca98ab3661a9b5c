"""The pictures of a run as SVG: the timeline of all ranks, and curves, a chart for each figure. Pure.

The timeline has a row for each rank, a bar for each generation, gaps and restarts across them. In a chart few ranks have a line
each, many have a median and a band. The size of a picture is bounded, however many restarts there were: bars that are too narrow
to be seen become one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil, floor, log10

from ddplaunch.system.words import duration, size
from ddplaunch.tools.page.history import History, Life
from ddplaunch.tools.page.markup import Html, join, scrolling, table, tag
from ddplaunch.tools.page.samples import Curve, Point

_LEFT, _WIDTH = 90, 900  # units of a picture: room for names, and for the time of the run
_RESTARTS = 200  # that are marked

_Place = Callable[[float], float]


def _length(run: History) -> float:
    """Return how many seconds a run took, more than none, since pictures divide by them."""
    return max(run.ended - run.began, 1e-3)


def _from_left(run: History) -> _Place:
    """Return what places a time of the run in a picture: so many units from the left."""
    length = _length(run)
    return lambda at: round(_LEFT + _WIDTH * min(max((at - run.began) / length, 0.0), 1.0), 1)


# --- the timeline


_AXIS = 30  # units above the rows
_MOST_BARS = 30_000
_MOST_RANKS = 2048
_KINDS = ("good", "stopped", "failed", "running")  # the later ones are drawn over the earlier ones


def timeline(run: History) -> Html:
    """Return the picture; its text alternative is the table of generations."""
    rows = [list(lives) for _, lives in groupby(run.lives, key=lambda life: life.rank)][:_MOST_RANKS]
    if not rows:
        return tag("p", "What the nodes recorded is on their hosts." if run.is_of_command else "No worker was started.")
    height = 16 if len(rows) <= 64 else 8
    bottom = _AXIS + height * len(rows)
    x = _from_left(run)
    finest = max(0.5, _WIDTH * len(rows) / _MOST_BARS)
    every = 1 if height == 16 else 8
    drawn = []
    for index, lives in enumerate(rows):
        top = _AXIS + index * height
        name = f"rank {lives[0].rank}"
        if index % every == 0:
            drawn.append(tag("text", name, x=_LEFT - 8, y=top + (12 if height == 16 else 8), class_="name"))
        last = lives[-1]
        title = tag("title", f"{name}: {last.how or 'running'}" + (f", {len(lives)} starts" if len(lives) > 1 else ""))
        drawn.append(tag("g", title, _bars(lives, x, run.ended, top + 1, height - 2, finest)))
    lines = [
        tag("path", d=f"M{x(one.began)} {_AXIS - 6}V{bottom}", class_="restart")
        for one in run.generations[1:][:_RESTARTS]
    ]
    gaps = [
        tag("rect", tag("title", f"did not run for {duration(gap.ended - gap.began)}"), x=x(gap.began), y=_AXIS,
            width=max(x(gap.ended) - x(gap.began), 1.0), height=bottom - _AXIS, class_="gap")
        for gap in run.gaps[:_RESTARTS]
    ]  # fmt: skip
    return tag(
        "svg",
        tag(
            "title",
            f"Timeline of {len(rows)} ranks over {duration(_length(run))}, which the table below has too",
            id="drawn",
        ),
        _axis(_length(run)),
        drawn,
        gaps,
        lines,
        viewBox=f"0 0 {_LEFT + _WIDTH + 10} {bottom + 6}",
        role="img",
        aria_labelledby="drawn",
    )


def _bars(lives: Iterable[Life], x: _Place, until: float, top: int, height: int, finest: float) -> Html:
    """Return the bars of one rank, those of a kind as one path."""
    spans: dict[str, list[list[float]]] = {}
    for life in lives:
        of_kind = spans.setdefault(life.kind, [])
        left = x(life.began)
        right = max(x(until if life.ended is None else life.ended), left + 1.0)
        if of_kind and left - of_kind[-1][0] < finest:
            of_kind[-1][1] = max(of_kind[-1][1], right)
        else:
            of_kind.append([left, right])
    paths = []
    for kind in _KINDS:
        if kind in spans:
            d = "".join(f"M{left:g} {top}H{right:g}v{height}H{left:g}z" for left, right in spans[kind])
            paths.append(tag("path", d=d, class_=kind))
    # not by colour alone: a failure has a cross at its end
    cross = [f"M{right - 4:g} {top}l4 {height}m0 -{height}l-4 {height}" for _, right in spans.get("failed", ())]
    return join(paths, tag("path", d="".join(cross), class_="cross") if cross else "")


def _axis(length: float) -> Html:
    """Return the times above the rows."""
    quarters = range(5)
    anchors = ("start", "middle", "middle", "middle", "end")
    return join(
        [
            tag(
                "text",
                duration(length * at / 4) if at else "0 s",
                x=_LEFT + _WIDTH * at / 4,
                y=14,
                text_anchor=anchors[at],
            )
            for at in quarters
        ]
    )


# --- the curves


_TOP, _HEIGHT, _RIGHT = 10, 110, 10  # units above, of and beside a chart
_EACH = 8  # ranks that have a line of their own, and a colour and a dash in the style sheet
_MOST_ROWS = 1024
_PARTS = 300  # of the time, which the band of many ranks has points for


def charts(run: History) -> Html | None:
    """Return a chart for each figure, and the same as a table; None without samples."""
    if not run.curves:
        return None
    drawn = [scrolling(curve.name, _chart(run, curve)) for curve in run.curves]
    ranks = sorted({rank for curve in run.curves for rank in curve.ranks})
    few = len(ranks) <= _EACH
    names = [(tag("i", class_=f"line{index}"), f"rank {rank}") for index, rank in enumerate(ranks)]
    many = "The line is the median of the ranks, the band reaches from the lowest to the highest."
    head = ["rank", *(f"{curve.name}, {kind}" for curve in run.curves for kind in ("mean", "highest"))]
    return tag(
        "div",
        tag("p", names if few else many, class_="key lines"),
        drawn,
        tag(
            "details",
            tag("summary", "The curves as a table"),
            table("Each rank over the whole run", head, _rows(run, ranks)),
        ),
    )


def _rows(run: History, ranks: Sequence[int]) -> Iterator[list[str]]:
    for rank in ranks[:_MOST_ROWS]:
        cells = [str(rank)]
        for curve in run.curves:
            values = [point.value for point in curve.ranks.get(rank, ())]
            show = _SHOW[curve.unit]
            cells += [show(statistics.fmean(values)), show(max(values))] if values else ["", ""]
        yield cells


_SHOW: dict[str, Callable[[float], str]] = {
    "%": lambda value: f"{value:.0f}%",
    "B": lambda value: size(round(value)),
    "s": duration,
}


def _chart(run: History, curve: Curve) -> Html:
    """Draw a figure over time: a line for each rank, or, for many ranks, a band."""
    largest = max(point.value for points in curve.ranks.values() for point in points)
    top = _round_up(largest, curve.unit)
    x = _from_left(run)

    def y(value: float) -> float:
        return round(_TOP + _HEIGHT * (1 - value / top), 1)

    show = _SHOW[curve.unit]
    bottom = _TOP + _HEIGHT
    parts = [tag("path", d=f"M{_LEFT} {y(top * at)}h{_WIDTH}", class_="grid") for at in (0, 0.5, 1)]
    parts += [tag("text", show(top * at), x=_LEFT - 8, y=y(top * at) + 4, class_="name") for at in (0, 0.5, 1)]
    parts += [
        tag("path", d=f"M{x(one.began)} {_TOP}V{bottom}", class_="restart") for one in run.generations[1:][:_RESTARTS]
    ]
    if len(curve.ranks) <= _EACH:
        for index, (rank, points) in enumerate(curve.ranks.items()):
            line = _line(points, lambda point: (x(point.at), y(point.value)))
            parts.append(tag("path", tag("title", f"rank {rank}"), d=line, class_=f"line{index}"))
    else:
        parts += _band(run, curve, x, y)
    title = f"{curve.name} of {len(curve.ranks)} ranks, at most {show(largest)}, which the table below has too"
    box = f"0 0 {_LEFT + _WIDTH + _RIGHT} {bottom + 8}"
    name = f"chart-{curve.name.lower().replace(' ', '-')}"
    return tag(
        "figure",
        tag("figcaption", curve.name),
        tag("svg", tag("title", title, id=name), parts, viewBox=box, role="img", aria_labelledby=name, class_="chart"),
    )


def _line(points: Sequence[Point], place: Callable[[Point], tuple[float, float]]) -> str:
    """Return an SVG path through these points, with a gap at each restart."""
    words, before = [], None
    for point in points:
        across, down = place(point)
        words.append(f"{'L' if point.generation == before else 'M'}{across:g} {down:g}")
        before = point.generation
    if len(points) == 1:
        words.append("h1")
    return "".join(words)


def _band(run: History, curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[Html]:
    """Return the band between the lowest and the highest rank, and the line of the median."""
    width = _length(run) / _PARTS
    parts: dict[tuple[int, int], list[float]] = {}
    for points in curve.ranks.values():
        for point in points:
            parts.setdefault((point.generation, int((point.at - run.began) / width)), []).append(point.value)
    generations: dict[int, list[tuple[float, list[float]]]] = {}
    for (generation, part), values in sorted(parts.items()):
        generations.setdefault(generation, []).append((run.began + (part + 0.5) * width, sorted(values)))
    for of_generation in generations.values():
        upper = [f"{x(at):g} {y(values[-1]):g}" for at, values in of_generation]
        lower = [f"{x(at):g} {y(values[0]):g}" for at, values in reversed(of_generation)]
        median = [f"{x(at):g} {y(values[len(values) // 2]):g}" for at, values in of_generation]
        yield tag("path", d=f"M{'L'.join(upper + lower)}z", class_="band")
        yield tag("path", d=f"M{'L'.join(median)}", class_="line0")


def _round_up(largest: float, unit: str) -> float:
    """Return the top of an axis: a number that reads well, not below the largest value."""
    if largest <= 0:
        return 1.0
    scale = 1.0
    if unit == "B":
        while largest / scale >= 1024:
            scale *= 1024
    elif unit == "%":
        return ceil(largest / 50) * 50.0
    power = 10.0 ** floor(log10(largest / scale))
    return next(step * power * scale for step in (1, 2, 4, 6, 8, 10) if step * power * scale >= largest * 0.999)
