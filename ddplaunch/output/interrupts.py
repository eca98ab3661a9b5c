"""Folds the tracebacks that Ctrl-C brings about: each worker writes one, and all say the same. Pure; the logs have them whole."""

from __future__ import annotations

import re

_BEGINS = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
_INTERRUPT = re.compile(rb"KeyboardInterrupt(: .*)?")
_FRAME = re.compile(rb'^  File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(rb"<|.*/(site|dist)-packages/|.*/lib(64)?/python\d")
_MOST_LINES = 1000  # of a traceback


class Interrupts:
    """Takes the tracebacks of KeyboardInterrupt out of whole lines; the first one becomes a line with its place."""

    def __init__(self) -> None:
        self._held: dict[int, list[bytes]] = {}  # by rank: a traceback that may be one
        self._is_one: dict[int, bool] = {}  # by rank: whether its last exception is one
        self._said = False

    def feed(self, rank: int, block: bytes) -> bytes:
        """Take whole lines of a rank's stderr; return what is to be shown."""
        if rank not in self._held and _BEGINS not in block:
            return block
        return b"".join(self._line(rank, line) for line in block.splitlines(keepends=True))

    def end(self, rank: int) -> bytes:
        """Return what is left when the stream has ended."""
        return self._resolve(rank)

    def _line(self, rank: int, line: bytes) -> bytes:
        text = line.rstrip(b"\r\n")
        held = self._held.get(rank)
        if text == _BEGINS:
            if held is None or (rank in self._is_one and held[-1].strip()):  # not chained to the one before
                before = self._resolve(rank)
                self._held[rank] = [line]
                return before
            self._is_one.pop(rank, None)
            assert held is not None
        elif held is None:
            return line
        elif rank not in self._is_one:  # between the traceback's first line and its exception
            if not text.startswith(b" "):
                self._is_one[rank] = _INTERRUPT.fullmatch(text) is not None
        elif text and not text.startswith(_CHAINED):
            return self._resolve(rank) + line
        held.append(line)
        return self._resolve(rank, show=True) if len(held) > _MOST_LINES else b""

    def _resolve(self, rank: int, *, show: bool = False) -> bytes:
        """Let go of what is held: nothing of it is shown, or all."""
        held, is_one = b"".join(self._held.pop(rank, [])), self._is_one.pop(rank, False)
        if show or not is_one:
            return held
        if self._said:
            return b""
        self._said = True
        frames = _FRAME.findall(held)
        own = [frame for frame in frames if not _LIBRARY.match(frame[0])] or frames
        return b"KeyboardInterrupt at %b:%b in %b\n" % own[-1] if own else b"KeyboardInterrupt\n"
