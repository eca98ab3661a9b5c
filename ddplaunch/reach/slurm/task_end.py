"""Finds in the stderr of srun what srun says of tasks that ended badly, and on which nodes. Pure; tells nothing of good ends.

slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory
srun: error: node[2-3]: tasks 1-2: Exited with exit code 2
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from ddplaunch.plan.cluster import hostlist
from ddplaunch.system.errors import LaunchError

_LONGEST = 1 << 16  # bytes of a line that are looked at: a host list of thousands of nodes, and no output of a program
_TASK_END = re.compile(rb"srun: error: (\S+): tasks? [\d,-]+: (.+)")


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
        """Give the ends that are complete with this piece."""
        first, *more = data.split(b"\n")
        self._line = (self._line + first)[:_LONGEST]
        for following in more:
            if (end := parse(self._line)) is not None:
                yield end
            self._line = following[:_LONGEST]


def parse(line: bytes) -> TaskEnd | None:
    """Return the end of which a line of srun tells; None if that is another line."""
    if (found := _TASK_END.fullmatch(line)) is None:
        return None
    try:
        nodes = hostlist.expand(found[1].decode(), "srun")
    except (LaunchError, UnicodeDecodeError):  # a program has written it
        return None
    return TaskEnd(tuple(nodes), found[2].decode(errors="replace"))
