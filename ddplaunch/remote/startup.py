"""Calling hosts, and hanging up: who is called next, how long answers and ends are waited for. Does not say why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ddplaunch.process.start import handled_signals
from ddplaunch.remote.connection import HostConnection, HostPhase

AT_A_TIME = 64  # hosts that are called and have not answered
FAREWELL = 5.0  # seconds that an agent needs to end when its workers have


class Startup:
    """The branches of a job, as far as they come and go together."""

    def __init__(
        self,
        branches: Sequence[HostConnection],
        *,
        env: Mapping[str, str],
        open_files: tuple[int, int],
        meeting_time: float,
        patience: float,
        is_hopeless: Callable[[], bool],
    ) -> None:
        """`env` and `open_files` are for the processes that lead to the hosts.

        `meeting_time` and `patience` are the seconds in which all hosts must have answered, and after which nobody who was
        hung up on is waited for. Nobody more is called once the job `is_hopeless`.
        """
        self._branches = branches
        self._env = env
        self._open_files = open_files
        self._patience = patience
        self._is_hopeless = is_hopeless
        self.is_over = False  # no host is called any more
        self.answer_by: float | None = time.monotonic() + meeting_time  # then `unanswered` are given up
        self.gone_by: float | None = None  # then `cut_off` is due

    @property
    def all_gone(self) -> bool:
        """Whether nothing more comes from any host."""
        return all(branch.phase is HostPhase.GONE for branch in self._branches)

    @property
    def only_first_is_there(self) -> bool:
        """Whether all but the first host are gone."""
        first, *others = self._branches
        return first.phase is HostPhase.THERE and all(branch.phase is HostPhase.GONE for branch in others)

    @property
    def is_undecided(self) -> bool:
        """Whether some host that was called may yet say that the job cannot run there."""
        asked = (branch for branch in self._branches if branch.phase in (HostPhase.CALLING, HostPhase.THERE))
        return any(not branch.is_ready for branch in asked)

    def call_next(self) -> None:
        """Start the agents of the next hosts, as many at a time as are bearable."""
        calling = sum(branch.phase is HostPhase.CALLING for branch in self._branches)
        for branch in self._branches:
            if self.is_over or self._is_hopeless() or calling >= AT_A_TIME:
                return
            if branch.phase is HostPhase.WAITING:
                branch.start(self._env, handled_signals(), self._open_files)
                calling += 1
        if not calling:
            self.answer_by = None

    def unanswered(self) -> list[HostConnection]:
        """Wait for answers no longer, and give those that have not come."""
        self.answer_by = None
        return [branch for branch in self._branches if branch.phase in (HostPhase.WAITING, HostPhase.CALLING)]

    def ask_all(self, silence: float, interval: float, *, heeded: bool) -> None:
        """Say that we are there, and give up whoever has not answered for `silence` seconds, when asked at this interval.

        What counts is how often they were asked, so that a pause of this process makes nobody else look dead. `heeded` is
        whether answers are read.
        """
        for branch in self._branches:
            if branch.phase is HostPhase.THERE and branch.beat(heeded=heeded) > silence / interval:
                branch.break_off(f"silent for {silence:g} s")

    def call_nobody(self) -> None:
        """Give up whoever has not answered."""
        self.is_over, self.answer_by = True, None
        for branch in self._branches:
            branch.give_up()

    def hang_up(self) -> None:
        """Say nothing more to anybody: what runs there ends."""
        self.call_nobody()
        for branch in self._branches:
            branch.hang_up()
        self.expect_the_end(self._patience)

    def expect_the_end(self, within: float) -> None:
        """Wait for nobody longer than this, unless more is shown."""
        by = time.monotonic() + within
        self.gone_by = by if self.gone_by is None else min(by, self.gone_by)

    def somebody_is_there(self) -> None:
        """Do not cut off a host in the middle of what it says."""
        if self.gone_by is not None:
            self.gone_by = max(self.gone_by, time.monotonic() + FAREWELL)

    def cut_off(self, say: Callable[[str], None]) -> None:
        """Wait no longer for anybody."""
        self.gone_by = None
        for branch in self._branches:
            if branch.phase is not HostPhase.GONE:
                say(f"{branch} has not said that its workers have ended")
                branch.kill()
