"""The status area: a few rows below the lines on a terminal, which show progress bars in place.

Pure: it gives the bytes to write, and neither writes nor asks for the size. It hides no cursor, sets no margins and switches no
mode, so that one killed in the middle leaves rows and nothing else. The cursor rests below it, where typed keys appear.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable

from ddplaunch.output.bars import Bar, condense, kinds
from ddplaunch.output.prefix import RESET
from ddplaunch.plan.ranks import compress

_SHARE = 3  # a third of the screen at most
_WIDEST_RANKS = 14  # characters; others are counted
_NAMES = ("slowest", "between", "fastest")
_COLOUR = r"(\x1b\[[0-9;:]*m)"
_OTHER_ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?"


class StatusArea:
    """What is on the terminal below the lines, and what has to be written to change it."""

    def __init__(self) -> None:
        self._bars: tuple[Bar, ...] = ()
        self._drawn: list[bytes] = []  # on the screen, right above the cursor
        self._midline = False  # what was written last has not ended its line

    def show(self, bars: tuple[Bar, ...]) -> None:
        """Take bars that are shown in place of those before, from the next `draw` on."""
        self._bars = bars

    def write(self, data: bytes) -> bytes:
        """Return what to write so that this stands above the area, which is gone until `draw`."""
        self._midline = not data.endswith(b"\n") if data else self._midline
        return self._erase() + data

    def forget(self) -> None:
        """Take what is drawn for lines: another program has written below it, as the shell after Ctrl-Z."""
        self._drawn = []

    def draw(self, size: os.terminal_size | None) -> bytes:
        """Return what to write so that the area is there, and up to date; None: the terminal is not ours at present."""
        if size is None:
            self.forget()
            return b""
        if self._midline:
            return b""
        rows, drawn = render(self._bars, size), self._drawn
        if rows == drawn:
            return b""
        if len(rows) != len(drawn):
            erase, self._drawn = self._erase(), rows
            return erase + b"".join(row + b"\n" for row in rows)
        self._drawn = rows
        # the cursor, which may stand behind typed characters, comes back to its place
        new = (b"\n" if row == old else row + b"\x1b[K\n" for row, old in zip(rows, drawn, strict=True))
        return b"\x1b7\r\x1b[%dA%b\x1b8" % (len(rows), b"".join(new))

    def _erase(self) -> bytes:
        rows, self._drawn = len(self._drawn), []
        return b"\r\x1b[%dA\x1b[J" % rows if rows else b""


def render(bars: Iterable[Bar], size: os.terminal_size) -> list[bytes]:
    """Lay the bars out in rows that fit: at most a third of the lines, none of them as wide as the screen."""
    rows: list[tuple[int, str, str, str]] = []  # how soon it goes if there are too many, ranks, name, text
    for kind in kinds(condense(bars)):
        for place, bar in enumerate(kind):
            which = 0 if place == 0 else 2 if place == len(kind) - 1 else 1
            rows.append(((0, 2, 1)[which], _ranks(bar.ranks), _NAMES[which] if len(kind) > 1 else "", bar.text))
    most = size.lines // _SHARE
    kept = sorted(sorted(range(len(rows)), key=lambda index: rows[index][0])[:most])
    chosen = [rows[index][1:] for index in kept]
    widths = [max(map(len, column)) for column in zip(*chosen, strict=True)]
    drawn = []
    for ranks, name, text in chosen:
        words = [ranks.ljust(widths[0]), *([name.ljust(widths[1])] if widths[1] else []), text]
        drawn.append(cut(" ".join(words), size.columns - 1).encode(errors="replace"))
    return drawn


def _ranks(ranks: tuple[int, ...]) -> str:
    text = compress(ranks)
    return f"[{text}]" if len(text) <= _WIDEST_RANKS - 2 else f"[{len(ranks)} ranks]"


def cut(text: str, cells: int) -> str:
    """Cut a row to so many cells of a terminal; colours stay, and end with it, whatever else moves or hides goes."""
    shown: list[str] = []
    coloured = False
    for piece in re.split(_COLOUR, re.sub(rf"(?!{_COLOUR}){_OTHER_ESCAPE}", "", text)):
        if re.fullmatch(_COLOUR, piece):
            coloured = True
            shown.append(piece)
            continue
        for char in piece.replace("\t", " "):
            if (width := _width(char)) is not None:
                cells -= width
                if cells >= 0:
                    shown.append(char)
    return "".join(shown) + (RESET.decode() if coloured else "")


def _width(char: str) -> int | None:
    """How many cells a character takes; None for one that is no picture, or that changes the one before."""
    category = unicodedata.category(char)
    if category[0] == "C" or category in ("Zl", "Zp") or "\ufe00" <= char <= "\ufe0f":
        return None
    if category in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
