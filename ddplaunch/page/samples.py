"""Reads samples.jsonl into curves: what each rank used over time, in few points. Opens nothing but that file.

A file may be damaged, from another version, or written by anybody: a line that does not fit is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ddplaunch.fields import Number, Seconds
from ddplaunch.process.files import open_regular
from ddplaunch.words import ranks_of

_LONGEST = 64 << 20  # bytes that are read of one node
MOST_RANKS = 65_536
_MIB = 1 << 20
T = TypeVar("T")

Figures = Annotated[tuple[Annotated[float, Meta(ge=0, le=1e12)] | None, ...], Meta(max_length=MOST_RANKS)]


class Point(Struct, frozen=True):
    """The value of a curve at a moment."""

    at: float  # seconds since 1970
    value: float
    generation: int


class Curve(Struct, frozen=True):
    """One figure of all ranks over time."""

    name: str
    unit: str  # "%", "B", "s"
    ranks: Mapping[int, Sequence[Point]]


class _Row(Struct):
    mono: Seconds
    ranks: Annotated[str, Meta(max_length=MOST_RANKS)]
    generation: Number = 0
    cpu: Figures = ()
    memory: Figures = ()
    step: Figures = ()
    gpu: Figures = ()
    gpu_memory: Figures = ()


class _Points:
    """The points of one curve of one rank: all values of a part of the time become one, their mean or the largest."""

    def __init__(self, *, largest: bool) -> None:
        self.points: list[Point] = []
        self._largest = largest
        self._key: tuple[int, int] | None = None  # part of the time and generation of the last point
        self._count = 0

    def add(self, part: int, at: float, value: float, generation: int) -> None:
        if self._key == (part, generation):
            before = self.points.pop().value
            value = max(before, value) if self._largest else before + (value - before) / (self._count + 1)
            self._count += 1
        else:
            self._key, self._count = (part, generation), 1
        self.points.append(Point(at, value, generation))


class _Steps:
    """The time of a step of one rank, from the moments at which its step was seen to be another."""

    def __init__(self) -> None:
        self._seen: tuple[float, float, int] | None = None  # when, the step, the generation

    def add(self, at: float, step: float, generation: int) -> float | None:
        """Return the seconds that a step took since it was seen to be another; None while it is the same."""
        before = self._seen
        if before is None or before[2] != generation or step < before[1]:
            self._seen = at, step, generation
            return None
        if step == before[1]:
            return None
        self._seen = at, step, generation
        return (at - before[0]) / (step - before[1])


_STEP_TIME = "Step time"
_FIGURES = (("CPU", "cpu"), ("Memory", "memory"), ("GPU", "gpu"), ("GPU memory", "gpu_memory"))  # and the fields
_MEMORY = {"Memory", "GPU memory"}  # of several values in a point the largest counts


def curves(files: Sequence[tuple[str, float]], began: float, ended: float, points: int) -> tuple[list[Curve], int]:
    """Return the curves of a run with at most so many points for each rank, and how many lines could not be read.

    `files` are the paths of the nodes, each with what is to be added to its clock to give seconds since 1970.
    """
    width = max(ended - began, 1e-3) / points
    found: dict[str, dict[int, _Points]] = {name: {} for name in (*dict(_FIGURES), _STEP_TIME)}
    steps: dict[int, _Steps] = {}
    damaged = 0

    def add(name: str, rank: int, at: float, value: float, generation: int) -> None:
        if rank not in found[name]:
            found[name][rank] = _Points(largest=name in _MEMORY)
        found[name][rank].add(max(0, min(int((at - began) / width), points)), at, value, generation)

    for path, offset in files:
        for row in lines_of(path, _Row):
            if row is None:
                damaged += 1
                continue
            at, ranks = row.mono + offset, ranks_of(row.ranks, MOST_RANKS)
            for name, field in _FIGURES:
                factor = _MIB if name in _MEMORY else 1
                for rank, value in zip(ranks, getattr(row, field), strict=False):
                    if value is not None:
                        add(name, rank, at, value * factor, row.generation)
            for rank, step in zip(ranks, row.step, strict=False):
                took = steps.setdefault(rank, _Steps()).add(at, step, row.generation) if step is not None else None
                if took is not None:
                    add(_STEP_TIME, rank, at, took, row.generation)
    made = [
        Curve(
            name,
            "B" if name in _MEMORY else "s" if name == _STEP_TIME else "%",
            {rank: each.points for rank, each in sorted(by_rank.items())},
        )
        for name, by_rank in found.items()
        if by_rank
    ]
    return made, damaged


def lines_of(path: str, kind: type[T]) -> Iterator[T | None]:
    """Yield the lines of a file as values of this type; None for a line that is none."""
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST)
    except OSError:
        return
    *lines, _ = content.split(b"\n")  # the last one may be half written
    decode = msgspec.json.Decoder(kind).decode
    for text in lines:
        try:
            yield decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield None
