"""The failure report: why the job failed, root cause first. Pure; prints nothing and reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from signal import SIGABRT

from msgspec import Struct

from ddplaunch.errors import ERROR, HINT, below
from ddplaunch.report.diagnosis import Cause, classify
from ddplaunch.report.evidence import Evidence
from ddplaunch.report.other_workers import describe_others, what_failed
from ddplaunch.report.paint import CODE, STRONG, WEAK, Line, Paint, Words, plain
from ddplaunch.report.stack import (
    fault_frames,
    frames_of,
    is_library,
    place,
    relevant_frames,
    short,
    source_lines,
    syntax_error_lines,
)
from ddplaunch.supervise.first_failure import failed_itself
from ddplaunch.supervise.outcome import OUT_OF_WALLTIME, PREEMPTED, Frame, Traces, WorkerExit
from ddplaunch.words import count, duration, size, tilde

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
_PLAIN = Paint()
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
    is_simulated: bool = False  # the hosts are this machine
    places: tuple[str, ...] = ()  # where other workers were then, in sentences


def render(report: FailureReport, paint: Paint = _PLAIN) -> str:
    """Write the report, ending with a newline. It reads the same in colours and without."""
    head, *rest = _head(report)
    where = _where(report)
    shown = [head, *rest, *map(plain, where)]
    hint = Words("hint:", HINT)
    sections: list[list[Line]] = [
        [(Words("error:", ERROR), Words(f" {head}", STRONG)), *_indented(rest)],
        _indented(where),
        _indented(_who(report)),
        _indented(_evidence(report.cause, shown)) if report.cause else [],
        [(hint, *_quoted(f" {report.cause.advice}"))] if report.cause else [],
    ]
    host = "" if report.is_simulated else report.first.host
    written = [[below(paint.line(line, host)) for line in section] for section in sections if section]
    return "\n\n".join(map("\n".join, written)) + "\n"


def _quoted(text: str) -> list[Words]:
    """Mark what is to be typed."""
    return [Words(part, CODE if part.startswith("`") else "") for part in re.split(r"(`[^`\n]+`)", text)]


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


def _where(report: FailureReport) -> list[Line]:
    """Show the place in the code; where there is none, the last stderr output."""
    first, cwd = report.first, report.cwd
    error = first.error
    if error is None:
        return _crash(first, cwd)
    if error.type in _SYNTAX_ERRORS:
        where, *source = syntax_error_lines(error.traceback) or [""]
        return [(Words(short(where, cwd), CODE, where.rpartition(":")[0]),), *_source(source)] if where else []
    own, inner = relevant_frames(frames_of(error))
    if error.type == "SystemExit":
        # where a library calls sys.exit() explains nothing; what was printed before, as by argparse, does
        inner = None if own else inner
    lines: list[Line] = []
    for frame in (own, inner):
        if frame is not None:
            lines += [(_place(frame, cwd),), *_source([f"  {line}" for line in source_lines(error, frame)])]
    if what_failed(first) == first.how and (last_output := _last_stderr(first.stderr_tail)):
        lines += ["", *last_output] if lines else last_output
    return lines


def _source(lines: Sequence[str]) -> list[Line]:
    """Show a line of code, and the pointer below it."""
    return [(Words(_cut(text), ERROR if set(text) <= {" ", "~", "^"} else STRONG),) for text in lines]


def _place(frame: Frame, cwd: str) -> Words:
    return Words(place(frame, cwd), WEAK if is_library(frame) else CODE, frame.file)


def _crash(first: WorkerExit, cwd: str) -> list[Line]:
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
        *((Words("  "), _place(frame, cwd)) for frame in frames[:_STACK_FRAMES]),
        *([f"  ... and {count(more, 'more frame')}"] if more > 0 else []),
    ]


def _evidence(cause: Cause, shown: Sequence[str]) -> list[str]:
    """Quote the line that is the evidence of the cause, unless the report shows it."""
    lines = [_cut(line.strip().removesuffix(":")) for line in _without_noise(cause.line)]
    return [f"evidence: {line}" for line in lines if not any(line in each for each in shown)]


def _last_stderr(text: str) -> list[Line]:
    lines = _without_noise(text)
    return ["last stderr output:", *(f"  {_cut(line)}" for line in lines[-_STDERR_LINES:])] if lines else []


def _who(report: FailureReport) -> list[Line]:
    """Return the process and its log; then what became of the others, and of the restarts."""
    first = report.first
    facts = [f"pid {first.pid}", first.device]
    if len({end.host for end in report.exits}) > 1:
        facts = [first.host, f"local rank {first.local_rank}", *facts]
    if first.signal is not None and first.peak_rss:
        facts.append(f"peak memory {size(first.peak_rss)}")
    process = Words(f"rank {first.rank}   {'  '.join(facts)}", WEAK)
    path = first.log or report.log_folder
    logs = Words(tilde(short(path, report.cwd), report.home), "", path) if path else None
    others = [*describe_others(first, report.exits, report.cwd), *report.places]
    if report.restarts:
        others.append(f"{report.restarts} of {count(report.max_restarts, 'restart')} used")
    return [
        (process, Words("   logs ", WEAK), logs) if logs else (process,),
        *((Words(line, WEAK),) for line in others),
    ]


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


def _indented(lines: Iterable[Line]) -> list[Line]:
    return [(Words("  "), *line) if isinstance(line, tuple) else f"  {line}" if line else "" for line in lines]


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
    paint: Paint,
    ended_by: str = "",
    is_simulated: bool = False,
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
        is_simulated=is_simulated,
        places=tuple(places),
    )
    return render(report, paint)
