"""Many ranks in few characters. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def compress(ranks: Iterable[int]) -> str:
    """Write ranks as ascending ranges, each rank once: "0-2,4"."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
