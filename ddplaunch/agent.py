"""The one loop of a node: what the operating system says becomes events, `supervise.step` decides, actions become calls.

No threads, no polling: without an event and without a deadline the process sleeps.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from math import inf

from ddplaunch import supervise
from ddplaunch.crew import CannotStart, Crew, Outfit
from ddplaunch.errors import LaunchError
from ddplaunch.link import HASTE, Outbox, Tie
from ddplaunch.outcome import WorkerExit
from ddplaunch.process.linux import become_subreaper
from ddplaunch.process.tree import descendants, reap, signal_process
from ddplaunch.record import record
from ddplaunch.report.output import Output
from ddplaunch.report.teller import Teller
from ddplaunch.supervise import Phase, Policy
from ddplaunch.valve import Valve

STARTS = 8  # workers that are started between two looks at what happens: some 15 ms
LONGEST_SLEEP = 1e6  # seconds; epoll takes no more than 2^31 ms


@record(kw_only=True)
class Job:
    """All that the agent of a node needs to know; made before it is forked."""

    policy: Policy
    outfit: Outfit
    output: Callable[[Outbox], Output]
    teller: Callable[[Outbox], Teller]
    signals: frozenset[int]  # that the front passes on, and that are taken as such when they come to us directly


def run(job: Job, tie: Tie) -> int:
    """Carry the job out and give its exit status. Runs in a process of its own."""
    become_subreaper()
    # the start went without a garbage collector; a job of weeks needs one, for what it makes itself
    gc.freeze()
    gc.enable()
    return Agent(job, tie).run()


class Agent:
    """The loop's state: the decision's, the crew's, and the way to the front."""

    def __init__(self, job: Job, tie: Tie) -> None:
        self._job = job
        self._signals_from_front = tie.signals[0]
        self._outbox = Outbox(tie.output[1])
        self._output = job.output(self._outbox)
        self._teller = job.teller(self._outbox)
        self._selector = selectors.DefaultSelector()
        self._valve = Valve(self._outbox, self._selector)
        self._crew: Crew | None = None
        self._state = supervise.State(policy=job.policy)
        self._events: deque[supervise.Event] = deque()

    def run(self) -> int:
        """Run the loop until everything is gone; give the job's exit status."""
        self._listen()
        self._take(supervise.begin(self._job.policy, _now()))
        self._digest()
        while self._state.phase is not Phase.ENDED:
            self._wait()
            self._start_some()
        self._hand_over()
        assert self._state.status is not None
        return self._state.status

    # --- events

    def _listen(self) -> None:
        ours, wakeup = os.pipe()
        for fd in (ours, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for signum in (*self._job.signals, signal.SIGCHLD):
            signal.signal(signum, _nothing)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._signalled(os.read(ours, 256)))
        self._selector.register(self._signals_from_front, selectors.EVENT_READ, self._front_spoke)

    def _wait(self) -> None:
        """Wait for events and digest them."""
        self._output.muted = self._valve.mind(self._crew, self._output.is_kept, _now())
        if not self._output.muted:
            self._teller.dropped(self._output.dropped)
        still = self._selector.get_map()
        for key, _ in self._selector.select(self._patience()):
            if still.get(key.fd) is key:  # an earlier event of this round may have closed it
                key.data()
                self._digest()
        now = _now()
        self._output.flush(now)
        self._teller.problem(self._output.problem)
        if self._state.deadline is not None and now >= self._state.deadline:
            self._feed(supervise.DeadlineReached(now))
            self._digest()

    def _patience(self) -> float | None:
        """How long to sleep at most, in seconds."""
        if self._crew is not None and self._crew.waiting:
            return 0
        deadlines = (self._state.deadline, self._output.deadline, self._valve.deadline)
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=inf)
        return None if soonest == inf else min(max(0.0, soonest - _now()), LONGEST_SLEEP)

    def _signalled(self, numbers: bytes) -> None:
        """Hear signals sent to this process itself: perhaps copies of the front's, so never a second one that kills."""
        for signum in numbers:
            if signum == signal.SIGCHLD:
                self._child_ended()
            else:
                self._feed(supervise.SignalReceived(signum, _now(), escalates=False))

    def _front_spoke(self) -> None:
        numbers = os.read(self._signals_from_front, 256)
        if not numbers:
            self._selector.unregister(self._signals_from_front)
            self._outbox.abandon()
            self._feed(supervise.FrontLost(_now()))
        for signum in numbers:
            if signum != signal.SIGCHLD:  # the front's child is this process
                self._feed(supervise.SignalReceived(signum, _now()))

    def _child_ended(self) -> None:
        reap(keep=self._pids)
        if self._state.phase is Phase.SWEEPING:
            self._look_around()

    def _worker_ended(self, rank: int) -> None:
        assert self._crew is not None
        now = _now()
        try:
            exit = self._crew.exit_of(rank, now)
        except CannotStart as error:
            self._feed(supervise.StartFailed(rank, str(error), error.status, now))
            return
        if exit is None:
            return
        # once the workers are being stopped, each end brings its own error with it
        if exit.status != 0 and self._state.phase in (Phase.RUNNING, Phase.SETTLING):
            for raised, what in self._crew.newly_raised():
                if raised != rank:
                    self._feed(supervise.WorkerRaised(raised, what, now))
        self._feed(supervise.WorkerExited(exit, now))

    def _look_around(self, signum: int = 0) -> None:
        """Find what workers left behind, signal it if `signum` is one, and say what there is."""
        left = [process for process in descendants(os.getpid()) if process.pid not in self._pids]
        if signum:
            for process in left:
                signal_process(process, signum)
        self._feed(supervise.Swept(tuple(map(str, left)), _now()))

    @property
    def _pids(self) -> frozenset[int]:
        return self._crew.pids if self._crew else frozenset()

    # --- decisions

    def _feed(self, event: supervise.Event) -> None:
        self._events.append(event)

    def _digest(self) -> None:
        """Take every event in its order; an action may cause further ones."""
        while self._events:
            event = self._events.popleft()
            self._teller.heard(event, self._state)
            self._take(supervise.step(self._state, event))

    def _take(self, result: supervise.Result) -> None:
        self._state, actions = result
        if self._crew is not None and not self._state.pending:
            self._crew.waiting.clear()
        for action in actions:
            self._teller.doing(action)
            self._do(action)

    # --- actions

    def _do(self, action: supervise.Action) -> None:
        crew, now = self._crew, _now()
        match action:
            case supervise.Start(generation):
                self._new_crew(generation)
            case supervise.Sweep(signum):
                self._look_around(signum)
            case supervise.Retry(wait):
                self._teller.failed(self._state, self._bury(now), wait, now)
            case supervise.Exit():
                exits = self._bury(now)
                self._teller.dropped(self._output.dropped)
                self._teller.ended(self._state, exits, now)
            case supervise.Forward(signum, ranks) if crew:
                crew.forward(signum, ranks)
            case supervise.Stop(signum, ranks) if crew:
                crew.end(signum, ranks, now)
            case supervise.Kill(ranks) if crew:
                crew.end(signal.SIGKILL, ranks, now)
            case supervise.Suspend() | supervise.Resume() if crew:
                crew.freeze(isinstance(action, supervise.Suspend))

    def _new_crew(self, generation: int) -> None:
        try:
            self._crew = Crew(self._job.outfit, generation, self._output, self._selector, self._worker_ended, _now)
        except LaunchError as error:
            self._feed(supervise.StartFailed(0, error.message, error.status, _now()))
        else:
            self._teller.generation(generation, self._crew.port)

    def _start_some(self) -> None:
        """Start a few workers; the loop comes by between two such rounds, so that no signal waits for the last."""
        crew = self._crew
        for _ in range(STARTS):
            if crew is None or not crew.waiting:
                return
            rank = crew.waiting.popleft()
            try:
                pid = crew.start(rank)
            except CannotStart as error:
                self._feed(supervise.StartFailed(rank, str(error), error.status, _now()))
            else:
                self._teller.started(rank, pid)
                self._feed(supervise.WorkerStarted(rank, _now()))
            self._digest()

    def _bury(self, now: float) -> list[WorkerExit]:
        crew, self._crew = self._crew, None
        return crew.bury(self._state.exits, now) if crew else []

    def _hand_over(self) -> None:
        """Wait until the front has taken all output; of a job that was told to stop, only while it takes any."""
        stops = self._job.policy.stop_signals
        stopped = self._state.why is supervise.Why.SIGNALLED

        def hear() -> None:
            nonlocal stopped
            numbers = os.read(self._signals_from_front, 256)
            stopped = stopped or bool(stops.intersection(numbers))
            if not numbers:
                self._outbox.abandon()

        self._valve.mind(None, True, _now())
        if self._signals_from_front in self._selector.get_map():
            self._selector.modify(self._signals_from_front, selectors.EVENT_READ, hear)
        while self._outbox.size:
            ready = self._selector.select(HASTE if stopped else None)
            if not ready:
                return
            for key, _ in ready:
                key.data()


def _now() -> float:
    return time.monotonic()


def _nothing(_signum: int, _frame: object) -> None:
    """Only there so that the wakeup descriptor is written to."""
