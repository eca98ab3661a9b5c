"""The workers of this node, one generation after another, and what a generation holds: outfit, output, port, crew.

It does what was decided and says what came of it; it decides nothing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.pipes import OutputQueue
from ddplaunch.agent.workers import CannotStart, Workers, WorkerSetup
from ddplaunch.errors import LaunchError
from ddplaunch.net.port import Reservation, reserve
from ddplaunch.output.sinks import Output
from ddplaunch.plan import Plan
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import WorkerExit

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.control.messages import Begin

Equip = Callable[["Begin | None", str | None], WorkerSetup]  # what the coordinator said, our address; None: one node
MakeOutput = Callable[[OutputQueue, Plan | None], Output]


class Generations:
    """At most one of them lives; `ended` is called with the rank of each worker whose process has ended."""

    def __init__(
        self,
        equip: Equip,
        make_output: MakeOutput,
        queue: OutputQueue,
        selector: selectors.BaseSelector,
        reporter: Reporter,
        *,
        feed: Callable[[node.Event], None],
        ended: Callable[[int], None],
    ) -> None:
        self._equip = equip
        self._make_output = make_output
        self._queue = queue
        self._selector = selector
        self._reporter = reporter
        self._feed = feed
        self._ended = ended
        self._reservation: Reservation | None = None
        self.output = make_output(queue, None)
        self.workers: Workers | None = None

    # --- its start

    def begin(self, number: int, ranks: frozenset[int], begin: Begin | None, address: str | None) -> None:
        """Make all ready for the workers of this generation, which are started one by one."""
        try:
            setup = self._equip(begin, address)
            port = self._port(setup.plan, begin)
            if begin is not None:
                self.output = self._make_output(self._queue, setup.plan)  # ranks may have changed
            self.workers = Workers(setup, number, port, self.output, self._selector, self._ended, time.monotonic)
        except LaunchError as error:
            self._feed(node.StartFailed(min(ranks), error.message, error.status, time.monotonic()))
        else:
            self._reporter.settle(setup.plan, setup.folder)
            self._reporter.generation(number, port)

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
        return self.workers is not None and bool(self.workers.waiting)

    def start_next(self) -> None:
        """Start one worker more."""
        assert self.workers is not None
        rank = self.workers.waiting.popleft()
        try:
            pid = self.workers.start(rank)
        except CannotStart as error:
            self._feed(node.StartFailed(rank, str(error), error.status, time.monotonic()))
        else:
            self._reporter.started(rank, pid)
            self._feed(node.WorkerStarted(rank, time.monotonic()))

    def start_no_more(self) -> None:
        """Leave out whoever was not started yet."""
        if self.workers is not None:
            self.workers.waiting.clear()

    # --- while it lives

    @property
    def pids(self) -> frozenset[int]:
        """The processes of all workers, dead ones included until they are buried."""
        return self.workers.pids if self.workers is not None else frozenset()

    @property
    def have_stopped(self) -> bool:
        """Whether each worker that lives is stopped (SIGSTOP)."""
        return self.workers is None or self.workers.has_stopped

    def do(self, action: node.Action) -> None:
        """Send the workers the signal that this action asks for, if it is one of those that do."""
        if self.workers is None:
            return
        match action:
            case node.Forward(signum, ranks):
                self.workers.forward(signum, ranks)
            case node.Stop(signum, ranks):
                self.workers.end(signum, ranks, time.monotonic())
            case node.Kill(ranks):
                self.workers.end(signal.SIGKILL, ranks, time.monotonic())
            case node.Suspend() | node.Resume():
                self.workers.freeze(isinstance(action, node.Suspend))

    # --- its end

    def dismiss_services(self) -> None:
        """Ask what served the workers to end, as far as it does not by itself."""
        if self.workers is not None:
            self.workers.dismiss_services()

    def reap(self, state: node.State, now: float) -> list[WorkerExit]:
        """Let go of all that the generation held, and give the ends of its workers."""
        workers, self.workers = self.workers, None
        exits = workers.reap(state.exits, now) if workers is not None else []
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        return exits
