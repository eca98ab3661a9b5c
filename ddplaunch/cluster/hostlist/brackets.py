"""Slurm's compressed lists: `rack[1-2]n[01-03,7],login` and `5,1(x2)`. Pure; knows names and numbers, not what they mean.

Grammar and order as in Slurm's own hostlist.c: of several brackets in a name the last runs fastest, then the first, then the
second and so on; a range is padded as its lower end is.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ddplaunch.cluster.hostlist.host import MAX_HOSTS, MAX_NAME, checked, number, shown, too_many, wrong

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d{1,8})", re.ASCII | re.DOTALL)
_LARGEST = 999_999_999


def expand(text: str, origin: str) -> tuple[str, ...]:
    """Return the names of a host list, in order.

    Raises:
        LaunchError: the text is no host list, or one of too many hosts.
    """
    names: list[str] = []
    for piece in split(text, origin):
        names += expand_piece(piece, origin)
        if len(names) > MAX_HOSTS:
            raise too_many(text, origin)
    return tuple(names)


def split(text: str, origin: str) -> list[str]:
    """Split a list at the commas outside of brackets.

    Raises:
        LaunchError: a bracket or a name is missing.
    """
    pieces, depth, start = [], 0, 0
    for position, char in enumerate(f"{text},"):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and not depth:
            pieces.append(text[start:position].strip())
            start = position + 1
        if depth not in (0, 1):
            raise wrong(text, origin, "the brackets do not match", hint="type names such as gpu[01-16]")
    if depth:
        raise wrong(text, origin, "the brackets do not match", hint="type names such as gpu[01-16]")
    if "" in pieces:
        what = "there is no host" if len(pieces) == 1 else "a name is missing beside a comma"
        raise wrong(text, origin, what, hint="type names such as gpu01,gpu02")
    return pieces


def expand_piece(piece: str, origin: str) -> list[str]:
    """Return the names of one element of a list, such as `rack[1-2]n[01-03,7]`.

    Raises:
        LaunchError: it names no hosts, or too many.
    """
    # odd parts were in brackets
    parts = [
        _ranges(part, piece, origin) if index % 2 else part for index, part in enumerate(re.split(r"[\[\]]", piece))
    ]
    if math.prod(sum(len(one.numbers) for one in part) for part in parts if not isinstance(part, str)) > MAX_HOSTS:
        raise too_many(piece, origin)
    if sum(len(part) if isinstance(part, str) else part[0].width for part in parts) > MAX_NAME:
        raise wrong(piece, origin, f"a name has at most {MAX_NAME} characters")
    choices = [[part] if isinstance(part, str) else [text for one in part for text in one.texts()] for part in parts]
    before, last = choices[:-2], choices[-2:]  # the last bracket, and what follows it
    combinations = itertools.product(*reversed(before), *last)
    count = len(before)
    return [checked("".join((*found[:count][::-1], *found[count:])), piece, origin) for found in combinations]


class _Range(Struct, frozen=True):
    """Numbers in brackets, expanded to text only once they are known not to be too many."""

    numbers: range
    width: int  # digits; shorter numbers are padded with zeros

    def texts(self) -> list[str]:
        """The numbers as they stand in names."""
        return [f"{number:0{self.width}}" for number in self.numbers]


def _ranges(content: str, piece: str, origin: str) -> list[_Range]:
    """The content of brackets: numbers and ranges between commas."""
    found = []
    for part in content.split(","):
        matched = _RANGE.fullmatch(part.strip())
        low = number(matched[1], _LARGEST) if matched else None
        high = number(matched[2] or matched[1], _LARGEST) if matched else None
        if matched is None or low is None or high is None:
            raise wrong(piece, origin, f"{shown(part)} is not a number or a range such as 01-16")
        if high < low:
            raise wrong(
                piece, origin, f"the range {part.strip()} runs backwards", hint=f"type {matched[2]}-{matched[1]}"
            )
        found.append(_Range(range(low, high + 1), len(matched[1])))
    return found


def counts(text: str, origin: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `5,1(x2)`: 5, 1, 1.

    Raises:
        LaunchError: the text is no such list, or too long a one.
    """
    found: list[int] = []
    for part in text.split(","):
        matched = _COUNT.fullmatch(part.strip())
        value = number(matched[1], _LARGEST) if matched else None
        times = number(matched[2] or "1", MAX_HOSTS) if matched else None
        if value is None or times is None or len(found) + times > MAX_HOSTS:
            raise wrong(text, origin, "this is not a list of numbers such as 5,1(x2)")
        found += [value] * times
    return tuple(found)


def compress(names: Sequence[str]) -> str:
    """Write names so that `expand` reads the same, neighbours with one prefix together: `node[01-03],login`."""
    return ",".join(_groups(names))


def _groups(names: Sequence[str]) -> Iterator[str]:
    """Write each run of neighbours that differ in their last number only."""
    index = 0
    while index < len(names):
        head = _NUMBERED.fullmatch(names[index])
        end = index + 1
        if head is None:
            yield names[index]
        else:
            while end < len(names) and _follows(names[end], head, end - index):
                end += 1
            low, high = head[2], names[end - 1][len(head[1]) :]
            yield names[index] if end == index + 1 else f"{head[1]}[{low}-{high}]"
        index = end


def _follows(name: str, head: re.Match[str], distance: int) -> bool:
    return name == f"{head[1]}{int(head[2]) + distance:0{len(head[2])}}"
