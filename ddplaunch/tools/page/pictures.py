"""HTML and SVG in which every text is escaped, and the pictures of a run: a timeline of all ranks, a chart a figure. Pure.

The timeline has a row for each rank, a bar for each generation, gaps and restarts across them. In a chart few ranks have a line
each, many have a median and a band. The size of a picture is bounded, however many restarts there were: bars that are too narrow
to be seen become one.

Workers write log lines, exceptions, names and paths. So each text is taken for hostile: `<script>`, `</pre>`, quotes, terminal
escapes, characters that change the direction of a line. Only what `tag` and `styles` return is taken as markup.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil, floor, log10
from typing import TypeAlias

from ddplaunch.system.fields import clean
from ddplaunch.system.words import duration, size
from ddplaunch.tools.page.history import History, Life
from ddplaunch.tools.page.samples import Curve, Point

_LEFT, _WIDTH = 90, 900  # units of a picture: room for names, and for the time of the run
_MOST_RESTARTS = 200  # that are marked, and as many gaps

_XOfTime = Callable[[float], float]  # where in a picture a time (seconds since 1970) lies: so many units from the left


def _length(run: History) -> float:
    """Return how many seconds a run took, more than none, since pictures divide by them."""
    return max(run.ended - run.began, 1e-3)


def _x_of_time(run: History) -> _XOfTime:
    """Return the function that gives the place of a time of the run."""
    length = _length(run)
    return lambda at: round(_LEFT + _WIDTH * min(max((at - run.began) / length, 0.0), 1.0), 1)


def _restarts(run: History, x: _XOfTime, top: int, bottom: int) -> list[Html]:
    """Return a line from top to bottom for each start of a generation but the first."""
    began = [generation.began for generation in run.generations[1:]]
    return [tag("path", d=f"M{x(at)} {top}V{bottom}", class_="restart") for at in began[:_MOST_RESTARTS]]


# --- the timeline


_AXIS = 30  # units above the rows
_ROW, _LOW_ROW = 16, 8  # units: the height of a row, and that where there are many
_MANY_ROWS = 64
_NAME_EVERY = 8  # of low rows, each eighth has its name beside it: the names are higher than the rows
_MOST_BARS = 30_000
_MOST_RANKS = 2048
_KINDS = ("good", "stopped", "failed", "running")  # the later ones are drawn over the earlier ones


def timeline(run: History) -> Html:
    """Return the timeline: a row for each rank, gaps and restarts across all rows. The table of generations says the same."""
    rows = [list(lives) for _, lives in groupby(run.lives, key=lambda life: life.rank)][:_MOST_RANKS]
    if not rows:
        return tag("p", "What the nodes recorded is on their hosts." if run.is_of_command else "No worker was started.")
    is_low = len(rows) > _MANY_ROWS
    height = _LOW_ROW if is_low else _ROW
    bottom = _AXIS + height * len(rows)
    x = _x_of_time(run)
    # units from one bar to the next at least, so that all rows together have no more than _MOST_BARS
    narrowest = max(0.5, _WIDTH * len(rows) / _MOST_BARS)
    drawn = []
    for index, lives in enumerate(rows):
        top, last = _AXIS + index * height, lives[-1]
        name = f"rank {last.rank}"
        if not is_low or index % _NAME_EVERY == 0:
            drawn.append(tag("text", name, x=_LEFT - 8, y=top + (8 if is_low else 12), class_="name"))
        how = f"{name}: {last.how or 'running'}" + (f", {len(lives)} starts" if len(lives) > 1 else "")
        drawn.append(tag("g", tag("title", how), _bars(lives, x, run.ended, top + 1, height - 2, narrowest)))
    gaps = [
        tag("rect", tag("title", f"did not run for {duration(gap.ended - gap.began)}"), x=x(gap.began), y=_AXIS,
            width=max(x(gap.ended) - x(gap.began), 1.0), height=bottom - _AXIS, class_="gap")
        for gap in run.gaps[:_MOST_RESTARTS]
    ]  # fmt: skip
    title = f"Timeline of {len(rows)} ranks over {duration(_length(run))}, which the table below has too"
    return tag(
        "svg",
        tag("title", title, id="drawn"),
        _axis(_length(run)),
        drawn,
        gaps,
        _restarts(run, x, _AXIS - 6, bottom),
        viewBox=f"0 0 {_LEFT + _WIDTH + 10} {bottom + 6}",
        role="img",
        aria_labelledby="drawn",
    )


def _bars(lives: Iterable[Life], x: _XOfTime, run_ended: float, top: int, height: int, narrowest: float) -> Html:
    """Return the bars of one rank: a bar for each life, or for several of one kind that begin within `narrowest` units.

    All bars of a kind are one path.
    """
    bars: dict[str, list[tuple[float, float]]] = {}  # by kind: from left to right
    for life in lives:
        of_kind = bars.setdefault(life.kind, [])
        left = x(life.began)  # in units of the picture
        right = max(x(run_ended if life.ended is None else life.ended), left + 1.0)
        if of_kind and left - of_kind[-1][0] < narrowest:
            bar_left, bar_right = of_kind[-1]
            of_kind[-1] = bar_left, max(bar_right, right)
        else:
            of_kind.append((left, right))
    paths = []
    for kind in _KINDS:
        if kind in bars:
            d = "".join(f"M{left:g} {top}H{right:g}v{height}H{left:g}z" for left, right in bars[kind])
            paths.append(tag("path", d=d, class_=kind))
    # not by colour alone: a failure has a cross at its end
    cross = [f"M{right - 4:g} {top}l4 {height}m0 -{height}l-4 {height}" for _, right in bars.get("failed", ())]
    return join(paths, tag("path", d="".join(cross), class_="cross") if cross else "")


def _axis(length: float) -> Html:
    """Return the times above the rows: at the beginning, at each quarter, and at the end after `length` seconds."""
    anchors = ("start", "middle", "middle", "middle", "end")  # so that no text leaves the picture
    return join(
        [
            tag("text", duration(length * quarter / 4) if quarter else "0 s", x=_LEFT + _WIDTH * quarter / 4, y=14,
                text_anchor=anchor)
            for quarter, anchor in enumerate(anchors)
        ]
    )  # fmt: skip


# --- the curves


_TOP, _HEIGHT, _RIGHT = 10, 110, 10  # units above, of and beside a chart
_MOST_LINES = 8  # ranks that have a line of their own, and a colour and a dash in the style sheet
_MOST_ROWS = 1024
_BAND_PARTS = 300  # of the time, which the band of many ranks has points for


def charts(run: History) -> Html | None:
    """Return a chart for each figure, and the same as a table; None without samples."""
    if not run.curves:
        return None
    drawn = [scrolling(curve.name, _chart(run, curve)) for curve in run.curves]
    ranks = sorted({rank for curve in run.curves for rank in curve.ranks})
    key: Content = "The line is the median of the ranks, the band reaches from the lowest to the highest."
    if len(ranks) <= _MOST_LINES:
        key = [(tag("i", class_=f"line{index}"), f"rank {rank}") for index, rank in enumerate(ranks)]
    head = ["rank", *(f"{curve.name}, {kind}" for curve in run.curves for kind in ("mean", "highest"))]
    return tag(
        "div",
        tag("p", key, class_="key lines"),
        drawn,
        tag(
            "details",
            tag("summary", "The curves as a table"),
            table("Each rank over the whole run", head, _rows(run, ranks)),
        ),
    )


def _rows(run: History, ranks: Sequence[int]) -> Iterator[list[str]]:
    """Yield a row for each rank: of each curve, its mean and its highest value."""
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
    x = _x_of_time(run)

    def y(value: float) -> float:
        """Return how many units below the top of the picture a value lies."""
        return round(_TOP + _HEIGHT * (1 - value / top), 1)

    show = _SHOW[curve.unit]
    bottom = _TOP + _HEIGHT
    shares = (0, 0.5, 1)  # of the largest value, that have a line across and a text
    parts = [tag("path", d=f"M{_LEFT} {y(top * share)}h{_WIDTH}", class_="grid") for share in shares]
    parts += [tag("text", show(top * share), x=_LEFT - 8, y=y(top * share) + 4, class_="name") for share in shares]
    parts += _restarts(run, x, _TOP, bottom)
    if len(curve.ranks) <= _MOST_LINES:
        for index, (rank, points) in enumerate(curve.ranks.items()):
            line = _line(points, x, y)
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


def _line(points: Sequence[Point], x: _XOfTime, y: Callable[[float], float]) -> str:
    """Return an SVG path through these points, with a gap at each restart."""
    words, generation = [], None
    for point in points:
        move_or_line = "L" if point.generation == generation else "M"
        words.append(f"{move_or_line}{x(point.at):g} {y(point.value):g}")
        generation = point.generation
    if len(points) == 1:
        words.append("h1")  # a path of one point shows nothing: a line of one unit
    return "".join(words)


def _band(run: History, curve: Curve, x: _XOfTime, y: Callable[[float], float]) -> Iterator[Html]:
    """Yield the band between the lowest and the highest rank, and the line of the median: one of each for a generation."""
    width = _length(run) / _BAND_PARTS  # seconds of a part
    by_part: dict[tuple[int, int], list[float]] = {}  # values of all ranks, by generation and part
    for points in curve.ranks.values():
        for point in points:
            part = int((point.at - run.began) / width)
            by_part.setdefault((point.generation, part), []).append(point.value)
    # by generation: the middle of each part, and its values from low to high
    generations: dict[int, list[tuple[float, list[float]]]] = {}
    for (generation, part), values in sorted(by_part.items()):
        generations.setdefault(generation, []).append((run.began + (part + 0.5) * width, sorted(values)))
    for parts in generations.values():
        upper = [f"{x(at):g} {y(values[-1]):g}" for at, values in parts]
        lower = [f"{x(at):g} {y(values[0]):g}" for at, values in reversed(parts)]
        median = [f"{x(at):g} {y(values[len(values) // 2]):g}" for at, values in parts]
        yield tag("path", d=f"M{'L'.join(upper + lower)}z", class_="band")
        yield tag("path", d=f"M{'L'.join(median)}", class_="line0")


def _round_up(largest: float, unit: str) -> float:
    """Return the top of an axis: a number that reads well, not below the largest value.

    Of "%" that is a multiple of 50; of "B" and "s" one of 1, 2, 4, 6, 8, 10 times a power of ten, of "B" in KiB, MiB, ...
    """
    if largest <= 0:
        return 1.0
    if unit == "%":
        return ceil(largest / 50) * 50.0
    scale = 1.0
    if unit == "B":
        while largest / scale >= 1024:
            scale *= 1024
    power = 10.0 ** floor(log10(largest / scale))
    tops = (step * power * scale for step in (1, 2, 4, 6, 8, 10))
    # a largest value that lies above a top by its last digits only needs no higher one
    return next(top for top in tops if top >= largest * 0.999)


_EMPTY = ("meta", "link", "br")


Content: TypeAlias = "str | Iterable[Content]"


class Html(str):
    """Markup in which all texts are escaped."""

    __slots__ = ()


def tag(name: str, /, *content: Content, **attributes: str | float) -> Html:
    """Return an element; of an attribute's name `class_` gives class, and `aria_label` aria-label."""
    words = [name]
    for key, value in attributes.items():
        words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(clean(str(value)))}"')
    opened = f"<{' '.join(words)}>"
    return Html(opened if name in _EMPTY else f"{opened}{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Return the pieces of `content` in one: markup as it is, texts escaped."""
    pieces = []
    for piece in content:
        if isinstance(piece, Html):
            pieces.append(str(piece))
        elif isinstance(piece, str):
            pieces.append(html.escape(clean(piece)))
        else:
            pieces.append(join(*piece))
    return Html("".join(pieces))


def styles(css: str) -> Html:
    """Return a style element; `css` is ours."""
    return Html(f"<style>{css}</style>")


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """Return a table with a caption and headers for its columns and rows, which scrolls within the page's width."""
    lines = []
    for first, *others in rows:
        lines.append(tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in others]))
    top = tag("tr", [tag("th", name, scope="col") for name in head])
    return scrolling(caption, tag("table", tag("caption", caption), tag("thead", top), tag("tbody", lines)))


def scrolling(label: str, content: Html) -> Html:
    """Return what may be wider than the page, which the keyboard scrolls."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=label)


def unfolding(title: str, text: str, room: int, **attributes: str) -> Html:
    """Return a title that unfolds a text. Of a long text, show only the end: at most `room` bytes of markup."""
    text = clean(text)
    shown = tag("code", text)
    while len(shown.encode()) > room and text:
        # a quarter goes, up to the end of a line; of one long line, half of it
        text = text[len(text) // 4 + 1 :].partition("\n")[2] or text[len(text) // 2 + 1 :]
        shown = tag("code", text)
    return tag(
        "details", tag("summary", title), tag("pre", shown, tabindex=0, role="region", aria_label=title), **attributes
    )
