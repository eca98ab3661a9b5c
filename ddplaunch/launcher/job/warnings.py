"""What holds for nodes, such as what they have to do without: said once, with their names, and not more than can be read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.job.orders import Warned
from ddplaunch.plan.cluster.hostlist import compress
from ddplaunch.system.errors import indented
from ddplaunch.system.loop.loop import Loop

GATHERED = 1.0  # seconds in which nodes say the same
MOST = 50  # texts that are said in a job
_NAMED = 16  # nodes that are named with a text


class _Coordinator(Protocol):
    """The coordinator, as far as warnings need it."""

    @property
    def members(self) -> Mapping[int, Member]: ...
    def print(self, text: str) -> None: ...


class Warnings:
    """Gathers equal texts of several nodes, so that each is printed once."""

    def __init__(self, loop: Loop, coordinator: _Coordinator) -> None:
        self._loop = loop
        self._coordinator = coordinator
        self._known: set[Warned] = set()  # all of them
        self._gathered: dict[Warned, dict[int, Member]] = {}  # who said what; not printed yet
        self._due = loop.timer(None, self.flush)

    def add(self, member: Member, warned: Warned) -> None:
        """Gather what a node warns of, and print it GATHERED seconds after the first such text."""
        if warned not in self._known and len(self._known) == MOST:
            return
        self._known.add(warned)
        self._gathered.setdefault(warned, {})[member.id] = member
        if not self._due.is_set:
            self._due.set(self._loop.now() + GATHERED)

    def flush(self) -> None:
        """Print what was gathered, now."""
        self._due.cancel()
        gathered, self._gathered = self._gathered, {}
        for warned, members in gathered.items():
            label = "warning: " if warned.is_warning else ""
            self._coordinator.print(f"{label}on {self._named(members.values())}: {indented(warned.text)}")

    def _named(self, members: Collection[Member]) -> str:
        """Return the hosts of these members as in a sentence: "node[1-3]", "all 40 nodes"."""
        ordered = sorted(members, key=lambda member: (member.node_rank is None, member.node_rank))
        # where a command was started for each rank, one for each
        hosts = list(dict.fromkeys(member.host for member in ordered))
        if len(hosts) > 1 and len(hosts) == len({member.host for member in self._coordinator.members.values()}):
            return f"all {len(hosts)} nodes"
        return compress(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
