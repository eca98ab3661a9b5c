"""What became of the hosts, and what that makes of the job. Pure; knows them by their place."""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals

from ddplaunch import exitcodes
from ddplaunch.record import record
from ddplaunch.remote import diagnose
from ddplaunch.remote.diagnose import HostError


@record
class Verdict:
    """How the command ends."""

    status: int
    error: str = ""  # as it stands on stderr
    remark: str = ""


class HostStatuses:
    """Keeps the books."""

    def __init__(self, hosts: Sequence[str], least: int) -> None:
        """Expect the agents of these hosts; `least` is the number of nodes that the job needs."""
        self._hosts = hosts
        self._least = least
        self._statuses: dict[int, int] = {}  # of the job, as the agents see it
        self._losses: dict[int, HostError] = {}  # those that came after the job had begun
        self.troubles: dict[int, HostError] = {}  # those that make the job impossible
        self.has_begun = False  # workers were started

    def ended(self, place: int, status: int) -> None:
        """Learn the job's status from an agent."""
        self._statuses[place] = status

    def status_of(self, place: int) -> int | None:
        """Give what an agent has said."""
        return self._statuses.get(place)

    def lost(self, place: int, trouble: HostError) -> None:
        """Learn that a host is gone from a job that runs: the agents know what to do."""
        self._losses[place] = trouble

    def is_bearable(self, place: int, left: int) -> bool:
        """Whether the job can begin without this host; `left` is how many others there are."""
        return place > 0 and left >= self._least and not self.troubles

    def verdict(self, *, signum: int, front_lost: bool) -> Verdict:
        """Give the status of the job, and what is to be said because no agent has; `signum` asked for the end, 0: none."""
        if front_lost:
            return Verdict(exitcodes.of_signal(Signals.SIGKILL))
        if self.troubles:
            error = diagnose.error([(self._hosts[place], self.troubles[place]) for place in sorted(self.troubles)])
            return Verdict(error.status, error.render())
        if 0 in self._statuses:
            return Verdict(self._statuses[0])
        if signum and not self.has_begun:
            words = f"stopped by {Signals(signum).name} before the workers were started"
            return Verdict(exitcodes.of_signal(signum), remark=words)
        error = diagnose.error([(self._hosts[0], self._losses.get(0) or diagnose.cut_off())])
        return Verdict(next(iter(self._statuses.values()), exitcodes.NODE_LOST), error.render())
