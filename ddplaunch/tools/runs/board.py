"""The table of `ddplaunch top`: what it shows of a job's replies, and what keys do to it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddplaunch.system.console.tables import NAME, NOTE, ODD, Words, line
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import count
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.columns import COLUMNS, Column, Row, rows_of
from ddplaunch.tools.runs.ps import facts_of, idle_in_words

_HELP = "q leave  s stacks  l log  a attach  k stop  < > sort  r reverse"
_LEAST = 8  # cells for the last line of each worker


class Board:
    """The workers of all nodes, one of them selected."""

    def __init__(self) -> None:
        """Make an empty table; `on_replies` is called before the first showing."""
        self.replies: RunReplies  # the latest ones
        self.selected: int | None = None  # the rank of the selected worker; None: there is no worker
        self._rows: list[Row] = []
        self._read_at = 0.0  # when the nodes replied, in monotonic seconds
        self._sort_index = 0  # of the column in COLUMNS
        self._is_reversed = False
        self._scrolled_by = 0  # rows that are above those shown
        self._height = 1  # rows for which there was room at the last showing

    @property
    def sort_column(self) -> Column:
        """The column by which rows are sorted."""
        return COLUMNS[self._sort_index]

    def on_replies(self, replies: RunReplies, at: float) -> None:
        """Take what the nodes reply at this time (monotonic seconds)."""
        self._rows = rows_of(replies, self._rows, at - self._read_at)
        self.replies, self._read_at = replies, at
        self._sort()

    def _sort(self) -> None:
        column = self.sort_column
        self._rows.sort(key=lambda row: row.worker.rank)
        self._rows.sort(key=lambda row: column.key(column.value(row)), reverse=self._is_reversed)
        ranks = [row.worker.rank for row in self._rows]
        if self.selected not in ranks:
            self.selected = ranks[0] if ranks else None

    def on_key(self, key: str) -> None:
        """Do what a key asks of the table."""
        match key:
            case "<" | ">":
                self._sort_index = (self._sort_index + (1 if key == ">" else -1)) % len(COLUMNS)
            case "r":
                self._is_reversed = not self._is_reversed
            case "up" | "down" | "page up" | "page down" | "home" | "end":
                self._move(key)
        self._sort()

    def _move(self, key: str) -> None:
        ranks = [row.worker.rank for row in self._rows]
        if self.selected is None:
            return
        last = len(ranks) - 1
        steps = {"up": -1, "down": 1, "page up": -self._height, "page down": self._height, "home": -last, "end": last}
        self.selected = ranks[max(0, min(last, ranks.index(self.selected) + steps[key]))]

    def lines(self, width: int, height: int, question: str = "") -> list[Words]:
        """Return what a terminal of so many columns and lines shows; the last line is `question`, or else what the keys do."""
        columns = self._columns_that_fit(width)
        names = [line((column.name, NAME if column is self.sort_column else NOTE)) for column in columns]
        head = [*self._head(), _cells(names, columns)]
        foot = line((question, ODD)) if question else line((_HELP, NOTE))
        self._height = max(1, height - len(head) - 1)
        self._scroll()
        below = self._rows[self._scrolled_by : self._scrolled_by + self._height]
        rows = [self._line(row, columns, width) for row in below]
        empty = [Words()] * (self._height - len(rows))
        every = [*head, *rows, *empty, foot][:height]
        for text in every:
            text.truncate(width, overflow="ellipsis")
        return every

    def _head(self) -> Iterator[Words]:
        """Yield what is said above the table: the job, its straggler, and in one line which nodes do not answer."""
        yield facts_of(self.replies)
        run = self.replies.run
        if run is not None and idle_in_words(run) and run.idle_why:
            yield line((printable(run.idle_why), ODD))
        if run is not None and run.straggler:
            yield line(printable(run.straggler))
        problems = find.silent(self.replies.nodes)
        if self.replies.problem:
            problems.append(printable(self.replies.problem))
        if problems:
            more = f"; {count(len(problems) - 1, 'more node')}" if len(problems) > 1 else ""
            yield line((problems[0] + more, ODD))

    def _scroll(self) -> None:
        """Have the selected row be one of those that are shown."""
        at = next((at for at, row in enumerate(self._rows) if row.worker.rank == self.selected), 0)
        most = max(0, len(self._rows) - self._height)
        self._scrolled_by = max(0, min(self._scrolled_by, at, most), at - self._height + 1)

    def _line(self, row: Row, columns: Sequence[Column], width: int) -> Words:
        made = _cells([column.cell(row) for column in columns], columns)
        if row.worker.rank == self.selected:
            made.truncate(width, overflow="ellipsis", pad=True)
            made.stylize("reverse")
        return made

    def _columns_that_fit(self, width: int) -> list[Column]:
        """Return the columns for which there is room, those that matter most first."""
        present = [column for column in COLUMNS if not column.is_absent(self.replies)]
        chosen, left = [], width - _LEAST
        for column in sorted(present, key=lambda column: column.order):
            left -= column.width + 1
            if left >= 0:
                chosen.append(column)
        return sorted(chosen, key=COLUMNS.index)


def _cells(texts: Sequence[str | Words], columns: Sequence[Column]) -> Words:
    """Return the cells of a row behind each other, each cut or filled to the width of its column; the last has the rest."""
    cells = [line(text) if isinstance(text, str) else text.copy() for text in texts]
    for cell, column in zip(cells, columns, strict=True):
        if column.width:
            cell.truncate(column.width, overflow="ellipsis")
            cell.align("right" if column.right else "left", column.width)
    return Words(" ", no_wrap=True, overflow="ignore").join(cells)
