"""Reads which worker this is from the variables that a launcher sets. Pure; refuses variables that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Ranks(NamedTuple):
    """Which worker of the job this is, of how many."""

    rank: int
    world_size: int


def ranks(env: Mapping[str, str]) -> Ranks:
    """Return rank and world size, those of a single process if no launcher has set them.

    Raises: ValueError: one of the variables is missing, or they contradict each other.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
    if len(missing) == 2:
        return Ranks(0, 1)
    if missing:
        there = "RANK" if missing == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise ValueError(f"{there} is set and {missing[0]} is not: a launcher must set both or none")
    found = Ranks(number("RANK", env), number("WORLD_SIZE", env))
    if found.rank >= found.world_size:
        raise ValueError(f"RANK is {found.rank}, but WORLD_SIZE is {found.world_size}: ranks count from 0")
    return found


def number(name: str, env: Mapping[str, str]) -> int:
    """Return the number in a variable, 0 if it is not set.

    Raises: ValueError: it holds something else.
    """
    text = env.get(name) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} is {text!r}, which is no number from 0")
    return int(text)
