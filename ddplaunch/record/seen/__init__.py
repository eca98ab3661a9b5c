"""What is seen in workers: their stacks, and the collectives that they wait in. Values, and what they mean.

`launcher/look/` finds these values in workers, and makes their texts and numbers fit the fields. They travel to the coordinator
and to commands as they are: a receiver checks the types of the fields, which bound what a node may send. `dump`, `recorder` and
`stack` read texts that workers have written; `merge`, `collectives`, `arrivals` and `stragglers` say what the values mean.
"""

from __future__ import annotations

from itertools import accumulate, chain, islice
from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.spec.outcome import Frame
from ddplaunch.system.fields import MAX_RANKS, Duration, Line, Number, Piece, Size, Text
from ddplaunch.system.words import ranges_of

# the state of a process without our handler; it may be ending
NOT_BEGUN = "no Python, or it has not begun to run its program"
MAX_THREADS = 256  # of a process
MAX_FRAMES = 256  # of a thread
MAX_GROUPS = 256  # of a process
MAX_CALLS = 64  # of a group
MAX_MEMBERS = 65536  # ranks of a group
LONGEST_MEMBERS = 1 << 16  # characters of these ranks
LONGEST_REPEATED_MEMBERS = 4096  # where each node sends them with each reading
MAX_ENTRIES = 2000  # of a worker: its recorders keep 500 each, unless its user wants more

_RANGE = "[0-9]{1,9}(?:-[0-9]{1,9})?"
# as ranges: "0-8191", which is as short as they are regular; "": not known
_RANKS = rf"\A(?:{_RANGE}(?:,{_RANGE})*)?\Z"
Stack = Annotated[tuple[Frame, ...], Meta(max_length=MAX_FRAMES)]  # innermost frame first
Gaps = Annotated[tuple[Size, ...], Meta(max_length=MAX_ENTRIES)]  # each from the one before, the first one from zero


class Thread(Struct, frozen=True, kw_only=True, array_like=True):
    """One thread of a process."""

    frames: Stack
    name: Piece = ""
    is_main: bool = False
    at_exit: bool = False  # it is the main one of a worker whose script has ended, and Python has not


class Call(Struct, frozen=True, kw_only=True, array_like=True):
    """One collective that a worker has called, or a send or receive."""

    number: Size  # of the collectives of its group, from 1 on
    operation: Piece  # "all_reduce"
    inputs: Piece  # "float32 [4096, 4096]", "" for none
    outputs: Piece
    done: bool
    is_p2p: bool = False
    at: Size = 0  # nanoseconds of the time of day: when the worker came to it; 0: not known


class Group(Struct, frozen=True, kw_only=True, array_like=True):
    """What a worker has called in one process group."""

    name: Piece
    title: Piece = ""  # what the program calls it
    members: Annotated[str, Meta(max_length=LONGEST_MEMBERS, pattern=_RANKS)] = ""
    completed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] = -1  # the number of the last collective that is completed
    calls: Annotated[tuple[Call, ...], Meta(max_length=MAX_CALLS)] = ()  # the last ones, in their order

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group; empty: not known."""
        return list(islice(chain.from_iterable(ranges_of(self.members, MAX_RANKS)), MAX_MEMBERS))


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process at one moment: a worker, or what a worker has started."""

    rank: Number
    pid: Number
    host: Line = ""
    child: Line = ""  # the name of what the worker has started, "" for the worker itself
    threads: Annotated[tuple[Thread, ...], Meta(max_length=MAX_THREADS)] = ()
    state: Piece = ""  # what is known instead of a stack: "in uninterruptible sleep, in nfs_wait_bit_killable (read)"
    ended: bool = False
    # in which it has called something; None: torch tells nothing
    groups: Annotated[tuple[Group, ...], Meta(max_length=MAX_GROUPS)] | None = None
    said: Text = ""  # the last traceback, or dump of a crash, that the worker or a child of it printed
    native: Text = ""  # the stacks of py-spy, with frames of C
    ras: Text = ""  # what NCCL's RAS service says of the whole job, if this worker is the one that listens for it

    @property
    def main(self) -> tuple[Frame, ...]:
        """The stack of its main thread, innermost frame first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())


class Arrivals(Struct, frozen=True, kw_only=True, array_like=True):
    """When one worker came to its last collectives in one process group."""

    rank: Number
    group: Piece  # its name, and what carries it out: "nccl 0"
    members: Annotated[str, Meta(max_length=LONGEST_REPEATED_MEMBERS, pattern=_RANKS)]
    numbers: Gaps  # of its collectives, rising; of very many ranks those of some steps only
    times: Gaps  # when it came to each: nanoseconds of the time of day
    newest: Size  # number of the last one, whether it is among these or not
    newest_at: Size  # its time
    length: Number  # collectives of a step; 0: they do not repeat
    period: Duration  # seconds from step to step

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.times):
            raise ValueError("collectives without their times")

    @property
    def calls(self) -> list[tuple[int, int]]:
        """The number and the time of each collective."""
        return list(zip(accumulate(self.numbers), accumulate(self.times), strict=True))


class Whereabouts(Struct, frozen=True, kw_only=True):
    """Where the workers of all nodes were when they had to end, and for whom they waited."""

    explanation: str = ""  # what is wrong, in a sentence; "": nothing, or that is not known
    locations: tuple[str, ...] = ()  # in sentences, those that others wait for first
    is_explained: bool = False  # more is known than who waits for whom: the job was not only slow
    awaited: tuple[int, ...] = ()  # the ranks that others waited for while they waited in no collective themselves
