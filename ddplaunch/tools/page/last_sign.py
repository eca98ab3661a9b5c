"""Finds when a run showed the last sign of life whose end nobody has recorded: by its samples, and by the times of its logs."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from ddplaunch.record.run_folder import SAMPLES
from ddplaunch.system.fields import Seconds
from ddplaunch.system.process.files import open_regular
from ddplaunch.tools.runs.logs import logs_of

_READ = 1 << 20  # bytes of samples, from the end; a line of thousands of ranks is shorter
_WITHIN = 60.0  # seconds that an event may wait until it is written


class _Row(Struct):
    mono: Seconds


def last_sign(folder: str, parts: Iterable[tuple[str, float, float]]) -> float:
    """Return when any worker of the run in `folder` was last seen to live, in seconds since 1970; 0 if that is not known.

    `parts` are the folders of its nodes, the offset of each node's CLOCK_MONOTONIC, and the time of its last event.
    """
    told = [each for each in parts if each[2]]  # a node without events has no clock that is known
    signs = [_last_sample(f"{part}/{SAMPLES}") + offset for part, offset, _ in told]
    if all(_is_original(f"{part}/events.jsonl", last) for part, _, last in told):
        signs += (_modified(path) for log in logs_of(folder) for path in _segments(f"{log.folder}/{log.name}"))
    return max(signs, default=0.0)


def _last_sample(path: str) -> float:
    """Return the time of the last sample that can be read, as CLOCK_MONOTONIC; -inf if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
            lines = file.read(_READ).split(b"\n")
    except OSError:
        return float("-inf")
    decode = msgspec.json.Decoder(_Row).decode
    for line in reversed(lines):
        try:
            return decode(line).mono
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return float("-inf")


def _is_original(events: str, last: float) -> bool:
    """Whether the files of a node have the times at which they were written, and not that of a copy of the folder."""
    return abs(_modified(events) - last) < _WITHIN


def _segments(log: str) -> list[str]:
    """Return the paths of a log and of the segments that a long one is continued in."""
    return [log, *glob.glob(f"{glob.escape(log)}.*")]


def _modified(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
