"""Draws figures of `run.py --json` as a picture: how much of torchrun's time or memory ddplaunch needs.

python benchmarks/draw.py figures.json > docs/pictures/benchmarks.svg
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

_ROW, _WIDTH, _TOP, _LEFT = 44, 640, 78, 16  # pixels
_LEAST = 0.01  # of torchrun's, at the left end of the scale
_MARKS = {0.01: "1/100", 0.1: "1/10", 1.0: "torchrun = 1"}
_STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#24292f}.s{fill:#57606a;font-size:13px}.b{fill:#0969da}"
    ".t{fill:#d0d7de}.l{stroke:#8c959f;stroke-dasharray:3 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#8b949e}.b{fill:#4493f8}.t{fill:#30363d}}"
)


def svg(measured: dict[str, Any]) -> str:
    """Draw each figure that was measured of both, from the largest difference to the smallest, on a logarithmic scale."""
    rows = [one["beside"] for one in measured["figures"] if one["beside"]]
    rows.sort(key=lambda row: row["ours"] / row["torchrun"])
    height = _TOP + _ROW * len(rows) + 12
    machine = measured["machine"]
    facts = ", ".join(f"{name} {machine[name]}" for name in ("machine", "Python", "torch"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>What ddplaunch needs, as a part of what torchrun needs</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="24">How much of torchrun\'s time and memory does ddplaunch need?</text>',
        f'<text class="s" x="{_LEFT}" y="44">{escape(facts)}; shorter is better, logarithmic</text>',
    ]
    for at, text in _MARKS.items():
        anchor = "end" if at == 1 else "start"
        lines += [
            f'<line class="l" x1="{_x(at):.1f}" x2="{_x(at):.1f}" y1="{_TOP - 8}" y2="{height - 8}"/>',
            f'<text class="s" x="{_x(at):.1f}" y="{_TOP - 13}" text-anchor="{anchor}">{text}</text>',
        ]
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        ours, theirs = (_written(row[whose], row["unit"]) for whose in ("ours", "torchrun"))
        lines += [
            f'<text x="{_LEFT}" y="{y + 16}">{escape(row["what"])}</text>',
            f'<text class="s" x="{_WIDTH - _LEFT}" y="{y + 16}" text-anchor="end">{ours}, torchrun {theirs}</text>',
            f'<rect class="t" x="{_LEFT}" y="{y + 22}" width="{_x(1) - _LEFT:.1f}" height="10"/>',
            f'<rect class="b" x="{_LEFT}" y="{y + 22}" width="{_x(row["ours"] / row["torchrun"]) - _LEFT:.1f}" height="10"/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(ratio: float) -> float:
    """Return where a ratio stands on the scale."""
    share = math.log(max(ratio, _LEAST) / _LEAST) / -math.log(_LEAST)
    return _LEFT + share * (_WIDTH - 2 * _LEFT)


def _written(value: float, unit: str) -> str:
    if unit == "s" and value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


if __name__ == "__main__":
    sys.stdout.write(svg(json.loads(Path(sys.argv[1]).read_text())))
