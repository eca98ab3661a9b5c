"""The lines that progress bars leave when they are complete: once for all ranks whose bars say the same. Pure.

Such a line waits for those of the other ranks that draw bars, WAIT seconds at most. The lines of each rank keep their order: what
a rank writes after its bar waits with it.
"""

from __future__ import annotations

import re

from ddplaunch.output.bars import is_complete, said
from ddplaunch.output.streams import Stream

WAIT = 0.5  # seconds

Block = tuple[tuple[int, ...], Stream, bytes]  # the ranks, ascending, whose lines these are
_Writer = tuple[int, Stream]


class _Line:
    """A line that several ranks may share."""

    __slots__ = ("due", "is_out", "key", "line", "ranks", "stream")

    def __init__(self, stream: Stream, line: bytes, key: str, due: float) -> None:
        self.stream = stream
        self.line = line
        self.key = key
        self.due = due
        self.ranks: list[int] = []
        self.is_out = False


class FinishedBars:
    """The lines of one node on their way to the console."""

    def __init__(self) -> None:
        self._drawing: dict[Stream, set[int]] = {stream: set() for stream in Stream}  # the ranks that draw bars
        self._waiting: list[_Line] = []  # the one that is due first, first
        self._held: dict[_Writer, list[_Line | bytes]] = {}

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        return self._waiting[0].due if self._waiting else None

    def feed(self, rank: int, stream: Stream, block: bytes, at: float, *, drawn: bool) -> list[Block]:
        """Take whole lines of a rank; return what to show. `drawn`: they come from rows that were redrawn."""
        held = self._held.get((rank, stream))
        if not drawn:
            if held is None:
                return [((rank,), stream, block)]
            held.append(block)
            return []
        held = self._held.setdefault((rank, stream), [])
        for line in re.findall(rb"[^\n]*\n", block):
            text = line.decode(errors="replace")
            held.append(self._join(rank, stream, line, said(text), at) if is_complete(text) else line)
        return self._released(at)

    def draws(self, rank: int, stream: Stream) -> None:
        """Note that a rank draws bars: the others' wait for its."""
        self._drawing[stream].add(rank)

    def _join(self, rank: int, stream: Stream, line: bytes, key: str, at: float) -> _Line:
        own = [at for at, line in enumerate(self._waiting) if line.stream is stream and rank in line.ranks]
        for waiting in self._waiting[
            own[-1] + 1 if own else 0 :
        ]:  # an earlier one would come before what the rank wrote before
            if waiting.stream is stream and waiting.key == key:
                waiting.ranks.append(rank)
                return waiting
        new = _Line(stream, line, key, at + WAIT)
        new.ranks.append(rank)
        self._waiting.append(new)
        return new

    def end(self, rank: int, stream: Stream, at: float) -> list[Block]:
        """Note that a stream has ended; return what need not wait for it."""
        self._drawing[stream].discard(rank)
        return self._released(at)

    def flush(self, at: float) -> list[Block]:
        """Return what has waited until this time."""
        return self._released(at)

    def _released(self, at: float) -> list[Block]:
        blocks: list[Block] = []
        # a line may stand behind another that waits: then it waits for as long
        for line in self._waiting:
            is_due = at >= line.due or self._drawing[line.stream].issubset(line.ranks)
            if is_due and not line.is_out:  # it may have gone with another
                self._release(line, blocks)
        self._waiting = [line for line in self._waiting if not line.is_out]
        for writer in list(self._held):
            self._pass(writer, blocks)
        return blocks

    def _release(self, line: _Line, blocks: list[Block]) -> None:
        """Show a line, after all that its ranks have written before."""
        line.is_out = True
        for rank in line.ranks:
            held = self._held.get((rank, line.stream), [])
            while line in held and held[0] is not line:
                first = held[0]
                if isinstance(first, _Line) and not first.is_out:
                    self._release(first, blocks)
                else:
                    self._pass_first(rank, line.stream, blocks)
        blocks.append((tuple(sorted(line.ranks)), line.stream, line.line))

    def _pass(self, writer: _Writer, blocks: list[Block]) -> None:
        held = self._held[writer]
        while held and (isinstance(held[0], bytes) or held[0].is_out):
            self._pass_first(*writer, blocks)
        if not held:
            del self._held[writer]

    def _pass_first(self, rank: int, stream: Stream, blocks: list[Block]) -> None:
        first = self._held[rank, stream].pop(0)
        if isinstance(first, bytes):
            blocks.append(((rank,), stream, first))
