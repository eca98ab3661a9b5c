"""What one rank did, read from the notes of worker/check.py. The program may damage them: an unreadable line is left out."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.record.seen import MAX_FRAMES
from ddplaunch.spec.error_file import content
from ddplaunch.spec.outcome import Frame, WorkerError
from ddplaunch.system.fields import Number, Piece
from ddplaunch.system.words import ranks_of

P2P = ("send", "recv", "recv_any_source")
_MAY_DIFFER_IN_SIZE = ("all_to_all", "all_to_all_single")  # from rank to rank
_LONGEST = 64 << 20  # bytes of the notes of a rank: MOST_CALLS of worker/check.py take a quarter


class Call(Struct, frozen=True, kw_only=True, tag="call"):
    """What a rank asked of one of its groups, as worker/check.py notes it."""

    operation: Piece  # "all_reduce"
    group: Piece  # its name
    step: Number  # that the rank was at, from 1 on
    stack: Number = 0  # the number of its stack, in a note of a worker
    # that stack, innermost first; a note has none
    frames: Annotated[tuple[Frame, ...], Meta(max_length=MAX_FRAMES)] = ()
    inputs: Piece = ""  # "float32 [4096]"
    outputs: Piece = ""
    peer: int | None = None  # the rank that sends to all, or gets from all; of a send or receive, the other rank
    tag: int = 0
    members: Piece = ""  # of a call that makes a group: the new group's ranks, "0-3,8"
    lacks: bool = False  # it should have received objects, and got none

    @property
    def text(self) -> str:
        """Write the call: "broadcast (float32 [4096], rank 0)". Ranks whose texts are equal agree."""
        if self.members:  # the call makes a group
            are_several = not self.members.isdecimal()  # "0-3,8"
            return f"{self.operation} ({'ranks' if are_several else 'rank'} {self.members})"
        tensors = self.inputs or self.outputs
        if self.inputs and self.outputs and self.operation not in P2P:
            tensors = f"{self.inputs} to {self.outputs}"
        if self.operation in _MAY_DIFFER_IN_SIZE:
            tensors = ", ".join(sorted(set(re.findall(r"(\w+) \[", tensors))))  # types alone: "float32"
        facts = [*([tensors] if tensors else []), *([f"rank {self.peer}"] if self.peer is not None else [])]
        return f"{self.operation} ({', '.join(facts)})" if facts else self.operation


class Group(Struct, frozen=True, kw_only=True):
    """A process group of a rank."""

    members: Annotated[tuple[int, ...], Meta(max_length=1 << 20)]
    title: Piece = ""  # what the program calls it


class Trace(Struct, frozen=True, kw_only=True):
    """What one rank did."""

    rank: int
    groups: dict[str, Group] = {}
    calls: tuple[Call, ...] = ()
    # "steps": all are done; "ended": the program is; "saves", "calls": the check went no further; "raised", "failed" (a status or
    # a signal) and "late": the rank did not get so far
    end: str
    steps: int = 0  # that are done
    frames: tuple[Frame, ...] = ()  # where the rank saved, or stood when its time was up; innermost first
    error: WorkerError | None = None
    how: str = ""  # "exit status 3"
    output: str = ""  # the end of it
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether the job would not have got this far either."""
        return self.end in ("raised", "failed", "late")

    @property
    def is_complete(self) -> bool:
        """Whether it is known that the rank asked for nothing more in these steps."""
        return self.end in ("steps", "ended")


# --- the notes


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


def read_trace(path: str, rank: int, world_size: int) -> Trace:
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
