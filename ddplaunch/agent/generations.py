"""The workers of this node, one generation after another, and what a generation holds: setup, output, workers.

It does what was decided and reports what came of it; it decides nothing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.agent.pipes import OutputQueue, watch
from ddplaunch.agent.setup import AgentSetup, WorkerSetup
from ddplaunch.agent.starter import CannotStart, Starter
from ddplaunch.agent.workers import Workers
from ddplaunch.coordinator.link import Generation
from ddplaunch.errors import LaunchError, expendable
from ddplaunch.process import clock
from ddplaunch.report.closing import render_stuck
from ddplaunch.report.error_file import JOINED, RAISED, STORE_WANTED
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise import node
from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.outcome import StartFailure, WorkerExit

if TYPE_CHECKING:
    from ddplaunch.agent.inspection import Inspection
    from ddplaunch.control.questions import Answer, Question
    from ddplaunch.process.apart import AskApart
    from ddplaunch.process.ask import Asked
    from ddplaunch.process.tree import Process
    from ddplaunch.stacks import Sample


_LOOK_WITHIN = 1.0  # seconds to find out whether workers still hang


class Generations:
    """At most one of them lives; `ended` is called with the rank of each worker whose process has ended."""

    def __init__(
        self,
        setup: AgentSetup,
        queue: OutputQueue,
        selector: selectors.BaseSelector,
        reporter: Reporter,
        *,
        feed: Callable[[node.Event], None],
        ended: Callable[[int], None],
        child_ended: Callable[[], None],
        ask_apart: AskApart,
        joined: Callable[[], None] | None,
    ) -> None:
        """`joined` is called once in a generation, when a worker has made a process group; None: it is not to be known."""
        self._setup = setup
        self._queue = queue
        self._selector = selector
        self._reporter = reporter
        self._feed = feed
        self._ended = ended
        self._ask_apart = ask_apart
        self._next: tuple[Generation, str | None] | None = None
        self._ready: tuple[Generation, WorkerSetup] | None = None  # but for the folder
        self.output = setup.output(queue, setup.draft)
        self.workers: Workers | None = None
        warm, why_cold = setup.inputs.warm, setup.inputs.why_cold
        self._starter = Starter(selector, reporter.print, child_ended, warm, why_cold, queue.fileno())
        self._inspection: Inspection | None = None
        self._joined = joined
        self._given_up: set[str] = set()  # of what a job can do without
        self._has_joined = False
        self._plan = setup.draft  # of the last generation, once there is one

    # --- its start

    def prepare(self, generation: Generation, address: str | None) -> None:
        """Take what the coordinator has set for the next one, and the address of this node that the others reach."""
        self._next = generation, address
        if self._inspection is not None:
            self._inspection.begin()

    def begin(self) -> None:
        """Make all ready for the workers of the next generation, which `start_next` starts."""
        assert self._next is not None
        generation, address = self._next
        try:
            setup = self._setup.workers(generation, address)
        except LaunchError as error:
            host = self._setup.draft.workers[0].host
            failure = StartFailure(min(generation.ranks), host, error.message, error.status)
            self._feed(node.StartFailed(failure, clock.now()))
        else:
            self._reporter.use(setup.plan, setup.folder)
            self._starter.prepare(setup.plan, setup.env)
            setup.error_files.forget_all_but(generation.number)
            if (notified := setup.error_files.notified) >= 0:
                watch(self._selector, notified, selectors.EVENT_READ, self._notified, wanted=True)
            self._has_joined = False
            self._ready = generation, setup
        if self._setup.inputs.spec.debug_on_error or self._setup.inputs.spec.debugpy_ranks:
            try:
                self.inspection.debuggers.listen()
            except OSError as error:
                self._reporter.print(f"warning: no worker can be given a debugger: {error.strerror}")

    def go_on(self) -> None:
        """Go on with the start once the place of the logs is known, or will not be known soon."""
        if self._ready is None or not self._ready[1].folder.is_settled:
            return
        (generation, setup), self._ready = self._ready, None
        if generation.agreed is not None:
            self.output = self._setup.output(self._queue, setup.plan)  # ranks may have changed
        self._plan = setup.plan
        self.workers = Workers(
            setup, self._starter, self.output, self._selector, self._ended, clock.now, self._ask_apart
        )
        self._reporter.generation_started(generation.number, generation.port)

    @property
    def is_starting(self) -> bool:
        """Whether workers are yet to be started, and can be."""
        if self._ready is not None:
            return self._ready[1].folder.is_settled
        return self.workers is not None and self.workers.may_start and self._starter.is_ready

    @property
    def deadline(self) -> float | None:
        """When `expire` is to be called at the latest."""
        looks = self._inspection.deadline if self._inspection is not None else None
        return soonest(self.output.deadline, self._starter.deadline, looks)

    def expire(self, now: float) -> None:
        """Show output that has waited; say what has taken long."""
        self.output.flush(now)
        self._starter.expire(now)
        if self._inspection is not None:
            self._inspection.expire(now)

    def start_next(self, most: int) -> int:
        """Start one worker more, or several that start together, so many at most; give how many."""
        if self._ready is not None:  # the place of the logs has become known since the last `go_on`
            self.go_on()
            return 0
        assert self.workers is not None
        try:
            started = self.workers.start(most)
        except CannotStart as error:
            failure = StartFailure(error.rank, self.workers.host, str(error), error.status, error.errno)
            self._feed(node.StartFailed(failure, clock.now()))
            return 1
        for rank, pid in started:
            self._reporter.worker_started(rank, pid)
            self._feed(node.WorkerStarted(rank, clock.now()))
        if not self.workers.waiting and self._setup.is_last_generation:
            self._starter.fork_no_more()
        return len(started)

    def start_no_more(self) -> None:
        """Leave out the workers that were not started yet."""
        self._ready = None
        if self.workers is not None:
            self.workers.waiting.clear()

    # --- while it lives

    def _notified(self) -> None:
        found = self._setup.error_files.notifications()
        if JOINED in found and self._joined is not None and not self._has_joined:
            self._has_joined = True
            self._guard("stragglers are no longer looked for", self._joined)
        if STORE_WANTED in found:
            self._feed(node.StoreWanted(clock.now()))
        if RAISED in found:
            self._feed(node.ErrorRecorded(clock.now()))

    @property
    def pids(self) -> frozenset[int]:
        """The processes of all workers, dead ones included until they are reaped."""
        return self.workers.pids if self.workers is not None else frozenset()

    @property
    def have_stopped(self) -> bool:
        """Whether each worker that lives is stopped (SIGSTOP)."""
        return self.workers is None or self.workers.has_stopped

    def pause_output(self, paused: bool) -> None:
        """Stop reading what the workers write, or go on."""
        if self.workers is not None:
            self.workers.pause_output(paused)

    def do(self, action: node.Action) -> None:
        """Send the workers the signal that this action asks for, if it is one of those that do."""
        if (workers := self.workers) is None:
            return
        match action:
            case node.ForwardSignal(signum, ranks):
                workers.forward(signum, ranks)
                if signum == signal.SIGWINCH:
                    self.output.show_bars_again(clock.now())
            case node.StopWorkers(signum, ranks, by_cluster):
                if self._inspection is not None:
                    self._inspection.detach_debuggers()
                workers.end(signum, ranks, time.monotonic(), by_cluster=by_cluster)
            case node.TakeStacks(if_joined=True) if not workers.may_have_joined:
                self._feed(node.StacksTaken(clock.now()))
            case node.TakeStacks(within, _, ras):
                if not self._guard("stacks are missing", lambda: self.inspection.take_stacks(workers, within, ras=ras)):
                    self._feed(node.StacksTaken(clock.now()))  # else they would be stopped late
            case node.LookForStuck(ranks):
                without = "workers that hang get the whole grace period"
                self._guard(without, lambda: self.inspection.look_for_stuck(workers, ranks, _LOOK_WITHIN))
            case node.Observe(asks):
                without = "a job in which nothing moves is no longer noticed"
                self._guard(without, lambda: self.inspection.observe(workers, asks=asks))
            case node.NameRunning(ranks, left):
                self._reporter.still_running(workers.written_since_stop(ranks), left)
            case node.NameStuck(ranks, seconds):
                self._reporter.print(render_stuck(sorted(ranks), seconds))
            case node.KillWorkers(ranks):
                workers.end(signal.SIGKILL, ranks, time.monotonic())
            case node.LookForRaised():
                for rank, error in workers.lingering():
                    self._feed(node.WorkerRaised(rank, error, clock.now(), lingers=True))
            case node.HostStore():
                self._guard("a store that is looked for at MASTER_PORT is not hosted", workers.host_store)
            case node.LendTerminal(rank):
                workers.drain(rank)
                self.output.hide(True)
                self.inspection.debuggers.lend_terminal(rank)
            case node.ShowOutput():
                self.output.hide(False)
            case node.RefuseTerminal(rank):
                self.inspection.debuggers.refuse_terminal(rank)
            case node.Suspend() | node.Resume():
                workers.suspend(isinstance(action, node.Suspend))
                self.output.show_bars_again(clock.now())  # when the job goes on, the shell has written to the screen

    @property
    def inspection(self) -> Inspection:
        """What looks into the workers."""
        if self._inspection is None:
            from ddplaunch.agent.inspection import Inspection  # most jobs need none

            self._inspection = Inspection(
                self._setup, self._selector, lambda: self.workers, self._feed, self._reporter.write
            )
        return self._inspection

    def answer(self, question: Question, reply: Callable[[Answer], None]) -> Asked[Any] | None:
        """Answer a question about the workers, now or later, by a call of `reply`; not at all if that fails.

        Return the child that answers later, if one does.
        """
        found: list[Asked[Any] | None] = [None]
        expendable(
            lambda: found.append(self.inspection.answer(question, self._plan, reply)),
            partial(self._warn, "a question could not be answered"),
        )
        return found[-1]

    def _guard(self, without: str, call: Callable[[], None]) -> bool:
        """Call this unless it has failed before; give whether it never has."""
        if without not in self._given_up:
            expendable(call, partial(self._give_up, without))
        return without not in self._given_up

    def _give_up(self, without: str, why: str) -> None:
        self._given_up.add(without)
        self._warn(without, why)

    def _warn(self, without: str, why: str) -> None:
        self._reporter.print(f"warning: {without}: {why}")

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Where the workers were when they had to end, if that was asked."""
        return self._inspection.samples if self._inspection is not None else ()

    @property
    def silent(self) -> float:
        """How many seconds ago a worker has last written to its pipes, or was started; 0 if one writes past us."""
        if self.workers is None or any(map(self.workers.has_terminal, self.workers.running)):
            return 0.0
        started = (time.monotonic() - worker.started_at for worker in self.workers.running.values())
        return min((*self.workers.quiet.values(), *started), default=0.0)

    @property
    def server_pids(self) -> frozenset[int]:
        """Our children that serve the workers, and are none themselves."""
        return self._starter.pids | (self._inspection.pids if self._inspection is not None else frozenset())

    def left(self) -> list[Process]:
        """Return what descends from workers that are no descendants of ours."""
        return self._starter.left()

    # --- its end

    def dismiss_services(self) -> None:
        """Ask what served the workers to end, as far as it does not by itself."""
        if self.workers is not None:
            self.workers.dismiss_services()

    def reap(self, state: node.State, now: float) -> list[WorkerExit]:
        """Release all that the generation held, and give the ends of its workers."""
        workers, self.workers = self.workers, None
        if workers is not None and self._inspection is not None:
            self._guard("the stacks of the workers are not kept", partial(self._inspection.keep_stacks, workers))
        return workers.reap(state.exits, now) if workers is not None else []

    def close(self) -> None:
        """Release what is kept from one generation to the next."""
        if self._inspection is not None:
            self._inspection.close()
        self._starter.close()
