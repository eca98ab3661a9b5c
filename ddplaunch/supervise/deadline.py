"""Deadlines as values: seconds of a monotonic clock, None for none. Pure; reads no clock."""

from __future__ import annotations


def soonest(*deadlines: float | None) -> float | None:
    """Give the earliest of these deadlines, None if there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)
