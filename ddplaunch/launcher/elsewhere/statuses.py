"""Because of which hosts a job cannot run, and what else became of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.reach.diagnose import UNRESOLVED, HostError
from ddplaunch.reach.diagnose import error as error_of_hosts
from ddplaunch.system.errors import LaunchError


class HostStatuses:
    """Collects the status and the errors of each host, by node rank."""

    def __init__(self, hosts: Sequence[str], min_nodes: int) -> None:
        """Expect the agents of these hosts; the job needs `min_nodes` of them."""
        self._hosts = hosts
        self._min_nodes = min_nodes
        self.ended: dict[int, int] = {}  # the status with which each agent has ended, and nothing of it is left
        self.errors: dict[int, HostError] = {}  # because of which the job cannot run

    @property
    def may_try_others(self) -> bool:
        """Whether other hosts are still tried: a list of names is often wrong in many places, and all are to be known at once."""
        return all(one.message == UNRESOLVED for one in self.errors.values())

    def can_go_on_without(self, left: int) -> bool:
        """Whether the job can begin without a host; `left` is the number of others."""
        return left >= self._min_nodes and not self.errors

    def error(self) -> LaunchError | None:
        """Return the error of all hosts because of which the job cannot run; None if there is none."""
        if not self.errors:
            return None
        return error_of_hosts(
            [(self._hosts[rank], self.errors[rank]) for rank in sorted(self.errors)], len(self._hosts)
        )
