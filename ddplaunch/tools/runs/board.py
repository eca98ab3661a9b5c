"""The table of `ddplaunch top`: what it shows of a job's replies, and what keys do to it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from ddplaunch.record.window.questions import WorkerStatus
from ddplaunch.system.console.tables import NAME, NOTE, ODD, Words, line
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import count, duration, size
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.ps import facts_of, percent_of_cpu, state_of, step_of

_HELP = "q leave  s stacks  l log  a attach  k stop  < > sort  r reverse"
_LEAST = 8  # cells for the last line of each worker
_SHORTEST_TIME = 0.05  # seconds between two looks of which a difference tells something


class Row(Struct, frozen=True):
    """A worker, and what has changed since the look before."""

    host: str
    worker: WorkerStatus
    cpu: float | None  # percent of a core
    rate: float | None  # bytes of output a second


class _Column(Struct, frozen=True):
    name: str
    width: int  # cells
    show: Callable[[Row], str | Words]
    key: Callable[[Row], Any]  # by which rows are sorted: what people look for comes first
    order: int  # in which columns are left out where there is no room: the highest first
    right: bool = False


def _per_second(rate: float) -> str:
    return f"{size(round(rate))}/s" if rate else ""


def _if_known(value: float | None, show: Callable[[float], str]) -> str:
    return show(value) if value is not None else ""


def _steps(row: Row) -> int:
    """Return how many steps a worker has done; one that says nothing comes last."""
    return row.worker.progress.step if row.worker.progress is not None else sys.maxsize


_COLUMNS = (
    _Column("rank", 5, lambda row: str(row.worker.rank), lambda row: row.worker.rank, 0, right=True),
    _Column("host", 14, lambda row: row.host, lambda row: row.host, 6),
    _Column("pid", 8, lambda row: str(row.worker.pid or ""), lambda row: row.worker.pid, 9, right=True),
    _Column("device", 8, lambda row: row.worker.device, lambda row: row.worker.device, 7),
    _Column("state", 15, lambda row: state_of(row.worker), lambda row: row.worker.state, 1),
    _Column("cpu", 6, lambda row: _if_known(row.cpu, "{:.0f}%".format), lambda row: -(row.cpu or 0.0), 3, right=True),
    _Column("memory", 9, lambda row: size(row.worker.rss), lambda row: -row.worker.rss, 4, right=True),
    _Column(
        "gpu", 5, lambda row: _if_known(row.worker.gpu, "{}%".format), lambda row: -(row.worker.gpu or 0), 3, right=True
    ),
    _Column(
        "gpu memory",
        10,
        lambda row: _if_known(row.worker.gpu_memory, lambda used: size(round(used))),
        lambda row: -(row.worker.gpu_memory or 0),
        4,
        right=True,
    ),
    _Column("output", 10, lambda row: _if_known(row.rate, _per_second), lambda row: -(row.rate or 0.0), 8, right=True),
    _Column("step", 13, lambda row: step_of(row.worker), _steps, 3, right=True),
    _Column(
        "quiet",
        10,
        lambda row: _if_known(row.worker.quiet, duration),
        lambda row: -(row.worker.quiet or 0.0),
        5,
        right=True,
    ),
    _Column("last line", 0, lambda row: printable(row.worker.last), lambda row: row.worker.last, 2),
)

_IF_ANY = {
    "step": "progress",
    "gpu": "gpu",
    "gpu memory": "gpu_memory",
}  # columns that are left out if no worker has this


class Board:
    """The workers of all nodes, one of them selected."""

    def __init__(self) -> None:
        """Make an empty table; `replies` is set before each showing."""
        self.replies: RunReplies
        self.selected: int | None = None  # its rank
        self._rows: list[Row] = []
        self._at = 0.0  # when the rows were read
        self._column = 0  # by which rows are sorted
        self._is_reversed = False
        self._first = 0  # the row at the top
        self._height = 1  # rows that were shown

    @property
    def sorted_by(self) -> str:
        """The name of the column by which rows are sorted."""
        return _COLUMNS[self._column].name

    def take(self, replies: RunReplies, at: float) -> None:
        """Take what the nodes reply at this time (monotonic seconds)."""
        self._rows = rows_of(replies, self._rows, at - self._at)
        self.replies, self._at = replies, at
        self._sort()

    def _sort(self) -> None:
        column = _COLUMNS[self._column]
        self._rows.sort(key=lambda row: row.worker.rank)
        self._rows.sort(key=column.key, reverse=self._is_reversed)
        ranks = [row.worker.rank for row in self._rows]
        if self.selected not in ranks:
            self.selected = ranks[0] if ranks else None

    def press(self, key: str) -> None:
        """Do what a key asks of the table."""
        match key:
            case "<" | ">":
                self._column = (self._column + (1 if key == ">" else -1)) % len(_COLUMNS)
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
        """Return what a terminal of so many columns and lines shows; `question` is asked at the bottom."""
        columns = self._shown(width)
        names = [line((column.name, NAME if column is _COLUMNS[self._column] else NOTE)) for column in columns]
        head = [*self._head(), _cells(names, columns)]
        foot = line((question, ODD)) if question else line((_HELP, NOTE))
        self._height = max(1, height - len(head) - 1)
        self._scroll()
        below = self._rows[self._first : self._first + self._height]
        rows = [self._line(row, columns, width) for row in below]
        empty = [Words()] * (self._height - len(rows))
        every = [*head, *rows, *empty, foot][:height]
        for text in every:
            text.truncate(width, overflow="ellipsis")
        return every

    def _head(self) -> Iterator[Words]:
        """Return what is to be said of the job and of nodes that do not answer."""
        yield facts_of(self.replies)
        run = self.replies.run
        if run is not None and run.straggler:
            yield line(printable(run.straggler))
        silent = find.silent(self.replies.nodes)
        if self.replies.problem:
            silent.append(printable(self.replies.problem))
        if silent:
            yield line((silent[0] if len(silent) == 1 else f"{silent[0]}; {count(len(silent) - 1, 'more node')}", ODD))

    def _scroll(self) -> None:
        """Have the selected row be one of those that are shown."""
        at = next((at for at, row in enumerate(self._rows) if row.worker.rank == self.selected), 0)
        most = max(0, len(self._rows) - self._height)
        self._first = max(0, min(self._first, at, most), at - self._height + 1)

    def _line(self, row: Row, columns: Sequence[_Column], width: int) -> Words:
        made = _cells([column.show(row) for column in columns], columns)
        if row.worker.rank == self.selected:
            made.truncate(width, overflow="ellipsis", pad=True)
            made.stylize("reverse")
        return made

    def _shown(self, width: int) -> list[_Column]:
        """Return the columns for which there is room, those that matter most first."""
        hosts = {node.host for node in self.replies.nodes}
        without = {"host"} if len(hosts) == 1 else set()
        for name, field in _IF_ANY.items():
            if all(getattr(row.worker, field) is None for row in self._rows):
                without.add(name)
        chosen, left = [], width - _LEAST
        for column in sorted(_COLUMNS, key=lambda column: column.order):
            if column.name in without:
                continue
            left -= column.width + 1
            if left >= 0:
                chosen.append(column)
        return sorted(chosen, key=_COLUMNS.index)


def rows_of(replies: RunReplies, before: Sequence[Row], passed: float) -> list[Row]:
    """Return the workers of all nodes, compared with what they were so many seconds before."""
    known = {row.worker.rank: row.worker for row in before}
    return [_row(node.host, worker, known.get(worker.rank), passed) for node, worker in replies.workers]


def _row(host: str, worker: WorkerStatus, before: WorkerStatus | None, passed: float) -> Row:
    if not worker.pid or worker.state == "ended":
        return Row(host, worker, None, None)
    if before is None or before.pid != worker.pid or passed < _SHORTEST_TIME:
        return Row(host, worker, percent_of_cpu(worker), None)
    cpu = 100 * max(0.0, worker.cpu_seconds - before.cpu_seconds) / passed
    return Row(host, worker, cpu, max(0, worker.written - before.written) / passed)


def _cells(texts: Sequence[str | Words], columns: Sequence[_Column]) -> Words:
    """Return the cells of a row behind each other, each cut or filled to the width of its column; the last has the rest."""
    cells = [line(text) if isinstance(text, str) else text.copy() for text in texts]
    for cell, column in zip(cells, columns, strict=True):
        if column.width:
            cell.truncate(column.width, overflow="ellipsis")
            cell.align("right" if column.right else "left", column.width)
    return Words(" ", no_wrap=True, overflow="ignore").join(cells)
