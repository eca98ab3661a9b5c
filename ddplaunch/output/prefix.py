"""The prefix of a worker's line: its rank, in its colour. Knows whole lines only; decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.output.streams import ShownWorker
from ddplaunch.words import compress

ESCAPE = b"\x1b"
RESET = b"\x1b[m"

# the 16-colour codes that are readable on black and on white; red is left to errors, white, black, dark blue and the
# other bright ones vanish on one of the two; underlined, the same six serve the next six ranks
_HUES = ("36", "35", "32", "94", "33", "95")
STYLES = _HUES + tuple(f"4;{hue}" for hue in _HUES)
SEVERAL = "1"  # bold: a line of several ranks has no colour of its own

_MAX_CACHED = 1024  # prefixes of groups of ranks; a job that makes more of them computes some anew


class Prefix:
    """What stands before each line of one worker, or of several that wrote the same."""

    __slots__ = ("_next", "coloured", "text")

    def __init__(self, text: bytes, style: str | None = None) -> None:
        """Take the text unchanged; `style` is an SGR code, None: no colour."""
        # the reset comes first so that no earlier output can colour the prefix
        self.text = text if style is None else b"\x1b[0;%bm%b%b" % (style.encode(), text, RESET)
        self._next = b"\n" + self.text
        self.coloured = style is not None

    def add(self, block: bytes, before: bytes = b"") -> bytes:
        """Put the prefix before each line of a block of whole lines, and `before` before that; each ends with a newline."""
        if before:
            block = self.add(block)[:-1]
            return b"".join((before, block.replace(b"\n", b"\n" + before), b"\n"))
        if self.coloured and ESCAPE in block:
            # a colour that the worker left on would colour our next message or the shell's prompt
            lines = [line + RESET if ESCAPE in line else line for line in block[:-1].split(b"\n")]
            return b"".join((self.text, self._next.join(lines), b"\n"))
        return b"".join((self.text, block[:-1].replace(b"\n", self._next), b"\n"))


def without_torchs(rank: int, block: bytes) -> bytes:
    """Take the rank away that torch's excepthook puts before each line of a traceback: ours is there already."""
    torchs = b"[rank%d]: " % rank
    if torchs not in block:
        return block
    return block.removeprefix(torchs).replace(b"\n" + torchs, b"\n")


class Prefixes:
    """The prefixes of a job on one stream, for any group of its ranks.

    Texts behind prefixes begin in one column: the padding is after the bracket, so that `[3] ` finds rank 3
    in a job of any size. A template makes the text alone, without padding, as torchrun's does (string.Template;
    role_name, rank, local_rank, hostname; unknown names stay; empty: none).
    """

    def __init__(
        self, workers: Sequence[ShownWorker], *, colour: bool, template: str | None, highest: int, together: bool
    ) -> None:
        """Prepare for these workers; `highest` is the job's last rank, `together` that ranks may share a prefix."""
        self._workers = {worker.rank: worker for worker in workers}
        self._colour = colour
        self._template = template
        widest = [f"[{highest}]", f"[{compress(self._workers)}]" if together else ""]
        self._width = max(map(len, widest))
        self._made: dict[tuple[int, ...], Prefix] = {}

    def of(self, ranks: tuple[int, ...]) -> Prefix:
        """The prefix of these ranks; ascending."""
        found = self._made.get(ranks)
        if found is None:
            if len(self._made) >= _MAX_CACHED:
                self._made.clear()
            found = self._made[ranks] = self._make(ranks)
        return found

    def _make(self, ranks: tuple[int, ...]) -> Prefix:
        style = STYLES[ranks[0] % len(STYLES)] if len(ranks) == 1 else SEVERAL
        return Prefix(self._text(ranks).encode("utf-8", "surrogateescape"), style if self._colour else None)

    def _text(self, ranks: tuple[int, ...]) -> str:
        if not self._template:
            return f"[{compress(ranks)}]".ljust(self._width) + " "
        from string import Template  # compiles regular expressions that few jobs need

        return Template(self._template).safe_substitute(
            role_name=self._workers[ranks[0]].role,
            rank=compress(ranks),
            local_rank=compress(self._workers[rank].local_rank for rank in ranks),
            hostname=self._workers[ranks[0]].host,
        )
