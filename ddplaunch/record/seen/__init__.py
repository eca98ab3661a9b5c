"""What is seen in workers: their stacks, and the collectives that they wait in. Values, and what they mean.

`launcher/look/` finds these values in workers. `dump`, `recorder` and `stack` read texts that workers have written; `merge` and
`collectives` say what the values mean.
"""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.record.seen.dump import Thread
from ddplaunch.spec.outcome import Frame

__all__ = ["NOT_BEGUN", "Call", "Group", "Sample", "Thread"]

NOT_BEGUN = (
    "no Python, or it has not begun to run its program"  # the state of a process without our handler; it may be ending
)


class Call(Struct, frozen=True, kw_only=True):
    """One collective that a worker has called, or a send or receive."""

    number: int  # of the collectives of its group, from 1 on
    operation: str  # "all_reduce"
    inputs: str  # "float32 [4096, 4096]", "" for none
    outputs: str
    done: bool
    is_p2p: bool = False
    at: int = 0  # nanoseconds of the time of day: when the worker came to it; 0: not known


class Group(Struct, frozen=True, kw_only=True):
    """What a worker has called in one process group."""

    name: str
    title: str = ""  # what the program calls it
    members: tuple[int, ...] = ()  # its ranks; (): not known
    completed: int = -1  # the number of the last collective that is completed
    calls: tuple[Call, ...] = ()  # the last ones, in their order


class Sample(Struct, frozen=True, kw_only=True):
    """One process at one moment: a worker, or what a worker has started."""

    rank: int
    pid: int
    host: str = ""
    child: str = ""  # the name of what the worker has started, "" for the worker itself
    threads: tuple[Thread, ...] = ()
    state: str = ""  # what is known instead of a stack: "in uninterruptible sleep, in nfs_wait_bit_killable (read)"
    ended: bool = False
    groups: tuple[Group, ...] | None = None  # in which it has called something; None: torch tells nothing
    said: str = ""  # the last traceback, or dump of a crash, that the worker or a child of it printed
    native: str = ""  # the stacks of py-spy, with frames of C
    ras: str = ""  # what NCCL's RAS service says of the whole job, if this worker is the one that listens for it

    @property
    def main(self) -> tuple[Frame, ...]:
        """The stack of its main thread, innermost frame first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())
