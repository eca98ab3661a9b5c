"""What one rank did, read from the notes of worker/check.py. The program may damage them: an unreadable line is left out."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.record.seen import MAX_FRAMES
from ddplaunch.spec.error_file import content
from ddplaunch.spec.outcome import Frame, WorkerError
from ddplaunch.system.fields import Number, Piece
from ddplaunch.system.words import ranks_of

_Frames = Annotated[tuple[Frame, ...], Meta(max_length=MAX_FRAMES)]  # innermost first

P2P = ("send", "recv", "recv_any_source")
_MAY_DIFFER_IN_SIZE = ("all_to_all", "all_to_all_single")  # from rank to rank
_LONGEST_NOTES = 64 << 20  # bytes of the notes of a rank: MOST_CALLS of worker/check.py take a quarter


class Call(Struct, frozen=True, kw_only=True):
    """What a rank asked of one of its groups, as worker/check.py notes it."""

    operation: Piece  # "all_reduce"
    group: Piece  # its name
    step: Number  # that the rank was at, from 1 on
    stack: Number = 0  # the number of its stack, in a note
    frames: _Frames = ()  # of that stack; in a note, only at its first call
    inputs: Piece = ""  # "float32 [4096]"
    outputs: Piece = ""
    peer: int | None = None  # the rank that sends to all, or gets from all; of a send or receive, the other rank
    tag: int = 0
    members: Piece = ""  # of a call that makes a group: the new group's ranks, "0-3,8"
    got_nothing: bool = False  # where it should have received objects

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
    how_it_ended: str = ""  # "exit status 3"
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


class _MadeGroup(Struct, frozen=True):
    """A group that the rank has made."""

    name: Piece
    members: Annotated[str, Meta(max_length=1 << 20)]  # "0-3,8"
    title: Piece = ""


class _Progress(Struct, frozen=True):
    """How far the rank is; where its check ends, also why and at which stack."""

    steps: Number  # that are done
    end: Literal["steps", "saves", "calls"] | None = None
    stack: Number = 0
    frames: _Frames = ()  # of that stack, if no call had it before


class _Note(Struct, frozen=True):
    """A line of the notes, which has one of these."""

    call: Call | None = None
    group: _MadeGroup | None = None
    progress: _Progress | None = None


_decoder = msgspec.json.Decoder(_Note)


def read_trace(path: str, rank: int, world_size: int) -> Trace:
    """Return what the notes at `path` tell of a rank; `end` is "ended" if no note says why the rank ended."""
    stacks: dict[int, tuple[Frame, ...]] = {}
    groups: dict[str, Group] = {}
    calls: list[Call] = []
    progress = _Progress(steps=0)
    for line in content(path, _LONGEST_NOTES).splitlines():
        try:
            note = _decoder.decode(line)
        except (ValueError, RecursionError):
            continue
        if (made := note.group) is not None:
            groups[made.name] = Group(members=tuple(ranks_of(made.members, world_size)), title=made.title)
        if (call := note.call) is not None:
            if call.frames:  # its stack is new
                stacks[call.stack] = call.frames
            calls.append(replace(call, frames=stacks.get(call.stack, ())))
        progress = note.progress or progress
    return Trace(
        rank=rank,
        groups=groups,
        calls=tuple(calls),
        end=progress.end or "ended",
        frames=stacks.get(progress.stack, progress.frames) if progress.end else (),
        steps=progress.steps,
    )
