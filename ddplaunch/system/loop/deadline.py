"""Deadlines as values: seconds of one clock, None for none. Pure; reads no clock."""

from __future__ import annotations


def soonest(*deadlines: float | None) -> float | None:
    """Return the earliest of these deadlines, None if there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def is_due(deadline: float | None, at: float) -> bool:
    """Whether this deadline has come."""
    return deadline is not None and at >= deadline


def later(deadline: float | None, seconds: float) -> float | None:
    """Return the deadline moved by so many seconds; None if there is none."""
    return None if deadline is None else deadline + seconds
