"""DECIDE: which worker's end is the root cause. Pure; reads what the workers reported and when, never a log or a clock.

A worker whose peer has ended fails too, often before that peer has been reaped. Such failures are recognized by their
text, so that none is ever reported in place of its cause.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, SIGTRAP

from msgspec.structs import replace

from ddplaunch.supervise.outcome import WorkerError, WorkerExit

# Texts of torch 1.13 to 2.13 and of NCCL 2.14 to 2.28. Plain "Connection reset by peer" is not among them: it may as
# well be the script's own download that broke. Neither is "watchdog thread terminated with exception": the exception
# may be an illegal memory access of this very worker. Repeats are bounded, so that no text can make the search slow.
# Before each pattern stands what a text that it fits has in it: that is found in a tenth of the time, and thousands may fail.
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


def first_failure(exits: Sequence[WorkerExit], raised: Mapping[int, WorkerError] | None = None) -> WorkerExit | None:
    """Pick the worker that ended badly on its own before all others; None if none did.

    `raised` has errors by rank that were recorded after the exit was written down, or are not in it for another
    reason; the exit that is returned carries them. All times must be of one clock.
    """
    errors = raised or {}
    complete = [
        replace(end, error=errors[end.rank]) if end.error is None and end.rank in errors else end for end in exits
    ]
    candidates = [end for end in complete if failed_itself(end) or ended_otherwise(end)]
    least: dict[int, WorkerExit] = {}  # the first for each doubt
    for end in sorted(candidates, key=lambda end: (failed_at(end), end.rank)):
        doubt = _doubt(end)
        if doubt == 0:  # the texts of those behind it are not searched
            return end
        least.setdefault(doubt, end)
    return least.get(1, least.get(2))


def failed_itself(end: WorkerExit) -> bool:
    """Whether a worker ended badly, or had recorded the error that was ending it, before we asked it to end."""
    if end.stopped_with is None:
        return end.status != 0
    raised_at = end.error.at if end.error else None
    return raised_at is not None and end.stopped_at is not None and raised_at < end.stopped_at


def failed_at(end: WorkerExit) -> float:
    """When a worker failed: when it raised, if that is known, else when it ended."""
    return end.error.at if end.error and end.error.at is not None else end.at


def follows(failure: WorkerExit | WorkerError) -> bool:
    """Whether a failure is one of those that a worker suffers because another one has ended or hangs."""
    if isinstance(failure, WorkerExit) and failure.error is None and failure.signal not in (None, SIGABRT):
        return False  # whatever it printed before, it did not end by an exception
    text = searchable(failure_text(failure))
    return any(words in text and re.search(pattern, text) for words, pattern in _FOLLOWING)


def failure_text(failure: WorkerExit | WorkerError) -> str:
    """The text of a failure: the exception with all that led to it, else the end of the stderr output."""
    error = failure.error if isinstance(failure, WorkerExit) else failure
    text = f"{error.type}: {error.message}\n{error.traceback}" if error else ""
    if isinstance(failure, WorkerExit) and (error is None or error.type == "SystemExit"):
        # SystemExit explains little: the reason was printed before
        text += failure.stderr_tail
    return text


def searchable(text: str) -> str:
    """Cut a text to its two ends: patterns are searched in these, so that a long text cannot block the agent."""
    return text if len(text) <= 2 * _SEARCHED else f"{text[:_SEARCHED]}\n{text[-_SEARCHED:]}"


def failure_status(first: WorkerExit) -> int:
    """Return the status that a first failure stands for, never 0: 1 if it had raised and was then stopped by us."""
    if first.stopped_with is None or ended_otherwise(first):
        return first.status or 1
    return first.code or 1


def ended_otherwise(end: WorkerExit) -> bool:
    """Whether a worker that we asked to end was ended by something else.

    A process that was killed closes its connections before it can be waited for, and with a GPU that takes a while:
    its peers may have failed, and we have begun to stop all, before it is known to be dead.
    """
    return end.stopped_with is not None and end.signal in _NOT_BY_A_STOP and end.signal != end.stopped_with


def _doubt(end: WorkerExit) -> int:
    """Rank a failure by how likely it is the cause of all; 0 is the most likely."""
    if follows(end):
        return 2
    return 0 if failed_itself(end) else 1
