"""The curves of a run as SVG, a chart for each figure: few ranks have a line each, many a median and a band. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10

from ddplaunch.system.words import duration, size
from ddplaunch.tools.page.history import History
from ddplaunch.tools.page.markup import Html, scrolling, table, tag
from ddplaunch.tools.page.samples import Curve, Point

_LEFT, _WIDTH, _TOP, _HEIGHT, _RIGHT = 90, 900, 10, 110, 10  # units of the picture, as wide as the timeline
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
    span = max(run.ended - run.began, 1e-3)
    largest = max(point.value for points in curve.ranks.values() for point in points)
    top = _round_up(largest, curve.unit)

    def x(at: float) -> float:
        return round(_LEFT + _WIDTH * min(max((at - run.began) / span, 0.0), 1.0), 1)

    def y(value: float) -> float:
        return round(_TOP + _HEIGHT * (1 - value / top), 1)

    show = _SHOW[curve.unit]
    bottom = _TOP + _HEIGHT
    parts = [tag("path", d=f"M{_LEFT} {y(top * at)}h{_WIDTH}", class_="grid") for at in (0, 0.5, 1)]
    parts += [tag("text", show(top * at), x=_LEFT - 8, y=y(top * at) + 4, class_="name") for at in (0, 0.5, 1)]
    parts += [tag("path", d=f"M{x(one.began)} {_TOP}V{bottom}", class_="restart") for one in run.generations[1:201]]
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
    width = max(run.ended - run.began, 1e-3) / _PARTS
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
