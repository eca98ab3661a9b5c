"""Writes quantities and names as they stand in a message, and reads ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from signal import Signals


def count(number: int, noun: str) -> str:
    """Count things: "1 worker", "4 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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


def compress(ranks: Iterable[int]) -> str:
    """Write ranks as ascending ranges, each rank once: "0-2,4"."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ranks_of(text: str, most: int) -> list[int]:
    """Read ranks and ranges, as `compress` writes them: those below `most`, whatever else stands there."""
    return [rank for each in ranges_of(text, most) for rank in each]


def ranges_of(text: str, most: int) -> list[range]:
    """Read ranks below `most`, such as "0-2,4", as ascending ranges that do not touch: a short text may name very many ranks."""
    spans = ((int(low), min(int(high or low) + 1, most)) for low, high in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", text))
    found: list[range] = []
    for low, stop in sorted(span for span in spans if span[0] < span[1]):
        if found and low <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, stop))
        else:
            found.append(range(low, stop))
    return found


def these_ranks(ranks: Collection[int]) -> str:
    """Name ranks as a subject: "rank 3", "ranks 0-2,4"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {compress(ranks)}"


def some(names: Iterable[str], most: int = 8) -> str:
    """Name things, of many the first ones: "a, b", "a, b and 7 more"."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def why_failed(error: OSError) -> str:
    """Return why a system call failed, as it reads after a colon: "permission denied"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def did_you_mean(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the word that was probably meant, None if none is similar; `cutoff` is difflib's, 1 means equal."""
    from difflib import get_close_matches  # only mistakes need it

    known = list(words)
    longer = [candidate for candidate in known if len(word) > 3 and candidate.startswith(word)]
    return next(iter(sorted(longer, key=len) or get_close_matches(word, known, n=1, cutoff=cutoff)), None)
