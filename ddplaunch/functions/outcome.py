"""How a job ended, as the command told it, and the exception that says so. Pure; knows no process and no socket."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Any

from ddplaunch import exitcodes
from ddplaunch.functions import exceptions
from ddplaunch.options.table import BY_NAME

# what leads to a function, or to a test
_RUNNER = re.compile(
    r'  File "[^"]*/(?:ddplaunch/worker/(?:call|bootstrap|program)\.py|ddplaunch/testing/[^"]*|_pytest/[^"]*|pluggy/[^"]*)", line'
)

_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")


class CallOutcome:
    """What the command has told so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._why = ""
        self._first: Mapping[str, Any] | None = None
        self._words = ""

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take what the command said."""
        match told["type"]:
            case "said":
                self._words = told["text"]
            case "outcome":
                self.status, self._why, self._first = told["status"], told["why"], told["first_failure"]

    def failure(
        self,
        status: int,
        raised: Callable[[int], exceptions.Raised | None],
        stacks: Callable[[], list[tuple[int, str]]],
        returned: Sequence[int],
    ) -> exceptions.JobError:
        """Make the exception for a job that ended with this status, which is not 0."""
        first = self._first
        if self._why == "timed_out":
            return exceptions.timed_out(
                _in_python(self._words), [(rank, _theirs(text)) for rank, text in stacks()], returned
            )
        if first is None:
            return exceptions.refused(_in_python(self._words) or _lost(status), abs(status))
        told = raised(first["rank"])
        error = (
            exceptions.failed(told, self._words) if told is not None else exceptions.died(self._words, first["rank"])
        )
        error.status = status
        error.exit_status, error.signal = first["status"], first["signal"]
        error.host, error.local_rank, error.pid = first["host"], first["local_rank"], first["pid"]
        return error

    def without_result(self, rank: int) -> exceptions.WorkerFailed:
        """Make the exception for a worker that ended with 0 before its function had returned."""
        error = exceptions.WorkerFailed(f"rank {rank} ended with exit status 0 before its function had returned")
        error.rank, error.status, error.exit_status = rank, 1, 0
        error.add_note("\nhint: it called sys.exit() or os._exit(): return instead")
        return error

    def unreadable(self, rank: int, why: Exception) -> exceptions.WorkerFailed:
        """Make the exception for a result that cannot be unpickled here."""
        error = exceptions.WorkerFailed(f"the result of rank {rank} cannot be read here: {type(why).__name__}: {why}")
        error.rank, error.status, error.exit_status = rank, 1, 0
        return error


def _in_python(words: str) -> str:
    """Write options as the keywords that they are here."""
    return _OPTION.sub(lambda found: name if (name := found[1].replace("-", "_")) in BY_NAME else found[0], words)


def _lost(status: int) -> str:
    if status < 0:
        return f"ddplaunch's command was killed by {Signals(-status).name}; its workers were ended with it"
    if status == exitcodes.BUG:
        return "this is a bug in ddplaunch; please report it with what it printed above"
    return f"the job ended with status {status}; what it printed above says why"


def _theirs(stack: str) -> str:
    """The stacks of a worker as faulthandler wrote them, without what is ours and without numbers of threads."""
    lines = [line for line in stack.splitlines() if not _RUNNER.match(line) and not line.startswith("Timeout (")]
    return re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", r"\1", "\n".join(lines)).strip("\n")
