"""A simulated agent: the real decision about a node's workers, behind a model of its link to the arbiter and of its lease."""

from __future__ import annotations

from functools import partial
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import Phase, teardown
from ddplaunch.spec.outcome import StartFailure, Why, WorkerError, WorkerExit
from ddplaunch.system import exitcodes
from tests.simulator.world import End, Process, Run, Violation, Worker, connect
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import node_step

if TYPE_CHECKING:
    from tests.simulator.arbiters import Arbiter

AT_WORK = (Phase.RUNNING, Phase.SETTLING)
STOPS = frozenset({int(SIGINT), int(SIGTERM), int(SIGHUP), int(SIGQUIT)})
_FOR_GOOD = (Why.SIGNALLED, Why.TIMED_OUT, Why.FRONT_LOST)  # reasons of a stop after which nobody waits for node 0
_LOOKS_EVERY = 1.0  # seconds
_SLACK = 1.0  # seconds by which a clock may take a pause for time


class Hello(Struct, frozen=True):
    """The first message of an agent, and the first renewal of its lease."""

    machine: int
    requested_rank: int | None
    last_generation: int
    was_left: bool  # by an arbiter that it has reached before
    at: float


class Pong(Struct, frozen=True):
    """A renewal of the lease of an agent, which it sent at this time."""

    at: float


class Dropped(Struct, frozen=True):
    """The agent follows this arbiter no longer, though its process goes on."""


class NodeEnd(Struct, frozen=True):
    """Nothing of a generation is left on a node."""

    generation: int
    exits: tuple[WorkerExit, ...]
    start_failure: StartFailure | None
    leftovers: tuple[str, ...]


class Ping(Struct, frozen=True):
    """The arbiter has last received the renewal that was sent at this time."""

    answered: float


class Begin(Struct, frozen=True):
    """Begin a generation with these ranks."""

    run: Run
    ranks: frozenset[int]


class Quit(Struct, frozen=True):
    """The job has ended, at least for this node: "ended", "left", "refused"."""

    status: int
    why: str


class Left(Struct, frozen=True):
    """Node 0 leaves the job, which goes on once it is started again."""


class Lease:
    """Until when an agent may have workers: so long from when it sent the last renewal that the arbiter is known to have."""

    def __init__(self, seconds: float, sent_at: float) -> None:
        self._seconds, self.ends_at = seconds, sent_at + seconds

    def echoed(self, sent_at: float) -> None:
        self.ends_at = max(self.ends_at, sent_at + self._seconds)


class Agent:
    """The agent of a node; one process, which may have the arbiter, too."""

    def __init__(self, process: Process) -> None:
        self.process, self.world, self.number = process, process.world, process.machine.number
        self.own: Arbiter | None = None  # in the same process
        self.end: End | None = None  # of the connection with the arbiter
        self.lease: Lease | None = None
        self.last_generation = -1
        self.told: Quit | None = None  # by the arbiter
        self.follows: Arbiter | None = None  # the last one that it was connected to
        self.start_fails = False
        self.is_awaited = True  # by the command that has started it, until it has joined or has ended
        self._run: Run | None = None
        self._ordered: Why | None = None  # why it was ordered to stop last
        self._heard_at = process.now()
        self._looks_until, self._look_at = process.now() + self._scenario.policy.rdzv_timeout, process.now()
        self._unstarted: frozenset[int] = frozenset()
        self._daemons = 0  # processes that workers left behind
        self._stopping_since: float | None = None
        policy = node.Policy(
            ranks=frozenset(range(self._scenario.workers)),
            stop_signals=STOPS,
            grace_period=self._scenario.grace_period,
            stacks_within=self._scenario.stacks_within,
            progress_interval=1.5 if self._scenario.policy.hang_timeout else 0.0,
            notices=self._scenario.policy.notices,
        )
        self.state = node.State(policy=policy)
        process.parts.append(self)

    def __str__(self) -> str:
        return f"agent {self.number}"

    @property
    def _scenario(self) -> Any:
        return self.world.scenario

    @property
    def _is_leased(self) -> bool:
        return bool(self._scenario.policy.lease)

    # --- the arbiter

    @property
    def _looks(self) -> bool:
        """Whether it looks for an arbiter."""
        return self.own is None and self.end is None and self.state.phase is Phase.WAITING and not self._is_over

    @property
    def _is_over(self) -> bool:
        return self.state.end.status is not None

    def _look(self) -> None:
        """Connect to the arbiter if it can be reached; give up once it was looked for long enough."""
        world, here = self.world, self.number
        self._look_at = self.process.now() + _LOOKS_EVERY
        if self.process.now() >= self._looks_until:
            self._end(exitcodes.RENDEZVOUS if self.follows is None else exitcodes.NODE_LOST)
            return
        arbiter = next((one for one in reversed(world.arbiters) if one.listens and one.process.is_alive), None)
        if arbiter is None or arbiter.process.is_stopped:
            return
        there = arbiter.process.machine.number
        if world.is_cut(here, there) or world.is_cut(there, here):
            return
        was_left = self.follows is not None
        self.end = connect(self.process, self, arbiter.process, arbiter)
        self.follows, self._heard_at = arbiter, self.process.now()
        arbiter.opened(self.end.other)
        rank = here if self._scenario.ranked else None
        self._lease_from(world.now)
        self.end.send(Hello(here, rank, self.last_generation, was_left, world.now))

    def _lease_from(self, sent_at: float) -> None:
        if self._is_leased:
            self.lease = Lease(self._scenario.heartbeat_timeout, sent_at)
            self._watch_lease()

    def _watch_lease(self) -> None:
        if self.lease is not None:
            self.world.at(
                max(self.lease.ends_at, self.process.machine.reached_at) + 1e-6, self._on_lease_due, self.lease
            )

    def _on_lease_due(self, lease: Lease) -> None:
        """Kill the workers if the lease is over: the front does so where the agent is stopped."""
        machine = self.process.machine
        if lease is not self.lease or not self.process.is_alive:
            return
        if self.world.now < lease.ends_at or machine.reached_at > self.world.now:
            self._watch_lease()
            return
        for worker in machine.workers():
            worker.kill()
        self.lease = None
        self.process.do(self._on_lease_over)

    def _on_lease_over(self) -> None:
        if self.end is not None:
            self.end.send(Dropped())
            self.end.close()
            self._on_lost("its lease is over")
        self.step(node.KillOrdered(self.process.now()))

    def on_closed(self, end: End, reason: str) -> None:
        if end is self.end:
            self._on_lost(reason)

    def _on_lost(self, reason: str) -> None:
        """Stop the workers; then wait for node 0 to come back, or end, where nobody comes."""
        self.world.note(self, f"has lost the arbiter: {reason}")
        self.end = None
        if self._is_over:
            return
        if signum := self.state.end.signum:
            self._end(exitcodes.of_signal(signum))
        elif self.waits_for_node_0:
            self._looks_until = self.process.now() + self._scenario.policy.rdzv_timeout
            self.step(node.StopOrdered(int(SIGTERM), self.process.now()))
        else:
            self._end(exitcodes.NODE_LOST)

    @property
    def waits_for_node_0(self) -> bool:
        is_ending = self._ordered in _FOR_GOOD or self.state.why in _FOR_GOOD or self.state.end.front_lost
        return self._is_leased and self._scenario.where == "by hand" and not is_ending

    def _end(self, status: int) -> None:
        self.step(node.JobEnded(status, self.process.now()))

    def on_message(self, end: End, message: object) -> None:
        """Take a message of the arbiter."""
        if end is not self.end:
            return
        self._heard_at = self.process.now()
        match message:
            case Ping(answered):
                if self.lease is not None:
                    self.lease.echoed(answered)
                end.send(Pong(self.world.now))
            case Left():
                end.close()
                self._on_lost("node 0 leaves")
            case _:
                self.take(message)

    def take(self, order: Any) -> None:
        """Carry out an order of the arbiter."""
        now = self.process.now()
        match order:
            case Begin(run, ranks) if run.number > self.last_generation:
                if (
                    self._is_leased
                    and self.own is None
                    and (self.lease is None or self.lease.ends_at <= self.world.now)
                ):
                    self._on_lease_over()  # and is renewed no more: the arbiter would wait for this node
                    return
                self.last_generation, self._run, self._ordered = run.number, run, None
                self.step(node.GenerationBegun(run.number, ranks, now, alone=len(run.nodes) == 1))
            case node.StopOrdered(signum, _, why, by_cluster):
                self._ordered = why
                self.step(node.StopOrdered(signum, now, why, by_cluster, others_ended=order.others_ended))
            case node.KillOrdered():
                self.step(node.KillOrdered(now))
                if self.state.phase in (*AT_WORK, Phase.STOPPING):
                    raise Violation(f"a kill reaches nodes that stop, and ends them: {self} in {self.state.phase.name}")
            case Quit(status):
                self.told = order
                self._end(status)

    def _report(self, report: Any) -> None:
        """Report to the arbiter; without one, a node that is to stop ends alone."""
        self.world.note(self, f"reports {report}")
        if self.own is not None:
            self.process.do(partial(self.own.take, 0, report))
        elif self.end is not None:
            self.end.send(report)
        elif isinstance(report, node.ReportStopping) and not self._is_over:
            self._end(exitcodes.of_signal(report.signum) if report.why is Why.SIGNALLED else exitcodes.NODE_LOST)

    # --- time

    @property
    def deadline(self) -> float | None:
        due = [self.state.deadline, self.state.rest_until]
        if self._looks:
            due.append(min(self._look_at, self._looks_until))
        if self.end is not None and not self._is_leased:
            due.append(self._heard_at + self._scenario.heartbeat_timeout)
        return min((one for one in due if one is not None), default=None)

    def on_deadline(self) -> None:
        now = self.process.now()
        if self._looks and now >= min(self._look_at, self._looks_until):
            self._look()
        if self.end is not None and not self._is_leased and now >= self._heard_at + self._scenario.heartbeat_timeout:
            self.end.send(Dropped())
            self.end.close()
            self._on_lost("silent")
        self.step(node.DeadlineReached(now))

    # --- the decision

    def step(self, event: node.Event) -> None:
        """Decide, and carry out what follows; raise Violation if nothing would ever happen any more."""
        if self.state.phase is Phase.ENDED:
            return
        if not isinstance(event, node.DeadlineReached):
            self.world.note(self, event)
        if isinstance(event, node.GenerationBegun) and self.state.phase is not Phase.WAITING:
            raise Violation(f"no worker of two generations runs on one node: {self} begins in {self.state.phase.name}")
        self.state, actions = node_step(self.state, event)
        for action in actions:
            self._act(action)
        state = self.state
        is_stopping = state.phase not in (*AT_WORK, Phase.WAITING, Phase.ENDED)
        if (
            is_stopping or (state.phase in AT_WORK and not state.alive and not state.pending)
        ) and state.deadline is None:
            raise Violation(f"nothing waits without a deadline: {self} in {state.phase.name}")
        since = self.process.now() if self._stopping_since is None else self._stopping_since
        self._stopping_since = since if is_stopping else None

    def check_stop(self) -> None:
        """Raise Violation if what is stopped is not gone in time."""
        if self._stopping_since is None or self.process.is_stopped or not self.process.is_alive:
            return
        limit = self._scenario.grace_period + self._scenario.stacks_within + 2 * teardown.KILL_TIMEOUT + _SLACK
        limit += teardown.TIDY_TIMEOUT + teardown.SWEEP_GRACE
        if self.process.now() - self._stopping_since > limit:
            raise Violation(f"what is stopped is gone in time: {self} stops for more than {limit:g} s")

    def _act(self, action: node.Action) -> None:
        """Have workers do what follows from an action, and questions about them answered."""
        world, dice = self.world, self.world.dice
        match action:
            case node.StartWorkers():
                self._daemons, self._unstarted = 0, self.state.pending
                for rank in sorted(self.state.pending):
                    world.soon(0.5, self.process.do, partial(self._start, self._run, rank))
            case node.StopWorkers(signum, ranks):
                self._unstarted = frozenset()
                for worker in self._mine(ranks):
                    worker.signal(signum)
            case node.KillWorkers(ranks):
                self._unstarted = frozenset()
                for worker in self._mine(ranks):
                    worker.kill()
            case node.ForwardSignal(_, ranks):
                for worker in self._mine(ranks):
                    world.soon(3.0, worker.end, 0)
            case node.CaptureStacks(within):
                if dice.random() < 0.8:
                    waiting = self.state.alive if dice.random() < 0.5 else frozenset[int]()
                    self._later(within, lambda at: node.StacksCaptured(at, self.state.alive, waiting))
            case node.FindStuck(ranks):
                self._later(1.0, lambda at: node.StuckFound(ranks, at))
            case node.Observe():
                self._later(0.3, lambda at: node.Observed(not world.hangs, at))
            case node.FindRaised():
                for worker in self._mine():
                    if worker.has_raised:
                        error = WorkerError(type="ValueError", message="boom", traceback="", at=worker.born)
                        raised = partial(node.WorkerRaised, worker.rank, error, lingers=True)
                        self._later(0.01, lambda at, raised=raised: raised(at=at))
            case node.Sweep(signum):
                self._sweep(signum)
            case node.ReportEnded():
                state = self.state
                self._report(NodeEnd(state.generation, state.exits, state.start_failure, state.teardown.leftovers))
            case node.Exit():
                self.process.do()
            case node.ReportStopping() | node.ReportNotice() | node.Escalate() | node.ReportIdle():
                self._report(action)

    def _later(self, most: float, event: Any) -> None:
        """Take what `event` gives for a time, within so many seconds."""
        self.world.soon(most, self.process.do, lambda: self.step(event(self.process.now())))

    def _soon(self, event: Any) -> None:
        self.process.do(lambda: self.step(event(self.process.now())))

    # --- workers

    def _mine(self, ranks: frozenset[int] | None = None) -> list[Worker]:
        return [
            one for one in self.process.machine.workers() if one.agent is self and (ranks is None or one.rank in ranks)
        ]

    def _start(self, run: Run | None, rank: int) -> None:
        if run is None or run is not self._run or rank not in self._unstarted or self.state.phase not in AT_WORK:
            return
        self._unstarted -= {rank}
        if self.start_fails:
            self.start_fails = False
            self._soon(partial(node.StartFailed, StartFailure(rank, str(self), "no room", 126)))
        elif self._is_leased and self.own is None and self.lease is None:
            return  # the lease has ended, and what kills its workers starts no more
        else:
            Worker(self, run, rank)
            self._soon(lambda at: node.WorkerStarted(rank, at))

    def on_worker_ended(self, worker: Worker, code: int | None, signum: int | None, error: WorkerError | None) -> None:
        stopped_with, stopped_at = worker.stopped or (None, None)
        self._daemons += self._scenario.program == "daemons"
        now, of = self.world.now, {"host": str(self), "error": error, "seconds": self.world.now - worker.born}
        exit = worker_exit(worker.rank, code, signum, at=now, stopped_with=stopped_with, stopped_at=stopped_at, **of)

        def learn() -> None:
            if worker.run is self._run and worker.rank in self.state.alive:
                self.step(node.WorkerExited(exit, self.process.now()))

        self.world.soon(0.01, self.process.do, learn)

    def _sweep(self, signum: int = 0) -> None:
        if signum and self._daemons and (signum == 9 or self.world.dice.random() < 0.5):
            self.world.soon(1.0, self.process.do, self._on_daemons_ended)
        left = (*(f"daemon {number}" for number in range(self._daemons)), *map(str, self._mine()))
        self._soon(partial(node.Swept, left))

    def _on_daemons_ended(self) -> None:
        self._daemons = 0
        if self.state.phase is Phase.SWEEPING:
            self._sweep()
