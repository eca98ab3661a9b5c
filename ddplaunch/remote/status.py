"""How each host ended, and what follows for the exit status of the job. Pure; hosts are node ranks here."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL

from msgspec import Struct

from ddplaunch import exitcodes
from ddplaunch.remote import diagnose
from ddplaunch.remote.diagnose import HostError
from ddplaunch.report.closing import render_stopped


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

    def can_go_on_without(self, node_rank: int, left: int) -> bool:
        """Whether the job can begin without this host; `left` is the number of others."""
        return node_rank > 0 and left >= self._min_nodes and not self.errors

    def verdict(self, *, signum: int, front_lost: bool) -> Verdict:
        """Return the status of the job, and what no agent has printed; `signum` is the signal to stop, 0 for none."""
        if front_lost:
            return Verdict(exitcodes.of_signal(SIGKILL))
        if self.errors:
            error = diagnose.error([(self._hosts[rank], self.errors[rank]) for rank in sorted(self.errors)])
            return Verdict(error.status, error.render())
        if 0 in self.ended:
            return Verdict(self.ended[0])
        if signum and not self.has_begun:
            return Verdict(exitcodes.of_signal(signum), note=render_stopped(signum, None, ()))
        error = diagnose.error([(self._hosts[0], self.lost.get(0, diagnose.NO_STATUS))])
        return Verdict(next(iter(self.ended.values()), exitcodes.NODE_LOST), error.render())
