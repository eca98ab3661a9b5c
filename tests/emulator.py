"""As much of a terminal as the command may use: what is on the screen after some bytes. Any other sequence is an error."""

import re
import unicodedata

_TOKEN = re.compile(r"(\r|\n|\x1b\[\d*[AJK]|\x1b[78]|\x1b\[[0-9;]*m)")


class Emulator:
    """Rows of cells, of which the last `lines` are on the screen; a newline goes to the first column, as of a pty."""

    def __init__(self, lines: int = 24, columns: int = 80, *, rewraps: bool = True) -> None:
        self._lines = lines
        self._columns = columns
        self._rewraps = rewraps
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._wrapped: set[int] = set()  # rows that go on with the line of the row above
        self._style = ""  # the SGR codes since the last reset
        self._row = self._column = 0
        self._saved = (0, 0)
        self._rest = ""

    @property
    def shown(self) -> list[str]:
        """All rows, those that have scrolled away too, without the empty ones at the end."""
        return "\n".join("".join(char for char, _ in row).rstrip() for row in self._rows).rstrip().split("\n")

    @property
    def styled(self) -> list[list[tuple[str, str]]]:
        """The same, as a character and its SGR codes for each cell; no character in the second cell of a wide one."""
        return self._rows[: len(self.shown)]

    def feed(self, text: str) -> None:
        """Take what was written; an escape sequence may be cut."""
        text, self._rest = self._rest + text, ""
        if cut := re.search(r"\x1b(\[[0-9;]*)?\Z", text):
            text, self._rest = text[: cut.start()], cut[0]
        for token in re.split(_TOKEN, text):
            self._take(token)

    def resize(self, columns: int) -> None:
        """Take another width: lines wrap again, and the cursor stays at its character; or they are cut at the right."""
        self._columns, rows, wrapped = columns, self._rows, self._wrapped
        if not self._rewraps:
            self._rows, self._column = [row[:columns] for row in rows], min(self._column, columns - 1)
            return
        cursor, style = (self._row, self._column), self._style
        self._rows, self._wrapped, self._row, self._column = [[]], set(), 0, 0
        for number, row in enumerate(rows):
            if number and number not in wrapped:
                self._take("\n")
            for column, (char, self._style) in enumerate([*row, ("", "")]):
                if (number, column) == cursor:
                    here = self._row, self._column
                if char:
                    self._put(char)
        self._row, self._column = here
        self._style = style

    def _take(self, token: str) -> None:
        if token == "\r":
            self._column = 0
        elif token == "\n":
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._rows):
                self._rows.append([])
        elif token == "\x1b7":
            self._saved = self._row, self._column
        elif token == "\x1b8":
            self._row, self._column = self._saved
        elif token.endswith("m") and token.startswith("\x1b"):
            codes = token[2:-1]
            self._style = (
                ""
                if codes in ("", "0")
                else codes[2:]
                if codes.startswith("0;")
                else f"{self._style};{codes}".strip(";")
            )
        elif token.startswith("\x1b"):
            self._control(token[-1], int(token[2:-1] or 1) if token[-1] == "A" else 0)
        else:
            for char in token:
                self._put(char)

    def _control(self, kind: str, number: int) -> None:
        if kind == "A":
            self._row = max(self._row - number, len(self._rows) - self._lines, 0)
        elif kind in "JK":
            del self._rows[self._row][self._column :]
            if kind == "J":
                del self._rows[self._row + 1 :]
                self._wrapped = {number for number in self._wrapped if number <= self._row}

    def _put(self, char: str) -> None:
        assert unicodedata.category(char) != "Cc", f"{char!r} on the terminal"
        if unicodedata.category(char) in ("Mn", "Me"):  # joins the character before it
            cells = self._rows[self._row][: self._column]
            at = next((at for at in reversed(range(len(cells))) if cells[at][0]), None)
            if at is not None:
                self._rows[self._row][at] = cells[at][0] + char, cells[at][1]
            return
        width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if self._column + width > self._columns:
            self._take("\n")
            self._wrapped.add(self._row)
        row = self._rows[self._row]
        row += [(" ", "")] * (self._column + width - len(row))
        row[self._column : self._column + width] = [(char, self._style), ("", "")][:width]
        self._column += width
