"""Draws figures of `run.py --json` as a picture: how long each takes, as part of what torchrun or the shell loop needs.

python benchmarks/draw.py figures.json > docs/pictures/benchmarks.svg
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

_ROW, _NAMES, _WIDTH, _TOP = 26, 400, 320, 64  # pixels
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.s{fill:#57606a;font-size:12px}.b{fill:#0969da}"
    ".n{stroke:#24292f}.l{stroke:#8c959f;stroke-dasharray:3 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#8b949e}.b{fill:#4493f8}.n{stroke:#e6edf3}}"
)


def svg(measured: dict[str, Any]) -> str:
    """Draw every figure that is a ratio of times, with the noise as a line across the end of its bar."""
    rows = [one for one in measured["figures"] if one["unit"] == "x" and not one["more_is_better"]]
    scale = _WIDTH / max([1.0, *(one["high"] for one in rows)])
    height = _TOP + _ROW * len(rows) + 16
    machine = measured["machine"]
    facts = ", ".join(f"{name} {machine[name]}" for name in ("machine", "Linux", "Python", "torch"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_NAMES + _WIDTH + 70} {height}" role="img">',
        f"<title>Times of ddplaunch, as parts of what others need</title><style>{_STYLE}</style>",
        '<text x="8" y="22">ddplaunch, as part of the time that the other needs: shorter is faster</text>',
        f'<text class="s" x="8" y="42">{escape(facts)}</text>',
    ]
    for at, one in enumerate(rows):
        y = _TOP + _ROW * at
        middle, end = y + 9, _NAMES + one["value"] * scale
        low, high = (_NAMES + one[key] * scale for key in ("low", "high"))
        lines += [
            f'<text x="{_NAMES - 8}" y="{y + 14}" text-anchor="end">{escape(one["name"])}</text>',
            f'<rect class="b" x="{_NAMES}" y="{y + 2}" width="{end - _NAMES:.1f}" height="14"/>',
            f'<line class="n" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
            f'<text class="s" x="{max(end, high) + 6:.1f}" y="{y + 14}">{one["value"]:.2f}</text>',
        ]
    whole = _NAMES + scale
    lines += [f'<line class="l" x1="{whole:.1f}" x2="{whole:.1f}" y1="{_TOP - 8}" y2="{height - 12}"/>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(svg(json.loads(Path(sys.argv[1]).read_text())))
