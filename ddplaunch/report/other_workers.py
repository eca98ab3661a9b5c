"""What became of the other workers after the first failure, each of them counted once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from signal import SIGKILL

from ddplaunch.report.stack import frames_of, place, relevant_frames
from ddplaunch.supervise.first_failure import failed_at, failed_itself, follows
from ddplaunch.supervise.outcome import Frame, WorkerExit
from ddplaunch.words import duration, signal_name, these_ranks

_MOST_FAILURES = 5  # later failures with a line of their own
_LONGEST = 120  # characters of a later failure's message


def describe_others(first: WorkerExit, exits: Iterable[WorkerExit], cwd: str) -> list[str]:
    """Return one line each for those that failed alike, failed otherwise, followed, had finished, were stopped."""
    others = sorted((end for end in exits if end.rank != first.rank), key=lambda end: end.rank)
    likeness = _likeness(first)
    alike: list[WorkerExit] = []
    followers: list[WorkerExit] = []
    later: list[WorkerExit] = []
    finished: list[WorkerExit] = []
    stopped: list[WorkerExit] = []
    for end in others:
        if failed_itself(end):
            group = alike if _likeness(end) == likeness else followers if follows(end) else later
        else:
            group = finished if end.stopped_with is None else stopped
        group.append(end)
    return [
        *_alike(first, alike, len(others) + 1),
        *_later(first, sorted(later, key=failed_at), cwd),
        *_followers(first, followers, cwd),
        *_finished(first, finished),
        *_stopped(stopped, len(others)),
    ]


def what_failed(end: WorkerExit) -> str:
    """Describe in short what ended a worker: its exception, or its exit status or signal."""
    error = end.error
    if error is None or (error.type == "SystemExit" and re.fullmatch(r"-?\d*|None", error.message)):
        return end.how
    message = error.message.strip()
    if error.type == "SystemExit":
        return message
    return f"{error.type}: {message}" if message else error.type


def _likeness(end: WorkerExit) -> tuple[object, ...]:
    """What two failures have in common if they are the same one: all but numbers, which name devices, sizes, ports."""
    frame = _frame(end)
    what = what_failed(end)
    status = what if what == end.how else None  # this number counts
    message = what if end.error else end.stderr_tail.strip().rpartition("\n")[2]
    return status, re.sub(r"0x[0-9a-f]+|\d+", "#", message), frame and (frame.file, frame.line)


def _frame(end: WorkerExit) -> Frame | None:
    own, inner = relevant_frames(frames_of(end.error) if end.error else ())
    return own or inner


def _alike(first: WorkerExit, alike: Sequence[WorkerExit], number: int) -> list[str]:
    if not alike:
        return []
    ranks = sorted(end.rank for end in (first, *alike))
    of_all = "both ranks" if number == 2 else f"all {number} ranks"
    who = of_all if len(ranks) == number else these_ranks(ranks)
    return [f"{who} failed with the same error"]


def _later(first: WorkerExit, later: Sequence[WorkerExit], cwd: str) -> list[str]:
    lines = []
    for end in later[:_MOST_FAILURES]:
        what = what_failed(end).partition("\n")[0]
        what = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."
        frame = _frame(end)
        where = f"   ({place(frame, cwd)})" if frame else ""
        lines.append(f"rank {end.rank} failed {duration(failed_at(end) - failed_at(first))} later: {what}{where}")
    if more := later[_MOST_FAILURES:]:
        lines.append(f"{these_ranks([end.rank for end in more])} failed too")
    return lines


def _followers(first: WorkerExit, followers: Sequence[WorkerExit], cwd: str) -> list[str]:
    if not followers:
        return []
    who = these_ranks([end.rank for end in followers])
    places = {place(frame, cwd) for end in followers if (frame := _frame(end)) is not None}
    where = f", in {places.pop()}" if len(places) == 1 else ""
    return [f"{who} lost contact too{where}" if follows(first) else f"{who} then lost contact with it{where}"]


def _finished(first: WorkerExit, finished: Sequence[WorkerExit]) -> list[str]:
    if not finished:
        return []
    who = these_ranks([end.rank for end in finished])
    before = failed_at(first) - max(end.at for end in finished)
    if follows(first) and before >= 0:
        last = ", the last one" if len(finished) > 1 else ""
        return [f"{who} had exited with status 0{last}, {duration(before)} before"]
    return [f"{who} finished with status 0"]


def _stopped(stopped: Sequence[WorkerExit], others: int) -> list[str]:
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
    # those that had to be killed are named, the others are counted
    counted = max(groups.values(), key=lambda group: (group[0].stopped_with != SIGKILL, len(group)))
    parts = [
        f"{len(group) if group is counted else these_ranks([end.rank for end in group])} {_how_stopped(group)}"
        for group in sorted(groups.values(), key=len, reverse=True)
    ]
    return [f"{who}: {', '.join(parts)}"]


def _how_stopped(group: Sequence[WorkerExit]) -> str:
    """Say "by SIGTERM in 0.1 s": what ended these workers, and how long after the stop the last one ended."""
    signum = group[0].stopped_with or 0
    took = [end.at - end.stopped_at for end in group if end.stopped_at is not None]
    by = f"by {signal_name(signum)}"
    return f"{by} {'after' if signum == SIGKILL else 'in'} {duration(max(took))}" if took else by
