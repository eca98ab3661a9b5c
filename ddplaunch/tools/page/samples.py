"""The lines of samples.jsonl as curves: what each rank used over time, in few points. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, islice
from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.system.fields import Number, Seconds
from ddplaunch.system.words import ranges_of

MOST_RANKS = 65_536
_MIB = 1 << 20

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


class SampleRow(Struct):
    """A line of samples.jsonl: what the workers of a node used at a moment, a value for each of `ranks`."""

    mono: Seconds  # CLOCK_MONOTONIC of the node
    ranks: Annotated[str, Meta(max_length=MOST_RANKS)]
    generation: Number = 0
    cpu: Figures = ()
    memory: Figures = ()
    step: Figures = ()
    gpu: Figures = ()
    gpu_memory: Figures = ()


class _StepTimes:
    """The time that a step of one rank takes, from the moments at which its step was seen to be another."""

    def __init__(self) -> None:
        self._last_change: tuple[float, float, int] | None = None  # when, the step, the generation

    def on_step(self, at: float, step: float, generation: int) -> float | None:
        """Return how many seconds a step took, if it is another one than before; None at first, and after a restart."""
        if self._last_change is None:
            self._last_change = at, step, generation
            return None
        changed_at, former_step, former_generation = self._last_change
        if (former_step, former_generation) == (step, generation):
            return None
        self._last_change = at, step, generation
        if former_generation != generation or step < former_step:
            return None
        return (at - changed_at) / (step - former_step)


_STEP_TIME = "Step time"
_MEMORY = ("Memory", "GPU memory")  # of several values in a point the largest counts, of others the mean
# the names of curves, each with the field of a row that has its values: percent, and of memory MiB
_FIGURES = (("CPU", "cpu"), (_MEMORY[0], "memory"), ("GPU", "gpu"), (_MEMORY[1], "gpu_memory"))


def curves(
    rows_of_nodes: Iterable[tuple[Iterable[SampleRow], float]], began: float, ended: float, points: int
) -> list[Curve]:
    """Return the curves of a run with at most so many points for each rank: one for each part of the run's time.

    `rows_of_nodes` are the lines of each node, with what is to be added to its clock to give seconds since 1970.
    """
    width = max(ended - began, 1e-3) / points  # seconds of a part
    points_of: dict[str, dict[int, list[Point]]] = {name: {} for name in (*dict(_FIGURES), _STEP_TIME)}  # by rank
    step_times: dict[int, _StepTimes] = {}  # by rank
    for rows, offset in rows_of_nodes:

        def part_of(row: SampleRow, offset: float = offset) -> tuple[int, int, str]:
            """Return in which part of the time a row lies, and of which workers it tells."""
            part = int((row.mono + offset - began) / width)
            return max(0, min(part, points)), row.generation, row.ranks

        for (_, generation, written_ranks), rows_of_part in groupby(rows, part_of):
            joined = list(rows_of_part)
            at = joined[-1].mono + offset
            most_values = max(map(_count_of_values, joined))  # of a figure: one for each of the first ranks
            ranks = parse_first_ranks(written_ranks, most_values)
            for name, field in _FIGURES:
                values = _one_for_each_rank([getattr(row, field) for row in joined], is_largest=name in _MEMORY)
                factor = _MIB if name in _MEMORY else 1
                for rank, value in zip(ranks, values, strict=False):
                    if value is not None:
                        points_of[name].setdefault(rank, []).append(Point(at, value * factor, generation))
            for rank, step in zip(ranks, joined[-1].step, strict=False):
                if step is None:
                    continue
                seconds = step_times.setdefault(rank, _StepTimes()).on_step(at, step, generation)
                if seconds is not None:
                    points_of[_STEP_TIME].setdefault(rank, []).append(Point(at, seconds, generation))
    units = dict.fromkeys(_MEMORY, "B") | {_STEP_TIME: "s"}  # of all others: "%"
    return [
        Curve(name, units.get(name, "%"), dict(sorted(ranks.items()))) for name, ranks in points_of.items() if ranks
    ]


def _count_of_values(row: SampleRow) -> int:
    return max(len(values) for values in (row.step, *(getattr(row, field) for _, field in _FIGURES)))


def _one_for_each_rank(rows: Sequence[Sequence[float | None]], *, is_largest: bool) -> Sequence[float | None]:
    """Return one value for each rank from several: the largest or the mean of those that are known."""
    if len(rows) == 1:
        return rows[0]
    columns = ([value for value in column if value is not None] for column in zip(*rows, strict=False))
    return [(max(column) if is_largest else sum(column) / len(column)) if column else None for column in columns]


def parse_first_ranks(text: str, most: int) -> list[int]:
    """Return the first ranks of a text, only so many as there are values for: it may name all ranks with few values."""
    return list(islice(chain.from_iterable(ranges_of(text, MOST_RANKS)), most))
