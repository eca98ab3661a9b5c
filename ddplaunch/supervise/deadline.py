"""Deadlines and pauses as values: seconds of one clock, None for none. Pure; reads no clock."""

from __future__ import annotations

SHORT_LIFE = 5.0  # seconds; a generation that fails sooner makes the next one wait
_LONGEST = 30.0  # seconds


def soonest(*deadlines: float | None) -> float | None:
    """Return the earliest of these deadlines, None if there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def pause(short_lives: int) -> float:
    """Return the seconds to wait after so many generations in a row that failed at once."""
    return min(2.0 ** (short_lives - 2), _LONGEST) if short_lives > 1 else 0.0
