"""`ddplaunch check`: some ranks of a large job run here, each alone, and what they ask of their process groups is compared.

`run` starts them and reads their notes, `compare` finds where they disagree, `show` says it.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.record.seen import MAX_FRAMES
from ddplaunch.spec.outcome import Frame, WorkerError
from ddplaunch.system.fields import Number, Piece

P2P = ("send", "recv", "recv_any_source")
_SIZES_DIFFER = ("all_to_all", "all_to_all_single")  # from rank to rank, as they may


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
    members: Piece = ""  # of the new group
    lacks: bool = False  # it should have received objects, and got none

    @property
    def text(self) -> str:
        """Write the call: "broadcast (float32 [4096], rank 0)". Ranks whose texts are equal agree."""
        if self.members:
            ranks = "ranks" if set(self.members) & {",", "-"} else "rank"
            return f"{self.operation} ({ranks} {self.members})"
        tensors = self.inputs or self.outputs
        if self.inputs and self.outputs and self.operation not in P2P:
            tensors = f"{self.inputs} to {self.outputs}"
        if self.operation in _SIZES_DIFFER:
            tensors = ", ".join(sorted(set(re.findall(r"(\w+) \[", tensors))))
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
