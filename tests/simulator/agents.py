"""A simulated agent: the real decision about a node's workers and the real link to the arbiter, with simulated workers."""

from __future__ import annotations

from functools import partial
from math import inf
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any, cast

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import Phase
from ddplaunch.launcher.job.link import Lease, Link
from ddplaunch.launcher.job.messages import Hello, NodeFacts
from ddplaunch.launcher.job.orders import Generation, JobEnd, LookingForCoordinator, NodeEnd, SentReport, Waits
from ddplaunch.launcher.job.remote_link import CoordinatorElsewhere, RemoteLink
from ddplaunch.launcher.node.child import LOOK_AT_LAPSE
from ddplaunch.launcher.tell.causes import NO_TRACES
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.outcome import StartFailure, Traces, WorkerError
from tests.simulator.arbiters import KEY, PORT, Arbiter
from tests.simulator.scenario import COMMAND
from tests.simulator.training import Run, Violation, Worker
from tests.simulator.world import Process, address_of
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import node_step

AT_WORK = (Phase.RUNNING, Phase.SETTLING)
STOPS = frozenset({int(SIGINT), int(SIGTERM), int(SIGHUP), int(SIGQUIT)})
FRONT_KILLS_WITHIN = 2 * LOOK_AT_LAPSE  # seconds from the end of a lease: the front sees it at three looks
FACTS = NodeFacts(ddplaunch="", python="", torch="", script="", nnodes="")


class _Link(RemoteLink):
    """The real link; which arbiter it has reached is known outside of the process, too."""

    def __init__(self, agent: Agent, elsewhere: CoordinatorElsewhere, lease: Lease) -> None:
        super().__init__(cast(Any, agent.process), elsewhere, lease)
        self._agent = agent

    def on_found(self, peer: Any, found_as: str) -> None:
        self._agent.follows = self._agent.world.arbiter
        super().on_found(peer, found_as)


class Agent:
    """The agent of a node; one process, which may have the arbiter, too."""

    link: Link

    def __init__(self, process: Process) -> None:
        self.process, self.world, self.number = process, process.world, process.machine.number
        self.start_fails = False
        self.follows: Arbiter | None = None  # the last one that it was connected to
        self._run: Run | None = None
        self._unstarted: frozenset[int] = frozenset()
        self._daemons = 0  # processes that workers left behind
        scenario = self.world.scenario
        policy = node.Policy(
            ranks=frozenset(range(scenario.workers)),
            stop_signals=STOPS,
            grace_period=scenario.grace_period,
        )
        self.state = node.State(policy=policy)
        process.handle = self.handle
        self._deadline = process.timer(None, self._on_deadline)
        self._rest = process.timer(None, self._on_deadline)

    def __str__(self) -> str:
        return f"agent {self.number}"

    def hello(self) -> Hello:
        """Return the first message to an arbiter."""
        return Hello(
            requested_rank=self.number if self.world.scenario.ranked else None,
            host=address_of(self.number),
            workers=self.world.scenario.workers,
            backend="gloo",
            backend_reason="",
            reached=address_of(self.number),
            facts=FACTS,
        )

    def connect(self) -> None:
        """Look for the arbiter at its address."""
        scenario, policy = self.world.scenario, self.world.scenario.policy
        seconds = scenario.heartbeat_timeout if policy.lease else inf
        self.lease = Lease(seconds, self.world.monotonic)
        elsewhere = CoordinatorElsewhere(
            key=KEY,
            first_message=self.hello(),
            keepalive=Keepalive(max_nodes=policy.max_nodes, timeout=scenario.heartbeat_timeout),
            rdzv_timeout=policy.rdzv_timeout,
            how_back="for it" if policy.lease and scenario.where == "by hand" else "",
        )
        self.link = link = _Link(self, elsewhere, self.lease)
        link.aim([address_of(COMMAND if scenario.where == "command" else 0)], [PORT])

    @property
    def status(self) -> int | None:
        """The exit status, once nothing is left to do."""
        return self.state.end.status if self.state.phase is Phase.ENDED and self.link.is_over else None

    def watch_lease(self) -> None:
        """Have the front of an agent that is stopped now kill it, with its workers, when the lease is over."""
        if isinstance(self.link, RemoteLink) and self.lease.left < inf:
            self.world.at(self.world.now + self.lease.left + FRONT_KILLS_WITHIN, self._on_front)

    def _on_front(self) -> None:
        machine = self.process.machine
        if self.world.now < machine.frozen_until:
            self.world.at(machine.frozen_until + FRONT_KILLS_WITHIN, self._on_front)
        elif self.process.is_stopped and not machine.is_asleep and not self.lease.left:
            self.process.kill()

    # --- what happens, and what follows

    def handle(self, event: Any) -> None:
        """Take an event of the loop; what the real one hands to its other parts concerns none of these."""
        now = self.process.now()
        match event:
            case Generation():
                self._run = self.world.runs[event.term]
                self.step(node.GenerationBegun(event.number, event.ranks, now, event.alone))
            case JobEnd(status):
                self.step(node.JobEnded(status, now))
            case LookingForCoordinator(text) | Waits(text):
                self.world.note(self, text)
            case _ if isinstance(event, node.Event):
                self.step(event)

    def _on_deadline(self) -> None:
        self.step(node.DeadlineReached(self.process.now()))

    def step(self, event: node.Event) -> None:
        """Decide, and carry out what follows; raise Violation if nothing would ever happen any more."""
        if self.state.phase is Phase.ENDED:
            return
        if not isinstance(event, node.DeadlineReached):
            self.world.note(self, event)
        if isinstance(event, node.GenerationBegun) and self.state.phase is not Phase.WAITING:
            raise Violation(f"no worker of two generations runs on one node: {self} begins in {self.state.phase.name}")
        self.state, actions = node_step(self.state, event)
        self._deadline.set(self.state.deadline)
        self._rest.set(self.state.quiet_deadline)
        for action in actions:
            self._act(action)
        state = self.state
        is_stopping = state.phase not in (*AT_WORK, Phase.WAITING, Phase.ENDED)
        is_idle = state.phase in AT_WORK and not state.alive and not state.pending
        if (is_stopping or is_idle) and state.deadline is None:
            raise Violation(f"nothing waits without a deadline: {self} in {state.phase.name}")

    def _act(self, action: node.Action) -> None:
        """Have workers do what follows from an action, and questions about them answered."""
        world = self.world
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
            case node.Sweep(signum):
                self._sweep(signum)
            case node.ReportEnded():
                state = self.state
                traces: Traces = NO_TRACES
                end = NodeEnd(state.generation, state.exits, state.start_failure, state.teardown.leftovers, traces)
                self.link.send(end)
            case node.Exit(status):
                if self.link.end is None:  # the arbiter did not answer
                    self.link.give_up()
                    self.link.end = JobEnd(status, "signalled")
            case _ if isinstance(action, SentReport):
                self.world.note(self, f"reports {action}")
                self.link.send(action)

    def soon(self, event: Any) -> None:
        """Take what `event` gives for a time, when the process comes to it."""
        self.process.do(lambda: self.step(event(self.process.now())))

    # --- workers

    def _mine(self, ranks: frozenset[int] | None = None) -> list[Worker]:
        mine = [one for one in self.process.machine.workers() if one.agent is self]
        return [one for one in mine if ranks is None or one.rank in ranks]

    def _start(self, run: Run | None, rank: int) -> None:
        if run is None or run is not self._run or rank not in self._unstarted or self.state.phase not in AT_WORK:
            return
        self._unstarted -= {rank}
        if self.start_fails:
            self.start_fails = False
            failure = StartFailure(rank, address_of(self.number), "no room", 126)
            self.step(node.StartFailed(failure, self.process.now()))
        else:
            Worker(self, run, rank)
            self.step(node.WorkerStarted(rank, self.process.now()))

    def on_worker_failed(self, worker: Worker, error: WorkerError) -> None:
        def learn() -> None:
            now = self.process.now()
            final = (
                node.ErrorRecorded(now),
                node.WorkerRaised(worker.rank, error, now),
                node.ExceptionFinal(worker.rank, now),
            )
            if worker.run is self._run and worker.rank in self.state.alive:
                for event in final:
                    self.step(event)

        self.world.soon(0.01, self.process.do, learn)

    def on_worker_ended(self, worker: Worker, code: int | None, signum: int | None, error: WorkerError | None) -> None:
        stopped_with, stopped_at = worker.stopped or (None, None)
        self._daemons += self.world.scenario.program == "daemons"
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
        self.process.post(node.Swept(left, self.process.now()))

    def _on_daemons_ended(self) -> None:
        self._daemons = 0
        if self.state.phase is Phase.SWEEPING:
            self._sweep()
