"""The failure report: why the job failed, root cause first, as plain text. Pure; prints nothing and reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from signal import SIGABRT

from msgspec import Struct

from ddplaunch.errors import below
from ddplaunch.report.diagnosis import Cause, classify
from ddplaunch.report.evidence import Evidence
from ddplaunch.report.other_workers import describe_others, what_failed
from ddplaunch.report.stack import fault_frames, frames_of, place, relevant_frames, short, syntax_error_lines
from ddplaunch.report.words import count, duration, size, tilde
from ddplaunch.supervise.first_failure import failed_itself
from ddplaunch.supervise.outcome import OUT_OF_WALLTIME, PREEMPTED, Traces, WorkerExit

_MESSAGE_LINES = 20  # of an exception's message, besides the first
_STDERR_LINES = 12
_STACK_FRAMES = 12
_LONGEST = 400  # characters of a line that is not ours
# the C++ stacks and places that torch adds to messages, and faulthandler's list of compiled modules
_NOISE = re.compile(
    r"(?:\[rank\d+\]: ?)?(?:frame #\d+: |Exception raised from |Extension modules: |<omitting python frames>)"
)
_CPP_PLACE = re.compile(r"\[(?:enforce fail at )?[^][\s]*\.(?:cc|cpp|hpp|h):\d+\] ")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~])?")
_RED_ERROR = "\x1b[1;31merror\x1b[0m\x1b[1m:\x1b[0m"
_CYAN_HINT = "\x1b[1;36mhint\x1b[0m\x1b[1m:\x1b[0m"
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


class FailureReport(Struct, frozen=True, kw_only=True):
    """All that the report needs."""

    first: WorkerExit  # as `first_failure` picked it
    exits: tuple[WorkerExit, ...]  # of all workers, the first failure's too
    cause: Cause | None = None
    ended_by: str = ""  # why the cluster is ending the job: "out of walltime"
    cwd: str = ""  # paths below it are shown relative to it
    home: str = ""  # the user's folder, for ~
    restarts: int = 0  # used
    max_restarts: int = 0
    log_folder: str | None = None
    places: tuple[str, ...] = ()  # where other workers were then, in sentences


def render(report: FailureReport, *, colour: bool = False) -> str:
    """Write the report, ending with a newline; with ANSI colours for a terminal if asked to."""
    head, *rest = _head(report)
    error, hint = (_RED_ERROR, _CYAN_HINT) if colour else ("error:", "hint:")
    where = _where(report)
    sections = [
        [f"{error} {head}", *_indented(rest)],
        _indented(where),
        _indented(_who(report)),
        _indented(_evidence(report.cause, (head, *rest, *where))) if report.cause else [],
        [f"{hint} {report.cause.advice}"] if report.cause else [],
    ]
    return "\n\n".join("\n".join(map(below, section)) for section in sections if section) + "\n"


def _head(report: FailureReport) -> list[str]:
    """Return which rank failed, why, how and after how long; then the rest of the exception's message."""
    first = report.first
    hosts = {end.host for end in report.exits}
    who = f"rank {first.rank} on {first.host}" if len(hosts) > 1 else f"rank {first.rank}"
    what, *rest = [_cut(line) for line in _without_noise(what_failed(first))] or [first.how]
    how = [f"after {duration(first.seconds)}"]
    if first.core_dumped:
        how.insert(0, "core dumped")
    if first.error and first.stopped_with is not None and failed_itself(first):
        how.insert(0, "stopped while it was exiting")  # the status says how we ended it, not how it failed
    elif what != first.how:
        how.insert(0, first.how)
    if len(rest) > _MESSAGE_LINES:
        rest = [*rest[:_MESSAGE_LINES], f"... and {count(len(rest) - _MESSAGE_LINES, 'more line')} in its log"]
    who = f"{report.ended_by}: {who}" if report.ended_by else who
    return [f"{who} failed: {what}   ({', '.join(how)})", *rest]


def _where(report: FailureReport) -> list[str]:
    """Show the place in the code; where there is none, the last stderr output."""
    first, cwd = report.first, report.cwd
    error = first.error
    if error is None:
        return _crash(first, cwd)
    if error.type in _SYNTAX_ERRORS:
        where, *source = syntax_error_lines(error.traceback) or [""]
        return [short(where, cwd), *source] if where else []
    own, inner = relevant_frames(frames_of(error))
    if error.type == "SystemExit":
        # where a library calls sys.exit() explains nothing; what was printed before, as by argparse, does
        inner = None if own else inner
    lines = []
    for frame in (own, inner):
        if frame is not None:
            lines += [place(frame, cwd), *([f"  {_cut(frame.source)}"] if frame.source else [])]
    if what_failed(first) == first.how and (last_output := _last_stderr(first.stderr_tail)):
        lines += ["", *last_output] if lines else last_output
    return lines


def _crash(first: WorkerExit, cwd: str) -> list[str]:
    """Show faulthandler's stack; the stderr output before it too if it was an abort, since that is the reason, or no stack."""
    before, _, _ = first.stderr_tail.rpartition("Fatal Python error:")
    frames = fault_frames(first.stderr_tail) if first.signal is not None else ()
    if not frames:
        return _last_stderr(before) or _last_stderr(first.stderr_tail)
    reason = _last_stderr(before) if first.signal == SIGABRT else []
    more = len(frames) - _STACK_FRAMES
    return [
        *([*reason, ""] if reason else []),
        "stack, innermost frame first:",
        *(f"  {place(frame, cwd)}" for frame in frames[:_STACK_FRAMES]),
        *([f"  ... and {count(more, 'more frame')}"] if more > 0 else []),
    ]


def _evidence(cause: Cause, shown: Sequence[str]) -> list[str]:
    """Quote the line that is the evidence of the cause, unless the report shows it."""
    lines = [_cut(line.strip().removesuffix(":")) for line in _without_noise(cause.line)]
    return [f"evidence: {line}" for line in lines if not any(line in each for each in shown)]


def _last_stderr(text: str) -> list[str]:
    lines = _without_noise(text)
    return ["last stderr output:", *(f"  {_cut(line)}" for line in lines[-_STDERR_LINES:])] if lines else []


def _who(report: FailureReport) -> list[str]:
    """Return the process and its log; then what became of the others, and of the restarts."""
    first = report.first
    facts = [f"pid {first.pid}", first.device]
    if len({end.host for end in report.exits}) > 1:
        facts = [first.host, f"local rank {first.local_rank}", *facts]
    if first.signal is not None and first.peak_rss:
        facts.append(f"peak memory {size(first.peak_rss)}")
    logs = [f" logs {tilde(short(path, report.cwd), report.home)}"] if (path := first.log or report.log_folder) else []
    lines = [f"rank {first.rank}   {'  '.join([*facts, *logs])}", *describe_others(first, report.exits, report.cwd)]
    lines += report.places
    if report.restarts:
        lines.append(f"{report.restarts} of {count(report.max_restarts, 'restart')} used")
    return lines


def _without_noise(text: str) -> list[str]:
    """Split text into lines: no C++ stacks, no colours, a progress bar's last state, no blank lines in a row."""
    lines: list[str] = []
    for raw in _ANSI.sub("", text).split("\n"):
        line = _CPP_PLACE.sub("", raw.rstrip().rpartition("\r")[2])
        if not _NOISE.match(line) and (line or (lines and lines[-1])):
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def failure_report(
    first: WorkerExit,
    exits: Sequence[WorkerExit],
    traces: Traces,
    *,
    interpreter: str | None,
    debugging: bool,
    chaos: bool,
    cwd: str,
    home: str = "",
    restarts: int,
    max_restarts: int,
    colour: bool,
    ended_by: str = "",
    places: Sequence[str] = (),
    master_port: int | None = None,
    port_given: bool = False,
) -> str:
    """Write the failure report of a generation.

    `traces` are those of the node where the first failure was, `ended_by` is why the cluster is ending the job, if it is.
    """
    size, room = traces.shm or (None, None)
    facts = Evidence(
        oom_kills=traces.oom_kills,
        oom_kills_of_machine=traces.oom_kills_of_machine,
        shm_size=size,
        shm_free=room,
        interpreter=interpreter,
        debugging=debugging,
        chaos=chaos,
        workers=len(exits),
        master_port=master_port,
        port_given=port_given,
        preempted=ended_by == PREEMPTED,
        walltime_over=ended_by == OUT_OF_WALLTIME,
    )
    report = FailureReport(
        first=first,
        exits=tuple(exits),
        cause=classify(first, facts),
        ended_by=ended_by,
        cwd=cwd,
        home=home,
        restarts=restarts,
        max_restarts=max_restarts,
        log_folder=traces.log_folder,
        places=tuple(places),
    )
    return render(report, colour=colour)
