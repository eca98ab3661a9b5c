"""The lines of a stream that contain a given text, as torchrun's --duplicate-stdout-filters copies them to a file. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ddplaunch.output.lines import MAX_LINE


class LineFilter:
    """Pass on the lines that contain any needle; case-sensitive, no patterns.

    As in torchrun (torch/distributed/elastic/multiprocessing/tail_log.py, which reads with universal newlines) a
    carriage return ends a line too, and each line comes out with a newline. One that is too long to be held is cut.
    """

    __slots__ = ("_needles", "_rest", "_returned")

    def __init__(self, needles: Iterable[str]) -> None:
        self._needles = [needle.encode("utf-8", "surrogateescape") for needle in needles]
        self._rest = bytearray()  # of the line that has not ended
        self._returned = False  # the last piece ended with a carriage return, already taken as the line's end

    def feed(self, data: bytes) -> bytes:
        """Take a piece of any size; return the lines that it completes and that match."""
        if self._returned and data:
            data = data.removeprefix(b"\n")
            self._returned = False
        if b"\r" in data:
            self._returned = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return self.end() if len(self._rest) > MAX_LINE else b""
        block = bytes(self._rest) + data[:end]
        self._rest[:] = data[end:]
        return self._matching(block)

    def end(self) -> bytes:
        """Return the line that has not ended, newline added, if it matches."""
        block = bytes(self._rest) + b"\n" if self._rest else b""
        self._rest.clear()
        return self._matching(block)

    def _matching(self, block: bytes) -> bytes:
        if not any(needle in block for needle in self._needles):
            return b""  # nearly always, and much faster than line by line
        return b"".join(
            line for line in block.splitlines(keepends=True) if any(needle in line for needle in self._needles)
        )
