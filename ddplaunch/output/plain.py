"""The text of a worker that draws on a terminal, for its log: no escape sequences, a state of a bar now and then. Pure."""

from __future__ import annotations

import re

from ddplaunch.output.lines import Lines

_ESCAPES = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
_LONGEST = 1 << 16  # bytes of a line that are passed on before its end


def without_escapes(data: bytes) -> bytes:
    """Return the data without colours, links and the like."""
    return re.sub(_ESCAPES, b"", data) if b"\x1b" in data else data


class PlainText:
    """One stream: each piece is passed on at once, except while a bar is drawn, of which a state comes now and then.

    A state ends with a carriage return, as tqdm's do in any log: whatever renders the log finds the last.
    """

    __slots__ = ("_lines", "_passed")

    def __init__(self) -> None:
        self._lines = Lines(end_of_state=b"\r")
        self._passed = b""  # of the line that has not ended

    @property
    def deadline(self) -> float | None:
        """When to call flush; None: not before the next feed."""
        return self._lines.deadline

    def feed(self, data: bytes, at: float) -> bytes:
        """Take a piece read at this time; return what the log gets."""
        return self._pass(self._lines.feed(data, at), self._lines.beginning)

    def flush(self, at: float) -> bytes:
        """Return what is due at this time."""
        return self._pass(self._lines.flush(at), self._lines.beginning)

    def end(self) -> bytes:
        """Return what is left; the last line ends as the worker left it."""
        beginning = self._lines.beginning
        last = self._lines.end()
        return self._pass(last[:-1] if beginning and last == beginning + b"\n" else last, b"")

    def _pass(self, block: bytes, beginning: bytes) -> bytes:
        if block:
            block, self._passed = _after(self._passed, block), b""
        # of a link only the whole is known
        if beginning and len(beginning) <= _LONGEST and b"\x1b]" not in beginning:
            block, self._passed = block + _after(self._passed, beginning), beginning
        return without_escapes(block)


def _after(passed: bytes, text: bytes) -> bytes:
    """Return what follows the part of a line that was passed on, or what overwrites it."""
    return text[len(passed) :] if text.startswith(passed) else b"\r" + text
