"""The grammar of times: text in, seconds out. Pure."""

from __future__ import annotations

import re

from ddplaunch.options.parsers import BadValue

_TOO_LONG = 30 * 365 * 24 * 3600 * 1000  # milliseconds; far above, floats cannot hold them exactly
_DURATION = r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})(?:\.(\d{1,3}))?s)?(?:(\d{1,9})ms)?"
_SECONDS = r"(\d{1,9})(?:\.(\d{1,3}))?"


def duration(value: str) -> float:
    """Read a time as seconds: 90, 1.5, 90s, 15m, 2h, 1h30m, 2d, 500ms."""
    if found := re.fullmatch(_SECONDS, value):
        parts = ("0", "0", "0", *found.groups(), "0")
    elif value and (found := re.fullmatch(_DURATION, value)):
        parts = found.groups()
    else:
        raise BadValue("expected seconds, or a time such as 90s, 15m or 1h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in parts[:4])
    # in milliseconds, so that the sum is exact
    milliseconds = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000
    milliseconds += int((parts[4] or "").ljust(3, "0")) + int(parts[5] or 0)
    if milliseconds >= _TOO_LONG:
        raise BadValue("expected less than 30 years")
    return milliseconds / 1000


def positive_duration(value: str) -> float:
    """Read a time above zero as seconds."""
    seconds = duration(value)
    if not seconds:
        raise BadValue("expected a time above zero")
    return seconds


def duration_from_1s(value: str) -> float:
    """Read a time of at least a second as seconds."""
    seconds = duration(value)
    if seconds < 1:
        raise BadValue("expected at least 1s")
    return seconds


def duration_or_off(value: str) -> float:
    """Read a time of at least a second as seconds, and "off" as 0."""
    return 0.0 if value == "off" else duration_from_1s(value)
