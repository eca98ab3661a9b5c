"""Which worker's end is the root cause of a failure, and whether a start would fail again. Pure; reads no log and no clock.

A worker whose peer has ended fails too, often before the agent has seen the peer's end. Such failures are recognized by
their text, so that none is ever reported in place of its cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, SIGTERM, SIGTRAP

from msgspec.structs import replace

from ddplaunch.spec.outcome import WorkerError, WorkerExit
from ddplaunch.system import exitcodes

# Texts of torch 1.13 to 2.13 and of NCCL 2.14 to 2.28, each as words that it contains and a pattern that it fits ("": the words
# are enough). The words are found in a tenth of the time, and thousands of workers may fail. Repeats in patterns are bounded, so
# that no text can make the search slow. Two texts are not here because they may tell of the worker's own error: plain
# "Connection reset by peer" (a download of the script?), and "watchdog thread terminated with exception" (an illegal access?).
_FOLLOWING = (
    # gloo
    ("gloo/transport/", r"gloo/transport/\S{1,99}:\d+\] .{0,199}Connection (?:closed|reset|refused)"),
    ("gloo/transport/", r"gloo/transport/\S{1,99}:\d+\] .{0,199}(?:Broken pipe|[Tt]imed out|timeout caused)"),
    ("Gloo connectFullMesh failed", ""),
    ("failed to pass monitoredBarrier", ""),
    ("reached monitoredBarrier, but received errors", ""),
    # the store; of its errors only these two are a worker's own: a port that is taken, a build without libuv
    ("DistNetworkError: ", r"DistNetworkError: (?!The server socket)"),
    ("DistStoreError: ", r"DistStoreError: (?!use_libuv)"),
    ("Failed to ", r"Failed to (?:recv|send), (?:got|sent) 0 bytes"),
    (
        "Exception raised from ",
        r"(?:Connection reset by peer|Broken pipe|Socket Timeout)\s+Exception raised from (?:recv|send)",
    ),
    ("Timed out initializing process group in store based barrier", ""),
    ("store->get('", r"store->get\('[^']{1,99}'\) got error"),
    # NCCL
    ("ncclRemoteError", ""),
    ("remote process exited or there was a network error", ""),
    ("Connection closed by remote peer", ""),
    ("Call to ", r"Call to (?:recv|send|connect) (?:from|to) \S{1,99} failed"),
    ("Watchdog caught collective operation timeout", ""),
    ("Received a dump signal due to a collective timeout from", ""),
    ("watchdog got stuck for ", r"watchdog got stuck for \d+ seconds"),
    ("NCCL communicator was aborted on rank", ""),
)
_SEARCHED = 8192  # characters at either end of a text
_NOT_BY_A_STOP = (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, SIGTRAP)

_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", *_SYNTAX_ERRORS)
_RUNPY = ("runpy.py", "<frozen runpy>")  # the files of `python -m`


def first_failure(exits: Sequence[WorkerExit], raised: Mapping[int, WorkerError] | None = None) -> WorkerExit | None:
    """Return the first worker that ended badly on its own; None if no worker did.

    Failures that only follow from others come last, whatever their times. `raised` has errors by rank that `exits` lack; the
    exit that is returned carries its error. All times must be of one clock.
    """
    errors = raised or {}
    complete = [
        replace(end, error=errors[end.rank]) if end.error is None and end.rank in errors else end for end in exits
    ]
    candidates = [end for end in complete if failed_itself(end) or ended_by_another_signal(end)]
    # the first that ddplaunch had asked to end, but that a signal of another sender ended
    uncertain: WorkerExit | None = None
    following: WorkerExit | None = None  # the first that failed because a peer had ended
    for end in sorted(candidates, key=lambda end: (failed_at(end), end.rank)):
        if follows_another(end):
            following = following or end
        elif failed_itself(end):
            return end  # without searching the texts of all later failures
        else:
            uncertain = uncertain or end
    return uncertain or following


def failed_itself(end: WorkerExit) -> bool:
    """Whether a worker ended badly, or had recorded the error that was ending it, before we asked it to end."""
    if end.stopped_with is None:
        return end.status != 0
    raised_at = end.error.at if end.error else None
    return raised_at is not None and end.stopped_at is not None and raised_at < end.stopped_at


def failed_at(end: WorkerExit) -> float:
    """Return when a worker failed: when it raised, if that is known, else when it ended."""
    return end.error.at if end.error and end.error.at is not None else end.at


def ended_by_another_signal(end: WorkerExit) -> bool:
    """Whether a worker that we asked to end was ended by a signal that we did not send, such as the kernel's SIGKILL.

    A killed process closes its connections before the agent can see its end, and with a GPU that takes a while: its peers may
    have failed by then, and we have begun to stop all.
    """
    return end.stopped_with is not None and end.signal in _NOT_BY_A_STOP and end.signal != end.stopped_with


def follows_another(failure: WorkerExit | WorkerError) -> bool:
    """Whether a worker failed because another one has ended or hangs, by the text of its failure."""
    if isinstance(failure, WorkerExit) and failure.error is None and failure.signal not in (None, SIGABRT):
        return False  # whatever it printed before, it did not end by an exception
    text = searchable(failure_text(failure))
    return any(words in text and re.search(pattern, text) for words, pattern in _FOLLOWING)


def all_exited_after(exits: Iterable[WorkerExit], *signals: int) -> bool:
    """Whether no worker failed, except by one of `signals`, by SIGTERM, or because another worker had ended."""
    asked = {SIGTERM, *signals} - {0}
    return not any(_failed_for_another_reason(end, asked) for end in exits)


def _failed_for_another_reason(end: WorkerExit, asked: set[int]) -> bool:
    """Whether a worker failed, and neither by a signal of `asked` nor because another worker had ended."""
    if end.status == 0 or follows_another(end):
        return False
    # a signal ends a program without a handler; shells and many handlers exit with 128 + its number
    by_signal = end.signal in asked or end.code in {exitcodes.of_signal(signum) for signum in asked}
    if by_signal and (end.error is None or end.error.type in ("KeyboardInterrupt", "SystemExit")):
        return False
    return failed_itself(end) or ended_by_another_signal(end)


def failure_text(failure: WorkerExit | WorkerError) -> str:
    """Return the text of a failure: the exception with its traceback, else the end of the stderr output."""
    error = failure.error if isinstance(failure, WorkerExit) else failure
    text = f"{error.type}: {error.message}\n{error.traceback}" if error else ""
    if isinstance(failure, WorkerExit) and (error is None or error.type == "SystemExit"):
        # SystemExit explains little: the program printed the reason before
        text += failure.stderr_tail
    return text


def searchable(text: str) -> str:
    """Cut a text to its two ends: patterns are searched in these, so that a long text cannot block the agent."""
    return text if len(text) <= 2 * _SEARCHED else f"{text[:_SEARCHED]}\n{text[-_SEARCHED:]}"


def failure_status(first: WorkerExit) -> int:
    """Return the status that a first failure gives the job, never 0: 1 for a worker that had raised and that we then stopped."""
    if first.stopped_with is None or ended_by_another_signal(first):
        return first.status or 1
    return first.code or 1


def import_failure(error: WorkerError | None) -> str:
    """Return the import that failed in the first lines of the program: "ModuleNotFoundError: No module named 'x'"; else "".

    Such an import fails at the next start as well. Only the program's own first lines count: the outermost line of the traceback
    is an import there, or cannot be compiled. An import in a function may fail after hours of training.
    """
    if error is None or not error.frames:
        return ""
    outermost = error.frames[0]
    file = outermost.file.rpartition("/")[2]
    if error.type == "SystemExit" and file in _RUNPY:
        return error.message  # `python -m` exits so, without a traceback of the import, where the module cannot be run
    if error.type not in _IMPORT_ERRORS or outermost.function != "<module>":
        return ""
    # SyntaxError names the file that cannot be compiled; if that is the program itself, none of its lines has run
    is_uncompiled = error.type in _SYNTAX_ERRORS and f"({file}, line {outermost.line})" in error.message
    is_import = outermost.source.startswith(("import ", "from "))
    return f"{error.type}: {error.message}" if is_uncompiled or is_import else ""


def all_failed_at_same_import(exits: Sequence[WorkerExit]) -> bool:
    """Whether each worker failed by itself, all at the same import in their first lines."""
    failures = {import_failure(end.error) if failed_itself(end) else "" for end in exits}
    return len(failures) == 1 and "" not in failures
