"""What srun writes, where the command in an allocation reads it: all of it with --live, its stderr if there are several nodes.

srun passes on the lines of the agents, and adds lines of its own to its stderr, which alone tell that a task could not begin:

slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory
srun: error: node[2-3]: tasks 1-2: Exited with exit code 2
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.pipes import FULL, MESSAGE, STDERR, STDOUT, OutputQueue
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop

_STREAMS = {1: STDOUT, 2: STDERR}
_LONGEST_LINE = 1 << 16  # bytes that are looked at: a host list of thousands of nodes, and no output of a program
_TASK_END = re.compile(rb"srun: error: (\S+): tasks? [\d,-]+: (.+)")


class StepOutput:
    """Passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(
        self, loop: Loop, queue: OutputQueue, read_ends: Mapping[int, int], on_task_end: Callable[[TaskEnd], None]
    ) -> None:
        """Read our ends of srun's pipes, by its descriptor: 1, 2 or both. `on_task_end` gets what srun tells of tasks."""
        self._loop = loop
        self._queue = queue
        self._streams = {fd: _STREAMS[its_descriptor] for its_descriptor, fd in read_ends.items()}
        self._task_ends = TaskEnds()
        self._on_task_end = on_task_end
        self._reads = False  # see `update`
        self.writes_itself = False  # the front is lost: what comes is written to our own stdout and stderr
        for fd in self._streams:
            os.set_blocking(fd, False)
        self.update()

    def update(self) -> None:
        """Begin to read if the queue to the front is less than half full, and stop once it is full: not at each message."""
        reads = not self._queue.full if self._reads else self._queue.size < FULL // 2
        if reads != self._reads:
            self._reads = reads
            for fd in self._streams:
                if reads:
                    self._loop.watch(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]  # fd is bound here
                else:
                    self._loop.unwatch(fd)

    def _read(self, fd: int) -> bool:
        """Pass a piece on; return whether there was one. Called by the loop."""
        try:
            data = os.read(fd, MESSAGE)
        except BlockingIOError:
            return False
        if data:
            stream = self._streams[fd]
            if self.writes_itself:
                with suppress(OSError):  # nobody reads it any more
                    os.write(1 if stream == STDOUT else 2, data)
            else:
                self._queue.put(stream, data)
            if stream == STDERR:
                for end in self._task_ends.feed(data):
                    self._on_task_end(end)
        else:
            self._loop.unwatch(fd)
            del self._streams[fd]
            os.close(fd)
        return bool(data)

    def drain(self) -> None:
        """Pass on what is left, once srun has ended."""
        for fd in list(self._streams):
            while self._read(fd):
                pass


class TaskEnd(Struct, frozen=True):
    """The bad end of the tasks on some nodes."""

    nodes: tuple[str, ...]  # by their names in Slurm
    how: str  # "Exited with exit code 2", "Killed"


class TaskEnds:
    """Finds the ends of tasks in pieces of srun's stderr."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._line = b""  # the beginning of the last line, whose end has not come yet

    def feed(self, data: bytes) -> Iterator[TaskEnd]:
        """Yield the ends of tasks whose lines are complete with this piece."""
        first, *more = data.split(b"\n")
        self._line = (self._line + first)[:_LONGEST_LINE]
        for following in more:
            if (end := parse(self._line)) is not None:
                yield end
            self._line = following[:_LONGEST_LINE]


def parse(line: bytes) -> TaskEnd | None:
    """Return the end of which a line of srun tells; None if that is another line."""
    if (found := _TASK_END.fullmatch(line)) is None:
        return None
    try:
        nodes = hostlist.expand(found[1].decode(), "srun")
    except (LaunchError, UnicodeDecodeError):  # a program has written it
        return None
    return TaskEnd(tuple(nodes), found[2].decode(errors="replace"))
