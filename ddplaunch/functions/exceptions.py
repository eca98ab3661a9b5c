"""What `launch()` raises when a job does not end well. Builds exceptions; raises none itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from ddplaunch.report.words import these_ranks

E = TypeVar("E", bound="JobError")


class JobError(RuntimeError):
    """The job of a `launch()` call failed. `status` is the exit status that the command would have."""

    __module__ = "ddplaunch"

    status: int = 1


class WorkerFailed(JobError):
    """A worker failed: the one that failed first, the others having been stopped.

    If the function raised an exception, this is one of its type as well: `except ValueError` and `except WorkerFailed` both
    catch a ValueError of a worker.
    """

    __module__ = "ddplaunch"

    rank: int
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    exit_status: int | None = None  # as a shell shows it: 128 + n if signal n ended it
    signal: int | None = None  # that ended it
    traceback: str | None = None  # as Python would have printed it there; None: no exception ended it


class JobTimeout(JobError, TimeoutError):
    """`timeout` was reached."""

    __module__ = "ddplaunch"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Raised(Struct, frozen=True, kw_only=True):
    """An exception as a worker sent it."""

    rank: int
    parts: tuple[type, tuple[Any, ...], Mapping[str, Any]] | None  # type, args, attributes; None: not all is known here
    type: str  # as a traceback names it
    message: str
    traceback: str
    during: str  # what it interrupted, if that was not the function: "while it ..."


def failed(raised: Raised, report: str) -> WorkerFailed:
    """Make the exception for one that a worker raised; `report` is the failure report, "" if there is none."""
    made = _of_both_types(*raised.parts) if raised.parts is not None else None
    result = made or WorkerFailed(f"{raised.type}: {raised.message}" if raised.message else raised.type)
    result.rank = raised.rank
    result.traceback = raised.traceback
    where = f"This is the exception of rank {raised.rank}{f', {raised.during}' if raised.during else ''}:"
    result.add_note(f"\n{where}\n\n{raised.traceback.rstrip()}")
    if rest := _after_traceback(report, raised.rank):
        result.add_note(f"\n{rest}")
    return result


def from_report(kind: type[E], report: str) -> E:
    """Make the exception for a job without an exception of a worker, from the failure report or error message."""
    head, _, rest = report.removeprefix("error: ").rstrip().partition("\n")
    result = kind(head)
    if rest:
        result.add_note(rest)
    return result


def timed_out(report: str, stacks: Sequence[tuple[int, str]], returned: Sequence[int]) -> JobTimeout:
    """Make the exception for a timeout; `stacks` has the stack of each rank, `returned` the ranks that had returned."""
    result = JobTimeout(report)
    result.status = 124
    alike: dict[str, list[int]] = {}
    for rank, stack in stacks:
        alike.setdefault(stack, []).append(rank)
    for stack, ranks in alike.items():
        was = "was" if len(ranks) == 1 else "were"
        result.add_note(f"\nwhere {these_ranks(ranks)} {was}:\n{stack.rstrip()}")
    if returned and stacks:
        result.add_note(f"\n{these_ranks(returned)} had returned: perhaps the others waited for that")
    return result


def without_result(rank: int, why: str, hint: str = "") -> WorkerFailed:
    """Make the exception for a worker that ended with 0, and whose result is not here."""
    result = WorkerFailed(why)
    result.rank, result.exit_status = rank, 0
    if hint:
        result.add_note(f"\nhint: {hint}")
    return result


def _after_traceback(report: str, rank: int) -> str:
    """The part of a failure report that follows the traceback: the process, the others, the hint."""
    at = report.rfind(f"\n\n  rank {rank}   ")
    return report[at:].strip("\n") if at >= 0 else ""


def _of_both_types(kind: type, args: tuple[Any, ...], attributes: Mapping[str, Any]) -> WorkerFailed | None:
    """Rebuild an exception as one of its own type that is a WorkerFailed too; None if its type does not allow that.

    Its __init__ is not called: its arguments in the worker are not known.
    """
    if not issubclass(kind, Exception):  # SystemExit and the like are not caught by `except Exception`
        return None
    try:
        bases: tuple[type, ...] = (kind, WorkerFailed)
        if issubclass(kind, WorkerFailed):
            bases = (kind,)
        elif issubclass(WorkerFailed, kind):  # RuntimeError, Exception
            bases = (WorkerFailed,)
        names = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            # it may be pickled for another process, where its class is made again
            "__reduce__": lambda self: (_of_both_types, (kind, self.args, {**attributes, **vars(self)})),
        }
        result: Any = type(kind.__name__, bases, names)
        result = result.__new__(result, *args)
        result.args = args
        for name, value in attributes.items():
            try:
                setattr(result, name, value)
            except (AttributeError, TypeError):  # made from args, like the exceptions of a group
                pass
        str(result)
    except Exception:  # noqa: BLE001 - it is the program's code
        return None
    return result if isinstance(result, WorkerFailed) else None
