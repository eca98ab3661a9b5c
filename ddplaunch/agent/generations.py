"""The workers of this node, one generation after another, and what a generation holds: outfit, output, port, crew.

It does what was decided and says what came of it; it decides nothing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.pipes import Outbox
from ddplaunch.agent.workers import CannotStart, Crew, Outfit
from ddplaunch.errors import LaunchError
from ddplaunch.net.port import Reservation, reserve
from ddplaunch.output.sinks import Output
from ddplaunch.plan import Plan
from ddplaunch.report.reporter import Teller
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import WorkerExit

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.control.messages import Begin

Equip = Callable[["Begin | None", str | None], Outfit]  # what the coordinator said, our address; None: one node
MakeOutput = Callable[[Outbox, Plan | None], Output]


class Generations:
    """At most one of them lives; `ended` is called with the rank of each worker whose process has ended."""

    def __init__(
        self,
        equip: Equip,
        make_output: MakeOutput,
        outbox: Outbox,
        selector: selectors.BaseSelector,
        teller: Teller,
        *,
        feed: Callable[[node.Event], None],
        ended: Callable[[int], None],
    ) -> None:
        self._equip = equip
        self._make_output = make_output
        self._outbox = outbox
        self._selector = selector
        self._teller = teller
        self._feed = feed
        self._ended = ended
        self._reservation: Reservation | None = None
        self.output = make_output(outbox, None)
        self.crew: Crew | None = None

    # --- its start

    def begin(self, number: int, ranks: frozenset[int], begin: Begin | None, address: str | None) -> None:
        """Make all ready for the workers of this generation, which are started one by one."""
        try:
            outfit = self._equip(begin, address)
            port = self._port(outfit.plan, begin)
            if begin is not None:
                self.output = self._make_output(self._outbox, outfit.plan)  # ranks may have changed
            self.crew = Crew(outfit, number, port, self.output, self._selector, self._ended, time.monotonic)
        except LaunchError as error:
            self._feed(node.StartFailed(min(ranks), error.message, error.status, time.monotonic()))
        else:
            self._teller.settle(outfit.plan, outfit.folder)
            self._teller.generation(number, port)

    def _port(self, plan: Plan, begin: Begin | None) -> int:
        if begin is not None:
            return begin.port
        if plan.workers[0].rank != 0:  # nodes that do not talk
            return plan.master_port or 0
        self._reservation = reserve(plan.master_port or 0)
        return self._reservation.port

    @property
    def is_starting(self) -> bool:
        """Whether workers are yet to be started."""
        return self.crew is not None and bool(self.crew.waiting)

    def start_next(self) -> None:
        """Start one worker more."""
        assert self.crew is not None
        rank = self.crew.waiting.popleft()
        try:
            pid = self.crew.start(rank)
        except CannotStart as error:
            self._feed(node.StartFailed(rank, str(error), error.status, time.monotonic()))
        else:
            self._teller.started(rank, pid)
            self._feed(node.WorkerStarted(rank, time.monotonic()))

    def start_no_more(self) -> None:
        """Leave out whoever was not started yet."""
        if self.crew is not None:
            self.crew.waiting.clear()

    # --- while it lives

    @property
    def pids(self) -> frozenset[int]:
        """The processes of all workers, dead ones included until they are buried."""
        return self.crew.pids if self.crew is not None else frozenset()

    @property
    def have_stopped(self) -> bool:
        """Whether each worker that lives is stopped (SIGSTOP)."""
        return self.crew is None or self.crew.has_stopped

    def do(self, action: node.Action) -> None:
        """Send the workers the signal that this action asks for, if it is one of those that do."""
        if self.crew is None:
            return
        match action:
            case node.Forward(signum, ranks):
                self.crew.forward(signum, ranks)
            case node.Stop(signum, ranks):
                self.crew.end(signum, ranks, time.monotonic())
            case node.Kill(ranks):
                self.crew.end(signal.SIGKILL, ranks, time.monotonic())
            case node.Suspend() | node.Resume():
                self.crew.freeze(isinstance(action, node.Suspend))

    # --- its end

    def dismiss_services(self) -> None:
        """Ask what served the workers to end, as far as it does not by itself."""
        if self.crew is not None:
            self.crew.dismiss_services()

    def bury(self, state: node.State, now: float) -> list[WorkerExit]:
        """Let go of all that the generation held, and give the ends of its workers."""
        crew, self.crew = self.crew, None
        exits = crew.bury(state.exits, now) if crew is not None else []
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        return exits
