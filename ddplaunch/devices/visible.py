"""Reads a visibility variable such as CUDA_VISIBLE_DEVICES as the runtime will read it; pure.

It never raises: what the runtime would ignore is ignored here too, and reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_UUID_PREFIXES = ("GPU-", "MIG-")
HIDES_ALL = ("", "-1", "NoDevFiles")  # the usual ways of hiding every device; the last one is Slurm's


class Listed(NamedTuple):
    """The devices that a variable names."""

    positions: tuple[int, ...]  # of those that will be visible, in the order they will be counted
    entries: tuple[str, ...]  # how the variable names each of them
    problem: str | None = None  # why there are fewer than the variable names; None: there are not


def listed(value: str, names: Sequence[tuple[str, ...]], count: int) -> Listed:
    """Return what `value` makes visible; `names[i]` are the UUIDs of device i, the first `count` have an index too.

    Rules: an entry that names no device, or several, ends the list; a device named twice hides them all; a UUID
    may be cut short; an index may have letters behind it; the first entry says whether the list is of indices or
    of UUIDs.
    Source: the CUDA programming guide, "CUDA environment variables"; torch/cuda/__init__.py, _parse_visible_devices.
    """
    if value.strip() in HIDES_ALL:
        return Listed((), ())
    entries = [entry.strip() for entry in value.split(",")]
    by_uuid = entries[0].startswith(_UUID_PREFIXES)
    positions: list[int] = []
    for entry in entries:
        matches = _by_uuid(entry, names) if by_uuid else _by_index(entry, count)
        if len(matches) != 1:
            return Listed(tuple(positions), tuple(entries[: len(positions)]), _why(entry, len(matches)))
        if matches[0] in positions:
            return Listed((), (), f"it names {entry} twice, which hides every device")
        positions += matches
    return Listed(tuple(positions), tuple(entries))


def _by_uuid(entry: str, names: Sequence[tuple[str, ...]]) -> list[int]:
    if not entry.startswith(_UUID_PREFIXES):
        return []
    whole = [position for position, own in enumerate(names) if entry in own]
    return whole or [position for position, own in enumerate(names) if any(name.startswith(entry) for name in own)]


def _by_index(entry: str, count: int) -> list[int]:
    digits = re.match(r"\+?([0-9]+)", entry)
    return [int(digits[1])] if digits and int(digits[1]) < count else []


def _why(entry: str, matches: int) -> str | None:
    if entry == "-1":  # the documented way to end a list
        return None
    names = f"{entry} names {matches} devices" if matches else f"there is no device {entry or '(empty)'} here"
    return f"{names}, so it and what follows it is ignored"
