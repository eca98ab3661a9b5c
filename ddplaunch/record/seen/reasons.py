"""Why workers may hang, as far as they have said so: errors that they printed and went on, and children of theirs that ended.

A thread or a child that dies with a traceback ends no worker, but a worker may wait for it for ever. Pure; opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddplaunch.record.seen import Sample
from ddplaunch.record.seen.dump import FATAL, parse_crash
from ddplaunch.record.seen.stack import frames_of, location, relevant_frames
from ddplaunch.spec.outcome import Frame, WorkerError
from ddplaunch.system.words import these_ranks

ENDED_WELL = "exit status 0"  # the state of such a child
LONGEST = 4000  # characters of an error that are kept
_TRACEBACK = "Traceback (most recent call last):\n"
_LONGEST_SHOWN = 200  # characters of an exception that are shown
_MOST_NAMED = 8  # errors, and children, that are named


def last_error(stderr: str) -> str:
    """Return the last traceback, or dump of a crash, in what a process and its children have printed; "" if there is none."""
    at = max(stderr.rfind(_TRACEBACK), stderr.rfind(FATAL))
    if at < 0:
        return ""
    # "  | " of an exception in a group, as of asyncio.TaskGroup; "[rank3]: " of torch
    margin = stderr[stderr.rfind("\n", 0, at) + 1 : at].replace("+ Exception Group ", "| ")
    return stderr[at : at + LONGEST].replace(f"\n{margin}", "\n")


def reasons(samples: Sequence[Sample], cwd: str) -> list[str]:
    """Say in sentences which errors the ranks have printed, and which of their children have ended badly."""
    return [*_printed(samples, cwd), *_ended_children(samples, badly=True)]


def sentences_on_ended_children(samples: Sequence[Sample]) -> list[str]:
    """Say which children have ended with status 0: a rank may wait for something that they have not done."""
    return _ended_children(samples, badly=False)


def _printed(samples: Iterable[Sample], cwd: str) -> list[str]:
    """Return a sentence for each error; errors of several ranks that differ in numbers alone are one."""
    by_error: dict[str, tuple[str, list[int]]] = {}
    for sample in samples:
        if sample.said and not sample.child and (text := _summary(sample.said, cwd)):
            by_error.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "#", text), (text, []))[1].append(sample.rank)
    return [f"{these_ranks(ranks)} printed {text}" for text, ranks in list(by_error.values())[:_MOST_NAMED]]


def _summary(said: str, cwd: str) -> str:
    """Write an error that a process printed: "OSError: shard 17 is gone   (train.py:5 in prefetch)"; "" if it says nothing."""
    frames: tuple[Frame, ...]  # outermost first
    if said.startswith(FATAL):
        what, crash = said.partition("\n")[0], parse_crash(said)
        frames = tuple(reversed(crash.current or crash.main))
    else:
        lines = said.removeprefix(_TRACEBACK).split("\n")
        what = next((line for line in lines if line and not line.startswith(" ")), "")  # frames are indented
        traceback, _, _ = said.partition(f"\n{what}")  # other output may follow the error
        frames = frames_of(WorkerError(type="", message="", traceback=traceback))
    if not what:
        return ""
    what = what if len(what) <= _LONGEST_SHOWN else f"{what[:_LONGEST_SHOWN]}..."
    own, inner = relevant_frames(frames)
    frame = own or inner
    return f"{what}   ({location(frame, cwd)})" if frame is not None else what


def _ended_children(samples: Iterable[Sample], *, badly: bool) -> list[str]:
    """Return a sentence for each way in which children have ended, `badly` or well, for which their ranks have not waited."""
    by_end: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        if sample.child and sample.ended and (sample.state != ENDED_WELL) is badly:
            by_end.setdefault((sample.child, sample.state), []).append(sample.rank)
    sentences = []
    for (name, how), ranks in list(by_end.items())[:_MOST_NAMED]:
        who, has = ("a child", "has") if len(ranks) == 1 else (f"{len(ranks)} children", "have")
        sentences.append(f"{who} of {these_ranks(sorted(set(ranks)))} ({name}) {has} ended: {how}")
    return sentences
