"""The status of a job on several hosts, from what became of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL

from msgspec import Struct

from ddplaunch.launcher.tell.closing import render_stopped
from ddplaunch.reach.diagnose import NO_STATUS, UNRESOLVED, HostError, error
from ddplaunch.system import exitcodes


class Verdict(Struct, frozen=True):
    """The exit status of the command, and what is printed."""

    status: int
    error: str = ""  # for stderr
    note: str = ""


class HostStatuses:
    """Collects the status and the errors of each host."""

    def __init__(self, hosts: Sequence[str], min_nodes: int) -> None:
        """Expect the agents of these hosts; the job needs `min_nodes` of them."""
        self._hosts = hosts
        self._min_nodes = min_nodes
        self.ended: dict[int, int] = {}  # the status of the job, as each agent reports it
        self.lost: dict[int, HostError] = {}  # after the job had begun: the agents handle that
        self.errors: dict[int, HostError] = {}  # because of which the job cannot run
        self.has_begun = False  # workers were started

    @property
    def is_prevented(self) -> bool:
        """Whether the job cannot begin because of a host."""
        return bool(self.errors) and not self.has_begun

    @property
    def may_try_others(self) -> bool:
        """Whether other hosts are still tried: a list of names is often wrong in many places, and all are to be known at once."""
        return all(one.message == UNRESOLVED for one in self.errors.values())

    def can_go_on_without(self, node_rank: int, left: int) -> bool:
        """Whether the job can begin without this host; `left` is the number of others."""
        return node_rank > 0 and left >= self._min_nodes and not self.errors

    def verdict(self, speakers: Sequence[int] = (0,), *, signum: int, front_lost: bool) -> Verdict:
        """Return the status of the job, and what no agent has printed; `signum` is the signal to stop, 0 for none.

        `speakers` are the hosts that may know the status: the coordinator's, then those whose agents have taken over from it.
        """
        if front_lost:
            return Verdict(exitcodes.of_signal(SIGKILL))
        if self.errors:
            found = error([(self._hosts[rank], self.errors[rank]) for rank in sorted(self.errors)], len(self._hosts))
            return Verdict(found.status, found.render())
        if told := [self.ended[host] for host in speakers if host in self.ended]:
            # one that was lost, and whose host has seen that, does not know how the others went on
            return Verdict(next((status for status in told if status != exitcodes.NODE_LOST), exitcodes.NODE_LOST))
        if signum and not self.has_begun:
            return Verdict(exitcodes.of_signal(signum), note=render_stopped(signum, None, ()))
        found = error([(self._hosts[speakers[0]], self.lost.get(speakers[0], NO_STATUS))])
        return Verdict(next(iter(self.ended.values()), exitcodes.NODE_LOST), found.render())
