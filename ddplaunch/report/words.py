"""Quantities and names as they stand in a sentence. Pure."""

from __future__ import annotations

from collections.abc import Collection
from signal import Signals

from ddplaunch.errors import count as count  # noqa: PLC0414 - offered here too
from ddplaunch.errors import duration as duration  # noqa: PLC0414


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
