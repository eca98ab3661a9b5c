"""How a job ended, from the messages of its command, and the exception for it. Pure; knows no process and no socket."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Any

from ddplaunch import exitcodes
from ddplaunch.functions import exceptions
from ddplaunch.options.table import BY_NAME

# frames of a traceback above a function, or a test
_RUNNER = re.compile(
    r'  File "[^"]*/(?:ddplaunch/worker/(?:call|bootstrap|program)\.py|ddplaunch/testing/[^"]*|_pytest/[^"]*|pluggy/[^"]*)", line'
)

_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")


class CallOutcome:
    """What the command has reported so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._why = ""
        self._first: Mapping[str, Any] | None = None
        self._report = ""

    def update(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the command."""
        match message["type"]:
            case "failure_text":
                self._report = message["text"]
            case "outcome":
                self.status, self._why, self._first = message["status"], message["why"], message["first_failure"]

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
                _in_python(self._report), [(rank, _user_stacks(text)) for rank, text in stacks()], returned
            )
        if first is None:
            refused = exceptions.from_report(exceptions.JobError, _in_python(self._report) or _lost(status))
            refused.status = abs(status)
            return refused
        if (exception := raised(first["rank"])) is not None:
            error = exceptions.failed(exception, self._report)
        else:
            error = exceptions.from_report(exceptions.WorkerFailed, self._report)
        error.rank, error.status = first["rank"], status
        error.exit_status, error.signal = first["status"], first["signal"]
        error.host, error.local_rank, error.pid = first["host"], first["local_rank"], first["pid"]
        return error


def _in_python(report: str) -> str:
    """Write options as keywords of `launch()`."""
    return _OPTION.sub(lambda found: name if (name := found[1].replace("-", "_")) in BY_NAME else found[0], report)


def _lost(status: int) -> str:
    if status < 0:
        return f"ddplaunch's command was killed by {Signals(-status).name}; its workers were killed with it"
    if status == exitcodes.BUG:
        return "this is a bug in ddplaunch; please report it with what it printed above"
    return f"the job ended with status {status}; see its output above"


def _user_stacks(stack: str) -> str:
    """The stacks of a worker as faulthandler wrote them, without frames of ours and without thread ids."""
    lines = [line for line in stack.splitlines() if not _RUNNER.match(line) and not line.startswith("Timeout (")]
    return re.sub(r"(Current thread|Thread) 0x[0-9a-f]+", r"\1", "\n".join(lines)).strip("\n")
