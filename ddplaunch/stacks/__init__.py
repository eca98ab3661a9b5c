"""Where workers are: their stacks, taken from outside, and the collectives that they wait in, merged over ranks.

`take` asks the processes of a node, in a child of the agent. What is found are the values below; all else is pure.
"""

from __future__ import annotations

from ddplaunch.record import record
from ddplaunch.supervise.outcome import Frame


@record(kw_only=True)
class Thread:
    """One thread of a process."""

    frames: tuple[Frame, ...]  # innermost first
    name: str = ""
    is_main: bool = False


@record(kw_only=True)
class Sample:
    """One process at one moment: a worker, or what a worker has started."""

    rank: int
    pid: int
    host: str = ""
    child: str = ""  # the name of what the worker has started, "" for the worker itself
    threads: tuple[Thread, ...] = ()
    state: str = ""  # what is known instead of a stack: "in uninterruptible sleep, in nfs_wait_bit_killable (read)"
    native: str = ""  # the stacks of py-spy, with frames of C

    @property
    def main(self) -> tuple[Frame, ...]:
        """The stack of its main thread, innermost frame first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())
