"""What parts of an agent write to the front (the process that has the console), kept for a test in place of shown."""

from __future__ import annotations

from ddplaunch.launcher.output.bars import Bar, unpack
from ddplaunch.reach.pipes import OutputQueue


class KeptLines:
    """Takes the lines of a node for its user."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def write_line(self, text: str) -> None:
        self.said.append(text)

    def write_closing_line(self, text: str) -> None:
        self.said.append(text)


class KeptOutput(OutputQueue):
    """Takes the output of workers, and their bars."""

    def __init__(self) -> None:
        self.lines = b""
        self.messages: list[bytes] = []  # of bars
        self.takes_bars = True

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The bars that are shown."""
        return unpack(self.messages[-1]) if self.messages else ()

    def put(self, stream: bytes, data: bytes) -> None:
        assert not self.bars, "a line comes while a row is there"
        self.lines += data

    def put_bars(self, message: bytes) -> bool:
        self.messages += [message] * self.takes_bars
        return self.takes_bars
