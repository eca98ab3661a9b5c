"""The timeline of all ranks as SVG: a row for each rank, a bar for each generation, gaps and restarts across them. Pure.

The size of the picture is bounded, however many restarts there were: bars that are too narrow to be seen become one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ddplaunch.system.words import duration
from ddplaunch.tools.page.history import History, Life
from ddplaunch.tools.page.markup import Html, join, tag

_LEFT, _WIDTH, _TOP = 90, 900, 30  # units of the picture: room for names, for bars, and for the axis
_MOST_BARS = 30_000
_MOST_ROWS = 2048
_MOST_LINES = 200  # of generations
_KINDS = ("good", "stopped", "failed", "running")  # the later ones are drawn over the earlier ones


def timeline(run: History) -> Html:
    """Return the picture; its text alternative is the table of generations."""
    rows = [list(lives) for _, lives in groupby(run.lives, key=lambda life: life.rank)][:_MOST_ROWS]
    if not rows:
        return tag("p", "What the nodes recorded is on their hosts." if run.is_of_command else "No worker was started.")
    height = 16 if len(rows) <= 64 else 8
    span = max(run.ended - run.began, 1e-3)
    bottom = _TOP + height * len(rows)

    def x(at: float) -> float:
        return round(_LEFT + _WIDTH * min(max((at - run.began) / span, 0.0), 1.0), 1)

    finest = max(0.5, _WIDTH * len(rows) / _MOST_BARS)
    every = 1 if height == 16 else 8
    drawn = []
    for index, lives in enumerate(rows):
        top = _TOP + index * height
        name = f"rank {lives[0].rank}"
        if index % every == 0:
            drawn.append(tag("text", name, x=_LEFT - 8, y=top + (12 if height == 16 else 8), class_="name"))
        last = lives[-1]
        title = tag("title", f"{name}: {last.how or 'running'}" + (f", {len(lives)} starts" if len(lives) > 1 else ""))
        drawn.append(tag("g", title, _bars(lives, x, run.ended, top + 1, height - 2, finest)))
    lines = [
        tag("path", d=f"M{x(one.began)} {_TOP - 6}V{bottom}", class_="restart")
        for one in run.generations[1:][:_MOST_LINES]
    ]
    gaps = [
        tag("rect", tag("title", f"did not run for {duration(gap.ended - gap.began)}"), x=x(gap.began), y=_TOP,
            width=max(x(gap.ended) - x(gap.began), 1.0), height=bottom - _TOP, class_="gap")
        for gap in run.gaps[:_MOST_LINES]
    ]  # fmt: skip
    return tag(
        "svg",
        tag("title", f"Timeline of {len(rows)} ranks over {duration(span)}, which the table below has too", id="drawn"),
        _axis(span),
        drawn,
        gaps,
        lines,
        viewBox=f"0 0 {_LEFT + _WIDTH + 10} {bottom + 6}",
        role="img",
        aria_labelledby="drawn",
    )


def _bars(lives: Iterable[Life], x, until: float, top: int, height: int, finest: float) -> Html:  # type: ignore[no-untyped-def]
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


def _axis(span: float) -> Html:
    """Return the times above the rows."""
    quarters = range(5)
    anchors = ("start", "middle", "middle", "middle", "end")
    return join(
        [
            tag(
                "text",
                duration(span * at / 4) if at else "0 s",
                x=_LEFT + _WIDTH * at / 4,
                y=14,
                text_anchor=anchors[at],
            )
            for at in quarters
        ]
    )
