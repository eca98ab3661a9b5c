"""When ranks came to the same collectives, as lines of collectives.jsonl: for the page and the trace of a run. Pure.

Times are those of CLOCK_MONOTONIC of the node that writes the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ddplaunch.launcher.look.stragglers import Arrivals, Clock
from ddplaunch.record.events import VERSION
from ddplaunch.record.seen import Sample
from ddplaunch.system.words import compress

_MOST = 512  # times in a line: the last collectives, but
_LEAST = 4  # of those at least

_Group: TypeAlias = "tuple[str, str]"  # its name and its ranks
_Came: TypeAlias = "dict[_Group, dict[int, dict[int, int]]]"  # by group, number and rank: nanoseconds


def of_arrivals(found: Mapping[int, Sequence[Arrivals]], clocks: Mapping[int, Clock]) -> list[dict[str, Any]]:
    """Return the lines of one reading of all ranks; `clocks` are those of their nodes, by rank."""
    came: _Came = {}
    for rank, of_rank in found.items():
        for each in of_rank:
            group = came.setdefault((each.group.partition(" ")[2], each.members), {})
            for number, at in zip(each.numbers[-_MOST:], each.times[-_MOST:], strict=True):
                group.setdefault(number, {})[rank] = at - clocks[rank].ahead
    return _rows(came, {})


def of_samples(samples: Iterable[Sample], ahead: int) -> list[dict[str, Any]]:
    """Return the lines of the workers of a node; `ahead`: nanoseconds that the time of day is ahead of CLOCK_MONOTONIC."""
    came: _Came = {}
    operations: dict[_Group, dict[int, str]] = {}
    for sample in samples:
        for group in (sample.groups or ()) if not sample.child else ():
            key = group.name, compress(group.members)
            for call in group.calls:
                if not call.is_p2p and call.at:
                    came.setdefault(key, {}).setdefault(call.number, {})[sample.rank] = call.at - ahead
                    operations.setdefault(key, {})[call.number] = call.operation
    return _rows(came, operations)


def _rows(came: _Came, operations: Mapping[_Group, Mapping[int, str]]) -> list[dict[str, Any]]:
    """Return a row of collectives.jsonl for each group: its ranks, and when each came to each of the latest collectives."""
    rows = []
    for (name, members), by_number in came.items():
        ranks = sorted({rank for of_number in by_number.values() for rank in of_number})
        numbers = sorted(by_number)[-max(_LEAST, _MOST // len(ranks)) :]
        base = min(at for number in numbers for at in by_number[number].values())
        row = {
            "v": VERSION,
            "mono": base / 1e9,
            "group": name,
            "members": members,
            "ranks": compress(ranks),
            "numbers": numbers,
            "came": [
                [(by_number[number][rank] - base) // 1000 if rank in by_number[number] else None for rank in ranks]
                for number in numbers
            ],
        }
        if known := operations.get((name, members)):
            row["operations"] = [known[number] for number in numbers]
        rows.append(row)
    return rows
