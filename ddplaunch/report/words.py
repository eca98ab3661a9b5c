"""Quantities and names as they stand in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Collection
from signal import Signals

from ddplaunch.errors import count as count  # noqa: PLC0414 - offered here too


def duration(seconds: float) -> str:
    """Write a time span in its two largest units: "40 ms", "0.1 s", "12 min 4 s", "3 h 2 min"."""
    seconds = max(seconds, 0.0)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d" + (f" {hours} h" if hours else "")


def size(number: int) -> str:
    """Write a number of bytes in its largest binary unit: "512 B", "61.2 GiB"."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1023.95:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def signal_name(signum: int) -> str:
    """Name a signal: "SIGTERM"; "signal 40" if it has no name."""
    try:
        return Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def tilde(path: str, home: str) -> str:
    """Shorten a path below the home folder, as a shell takes it back."""
    return f"~{path[len(home.rstrip('/')) :]}" if home and path.startswith(f"{home.rstrip('/')}/") else path


def these_ranks(ranks: Collection[int]) -> str:
    """Name ranks as a subject: "rank 3", "ranks 0-2,4"."""
    from ddplaunch.plan.ranks import compress  # what only writes quantities needs no plan

    return f"rank{'s' if len(ranks) > 1 else ''} {compress(ranks)}"
