"""The columns in which `ps`, `top` and --live show workers: one table, COLUMNS, and what its rows need. Pure.

A new column is a row here, a field of `WorkerStatus` in `record/window/questions.py`, and its value, which
`launcher/look/answers.py` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from ddplaunch.record.window.questions import WorkerStatus
from ddplaunch.spec.outcome import Progress
from ddplaunch.system.console.tables import BAD, GOOD, NOTE, ODD, Words, line
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import duration, size
from ddplaunch.tools.runs.client import RunReplies

ENDED_WELL = "exit status 0"
_STYLES = {"running": GOOD, "waiting": NOTE, "ended": NOTE}  # of states
_MOMENT = 0.001  # seconds since the start of a worker, before which its share of a CPU means nothing
_SHORTEST_TIME = 0.05  # seconds between two looks of which a difference tells something


class Row(Struct, frozen=True):
    """A worker, and what has changed since the look before."""

    host: str
    worker: WorkerStatus
    # percent of a core, since the look before or, at the first look, since the start; None: it does not live
    cpu: float | None
    rate: float | None  # bytes of output a second; None: not known yet

    @property
    def is_alive(self) -> bool:
        """Whether the worker has started, and has not ended."""
        return self.worker.pid != 0 and self.worker.state != "ended"


def rows_of(replies: RunReplies, before: Sequence[Row] = (), passed: float = 0.0) -> list[Row]:
    """Return the workers of all nodes, compared with the rows `before`, of `passed` seconds ago."""
    known = {row.worker.rank: row.worker for row in before}
    return [_row(node.host, worker, known.get(worker.rank), passed) for node, worker in replies.workers]


def _row(host: str, worker: WorkerStatus, before: WorkerStatus | None, passed: float) -> Row:
    """Return the row of a worker; `before`: what it was `passed` seconds ago; None: not known."""
    row = Row(host, worker, cpu=None, rate=None)
    if not row.is_alive:
        return row
    if before is None or before.pid != worker.pid or passed < _SHORTEST_TIME:
        return Row(host, worker, cpu=percent_of_cpu(worker), rate=None)
    cpu = 100 * max(0.0, worker.cpu_seconds - before.cpu_seconds) / passed
    return Row(host, worker, cpu=cpu, rate=max(0, worker.written - before.written) / passed)


# --- what the columns show of a worker


def percent_of_cpu(worker: WorkerStatus) -> float:
    """Return the share of a core since the worker's start, as ps(1) says it; 0 in the first moment."""
    return 100 * worker.cpu_seconds / worker.seconds if worker.seconds >= _MOMENT else 0.0


def state_of(worker: WorkerStatus) -> Words:
    """Return how a worker is, or how it has ended."""
    failed = worker.how not in ("", ENDED_WELL)
    return line((worker.how or worker.state, BAD if failed else _STYLES.get(worker.state, ODD)))


def written_step(progress: Progress) -> str:
    """Write how far a worker is: "412/1,000"."""
    return f"{progress.step:,}" if progress.total is None else f"{progress.step:,}/{progress.total:,}"


def _written_rate(rate: float) -> str:
    return f"{size(round(rate))}/s" if rate else ""


# --- the table


def _never(_: RunReplies) -> bool:
    return False


def _on_one_host(replies: RunReplies) -> bool:
    return len({node.host for node in replies.nodes}) == 1


def _without(field: str) -> Callable[[RunReplies], bool]:
    """Return whether no worker has this field."""
    return lambda replies: all(getattr(worker, field) is None for _, worker in replies.workers)


def _itself(value: Any) -> Any:
    return value


def _largest(value: float | None) -> float:
    return -(value or 0)


def _steps(progress: Progress | None) -> int:
    return progress.step if progress is not None else sys.maxsize  # a worker that says nothing comes last


class Column(Struct, frozen=True):
    """A column of the table of workers.

    `ps` leaves out a column that is empty in all rows. `top` leaves out one that is absent, or for which there is no room.
    """

    name: str
    width: int  # cells in `top`; 0: what is left of its line
    order: int  # in which `top` leaves columns out where there is no room: the highest first
    value: Callable[[Row], Any]  # None: not known, which shows nothing
    form: Callable[[Any], str | Words] = str
    key: Callable[[Any], Any] = _itself  # of a value, by which `top` sorts: what people look for comes first
    right: bool = False  # flush right
    is_absent: Callable[[RunReplies], bool] = _never
    in_ps: bool = True
    of_living: bool = False  # `ps` shows nothing of a worker that does not live

    def cell(self, row: Row) -> str | Words:
        """Return what the column shows of a worker."""
        value = self.value(row)
        return "" if value is None else self.form(value)


COLUMNS = (
    Column("rank", 5, 0, lambda row: row.worker.rank, right=True),
    Column("host", 14, 6, lambda row: row.host, is_absent=_on_one_host),
    Column("pid", 8, 9, lambda row: row.worker.pid, lambda pid: str(pid or ""), right=True),
    Column("device", 8, 7, lambda row: row.worker.device),
    Column("state", 15, 1, lambda row: row.worker, state_of, lambda worker: worker.state),
    Column("cpu", 6, 3, lambda row: row.cpu, "{:.0f}%".format, _largest, right=True),
    Column("memory", 9, 4, lambda row: row.worker.rss, size, _largest, right=True, of_living=True),
    Column("gpu", 5, 3, lambda row: row.worker.gpu, "{}%".format, _largest, right=True, is_absent=_without("gpu")),
    Column("gpu memory", 10, 4, lambda row: row.worker.gpu_memory, size, _largest, right=True, is_absent=_without("gpu_memory")),
    Column("output", 10, 8, lambda row: row.rate, _written_rate, _largest, right=True, in_ps=False),
    Column("step", 13, 3, lambda row: row.worker.progress, written_step, _steps, right=True, is_absent=_without("progress")),
    Column("quiet", 10, 5, lambda row: row.worker.quiet, duration, _largest, right=True, of_living=True),
    Column("last line", 0, 2, lambda row: row.worker.last, printable, in_ps=False),
)  # fmt: skip


def totals(alive: Sequence[Row]) -> list[str]:
    """Return what --live says of all living workers together, what matters most first; of GPUs only if any is known."""
    gpus = [row.worker.gpu for row in alive if row.worker.gpu is not None]
    on_gpus = sum(row.worker.gpu_memory or 0 for row in alive)
    return [
        f"CPU {sum(row.cpu or 0.0 for row in alive):.0f}%",
        *([f"GPU {sum(gpus) / len(gpus):.0f}%"] if gpus else []),
        *([f"GPU memory {size(on_gpus)}"] if on_gpus else []),
        f"memory {size(sum(row.worker.rss for row in alive))}",
    ]
