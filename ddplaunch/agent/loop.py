"""The one loop of a node: what the operating system reports becomes events, `supervise.node` decides, actions become calls.

No threads: without an event the process sleeps; where there is a deadline it wakes once a second, see `process/clock.py`.
"""

from __future__ import annotations

import gc
import selectors
import time
from collections import deque
from math import inf
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.agent.begin import AgentJob
from ddplaunch.agent.generations import Generations
from ddplaunch.agent.orders import Orders
from ddplaunch.agent.pipes import Backpressure, FrontPipes, OutputQueue
from ddplaunch.agent.run_socket import RunSocket
from ddplaunch.agent.setup import AgentSetup
from ddplaunch.agent.shutdown import Shutdown
from ddplaunch.agent.signals import END_MARGIN, SignalOrigin, SignalSource
from ddplaunch.agent.starter import CannotStart
from ddplaunch.coordinator.link import JobEnd, Link, NodeEnd, SentReport
from ddplaunch.errors import LaunchError
from ddplaunch.output.file_queue import FileQueue
from ddplaunch.process import clock
from ddplaunch.process.apart import AskApart
from ddplaunch.process.linux import keep_freed_memory
from ddplaunch.process.tree import Leftovers
from ddplaunch.supervise import node
from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.node import Phase
from ddplaunch.supervise.outcome import StartFailure, WorkerExit

if TYPE_CHECKING:
    from ddplaunch.agent.begin import Connect
    from ddplaunch.coordinator.link import Report

# workers that are started between two waits for events: some 15 ms of fresh ones, 0.1 s of forks with torch
STARTS_PER_ROUND = 8


def run(job: AgentJob, connect: Connect, files: FileQueue, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status; `files` goes to the process that writes them."""
    # the start went without a garbage collector; a job of weeks needs one, for what it makes itself
    gc.freeze()
    gc.enable()
    keep_freed_memory()
    return Agent(job, AgentSetup(job.inputs, files), pipes).run(connect)


class Agent:
    """The loop's state: the decision's, the workers', and the pipes to the front."""

    def __init__(self, job: AgentJob, setup: AgentSetup, pipes: FrontPipes) -> None:
        self._job = job
        self._events: deque[node.Event] = deque()
        self._queue = OutputQueue(pipes.output[1])
        self._reporter = setup.reporter(self._queue)
        self._selector = selectors.DefaultSelector()
        self._files = setup.files
        self._files.attach(self._selector)
        self._backpressure = Backpressure(self._queue, self._selector)
        self._leftovers = Leftovers(
            lambda: self._generations.pids,
            lambda: self._others,
            lambda: self._generations.left(),  # noqa: PLW0108 - they are made below
            lambda left: self._events.append(node.Swept(left, clock.now())),
        )
        self._signals = SignalSource(
            self._selector,
            pipes,
            stops=job.policy.stop_signals,
            sent_again=job.sent_again,
            feed=self._events.append,
            child_ended=self._leftovers.child_ended,
            front_lost=self._queue.abandon,
            one_fewer=self._expect_one_fewer,
            has_stopped=lambda: self._generations.have_stopped,
            end_within=job.policy.grace_period + END_MARGIN,
            signals_all=job.signals_all,
        )
        self._ask_apart = AskApart(self._selector)
        ends = (self._queue, self._selector, self._signals, self._backpressure, self._files, pipes)
        self._shutdown = Shutdown(*ends, reporter=self._reporter, requeue=job.requeue, ask_apart=self._ask_apart)
        self._generations = Generations(
            setup,
            self._queue,
            self._selector,
            self._reporter,
            feed=self._events.append,
            ended=self._worker_ended,
            child_ended=self._leftovers.child_ended,
            ask_apart=self._ask_apart,
            joined=self._joined if job.inputs.spec.straggler_check else None,
        )
        self._orders = Orders(
            self._queue,
            self._signals,
            self._generations,
            feed=self._events.append,
            reporter=self._reporter,
            report=self._report,
            ask_apart=self._ask_apart,
        )
        self._run_socket = RunSocket(
            setup,
            self._selector,
            self._stop_job,
            self._reporter.print,
            lambda: self._generations.inspection.debuggers,
        )
        self._exits: list[WorkerExit] = []  # of the last generation that has ended
        self._state = node.begin(job.policy)
        self._own_link: Link | None = None  # until the coordinator is known

    def run(self, connect: Connect) -> int:
        """Run the loop until everything is gone; give the job's exit status."""
        self._signals.listen(self._job.signals)
        try:
            self._own_link = connect(self._orders, self._reporter, self._selector)
        except LaunchError as error:
            self._reporter.write(error.render())
            self._shutdown.leave_early(self._state)
            return error.status
        self._run_socket.open(self._own_link)
        self._process_events()
        while self._state.phase is not Phase.ENDED or not self._link.is_over:
            self._wait()
            self._start_some()
        self._generations.close()
        self._run_socket.close()
        self._link.close()
        assert self._state.status is not None
        assert self._orders.job_end is not None
        self._shutdown.leave(self._state, self._exits, self._orders.job_end)
        return self._state.status

    # --- events

    def _wait(self) -> None:
        """Wait for events and process them."""
        output = self._generations.output
        output.muted = self._backpressure.update(
            self._generations.pause_output, output.is_kept, clock.now(), self._files.holds
        )
        if not output.muted:
            self._reporter.output_dropped(output.dropped)
        still = self._selector.get_map()
        rest_until = soonest(self._link.rest_until, self._state.rest_until)
        deadline = self._deadline
        ready = clock.PROCESS_CLOCK.select(
            self._selector, inf if deadline is None else deadline, inf if rest_until is None else rest_until
        )
        self._reporter.paused(clock.PROCESS_CLOCK.pause)
        for key, _ in ready:
            if still.get(key.fd) is key:  # an earlier event of this round may have closed it
                key.data()
                self._process_events()
        now = clock.now()
        self._leftovers.expire(now, sweeps=self._state.phase is Phase.SWEEPING)
        self._link.expire(now)
        self._files.expire(now)
        self._run_socket.expire(now)
        self._process_events()
        self._generations.expire(now)
        self._reporter.report_folder()
        due = soonest(self._state.deadline, self._state.rest_until)
        if due is not None and now >= due:
            self._events.append(node.DeadlineReached(now))
            self._process_events()

    @property
    def _deadline(self) -> float | None:
        """When to wake at the latest."""
        if self._generations.is_starting:
            return clock.now()
        parts = (self._state, self._generations, self._leftovers, self._backpressure, self._link)
        return soonest(*(part.deadline for part in (*parts, self._files, self._run_socket)))

    def _worker_ended(self, rank: int) -> None:
        workers, now = self._generations.workers, clock.now()
        assert workers is not None
        try:
            exit = workers.exit_of(rank, time.monotonic())
        except CannotStart as error:
            failure = StartFailure(rank, workers.host, str(error), error.status, error.errno)
            self._events.append(node.StartFailed(failure, now))
            return
        if exit is None:
            return
        # once the workers are being stopped, each end brings its own error with it
        if exit.status != 0 and self._state.phase in (Phase.RUNNING, Phase.SETTLING):
            for raised, what in workers.newly_raised():
                if raised != rank:
                    self._events.append(node.WorkerRaised(raised, what, now))
        self._events.append(node.WorkerExited(exit, now))

    @property
    def _others(self) -> frozenset[int]:
        """Our children that are neither workers that live nor left behind by any."""
        own = self._own_link.pids if self._own_link is not None else frozenset()
        ended = self._generations.workers.ended if self._generations.workers is not None else frozenset()
        return own | ended | self._generations.server_pids | self._ask_apart.pids | {self._files.pid}

    # --- the coordinator

    @property
    def _link(self) -> Link:
        assert self._own_link is not None
        return self._own_link

    def _report(self, report: Report) -> None:
        """Report to the coordinator."""
        self._link.send(report)

    def _stop_job(self) -> None:
        """End the job as Ctrl-C does: with another signal if that is ignored here, as after nohup."""
        signum = SIGINT if SIGINT in self._job.signals else SIGTERM
        self._signals.received(signum, SignalOrigin.FRONT)

    def _joined(self) -> None:
        if self._link.coordinator is not None:
            self._link.coordinator.joined()

    def _expect_one_fewer(self) -> None:
        if self._own_link is not None:
            self._own_link.expect_one_fewer()

    def _report_end(self, now: float) -> None:
        """Report to the coordinator how the workers of this node have ended."""
        state = self._state
        self._exits = self._generations.reap(state, now)
        raised = dict(state.raised)
        exits = tuple(replace(end, error=end.error or raised.get(end.rank)) for end in self._exits)
        if samples := self._generations.samples:
            from ddplaunch.stacks.sent import stacks_at_end  # most jobs do not fail

            if (seen := stacks_at_end(state.generation, samples)) is not None:
                self._report(seen)
        self._report(NodeEnd(state.generation, exits, state.start_failure, state.left, self._reporter.traces))

    # --- decisions

    def _process_events(self) -> None:
        """Take every event in its order; an action may cause further ones."""
        while self._events:
            event = self._events.popleft()
            if self._state.phase is Phase.ENDED:
                continue  # two children may have ended at once; nothing is reported after the end
            if isinstance(event, (node.SignalReceived, node.StopOrdered)) and event.signum == SIGINT:
                event = replace(event, silent=self._generations.silent)
            self._reporter.on_event(event, self._state)
            self._take(node.step(self._state, event))

    def _take(self, result: node.Result) -> None:
        self._state, actions = result
        if not self._state.pending:
            self._generations.start_no_more()
        for action in actions:
            self._reporter.on_action(action)
            self._do(action)

    # --- actions

    def _do(self, action: node.Action) -> None:
        match action:
            case node.StartWorkers():
                self._generations.begin()
            case node.Sweep(signum, sparing):
                if sparing:
                    self._generations.dismiss_services()
                self._leftovers.look(signum, sparing=sparing)
            case node.ReportEnded():
                self._report_end(clock.now())
            case node.Suspend() | node.Resume():
                self._report(action)
                self._generations.do(action)
            case _ if isinstance(action, SentReport):
                self._report(action)
            case node.Exit():
                self._exits = self._generations.reap(self._state, clock.now()) or self._exits
                self._reporter.output_dropped(self._generations.output.dropped)
                end = self._orders.job_end
                if end is None:  # the coordinator did not answer, and the user does not wait for it
                    self._link.leave()
                    end = JobEnd(action.status, "signalled", self._reporter.stopped(self._state.signum))
                    self._orders.job_end = end
                self._shutdown.conclude(self._state, self._exits, end, time.monotonic())
                self._run_socket.ended(end)
            case _:
                self._generations.do(action)

    def _start_some(self) -> None:
        """Start a few workers; the loop comes by between two such rounds, so that no signal waits for the last."""
        self._generations.go_on()
        self._process_events()
        left = STARTS_PER_ROUND
        while left > 0 and self._generations.is_starting:
            left -= self._generations.start_next(left)
            self._process_events()
