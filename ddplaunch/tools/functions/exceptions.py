"""What `launch()` raises when a job does not end well, from the messages of its command. Raises nothing itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Any, TypeVar

from msgspec import Struct

from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.system import exitcodes
from ddplaunch.system.words import these_ranks

E = TypeVar("E", bound="JobError")

# the frames above the function, or the test, in the stack of a worker
_FRAME_OF_OURS = re.compile(
    r'  File "[^"]*/(?:ddplaunch/worker/(?:call|bootstrap|program)\.py|ddplaunch/tools/testing/[^"]*|'
    r'_pytest/[^"]*|pluggy/[^"]*)", line'
)

_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")


class JobError(RuntimeError):
    """The job of a `launch()` call failed. `status` is the exit status that the command would have."""

    __module__ = "ddplaunch"

    status: int = 1


class WorkerFailed(JobError):
    """A worker failed: this is the first failure, after which ddplaunch stopped the others.

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


def worker_failed(raised: Raised, report: str) -> WorkerFailed:
    """Return the exception for an exception of a worker; `report` is the failure summary, "" if there is none."""
    result = None
    if raised.parts is not None:
        kind, args, attributes = raised.parts
        result = _with_both_types(kind, args, attributes)
    if result is None:
        result = WorkerFailed(f"{raised.type}: {raised.message}" if raised.message else raised.type)
    result.rank = raised.rank
    result.traceback = raised.traceback
    where = f"This is the exception of rank {raised.rank}{f', {raised.during}' if raised.during else ''}:"
    result.add_note(f"\n{where}\n\n{raised.traceback.rstrip()}")
    behind_traceback = report.rfind(f"\n\n  rank {raised.rank}   ")  # the process, the other workers, the hint
    if behind_traceback >= 0:
        result.add_note("\n" + report[behind_traceback:].strip("\n"))
    return result


def from_report(kind: type[E], report: str) -> E:
    """Return the exception for a job in which no worker raised one, from the failure summary or error message."""
    head, _, rest = report.removeprefix("error: ").rstrip().partition("\n")
    result = kind(head)
    if rest:
        result.add_note(rest)
    return result


def timed_out(report: str, stacks: Sequence[tuple[int, str]], returned: Sequence[int]) -> JobTimeout:
    """Return the exception for a timeout; `stacks` are faulthandler's texts by rank, `returned` ranks that had returned."""
    result = JobTimeout(report)
    result.status = exitcodes.TIMEOUT
    ranks_by_stack: dict[str, list[int]] = {}
    for rank, text in stacks:
        # without our frames, faulthandler's head and thread ids, so that ranks at the same line have the same text
        lines = [
            line for line in text.splitlines() if not _FRAME_OF_OURS.match(line) and not line.startswith("Timeout (")
        ]
        stack = re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", r"\1", "\n".join(lines)).strip("\n")
        ranks_by_stack.setdefault(stack, []).append(rank)
    for stack, ranks in ranks_by_stack.items():
        was = "was" if len(ranks) == 1 else "were"
        result.add_note(f"\nwhere {these_ranks(ranks)} {was}:\n{stack.rstrip()}")
    if returned and stacks:
        result.add_note(f"\n{these_ranks(returned)} had returned: perhaps the others waited for that")
    return result


def without_result(rank: int, why: str, hint: str = "") -> WorkerFailed:
    """Return the exception for a worker that ended with 0 and sent no result."""
    result = WorkerFailed(why)
    result.rank, result.exit_status = rank, 0
    if hint:
        result.add_note(f"\nhint: {hint}")
    return result


def _with_both_types(kind: type, args: tuple[Any, ...], attributes: Mapping[str, Any]) -> WorkerFailed | None:
    """Return the exception with a type derived from its own type and WorkerFailed; None if its own type forbids that.

    `__init__` is not called: its arguments in the worker are not known.
    """
    if not issubclass(kind, Exception):  # SystemExit and the like are not caught by `except Exception`
        return None
    try:
        bases: tuple[type, ...] = (kind, WorkerFailed)
        if issubclass(kind, WorkerFailed):
            bases = (kind,)
        elif issubclass(WorkerFailed, kind):  # RuntimeError, Exception: Python allows no such bases beside each other
            bases = (WorkerFailed,)
        of_class = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            # it may be pickled for another process, where its class is made again
            "__reduce__": lambda self: (_with_both_types, (kind, self.args, {**attributes, **vars(self)})),
        }
        result: Any = type(kind.__name__, bases, of_class)
        result = result.__new__(result, *args)
        result.args = args
        for name, value in attributes.items():
            try:
                setattr(result, name, value)
            except (AttributeError, TypeError):  # made from args, like the exceptions of a group
                pass
        str(result)  # may fail without what `__init__` would have set, and would then fail in the caller's traceback
    except Exception:  # noqa: BLE001 - it is the program's code
        return None
    return result if isinstance(result, WorkerFailed) else None


class CallOutcome:
    """How the job ended, from the messages of its command."""

    def __init__(self) -> None:
        self.status: int | None = None  # None: the command has not said it, as when it was killed
        self._why = ""  # the job ended: "timed_out", ...
        self._first_failure: Mapping[str, Any] | None = None  # of a worker
        self._report = ""  # of the failure, or the error message

    def update(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the command."""
        match message["type"]:
            case "failure_text":
                self._report = message["text"]
            case "outcome":
                self.status, self._why = message["status"], message["why"]
                self._first_failure = message["first_failure"]

    def failure(
        self,
        status: int,
        raised: Callable[[int], Raised | None],
        stacks: Callable[[], list[tuple[int, str]]],
        returned: Sequence[int],
    ) -> JobError:
        """Return the exception for a job that ended with this status, which is not 0.

        `raised` returns the exception that a rank sent, `stacks` the stacks of the ranks at the timeout; `returned` are the ranks
        whose function had returned.
        """
        first = self._first_failure
        if self._why == "timed_out":
            return timed_out(_with_python_names(self._report), stacks(), returned)
        if first is None:
            no_worker_failed = from_report(JobError, _with_python_names(self._report) or _without_report(status))
            no_worker_failed.status = abs(status)  # negative: a signal killed the command
            return no_worker_failed
        exception = raised(first["rank"])
        error = worker_failed(exception, self._report) if exception else from_report(WorkerFailed, self._report)
        error.rank, error.status = first["rank"], status
        error.exit_status, error.signal = first["status"], first["signal"]
        error.host, error.local_rank, error.pid = first["host"], first["local_rank"], first["pid"]
        return error


def _with_python_names(report: str) -> str:
    """Return a report with options as keywords of `launch()`: "--max-restarts" becomes "max_restarts"; unknown ones stay."""

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in BY_NAME else found[0]

    return _OPTION.sub(keyword, report)


def _without_report(status: int) -> str:
    """Return what to say of a command that ended without a report."""
    if status < 0:
        return f"ddplaunch's command was killed by {Signals(-status).name}; its workers were killed with it"
    if status == exitcodes.BUG:
        return "this is a bug in ddplaunch; please report it with its output above"
    return f"the job ended with status {status}; see its output above"
