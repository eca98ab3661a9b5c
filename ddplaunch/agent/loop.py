"""The one loop of a node: what the operating system says becomes events, `supervise.step` decides, actions become calls.

No threads, no polling: without an event and without a deadline the process sleeps.
"""

from __future__ import annotations

import gc
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ddplaunch.agent.generations import Equip, Generations, MakeOutput
from ddplaunch.agent.pipes import CONTROL, Backpressure, FrontPipes, OutputQueue
from ddplaunch.agent.shutdown import Requeue, Shutdown
from ddplaunch.agent.signals import SignalSource
from ddplaunch.agent.workers import CannotStart
from ddplaunch.errors import LaunchError
from ddplaunch.process.linux import become_subreaper
from ddplaunch.process.tree import descendants, reap, signal_process
from ddplaunch.record import record
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise import node
from ddplaunch.supervise.node import Phase, Policy
from ddplaunch.supervise.outcome import WorkerExit

if TYPE_CHECKING:  # one node needs none of it
    from ddplaunch.control.messages import Begin, Quit
    from ddplaunch.coordinator.link import Nodes

STARTS = 8  # workers that are started between two looks at what happens: some 15 ms
LONGEST_SLEEP = 1e6  # seconds; epoll takes no more than 2^31 ms


@record(kw_only=True)
class AgentJob:
    """All that the agent of a node needs to know; made before it is forked."""

    policy: Policy
    equip: Equip
    output: MakeOutput
    reporter: Callable[[OutputQueue], Reporter]
    signals: frozenset[int]  # that the front passes on, and that are taken as such when they come to us directly
    sent_again: frozenset[int]  # of which a second one means no hurry
    nodes: Callable[[Agent, Reporter, selectors.BaseSelector], Nodes] | None = None  # several nodes
    requeue: Requeue | None = None  # into the queue; None: not ours to go


def run(job: AgentJob, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status. Runs in a process of its own."""
    become_subreaper()
    # the start went without a garbage collector; a job of weeks needs one, for what it makes itself
    gc.freeze()
    gc.enable()
    return Agent(job, pipes).run()


class Agent:
    """The loop's state: the decision's, the crew's, and the way to the front."""

    def __init__(self, job: AgentJob, pipes: FrontPipes) -> None:
        self._job = job
        self._queue = OutputQueue(pipes.output[1])
        self._reporter = job.reporter(self._queue)
        self._selector = selectors.DefaultSelector()
        self._backpressure = Backpressure(self._queue, self._selector)
        self._signals = SignalSource(
            self._selector,
            pipes,
            stops=job.policy.stop_signals,
            sent_again=job.sent_again,
            feed=self.feed,
            child_ended=self._child_ended,
            front_lost=self._queue.abandon,
            one_fewer=self._one_fewer,
            has_stopped=lambda: self._generations.have_stopped,
        )
        self._shutdown = Shutdown(
            self._queue, self._selector, self._signals, self._backpressure, reporter=self._reporter, requeue=job.requeue
        )
        self._generations = Generations(
            job.equip,
            job.output,
            self._queue,
            self._selector,
            self._reporter,
            feed=self.feed,
            ended=self._worker_ended,
        )
        self._exits: list[WorkerExit] = []  # of the last crew that was buried
        self._state = node.State(policy=job.policy)
        self._events: deque[node.Event] = deque()
        self._nodes: Nodes | None = None
        self._begin: Begin | None = None  # what the coordinator said last
        self._address: str | None = None  # of this node, that the others reach
        self._quit: Quit | None = None

    def run(self) -> int:
        """Run the loop until everything is gone; give the job's exit status."""
        self._signals.listen(self._job.signals)
        self._take(node.begin(self._job.policy, _now()))
        if self._job.nodes is not None:
            try:
                self._nodes = self._job.nodes(self, self._reporter, self._selector)
            except LaunchError as error:
                self._reporter.write(error.render())
                self._shutdown.hand_over(self._state)
                return error.status
        self._digest()
        while self._state.phase is not Phase.ENDED or not (self._nodes is None or self._nodes.is_over):
            self._wait()
            self._start_some()
        if self._nodes is not None:
            self._nodes.close()
        self._shutdown.leave(self._state, self._exits, self._quit)
        assert self._state.status is not None
        return self._state.status

    # --- events

    def _wait(self) -> None:
        """Wait for events and digest them."""
        output = self._generations.output
        output.muted = self._backpressure.mind(self._generations.workers, output.is_kept, _now())
        if not output.muted:
            self._reporter.dropped(output.dropped)
        still = self._selector.get_map()
        for key, _ in self._selector.select(self._patience()):
            if still.get(key.fd) is key:  # an earlier event of this round may have closed it
                key.data()
                self._digest()
        now = _now()
        if self._nodes is not None:
            self._nodes.expire(now)
            self._digest()
        output = self._generations.output  # another one, if a generation has begun
        output.flush(now)
        self._reporter.problem(output.problem)
        if self._state.deadline is not None and now >= self._state.deadline:
            self.feed(node.DeadlineReached(now))
            self._digest()

    def _patience(self) -> float | None:
        """How long to sleep at most, in seconds."""
        if self._generations.is_starting:
            return 0
        others = self._nodes.deadline if self._nodes is not None else None
        deadlines = (self._state.deadline, self._generations.output.deadline, self._backpressure.deadline, others)
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=inf)
        return None if soonest == inf else min(max(0.0, soonest - _now()), LONGEST_SLEEP)

    def _child_ended(self) -> None:
        reap(keep=self._pids)
        if self._state.phase is Phase.SWEEPING:
            self._look_around()

    def _worker_ended(self, rank: int) -> None:
        workers, now = self._generations.workers, _now()
        assert workers is not None
        try:
            exit = workers.exit_of(rank, now)
        except CannotStart as error:
            self.feed(node.StartFailed(rank, str(error), error.status, now))
            return
        if exit is None:
            return
        # once the workers are being stopped, each end brings its own error with it
        if exit.status != 0 and self._state.phase in (Phase.RUNNING, Phase.SETTLING):
            for raised, what in workers.newly_raised():
                if raised != rank:
                    self.feed(node.WorkerRaised(raised, what, now))
        self.feed(node.WorkerExited(exit, now))

    def _look_around(self, signum: int = 0, sparing: bool = False) -> None:
        """Find what workers left behind, signal it if `signum` is one, and say what there is."""
        left = [process for process in descendants(os.getpid()) if process.pid not in self._pids]
        if signum:
            for process in left:
                if not (sparing and process.tidies_up):
                    signal_process(process, signum)
        self.feed(node.Swept(tuple(map(str, left)), _now()))

    @property
    def _pids(self) -> frozenset[int]:
        """Our children that are no leftovers of workers."""
        workers = self._generations.pids
        return workers if self._nodes is None else workers | self._nodes.pids

    # --- other nodes

    def feed(self, event: node.Event) -> None:
        """Take an event from another node; it is digested when the loop comes to it."""
        self._events.append(event)

    def listening(self, port: int) -> None:
        """Say where the coordinator, which is here, listens: whoever started the other agents tells them."""
        self._queue.put(CONTROL, b'{"type":"listening","port":%d}' % port)

    def say(self, text: str) -> None:
        """Tell the user what the way to the other nodes has to say."""
        self._reporter.say(text)

    def _one_fewer(self) -> None:
        if self._nodes is not None:
            self._nodes.expect_one_fewer()

    def begun(self, begin: Begin, address: str | None) -> None:
        """Take the coordinator's word to start, and the address of this node that the others reach."""
        self._begin, self._address = begin, address
        first = sum(seat.workers for seat in begin.seats[: begin.place])
        ranks = frozenset(range(first, first + begin.seats[begin.place].workers))
        self.feed(node.Begun(begin.generation, ranks, _now()))

    def dismissed(self, message: Quit) -> None:
        """Take the coordinator's word to end."""
        self._quit = message
        self.feed(node.Dismissed(message.status, _now()))

    def _report(self, now: float) -> None:
        """Tell the coordinator how the workers of this node have ended."""
        assert self._nodes is not None
        self._exits = self._generations.reap(self._state, now)
        self._nodes.report(self._state, self._exits, self._reporter.traces)

    # --- decisions

    def _digest(self) -> None:
        """Take every event in its order; an action may cause further ones."""
        while self._events:
            event = self._events.popleft()
            if self._state.phase is Phase.ENDED:
                continue  # two children may have ended at once; nothing is told after the end
            self._reporter.heard(event, self._state)
            self._take(node.step(self._state, event))

    def _take(self, result: node.Result) -> None:
        self._state, actions = result
        if not self._state.pending:
            self._generations.start_no_more()
        for action in actions:
            self._reporter.doing(action)
            self._do(action)

    # --- actions

    def _do(self, action: node.Action) -> None:
        now = _now()
        match action:
            case node.Start(generation):
                self._generations.begin(generation, self._state.policy.ranks, self._begin, self._address)
            case node.Sweep(signum, sparing):
                if sparing:
                    self._generations.dismiss_services()
                self._look_around(signum, sparing)
            case node.Retry(wait):
                self._reporter.failed(self._state, self._generations.reap(self._state, now), wait)
            case node.Report():
                self._report(now)
            case node.Announce(why, signum) if self._nodes:
                self._nodes.announce(why, signum)
            case node.TellNotice(signum) if self._nodes:
                self._nodes.notice(signum)
            case node.Hurry() if self._nodes:
                self._nodes.hurry()
            case node.Exit():
                self._exits = self._generations.reap(self._state, now) or self._exits
                self._reporter.dropped(self._generations.output.dropped)
                if self._quit is None and self._nodes is not None:
                    self._nodes.leave()
                self._state = self._shutdown.conclude(self._state, self._exits, self._quit, now)
            case _:
                self._generations.do(action)

    def _start_some(self) -> None:
        """Start a few workers; the loop comes by between two such rounds, so that no signal waits for the last."""
        for _ in range(STARTS):
            if not self._generations.is_starting:
                return
            self._generations.start_next()
            self._digest()


def _now() -> float:
    return time.monotonic()
