"""Reads what torch's flight recorder in a worker answers, and which ranks the worker's groups have. Pure.

Nothing is trusted: of what is wrong in an answer no more is lost than what it would have said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ddplaunch.record.seen import LONGEST_MEMBERS, MAX_MEMBERS, Call, Group
from ddplaunch.system.fields import Malformed, check_density, piece

_MOST_GROUPS = 64  # of a worker
_MOST_MEMBERS = 1 << 18  # ranks of all groups of a worker together
_MOST_CALLS = 16  # of a group that are kept: the last ones
_MOST_TENSORS = 4  # of a call that are written one by one
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_LONGEST_TEXT = 160  # characters of a name or of sizes
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
}


def parse_members(text: str) -> dict[str, str]:
    """Return the ranks of groups, as "0-3,7" by name, in the file that worker/distributed.py writes: "NAME RANKS" in each line.

    A group is left out if its ranks are malformed, are more than a job can have, or are too many beside those of other groups.
    """
    found = {}
    room = _MOST_MEMBERS
    for line in text.split("\n"):
        name, _, ranks = line.rpartition(" ")
        size = _count_ranks(ranks) if len(ranks) <= LONGEST_MEMBERS else 0
        if 0 < size <= min(room, MAX_MEMBERS):
            found[name] = ranks
            room -= size
    return found


def last_rank(written: str) -> int:
    """Return the highest rank in a text of ascending ranges, -1 for any other text."""
    return int(re.split("[,-]", written)[-1]) if _count_ranks(written) else -1


def _count_ranks(written: str) -> int:
    """Return how many ranks a text of ascending ranges names: 4 for "0-2,4"; 0 for any other text."""
    ranges = []
    for part in written.split(","):
        if not (match := _RANGE.fullmatch(part)):
            return 0
        low = int(match[1])
        ranges.append(range(low, int(match[2] or low) + 1))
    ascends = all(before.stop <= after.start for before, after in pairwise(ranges))
    none_is_empty = all(ranges)  # as "3-1" would be
    return sum(map(len, ranges)) if ascends and none_is_empty else 0


def parse(body: bytes, members: Mapping[str, str]) -> list[Group]:
    """Return the groups in an answer of the recorder, with their last calls; `members` is what `parse_members` returns."""
    answer = _decoded(body)
    status = _mapping(answer.get("pg_status"))
    calls: dict[str, list[Call]] = {}  # these and the names by torch's id of the group
    names: dict[str, tuple[str, str]] = {}
    for fields in _entries(answer):
        group_id = str(fields.get("pg_id"))
        has_room = group_id in names or len(names) < _MOST_GROUPS
        if has_room and (call := call_of(fields)) is not None:
            names.setdefault(group_id, name_and_title_of(fields.get("process_group")))
            calls.setdefault(group_id, []).append(call)
    return [
        Group(
            name=name,
            title=title,
            members=members.get(name, ""),
            completed=number_of(_mapping(status.get(group_id)).get("last_completed_collective")),
            calls=_latest_and_awaited(calls[group_id]),
        )
        for group_id, (name, title) in names.items()
    ]


def entries_of(body: bytes) -> list[Mapping[str, Any]]:
    """Take out of an answer what is recorded of each call, oldest first."""
    return _entries(_decoded(body))


def _decoded(body: bytes) -> Mapping[str, Any]:
    import msgspec  # only what asks workers needs it

    try:
        check_density(body)
        return _mapping(msgspec.json.decode(body))
    except (Malformed, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _entries(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = answer.get("entries")
    return [_mapping(entry) for entry in entries] if isinstance(entries, list) else []


def _latest_and_awaited(calls: list[Call]) -> tuple[Call, ...]:
    """The last calls, and the first that is not completed: its rank waits there, whatever it has queued since."""
    waiting = next((call for call in calls if not call.done), None)
    kept = calls[-_MOST_CALLS:]
    return tuple(kept if waiting is None or waiting in kept else [waiting, *kept])


def call_of(fields: Mapping[str, Any]) -> Call | None:
    """Return the call of one entry of torch's flight recorder; None if the entry has no number or no name of a call."""
    is_p2p = fields.get("is_p2p") is True
    number = number_of(fields.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    name = fields.get("profiling_name")
    if number < 0 or not isinstance(name, str):
        return None
    done = fields.get("retired") is True or fields.get("state") == "completed"  # NCCL's watchdog retires what has ended
    created = max(0, number_of(fields.get("time_created_ns")))
    inputs, outputs = (_tensors(fields, side) for side in ("input", "output"))
    operation = name.partition(":")[2] or name  # "gloo:all_reduce"
    return Call(
        number=number,
        operation=piece(operation, _LONGEST_TEXT),
        inputs=inputs,
        outputs=outputs,
        is_p2p=is_p2p,
        done=done,
        at=created,
    )


def _tensors(fields: Mapping[str, Any], side: str) -> str:
    """Write the tensors of one side of a call, "input" or "output": "float32 [4096, 4096]", "float32 8 x [1024]"."""
    sizes, dtypes = fields.get(f"{side}_sizes"), fields.get(f"{side}_dtypes")
    if not isinstance(sizes, list) or not isinstance(dtypes, list):
        return ""
    kinds = [_DTYPES.get(str(kind), str(kind).lower()) for kind in dtypes[:_MOST_TENSORS]]
    kind = kinds[0] if len(set(kinds)) == 1 else "/".join(kinds)
    shapes = ", ".join(map(str, sizes[:_MOST_TENSORS])) + (", ..." if len(sizes) > _MOST_TENSORS else "")
    are_equal = len(sizes) > 1 and len(set(map(str, sizes))) == 1
    if are_equal:
        shapes = f"{len(sizes)} x {sizes[0]}"
    return piece(f"{kind} {shapes}".strip(), _LONGEST_TEXT)


def name_and_title_of(value: object) -> tuple[str, str]:
    """Return the name of a group, and what the program calls it; "" for what is not known."""
    name, title = ([*value, "", ""] if isinstance(value, list) else ["", ""])[:2]
    return piece(str(name), _LONGEST_TEXT), "" if title in ("default_pg", "undefined") else piece(
        str(title), _LONGEST_TEXT
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def number_of(value: object) -> int:
    """An integer, which torch writes as a text in places; -1 for none."""
    try:
        number = int(value) if isinstance(value, (int, str)) else -1
    except ValueError:
        return -1
    return number if -1 <= number < 2**63 else -1
