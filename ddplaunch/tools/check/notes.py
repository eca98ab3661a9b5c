"""Reads the notes that worker/check.py writes. The program may damage them: a line that cannot be read is left out."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.spec.error_file import content
from ddplaunch.spec.outcome import Frame
from ddplaunch.system.fields import Number, Piece
from ddplaunch.system.words import ranks_of
from ddplaunch.tools.check import Call, Group, Trace

_LONGEST = 64 << 20  # bytes of the notes of a rank: MOST_CALLS of worker/check.py take a quarter


class _Stack(Struct, frozen=True, tag="stack"):
    number: Number
    frames: Annotated[tuple[Frame, ...], Meta(max_length=100)]


class _Group(Struct, frozen=True, tag="group"):
    name: Piece
    members: Annotated[str, Meta(max_length=1 << 20)]
    title: Piece = ""


class _Step(Struct, frozen=True, tag="step"):
    done: Number


class _End(Struct, frozen=True, tag="end"):
    why: Piece
    stack: Number


_decoder = msgspec.json.Decoder(_Stack | _Group | Call | _Step | _End)


def read(path: str, rank: int, world_size: int) -> Trace:
    """Return what the notes at `path` tell of a rank; `end` is "ended" if no note says why the rank ended."""
    stacks: dict[int, tuple[Frame, ...]] = {}
    groups: dict[str, Group] = {}
    calls: list[Call] = []
    where: tuple[Frame, ...] = ()
    end, steps = "ended", 0
    for line in content(path, _LONGEST).splitlines():
        try:
            note = _decoder.decode(line)
        except (ValueError, RecursionError):
            continue
        match note:
            case _Stack():
                stacks[note.number] = note.frames
            case _Group():
                groups[note.name] = Group(members=tuple(ranks_of(note.members, world_size)), title=note.title)
            case Call():
                calls.append(replace(note, frames=stacks.get(note.stack, ())))
            case _Step():
                steps = note.done
            case _End(why="steps" | "saves" | "calls"):
                end, where = note.why, stacks.get(note.stack, ())
    return Trace(rank=rank, groups=groups, calls=tuple(calls), end=end, frames=where, steps=steps)
