"""What nodes have to do without: said once, with all the nodes of which it holds, and no more than a reader can take in."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.cluster.hostlist import compress
from ddplaunch.errors import below
from ddplaunch.loop.loop import Loop
from ddplaunch.supervise.job import Member

GATHERED = 1.0  # seconds in which nodes say the same
MOST = 50  # texts that are said in a job
_NAMED = 16  # nodes that are named with a text


class Warnings:
    """Gathers equal texts of several nodes."""

    def __init__(self, loop: Loop, print_line: Callable[[str], None], count_nodes: Callable[[], int]) -> None:
        self._loop = loop
        self._print = print_line
        self._count_nodes = count_nodes
        self._texts: set[str] = set()  # all of them
        self._gathered: dict[str, dict[int, Member]] = {}  # who said what; not printed yet
        self._due = loop.timer(None, self.flush)

    def add(self, member: Member, text: str) -> None:
        """Take what a node has to do without."""
        if text not in self._texts and len(self._texts) == MOST:
            return
        self._texts.add(text)
        self._gathered.setdefault(text, {})[member.id] = member
        if not self._due.is_set:
            self._due.set(self._loop.now() + GATHERED)

    def flush(self) -> None:
        """Print what was gathered, now."""
        self._due.cancel()
        gathered, self._gathered = self._gathered, {}
        for text, members in gathered.items():
            self._print(f"warning: on {self._named(list(members.values()))}: {below(text)}")

    def _named(self, members: list[Member]) -> str:
        if len(members) == self._count_nodes():
            return f"all {len(members)} nodes"
        ordered = sorted(members, key=lambda member: (member.place is None, member.place))
        more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
        return compress([member.host for member in ordered[:_NAMED]]) + more
