"""Emulates a terminal for a worker that redraws its lines, as progress bars do: a few rows and a cursor.

Understands carriage return, newline, cursor up, and erase; drops the other movements; keeps colours. It does not know
columns: text after a carriage return replaces the row.
"""

from __future__ import annotations

import re

# escape sequences: moves, erases, hides the cursor; not colours, which end in m
_CSI = rb"\x1b\[[0-9;:?]{0,16}[A-HJKSTfhlsu]"
# patterns are compiled (and kept, by `re`) when a worker first writes such a thing, not when the command starts
_TOKEN = rb"(\r|\n|" + _CSI + rb")"
_NEW_SCREEN = rb"\x1b\[(?:[0-9;]*[Hf]|[23]J)"  # to a place of the screen, or all of it erased
_UNFINISHED = rb"(?:\r|\x1b(?:\[[0-9;:?]{0,16})?)\Z"
_UNFINISHED_LENGTH = 18  # bytes of the longest

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_MAX_ROWS = 32  # programs do not nest more bars, and each row above the cursor holds a line back


def moves(data: bytes) -> bool:
    """Whether a piece of output moves the cursor otherwise than by a newline."""
    return b"\r" in data or (b"\x1b" in data and re.search(_CSI, data) is not None)


def split_unfinished(data: bytes) -> tuple[bytes, bytes]:
    """Cut off a carriage return or an escape sequence at the very end: its meaning depends on what follows."""
    end = data[-_UNFINISHED_LENGTH:]
    if b"\r" not in end and b"\x1b" not in end:
        return data, b""
    found = re.search(_UNFINISHED, end)
    unfinished = end[found.start() :] if found else b""
    return data[: len(data) - len(unfinished)], unfinished


class RedrawnRows:
    """The last rows of one stream; rows that can no longer change leave it as lines.

    The class learns how far up the cursor goes: it holds that many rows above the last row, and at first none. It can begin
    with a guess: then each move up shows where the bars begin, and the rows above that become lines.
    """

    __slots__ = (
        "_at_start",
        "_climb_is_guessed",
        "_cursor",
        "_longest_climb",
        "_next_row_is_first_bar",
        "_rows",
        "_rows_climbed",
        "ends_in_bar",
        "went_up",
        "went_up_in_last_piece",
    )  # fmt: skip

    def __init__(self, guessed_climb: int = 0) -> None:
        """`guessed_climb` is how many rows up from the last one the cursor may be expected to go; 0: no guess."""
        self._rows = [bytearray()]
        self._cursor = 0  # the row where it is, 0 the top one
        self._at_start = False  # the cursor is at the start of its row: the next text replaces the row
        self._longest_climb = guessed_climb  # so many rows above the last one are held: the cursor may come back
        self._climb_is_guessed = (
            guessed_climb > 0
        )  # then the row that a climb reaches is the first bar, and those above are lines
        # with a guess: the cursor has gone up to that row, and nothing was written there yet
        self._next_row_is_first_bar = False
        self._rows_climbed = 0  # rows up since the last newline
        self.went_up = False  # the cursor has, since rows settled last
        self.went_up_in_last_piece = False
        self.ends_in_bar = False  # the rows from the cursor's on are a bar, not a line that is just being written

    @property
    def rows(self) -> list[bytes]:
        """All rows, from the top, the empty ones too."""
        return [bytes(row) for row in self._rows]

    @property
    def holds_lines(self) -> bool:
        """Whether rows above the cursor's wait to become lines."""
        return self._cursor > 0

    @property
    def longest(self) -> int:
        """Bytes in the cursor's row."""
        return len(self._rows[self._cursor])

    def plain_line(self) -> bytes | None:
        """Return the line that is being written, if a plain buffer would do as well as this screen; else None."""
        if self.ends_in_bar or self._longest_climb or len(self._rows) > 1:
            return None
        return bytes(self._rows[0])

    def feed(self, data: bytes) -> bytes:
        """Draw a piece of output; return the rows that became lines."""
        self.went_up_in_last_piece = False
        lines: list[bytes | bytearray] = []
        for token in re.split(_TOKEN, data):
            if token == b"\r":  # what is written next replaces the row: a bar
                self._at_start = self.ends_in_bar = True
                continue
            if token == SHOW_CURSOR:  # at the end of the redrawing
                lines.append(self.settle())
                continue
            if re.match(_NEW_SCREEN, token):
                self._leave_screen(lines, erases=token.endswith(b"J"))
                continue
            if re.match(_CSI, token):
                self._move(token)
                continue
            if token and self._next_row_is_first_bar:
                self._end_rows_above(lines)  # they were held for a guess, and the cursor did not go up to them
            if token == b"\n":
                self._newline(lines)
            elif token:
                if self._at_start:
                    self._rows[self._cursor] = bytearray(token)
                    self._at_start = False
                else:
                    self._rows[self._cursor] += token
        return b"".join(lines)

    def _newline(self, lines: list[bytes | bytearray]) -> None:
        """Move the cursor down; make lines of the top rows, to which the program does not go back up."""
        self._cursor += 1
        self._at_start = True
        self._rows_climbed = 0
        if self._cursor == len(self._rows):
            self._rows.append(bytearray())
        while len(self._rows) > self._longest_climb + 1 and self._cursor:
            lines += (self._rows.pop(0), b"\n")
            self._cursor -= 1
        if not self._longest_climb:  # the program has not gone up so far: the bar has ended
            self.ends_in_bar = False

    def _end_rows_above(self, lines: list[bytes | bytearray]) -> None:
        """Make lines of the rows above the one to which the cursor went up: that one is the first of the bars."""
        self._next_row_is_first_bar = False
        for row in self._rows[: self._cursor]:
            lines += (row, b"\n")
        del self._rows[: self._cursor]
        self._cursor = 0

    def _leave_screen(self, lines: list[bytes | bytearray], *, erases: bool) -> None:
        """Make lines of all rows before the program clears the screen or moves by position; a bar stays, unless that erases it.

        `erases`: the screen is erased.
        """
        is_bar = self.ends_in_bar
        if is_bar and not erases:  # a bar that the program draws by positions on the screen: keep it where it is
            return
        lines.append(self.settle())
        line_without_end = self._rows[0]  # that of the cursor: all rows above have become lines
        if line_without_end and not is_bar:
            lines += (line_without_end, b"\n")
        self._rows = [bytearray()]
        self._at_start = self.ends_in_bar = False

    def _move(self, sequence: bytes) -> None:
        """Follow an escape sequence that moves the cursor up, or clears a row."""
        kind, argument = sequence[-1:], sequence[2:-1]
        self.ends_in_bar = True
        if kind in b"AF":  # up
            rows = int(argument) if argument.isdigit() else 1
            self._rows_climbed += rows
            self.went_up = self.went_up_in_last_piece = True
            self._next_row_is_first_bar = self._climb_is_guessed
            self._longest_climb = min(max(self._longest_climb, self._rows_climbed), _MAX_ROWS)
            self._cursor = max(0, self._cursor - rows)
            self._at_start = True
        elif kind in b"JK" and (argument == b"2" or self._at_start):  # erase the row, or from the cursor to its end
            self._rows[self._cursor].clear()

    def settle(self) -> bytes:
        """Turn the rows above the cursor into lines: the cursor did not come back in time, so the bars there are complete."""
        lines = b"".join(bytes(row) + b"\n" for row in self._rows[: self._cursor])
        del self._rows[: self._cursor]
        self._cursor = self._longest_climb = 0
        self.went_up = False
        if self._at_start and not self._rows[0].strip():
            self._rows[0].clear()  # spaces, from erasing a bar
            self.ends_in_bar = False
        return lines

    def snapshot(self) -> bytes:
        """The lowest row of the bar, empty if the bar is erased."""
        return bytes(next((row for row in reversed(self._rows[self._cursor :]) if row.strip()), b""))

    def end(self) -> bytes:
        """Make lines of all rows, as the terminal would leave them; an erased bar leaves none. Not to be fed again."""
        lines = self.settle()
        drawn = self.ends_in_bar or len(self._rows) > 1
        return lines + b"".join(bytes(row) + b"\n" for row in self._rows if (row.strip() if drawn else row))
