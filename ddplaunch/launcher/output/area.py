"""The status area: rows below the lines on a terminal: progress bars, prompts (workers' lines that have not ended) and --live.

Pure: it gives the front (the process that owns the terminal) the bytes to write, and neither writes nor asks for the size. It
hides no cursor, sets no margins and switches no mode, so that a front that is killed in the middle leaves rows and nothing else.
The cursor rests below the area, where typed keys appear.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable

from msgspec import Struct

from ddplaunch.launcher.output.bars import LONGEST, PROMPT_ROW, Bar, by_kind, condense
from ddplaunch.system.console.streams import RESET
from ddplaunch.system.fields import COLOUR, TERMINAL_ESCAPE
from ddplaunch.system.words import compress

_SHARE_OF_SCREEN = 3  # a third of the screen at most
_WIDEST_RANKS = 14  # characters; others are counted
_SLOWEST, _BETWEEN, _FASTEST = "slowest", "between", "fastest"
# the rows with the highest numbers are left out if there are too many
_PRIORITIES = {_SLOWEST: 0, _FASTEST: 1, _BETWEEN: 2}
_PROMPT_PRIORITY = -1


class StatusArea:
    """What is on the terminal below the lines, and what has to be written to change it."""

    def __init__(self, *, rewraps: bool = True) -> None:
        """`rewraps`: the terminal wraps lines again when its width changes."""
        self._rewraps = rewraps
        self._bars: tuple[Bar, ...] = ()
        self._live: list[str] = []  # rows of --live, below the bars; without room for all, the last are left out
        self._drawn: list[bytes] = []  # the rows on the screen, right above the cursor
        self._columns = 0  # of the terminal when those were drawn
        self._ends_in_prompt = False  # the last of them, behind which the cursor stands, and what is typed
        self._midline = False  # what was written last has not ended its line

    def show_bars(self, bars: tuple[Bar, ...]) -> None:
        """Show these bars in place of those before, from the next `draw` on."""
        self._bars = bars

    def show_live(self, rows: list[str]) -> None:
        """Show these rows of --live in place of those before, from the next `draw` on."""
        self._live = rows

    def write(self, data: bytes, size: os.terminal_size | None) -> bytes:
        """Return what to write so that `data` stands above the area, which is gone until `draw`; the size is as for `draw`."""
        self._midline = not data.endswith(b"\n") if data else self._midline
        return self._erase(size) + data

    def forget(self) -> None:
        """Leave the drawn rows as lines: another program has written below them, as the shell after Ctrl-Z."""
        self._drawn, self._ends_in_prompt = [], False

    def keep_prompt(self, size: os.terminal_size | None) -> bytes:
        """Return what to write once a prompt was answered, so that it stays as a line, with what was typed behind it.

        Enter has moved the cursor to the next row, Ctrl-D has not. As many spaces as there are columns leave a cursor in the
        first column in its row, and bring any other to the next one.
        """
        ended_in_prompt = self._ends_in_prompt
        self.forget()
        return b" " * size.columns + b"\r\x1b[K" if ended_in_prompt and size is not None else b""

    def draw(self, size: os.terminal_size | None) -> bytes:
        """Return what to write so that the area is there, and up to date; a size of None: the terminal is not ours at present."""
        if size is None:
            self.forget()
            return b""
        if self._midline:  # rows would continue the line
            return b""
        rows = render(self._bars, size)
        # the cursor stands behind the prompt: below it, rows of --live would leave no place for that
        ends_in_prompt = bool(rows) and not self._live and any(bar.row == PROMPT_ROW for bar in self._bars)
        room_for_live = max(0, min(size.lines // 2, size.lines - 1 - len(rows)))
        rows += [cut(row, size.columns - 1).encode(errors="replace") for row in self._live[:room_for_live]]
        if rows == self._drawn:
            return b""
        # a narrower terminal has wrapped the rows, which then take more of the screen: see `_height`
        has_same_height = len(rows) == len(self._drawn) == self._height(size)
        prompt_has_changed = ends_in_prompt != self._ends_in_prompt or (ends_in_prompt and rows[-1] != self._drawn[-1])
        if has_same_height and not prompt_has_changed:
            return self._draw_over(rows, size)
        erase = self._erase(size)
        self._drawn, self._columns, self._ends_in_prompt = rows, size.columns, ends_in_prompt
        return erase + b"\n".join(rows) + (b"" if ends_in_prompt or not rows else b"\n")

    def _draw_over(self, rows: list[bytes], size: os.terminal_size) -> bytes:
        """Return what to write to draw as many rows over those that are there; a prompt in the last one is the same and stays.

        The cursor, which may stand behind typed characters, is saved before (ESC 7) and comes back to its place (ESC 8).
        """
        old_rows, self._drawn, self._columns = self._drawn, rows, size.columns
        changing = len(rows) - self._ends_in_prompt
        pairs = zip(rows[:changing], old_rows[:changing], strict=True)
        drawn = (b"\n" if row == old else row + b"\x1b[K\n" for row, old in pairs)
        return b"\x1b7\r\x1b[%dA%b\x1b8" % (changing, b"".join(drawn))

    def _erase(self, size: os.terminal_size | None) -> bytes:
        """Return what to write so that no row of the area is left."""
        if not self._drawn:
            return b""
        above = self._height(size) - self._ends_in_prompt  # rows above the cursor
        self._drawn, self._ends_in_prompt = [], False
        return b"\r%b\x1b[J" % (b"\x1b[%dA" % above if above else b"")

    def _height(self, size: os.terminal_size | None) -> int:
        """Return how many rows of the screen the area takes: more than were drawn if the terminal has become narrower.

        A terminal that wraps lines again moves the cursor along with them, so that the rows are right above it as before.
        """
        if size is None or size.columns >= self._columns or not self._rewraps:
            return len(self._drawn)
        return sum(_wrapped(row.decode(errors="replace"), size.columns) for row in self._drawn)


def render(bars: Iterable[Bar], size: os.terminal_size) -> list[bytes]:
    """Lay the bars out in rows that fit: at most a third of the lines, none of them as wide as the screen.

    Where there are too many, those with the highest priority numbers are left out; the others keep their order.
    """
    rows: list[_Row] = []
    for kind in by_kind(condense(bars)):
        for index, bar in enumerate(kind):
            pace = _SLOWEST if index == 0 else _FASTEST if index == len(kind) - 1 else _BETWEEN
            is_prompt = bar.row == PROMPT_ROW
            priority = _PROMPT_PRIORITY if is_prompt else _PRIORITIES[pace]
            shown_pace = pace if len(kind) > 1 else ""
            rows.append(_Row(priority, _ranks(bar.ranks), bar.text, shown_pace, is_prompt))
    most = size.lines // _SHARE_OF_SCREEN
    by_priority = sorted(range(len(rows)), key=lambda index: rows[index].priority)
    kept = [rows[index] for index in sorted(by_priority[:most])]
    width_of_ranks = max((len(row.ranks) + 1 for row in kept), default=0)
    return [_lay_out(row, width_of_ranks, size.columns - 1).encode(errors="replace") for row in kept]


class _Row(Struct, frozen=True):
    priority: int
    ranks: str
    text: str
    pace: str  # which bar of its kind this is: "slowest"; "" if the kind has no other
    is_prompt: bool


def _lay_out(row: _Row, width_of_ranks: int, cells: int) -> str:
    """Return the ranks, the text in the cells that are left, and the pace behind it, if there is room."""
    ranks = cut(row.ranks.ljust(width_of_ranks), cells)
    room = cells - width_of_ranks
    if row.is_prompt:
        return ranks + _end_of(row.text, room)
    pace = f" {row.pace}" if row.pace and room > 2 * len(row.pace) else ""
    return ranks + cut(row.text.rstrip(), room - len(pace)) + pace


def _end_of(text: str, cells: int) -> str:
    """Return the end of a text that fits: there a prompt has its question, and a row of dots the last one."""
    text = cut(text, LONGEST * 2)
    while text and cut(text, cells) != text:
        text = text[1:]
    return text


def _ranks(ranks: tuple[int, ...]) -> str:
    text = compress(ranks)
    return f"[{text}]" if len(text) <= _WIDEST_RANKS - 2 else f"[{len(ranks)} ranks]"


def cut(text: str, cells: int) -> str:
    """Return a row cut to so many cells of a terminal. Colours stay and are reset at the end; other control codes are dropped."""
    shown: list[str] = []
    coloured = False
    for piece in re.split(f"({COLOUR})", re.sub(f"(?!{COLOUR}){TERMINAL_ESCAPE}", "", text)):
        if re.fullmatch(COLOUR, piece):
            coloured = True
            shown.append(piece)
            continue
        for char in piece.replace("\t", " "):
            width = _width(char)
            if width is None:  # it shows nothing, as a control code
                continue
            cells -= width
            if cells >= 0:  # else the rest has no room; only the colours in it are kept
                shown.append(char)
    return "".join(shown) + (RESET.decode() if coloured else "")


def _wrapped(text: str, columns: int) -> int:
    """Return how many rows a text takes on a terminal of so many columns."""
    rows, used = 1, 0
    for char in re.sub(COLOUR, "", text):
        width = _width(char) or 0
        rows, used = (rows, used + width) if used + width <= columns else (rows + 1, width)
    return rows


def _width(char: str) -> int | None:
    """Return how many cells a character takes; None for one that shows nothing, or that changes the one before."""
    category = unicodedata.category(char)
    if category[0] == "C" or category in ("Zl", "Zp") or "\ufe00" <= char <= "\ufe0f":
        return None
    if category in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
