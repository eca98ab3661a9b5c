"""The failure summary: why the job failed, root cause first. Pure; prints nothing and reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import failed_at, failed_itself, follows_another, searchable
from ddplaunch.launcher.tell.causes import Cause
from ddplaunch.record.seen import stack
from ddplaunch.record.seen.dump import FATAL, NOISE, Crash, parse_crash
from ddplaunch.record.seen.stack import frames_of, location, short
from ddplaunch.spec.outcome import Frame, WorkerError, WorkerExit
from ddplaunch.system.console.paint import CODE, ERROR, HINT, STRONG, WEAK, Line, Paint, Words, plain
from ddplaunch.system.errors import indented
from ddplaunch.system.fields import TERMINAL_ESCAPE
from ddplaunch.system.words import count, duration, signal_name, size, these_ranks, tilde

_MESSAGE_LINES = 20  # of an exception's message, besides the first
_STDERR_LINES = 12
_STACK_FRAMES = 12
_LONGEST = 400  # characters of a line that is not ours
# as Python prints `raise ... from`
_RAISED_FROM = "\nThe above exception was the direct cause of the following exception:\n"
_MOST_CAUSES = 3
_MOST_FAILURES = 5  # later failures with a line of their own
_LONGEST_LATER = 120  # characters of a later failure's message
# of torch 2.1 to 2.13: ProcessGroupNCCL.cpp
_TIMED_OUT = r"WorkNCCL\(SeqNum=(\d{1,19}), OpType=(\w{1,40}).{0,200}?\) ran for (\d{1,15}) milliseconds"
_FAILED_AT = r"detected by watchdog at work: (\d{1,19})"
_DUMPS_STACKS = (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV)  # the signals at which faulthandler writes the stacks
_CPP_PLACE = re.compile(r"\[(?:enforce fail at )?[^][\s]*\.(?:cc|cpp|hpp|h):\d+\] ")
_PLAIN = Paint()
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")


class FailureReport(Struct, frozen=True, kw_only=True):
    """All that the failure summary needs."""

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
    locations: tuple[str, ...] = ()  # where other workers were then, in sentences


def render(report: FailureReport, paint: Paint = _PLAIN) -> str:
    """Return the report, which ends with a newline, and reads the same in colours and without."""
    head, *rest = _headline(report)
    where = _location_lines(report)
    shown = [head, *rest, *map(plain, where)]
    cause = report.cause
    hints: list[list[Line]] = []
    if cause is not None:  # its line is evidence, unless the report shows it; commands in the advice are marked
        lines = [_cut(line.strip().removesuffix(":")) for line in _without_noise(cause.line)]
        evidence = [f"evidence: {line}" for line in lines if not any(line in each for each in shown)]
        advice = re.split(r"(`[^`\n]+`)", f" {cause.advice}")
        marked = (Words(part, CODE if part.startswith("`") else "") for part in advice)
        hints = [_indented(evidence), [(Words("hint:", HINT), *marked)]]
    sections: list[list[Line]] = [
        [(Words("error:", ERROR), Words(f" {head}", STRONG)), *_indented(rest)],
        _indented(where),
        _indented(_process_lines(report)),
        *hints,
    ]
    # whose files the lines link to in a terminal; "": of this one
    host = "" if report.is_simulated else report.first.host
    written = [[indented(paint.line(line, host)) for line in section] for section in sections if section]
    return "\n\n".join(map("\n".join, written)) + "\n"


def _headline(report: FailureReport) -> list[str]:
    """Return which rank failed, why, how and after how long; then the rest of the exception's message."""
    first = report.first
    hosts = {end.host for end in report.exits}
    who = f"rank {first.rank} on {first.host}" if len(hosts) > 1 else f"rank {first.rank}"
    what, *rest = [_cut(line) for line in _without_noise(what_failed(first))] or [first.how]
    how = [f"after {duration(first.seconds)}"]
    if first.core_dumped:
        how.insert(0, "core dumped")
    raised_before_stop = first.error is not None and first.stopped_with is not None and failed_itself(first)
    if raised_before_stop:
        how.insert(0, "stopped while it was exiting")  # the status says how ddplaunch ended it, not how it failed
    elif what != first.how:
        how.insert(0, first.how)
    if len(rest) > _MESSAGE_LINES:
        rest = [*rest[:_MESSAGE_LINES], f"... and {count(len(rest) - _MESSAGE_LINES, 'more line')} in its log"]
    who = f"{report.ended_by}: {who}" if report.ended_by else who  # "out of walltime: rank 3"
    return [f"{who} failed: {what}   ({', '.join(how)})", *rest]


def _location_lines(report: FailureReport) -> list[Line]:
    """Return lines on where in the code the first worker failed, or on its last stderr output if no exception says more."""
    first, cwd = report.first, report.cwd
    error = first.error
    if error is None:
        return _crash_lines(first, cwd)
    if error.type in _SYNTAX_ERRORS:  # what cannot be compiled has no frame: the message names file and line
        found = stack.syntax_error_lines(error.traceback)
        if not found:
            return []
        where, *source = found
        return [(Words(short(where, cwd), CODE, file=where.rpartition(":")[0]),), *_source_lines(source)]
    own, inner = stack.relevant_frames(frames_of(error))  # in the user's code, and below it in a library
    if error.type == "SystemExit":
        # where a library calls sys.exit() explains nothing; what was printed before, as by argparse, does
        inner = None if own else inner
    lines: list[Line] = []
    for frame in (own, inner):
        if frame is not None:
            source = [f"  {line}" for line in stack.source_lines(error, frame)]
            lines += [(_location_words(frame, cwd),), *_source_lines(source)]
    lines += _raised_from(error, cwd)
    last_output = _last_stderr(first.stderr_tail) if _says_only_how_it_ended(first) else []
    if last_output:
        lines += ["", *last_output] if lines else last_output
    return lines


def _raised_from(error: WorkerError, cwd: str) -> list[Line]:
    """Return a line for each exception from which this one was raised, the nearest first: what it was, and where."""
    lines: list[Line] = []
    *causes, _ = error.traceback.split(_RAISED_FROM)  # Python prints the first cause first, and this error last
    for text in causes[::-1][:_MOST_CAUSES]:
        after_header = text.rpartition("Traceback (most recent call last):\n")[2].split("\n")
        what = next((line for line in after_header if line and not line.startswith(" ")), "")  # its frames are indented
        cause = replace(error, frames=(), traceback=text)  # without frames, those of the text count
        frame = next(filter(None, stack.relevant_frames(frames_of(cause))), None)
        where = f"   ({location(frame, cwd)})" if frame is not None else ""
        lines += [f"raised from {_cut(what)}{where}"] if what else []
    return lines


def _source_lines(lines: Sequence[str]) -> list[Line]:
    """Return a line of code, and the pointer below it, as the report shows them."""
    return [(Words(_cut(text), ERROR if set(text) <= {" ", "~", "^"} else STRONG),) for text in lines]


def _location_words(frame: Frame, cwd: str) -> Words:
    """Return where a frame is, as the report shows it: in a library, or in the user's code."""
    return Words(location(frame, cwd), WEAK if stack.is_library(frame) else CODE, frame.file)


def _crash_lines(first: WorkerExit, cwd: str) -> list[Line]:
    """Return lines on an end without an exception.

    They are the stderr output, which says why, for an abort or without a stack; the collective that NCCL's watchdog names; and
    faulthandler's stacks, of the main thread too if another one has crashed.
    """
    is_abort = first.signal == SIGABRT
    before_stacks, _, _ = first.stderr_tail.rpartition(FATAL)  # FATAL begins what faulthandler writes
    crash = parse_crash(first.stderr_tail) if first.signal in _DUMPS_STACKS else Crash()
    has_stack = bool(crash.current or crash.main)
    reason: list[Line] = _last_stderr(before_stacks) if is_abort or not has_stack else []
    if not (has_stack or reason):
        reason = _last_stderr(first.stderr_tail)
    by_watchdog = _collective(before_stacks) if is_abort else ""
    collective: list[Line] = [by_watchdog] if by_watchdog else []
    sections = [
        reason,
        collective,
        _stack_lines("stack", crash.current, cwd),
        _stack_lines("stack of the main thread", crash.main, cwd),
    ]
    lines: list[Line] = []
    for section in sections:
        lines += ["", *section] if lines and section else section
    return lines


def _stack_lines(title: str, frames: Sequence[Frame], cwd: str) -> list[Line]:
    """Return the innermost frames of a stack, and the script's first frame if that is left out; nothing if there is no frame."""
    if not frames:
        return []
    shown, more = frames[:_STACK_FRAMES], frames[_STACK_FRAMES:]
    left_out: list[Line] = [f"  ... and {count(len(more), 'more frame')}"] if more else []
    if more and all(map(stack.is_library, shown)):
        own = next((number for number, frame in enumerate(more) if not stack.is_library(frame)), None)
        if own is not None:
            left_out = [f"  ... {count(own, 'frame')} of libraries"] if own else []
            left_out.append((Words("  "), _location_words(more[own], cwd)))
    return [
        f"{title}, innermost frame first:",
        *((Words("  "), _location_words(frame, cwd)) for frame in shown),
        *left_out,
    ]


def _collective(text: str) -> str:
    """Return what NCCL's watchdog says of the collective for which it has ended the process; "" if it says nothing."""
    text = searchable(text)
    if timeouts := re.findall(_TIMED_OUT, text):  # the last one is in the exception that ended the process
        number, operation, ran = timeouts[-1]
        name = operation.lower()
        for words in ("all_reduce", "all_gather", "all_to_all"):  # as torch's functions and its recorder are called
            name = name.replace(words.replace("_", ""), words)
        return f"NCCL's watchdog ended it: {name} #{number} had run for {duration(int(ran) / 1000)}"
    works = re.findall(_FAILED_AT, text)
    return f"NCCL's watchdog ended it: it found the failure at collective #{works[-1]}" if works else ""


def _last_stderr(text: str) -> list[Line]:
    """Return the last lines of a stderr output with a title; nothing if there is none."""
    lines = _without_noise(text)
    return ["last stderr output:", *(f"  {_cut(line)}" for line in lines[-_STDERR_LINES:])] if lines else []


def _process_lines(report: FailureReport) -> list[Line]:
    """Return lines about the failed process and its log, about the other workers, and about restarts."""
    first = report.first
    facts = [f"pid {first.pid}", first.device]
    if len({end.host for end in report.exits}) > 1:
        facts = [first.host, f"local rank {first.local_rank}", *facts]
    if (progress := first.progress) is not None:
        facts.append(f"step {progress.step:,}" + (f" of {progress.total:,}" if progress.total else ""))
    if first.signal is not None and first.peak_rss:
        facts.append(f"peak memory {size(first.peak_rss)}")
    process = Words(f"rank {first.rank}   {'  '.join(facts)}", WEAK)
    path = first.log or report.log_folder
    # a line of its own, since a path that wraps cannot be copied
    label = "logs " if first.log else "run  "  # a worker that has the terminal itself has no log
    logs = [(Words(label, WEAK), Words(tilde(short(path, report.cwd), report.home), file=path))] if path else []
    others = [*describe_others(first, report.exits, report.cwd), *report.locations]
    if report.restarts:
        others.append(f"{report.restarts} of {count(report.max_restarts, 'restart')} used")
    return [(process,), *logs, *((Words(line, WEAK),) for line in others)]


def _without_noise(text: str) -> list[str]:
    """Return the lines of a text: no C++ stacks and places, no colours, a bar's last state, no blank lines in a row."""
    lines: list[str] = []
    for raw in re.sub(TERMINAL_ESCAPE, "", text).split("\n"):
        line = _CPP_PLACE.sub("", raw.rstrip().rpartition("\r")[2])
        if not NOISE.match(line) and (line or (lines and lines[-1])):
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _indented(lines: Iterable[Line]) -> list[Line]:
    return [(Words("  "), *line) if isinstance(line, tuple) else f"  {line}" if line else "" for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


# --- the other workers


def describe_others(first: WorkerExit, exits: Iterable[WorkerExit], cwd: str) -> list[str]:
    """Return one line for each group of the other workers.

    They failed alike, failed otherwise (later), failed because a peer had ended (followers), finished, or were stopped.
    """
    others = sorted((end for end in exits if end.rank != first.rank), key=lambda end: end.rank)
    likeness = _likeness(first)
    alike, followers, later, finished, stopped = (list[WorkerExit]() for _ in range(5))
    for end in others:
        if failed_itself(end):
            group = alike if _likeness(end) == likeness else followers if follows_another(end) else later
        elif end.stopped_with is not None and _said_the_same(end, first):
            group = alike  # ddplaunch stopped it on its way out
        else:
            group = finished if end.stopped_with is None else stopped
        group.append(end)
    lines = []
    if alike:
        number, ranks = len(others) + 1, sorted(end.rank for end in (first, *alike))
        of_all = "both ranks" if number == 2 else f"all {number} ranks"
        lines.append(f"{of_all if len(ranks) == number else these_ranks(ranks)} failed with the same error")
    lines += _later_lines(first, sorted(later, key=failed_at), cwd)
    if followers:
        who = these_ranks([end.rank for end in followers])
        locations = {location(frame, cwd) for end in followers if (frame := _frame_of(end)) is not None}
        where = f", in {locations.pop()}" if len(locations) == 1 else ""
        how = "lost contact too" if follows_another(first) else "then lost contact with it"
        lines.append(f"{who} {how}{where}")
    return [*lines, *_finished_lines(first, finished), *_stopped_lines(stopped, len(others))]


def what_failed(end: WorkerExit) -> str:
    """Return in short what ended a worker: its exception, or its exit status or signal."""
    error = end.error
    if error is None or (error.type == "SystemExit" and re.fullmatch(r"-?\d*|None", error.message)):
        return end.how
    message = error.message.strip()
    if error.type == "SystemExit":
        return message
    return f"{error.type}: {message}" if message else error.type


def _says_only_how_it_ended(end: WorkerExit) -> bool:
    """Whether nothing better is known of a failure than the exit status or signal."""
    return what_failed(end) == end.how


def _likeness(end: WorkerExit) -> tuple[object, ...]:
    """Return what two failures have in common if they are the same one: all but numbers, which name devices, sizes, ports."""
    frame = _frame_of(end)
    status = end.how if _says_only_how_it_ended(end) else None  # this number counts
    message = _without_numbers(what_failed(end)) if end.error else _last_words(end)
    return status, message, frame and (frame.file, frame.line)


def _last_words(end: WorkerExit) -> str:
    """Return the last line that a worker wrote to stderr before faulthandler did, without its numbers; "" if there is none."""
    said = end.stderr_tail.rpartition(FATAL)[0] if end.signal in _DUMPS_STACKS else ""
    lines = _without_noise(said or end.stderr_tail)
    return _without_numbers(lines[-1]) if lines else ""


def _said_the_same(stopped: WorkerExit, first: WorkerExit) -> bool:
    """Whether a worker that was stopped had ended its output as the first one did, which exited with a status of its own."""
    exited = first.signal is None and _says_only_how_it_ended(first) and first.code not in (None, 0)
    words = _last_words(first)
    return exited and stopped.error is None and words != "" and _last_words(stopped) == words


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _frame_of(end: WorkerExit) -> Frame | None:
    """Return where a worker failed: in the script, if that is known, else in a library."""
    if end.error is not None:
        frames = frames_of(end.error)
    else:
        crash = parse_crash(end.stderr_tail) if end.signal in _DUMPS_STACKS else Crash()
        frames = tuple(reversed(crash.current or crash.main))
    own, inner = stack.relevant_frames(frames)
    return own or inner


def _later_lines(first: WorkerExit, later: Sequence[WorkerExit], cwd: str) -> list[str]:
    """Return lines about workers that failed after the first: when, how and where."""
    lines = []
    for end in later[:_MOST_FAILURES]:
        what = what_failed(end).partition("\n")[0]
        what = what if len(what) <= _LONGEST_LATER else f"{what[:_LONGEST_LATER]}..."
        frame = _frame_of(end)
        where = f"   ({location(frame, cwd)})" if frame else ""
        lines.append(f"rank {end.rank} failed {duration(failed_at(end) - failed_at(first))} later: {what}{where}")
    if more := later[_MOST_FAILURES:]:
        lines.append(f"{these_ranks([end.rank for end in more])} failed too")
    return lines


def _finished_lines(first: WorkerExit, finished: Sequence[WorkerExit]) -> list[str]:
    """Return a line about workers that had ended with status 0; none if there are none."""
    if not finished:
        return []
    who = these_ranks([end.rank for end in finished])
    seconds_before = failed_at(first) - max(end.at for end in finished)
    # the first failure is the loss of a peer: one that had left too early
    if follows_another(first) and seconds_before >= 0:
        last = ", the last one" if len(finished) > 1 else ""
        return [f"{who} had exited with status 0{last}, {duration(seconds_before)} before"]
    return [f"{who} finished with status 0"]


def _stopped_lines(stopped: Sequence[WorkerExit], others: int) -> list[str]:
    """Return a line about workers that ddplaunch stopped, grouped by the signal that ended them."""
    if not stopped:
        return []
    groups: dict[int, list[WorkerExit]] = {}
    for end in stopped:
        groups.setdefault(end.stopped_with or 0, []).append(end)
    ranks = [end.rank for end in stopped]
    all_others = "the other worker" if others == 1 else f"the other {others} workers"
    who = these_ranks(ranks) if len(stopped) < others else all_others
    who = f"{who} {'was' if len(stopped) == 1 else 'were'} stopped"
    if len(groups) == 1:
        return [f"{who} {_how_stopped(stopped)}"]
    # the largest group is counted, but never those that had to be killed: all others are named
    counted = max(groups.values(), key=lambda group: (group[0].stopped_with != SIGKILL, len(group)))
    parts = [
        f"{len(group) if group is counted else these_ranks([end.rank for end in group])} {_how_stopped(group)}"
        for group in sorted(groups.values(), key=len, reverse=True)
    ]
    return [f"{who}: {', '.join(parts)}"]


def _how_stopped(group: Sequence[WorkerExit]) -> str:
    """Return "by SIGTERM in 0.1 s": what ended these workers, and how long after the stop the last one ended."""
    signum = group[0].stopped_with or 0
    took = [end.at - end.stopped_at for end in group if end.stopped_at is not None]
    by = f"by {signal_name(signum)}"
    return f"{by} {'after' if signum == SIGKILL else 'in'} {duration(max(took))}" if took else by
