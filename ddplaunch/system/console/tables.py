"""Lays out texts for people on stdout: rich's tables in the columns and colours that the terminal has.

Only commands that show something import this module, since rich takes 20 ms. Lines of workers never pass through it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import StringIO

from msgspec import Struct
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.errors import visible

Block = RenderableType  # what is laid out: a line, a table, several below each other
Words = Text
Piece = str | tuple[str, str]  # a text, or a text and its style

# the 16 colours of a terminal, which its user has chosen to be readable
NAME, NOTE, COMMAND, GOOD, BAD, ODD = "bold", "dim", "cyan", "green", "bold red", "yellow"

_READABLE = 80  # cells of a sentence, however wide the screen is
_ENDLESS = 1 << 20  # cells of a file or pipe
_CONSOLE = Console(
    file=StringIO(), width=_ENDLESS, color_system=None, legacy_windows=False
)  # which lays out, and shows nothing
_QUOTED = r"`[^`\n]+`"  # what is to be typed
_UNBROKEN_SPACE = "\ue000"  # a space at which no line is broken; of Unicode's private use


class Look(Struct, frozen=True):
    """How stdout shows text."""

    colour: bool = False
    width: int | None = None  # cells of the terminal; None: stdout is none

    @classmethod
    def of_stdout(cls, env: Mapping[str, str]) -> Look:
        """Inspect our own stdout."""
        try:
            width = os.get_terminal_size(1).columns or _READABLE  # a serial line has no size
        except OSError:
            width = None
        return cls(use_colour(env, width is not None), width)


def line(*pieces: Piece) -> Text:
    """Return a text whose lines are never broken: it may be copied. A terminal obeys nothing in it."""
    shown = (visible(piece) if isinstance(piece, str) else (visible(piece[0]), piece[1]) for piece in pieces)
    return Text.assemble(*shown, no_wrap=True, overflow="ignore")


def table(
    rows: Iterable[Sequence[str | Text]],
    *,
    header: Sequence[str] = (),
    styles: Sequence[str] = (),
    right: Collection[str] = (),
    wraps: bool = False,
    gap: int = 2,
    indent: int = 0,
) -> Block:
    """Return rows in columns, without rules between the columns, so that values can be copied.

    `styles` are those of the columns; `right` names columns that are flush right; `gap` cells are between two columns. No cell is
    broken, except with `wraps` those of the last column, which are sentences, where the screen is too narrow.
    """
    cells = [[line(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    laid_out = Table(box=None, padding=(0, gap, 0, 0), show_header=bool(header), header_style=NOTE)
    columns = len(header) or len(cells[0])
    names = header or [""] * columns
    for at, name in enumerate(names):
        is_sentence = wraps and at == columns - 1
        for row in cells:
            row[at].no_wrap, row[at].overflow = not is_sentence, "fold"
        laid_out.add_column(
            name,
            style=styles[at] if at < len(styles) else "",
            justify="right" if name in right else "left",
            no_wrap=not is_sentence,
            min_width=None if is_sentence else max(cell_len(name), *(row[at].cell_len for row in cells)),
        )
    for row in cells:
        laid_out.add_row(*row)
    return Padding(laid_out, (0, 0, 0, indent), expand=False)


def sentence(label: Piece, text: str, style: str = "") -> Block:
    """Return a sentence whose further lines begin below its first word; what is quoted in it, to be typed, is never broken."""
    kept = re.sub(_QUOTED, lambda found: found[0].replace(" ", _UNBROKEN_SPACE), text)
    head = line(label)
    longest = max(map(cell_len, kept.split()), default=0)
    made = table([(head, line((kept, style)))], wraps=True, gap=0)
    return Constrain(made, max(_READABLE, head.cell_len + longest))


def section(*parts: Block) -> Block:
    """Return parts that stand below each other, with no empty line between them."""
    return Group(*parts)


def fits(block: Block, look: Look) -> bool:
    """Whether the screen has room for a block as it is: a terminal breaks longer rows in the middle of a word."""
    return look.width is None or Measurement.get(_CONSOLE, _CONSOLE.options, block).maximum <= look.width


def written(blocks: Iterable[Block], look: Look) -> str:
    """Return blocks as text, with an empty line between them; no line ends in spaces."""
    colours = ColorSystem.STANDARD if look.colour else None
    texts = []
    for block in blocks:
        least_width = Measurement.get(_CONSOLE, _CONSOLE.options, block).minimum  # the terminal breaks what is wider
        options = _CONSOLE.options.update(width=max(look.width or _ENDLESS, least_width))
        rows = Segment.split_lines(_CONSOLE.render(block, options))
        texts.append("\n".join(_row(row, colours) for row in rows))
    return "\n\n".join(texts).replace(_UNBROKEN_SPACE, " ")  # the layout is done, so spaces may be spaces again


def _row(segments: list[Segment], colours: ColorSystem | None) -> str:
    while segments and not segments[-1].text.strip():
        segments.pop()
    texts = [text for text, _, _ in segments]
    texts[-1:] = [text.rstrip() for text in texts[-1:]]
    styles = (style or Style.null() for _, style, _ in segments)
    return "".join(style.render(text, color_system=colours) for text, style in zip(texts, styles, strict=True))
