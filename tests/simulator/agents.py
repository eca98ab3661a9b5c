"""A simulated agent: the real decision of a node, and a model of what carries it out.

Stands for `agent/agent.py` (`handle`, `_step`, `_check_and_begin`), `coordinator/remote_link.py` (`send`, `_on_timeout`,
`_on_closed`) and `process/clock.py`, by which a pause is no time. `Link.take`, `on_arrival` and `node.step` are the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.coordinator import messages
from ddplaunch.coordinator.link import Link
from ddplaunch.coordinator.orders import JobEnd, NodeEnd, Unfit
from ddplaunch.supervise import node
from ddplaunch.supervise.node import Phase, teardown
from ddplaunch.supervise.outcome import StartFailure, Traces, Why, WorkerError
from tests.simulator.world import Closed, Connection, Violation, Worker, World
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import node_step

if TYPE_CHECKING:
    from tests.simulator.coordinator import Coordinator

ENDS_OF_JOB = frozenset(why.value for why in Why)
AT_WORK = (Phase.RUNNING, Phase.SETTLING)
STOPS = frozenset({int(SIGINT), int(SIGTERM), int(SIGHUP), int(SIGQUIT)})
TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
LATE = 1.0  # seconds of a pause that count as time


class Begin(Struct, frozen=True):
    """Stands for `orders.Generation`."""

    number: int
    ranks: frozenset[int]
    alone: bool


class Killed(Exception):
    """The agent is killed between two actions."""


class AgentLink(Link):
    """The link of an agent, whose other end is reached by a connection, or is in the same process."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)  # type: ignore[arg-type]  # of a loop it only needs `post`
        self.agent = agent

    def take(self, order: Any) -> None:
        """Take an order, as the real one does."""
        if isinstance(order, Begin):
            self._loop.post(order)  # as it does with a Generation
        else:
            super().take(order)

    def send(self, report: Any) -> None:
        """Report to the coordinator; one that is not reached yet needs no report, so that a stop ends this node."""
        agent = self.agent
        if agent.coordinator is not None:
            agent.coordinator.take(0, report)
        elif agent.connection is not None:
            if agent.connection.sides[0] is not None:
                agent.connection.send(1, report)
        elif isinstance(report, node.ReportStopping):
            status = exitcodes.of_signal(report.signum) if report.signum else exitcodes.NODE_LOST
            self.take(JobEnd(status=status, why=report.why.value))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected."""
        own = self.agent.coordinator
        return self._has_ended if own is None else own.is_over

    def expect_one_fewer(self) -> None:
        """Never called."""

    def close(self) -> None:
        """Have nothing to close."""

    address = None


class Agent:
    """The agent of a node, with the coordinator if it is node 0."""

    def __init__(self, world: World, number: int) -> None:
        """Start an agent, without a connection yet."""
        scenario = world.scenario
        self.world, self.number = world, number
        self.coordinator: Coordinator | None = None
        self.connection: Connection | None = None
        self.is_member = False  # the coordinator has it on its list
        self.is_disturbed = False  # it, its link or the coordinator was paused, cut or killed
        self.link = AgentLink(self)
        self.state = node.State(
            policy=node.Policy(
                ranks=frozenset(range(scenario.workers)),
                stop_signals=STOPS,
                grace_period=scenario.grace_period,
                stacks_within=scenario.stacks_within,
                progress_interval=1.5 if scenario.policy.hang_timeout else 0.0,
                notices=scenario.policy.notices,
            )
        )
        self.status: int | None = None
        self.is_alive, self.is_paused = True, False
        self.fuse: int | None = None  # actions until it is killed
        self.start_fails = False
        self.is_unfit = False
        self.heard_at = 0.0  # by its clock
        self._missed = 0.0  # seconds in which it did not run
        self._paused_at = 0.0
        self._backlog: list[Callable[[], object]] = []
        self._events: deque[Any] = deque()
        self._pending_check: Begin | None = None  # --health-check
        self._unstarted: frozenset[int] = frozenset()
        self._daemons = 0  # processes that workers left behind
        self._armed = 0
        self._stopping_since: float | None = None

    def __str__(self) -> str:
        return f"agent {self.number}"

    # --- running

    def clock(self) -> float:
        """Return the time of its clock of deadlines."""
        return self.world.now - self._missed

    def post(self, event: Any) -> None:
        """Queue an event, as the loop does."""
        self._events.append(event)

    def do(self, call: Callable[[], object]) -> None:
        """Have the agent do something: now, or when it goes on; a killed one does nothing."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._backlog.append(call)
            return
        try:
            call()
            while self._events:
                self._handle(self._events.popleft())
        except Killed:
            self.kill()
        if self.is_alive and self.state.phase is Phase.ENDED and self.link.is_over:
            self._exit()

    def act(self) -> None:
        """Be killed here, if that is due: between two actions."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    def pause(self, lasts: float) -> None:
        """Stop running for so long."""
        if self.is_alive and not self.is_paused:
            self.is_paused, self._paused_at = True, self.world.now
            self.world.at(self.world.now + lasts, self.resume)

    def resume(self) -> None:
        """Go on: with what has come meanwhile, of which no order is known, then with what is due."""
        if not self.is_paused or not self.is_alive:
            return
        self.is_paused = False
        pause = self.world.now - self._paused_at
        self._missed += max(0.0, pause - self.world.dice.random() * LATE) if pause > LATE else 0.0
        backlog, self._backlog = self._backlog, []
        for call in backlog:
            self.do(call)
        self.arm()
        if self.coordinator is not None:
            self.coordinator.arm()
        elif self.connection is not None and self.connection.sides[0] is not None and not self.connection.is_cut:
            self.connection.send(1, messages.Pong(0.0, 0.0))

    def kill(self) -> None:
        """Be killed: the kernel ends its workers, and closes its connections."""
        if self.is_alive:
            self.world.note(self, "is killed")
            self._leave()

    def crash(self) -> None:
        """Lose power: nobody is told."""
        if self.is_alive and self.connection is not None:
            self.connection.vanish(0)
        self.kill()

    def _exit(self) -> None:
        self.status = self.state.status
        self.world.note(self, f"exits with {self.status}")
        if any(worker.agent is self and self.number != self.world.scenario.stuck for worker in self.world.workers):
            raise Violation(f"nothing is left: {self} exits while its workers run")
        self._leave()

    def _leave(self) -> None:
        self.is_alive = False
        for worker in [worker for worker in self.world.workers if worker.agent is self]:
            worker.end(None, 9)
        if self.connection is not None:
            self.connection.close(0)
        if self.coordinator is not None:
            self.coordinator.close()

    # --- the link

    def connected(self, connection: Connection) -> None:
        """Take a connection to the coordinator."""
        self.connection, self.heard_at = connection, self.clock()
        connection.sides[0] = lambda message: self.do(lambda: self._on_message(message))

    def _on_message(self, message: Any) -> None:
        self.heard_at = self.clock()
        if isinstance(message, Closed):
            self._lose(message.reason)
        elif isinstance(message, messages.Ping):
            if self.connection is not None and self.connection.sides[0] is not None:
                self.connection.send(1, messages.Pong(0.0, 0.0))
        else:
            self.link.take(message if isinstance(message, Begin) else messages.on_arrival(message, self.clock()))

    def check_silence(self) -> None:
        """Give the coordinator up if it was silent for too long, or was not reached."""
        scenario, limit = self.world.scenario, self.world.scenario.heartbeat_timeout
        if self.link._has_ended or self.coordinator is not None:
            return
        if self.connection is None and self.clock() - self.heard_at >= scenario.policy.rdzv_timeout:
            self.link.take(JobEnd(exitcodes.RENDEZVOUS, "not_reached"))
        elif self.connection is not None and self.clock() - self.heard_at >= limit:
            self._lose(f"silent for {limit:g} s")

    def _lose(self, reason: str) -> None:
        self.link.take(JobEnd(exitcodes.NODE_LOST, "lost", reason))

    # --- the decision

    def step(self, event: node.Event) -> None:
        """Let the decision take an event, and carry out what follows."""
        if isinstance(event, (node.StopOrdered, node.KillOrdered, node.JobEnded)):
            self._checked(ended=True)
        if self.state.phase is Phase.ENDED:
            return
        self.world.note(self, event)
        self.state, actions = node_step(self.state, event)
        self._check()
        self.arm()
        if not self.state.pending:
            self._unstarted = frozenset()
        for action in actions:
            self.act()
            self._handle(action)
        if self.state.signum or self.state.front_lost:
            self._checked(ended=True)

    def arm(self) -> None:
        """Set the timer of the state's deadline."""
        self._armed += 1
        if (deadline := self.state.deadline) is not None:
            self.world.at(deadline + self._missed + 1e-6, self._on_deadline, self._armed)

    def _on_deadline(self, armed: int) -> None:
        if armed == self._armed and not self.is_paused:
            self.do(lambda: self.step(node.DeadlineReached(self.clock())))

    def _check(self) -> None:
        """Raise Violation if nothing would ever happen any more, or a stop takes too long."""
        state = self.state
        if state.phase not in (*AT_WORK, Phase.WAITING, Phase.ENDED):
            if self._stopping_since is None:
                self._stopping_since = self.clock()
            if state.deadline is None:
                raise Violation(f"nothing waits without a deadline: {self} in {state.phase.name}")
        else:
            self._stopping_since = None
            if state.phase in AT_WORK and not state.alive and not state.pending and state.deadline is None:
                raise Violation(f"nothing waits without a deadline: {self} in {state.phase.name} without workers")
        self.check_stop()

    def check_stop(self) -> None:
        """Raise Violation if what is stopped is not gone in time."""
        limit = self.world.scenario.grace_period + self.world.scenario.stacks_within + 2 * teardown.KILL_TIMEOUT
        limit += teardown.TIDY_TIMEOUT + teardown.SWEEP_GRACE + LATE
        if not self.is_paused and self._stopping_since is not None and self.clock() - self._stopping_since > limit:
            raise Violation(f"what is stopped is gone in time: {self} stops for more than {limit:g} s")

    def _handle(self, event: Any) -> None:
        """Carry out what follows from an order, an event, or an action of the decision."""
        world, state = self.world, self.state
        match event:
            case JobEnd(status):
                self.step(node.JobEnded(status, self.clock()))
            case Begin():
                self._check_and_begin(event)
            case node.StartWorkers():
                self._unstarted = state.pending
                for rank in sorted(state.pending):
                    world.soon(0.5, self.do, lambda rank=rank: self._start(event.generation, rank))
            case node.StopWorkers(signum, ranks):
                for worker in self._workers(ranks):
                    worker.signal(signum)
            case node.KillWorkers(ranks):
                for worker in self._workers(ranks):
                    worker.kill()
            case node.ForwardSignal(signum, ranks):
                for worker in self._workers(ranks):
                    world.soon(3.0, worker.end, 0)
            case node.Sweep(signum):
                if self._daemons and (signum == 9 or world.dice.random() < 0.5):
                    world.soon(1.0, self.do, self._daemons_end)
                self._swept()
            case node.CaptureStacks(within):
                if world.dice.random() < 0.8:
                    world.soon(within, self.do, lambda: self.step(self._captured()))
            case node.FindStuck(ranks):
                world.soon(1.0, self.do, lambda: self.step(node.StuckFound(ranks, self.clock())))
            case node.Observe():
                world.soon(0.3, self.do, lambda: self.step(node.Observed(not world.hangs, self.clock())))
            case node.FindRaised():
                for worker in self._workers(state.alive):
                    if worker.has_raised:
                        error = WorkerError(type="ValueError", message="boom", traceback="", at=worker.born)
                        self.post(node.WorkerRaised(worker.rank, error, self.clock(), lingers=True))
            case node.ReportEnded():
                raised = dict(state.raised)
                exits = tuple(replace(end, error=end.error or raised.get(end.rank)) for end in state.exits)
                self._report(NodeEnd(state.generation, exits, state.start_failure, state.leftovers, TRACES))
            case node.Exit():
                if self.link.end is None:
                    self.link.leave()
                    self.link.end = JobEnd(state.status or 0, "impatient")
            case node.ReportStopping() | node.ReportNotice() | node.Escalate() | node.ReportIdle():
                self._report(event)
            case _ if isinstance(event, node.Event):
                self.step(event)

    def _report(self, report: Any) -> None:
        self.world.note(self, f"reports {report}" if not isinstance(report, NodeEnd) else "reports the end")
        self.link.send(report)

    def _check_and_begin(self, begin: Begin) -> None:
        if begin.number == 0 or not self.world.scenario.health_check:
            self._begin(begin)
            return
        self._pending_check = begin
        self.world.soon(3.0, self.do, lambda: self._checked() if self._pending_check is begin else None)

    def _checked(self, *, ended: bool = False) -> None:
        """End the health check, if there is one."""
        begin, self._pending_check = self._pending_check, None
        if begin is None:
            return
        why = "unfit" if self.is_unfit and not ended else ""
        if why and self.coordinator is None:
            self._report(Unfit(why))
            self.link.take(JobEnd(exitcodes.NODE_LOST, "unfit"))
            return
        self._begin(begin)
        if why:
            failure = StartFailure(min(begin.ranks), str(self), why, exitcodes.NODE_LOST)
            self.step(node.StartFailed(failure, self.clock()))

    def _begin(self, begin: Begin) -> None:
        if self.state.phase is not Phase.WAITING:
            raise Violation(f"no worker of two generations runs on one node: {self} begins in {self.state.phase.name}")
        self._daemons = 0
        self.step(node.GenerationBegun(begin.number, begin.ranks, self.clock(), begin.alone))

    # --- workers

    def _workers(self, ranks: frozenset[int]) -> list[Worker]:
        return [worker for worker in self.world.workers if worker.agent is self and worker.rank in ranks]

    def _start(self, generation: int, rank: int) -> None:
        if generation != self.state.generation or rank not in self._unstarted:
            return
        self._unstarted -= {rank}
        if self.start_fails:
            self.start_fails = False
            self.step(node.StartFailed(StartFailure(rank, str(self), "no room", 126), self.clock()))
            return
        Worker(self, generation, rank)
        self.step(node.WorkerStarted(rank, self.clock()))

    def worker_ended(self, worker: Worker, code: int | None, signum: int | None, error: WorkerError | None) -> None:
        """Learn of the end of a worker."""
        stopped_with, stopped_at = worker.stopped or (None, None)
        self._daemons += self.world.scenario.program == "daemons"
        exit = worker_exit(
            worker.rank,
            code,
            signum,
            local_rank=0,
            host=str(self),
            at=self.world.now,
            seconds=self.world.now - worker.born,
            stopped_with=stopped_with,
            stopped_at=stopped_at,
            error=error,
        )

        def learn() -> None:
            if worker.generation == self.state.generation and worker.rank in self.state.alive:
                self.step(node.WorkerExited(exit, self.clock()))

        self.world.soon(0.01, self.do, learn)

    def _captured(self) -> node.StacksCaptured:
        alive = self.state.alive
        return node.StacksCaptured(self.clock(), alive, alive if self.world.dice.random() < 0.5 else frozenset())

    def _daemons_end(self) -> None:
        self._daemons = 0
        if self.state.phase is Phase.SWEEPING:
            self._swept()

    def _swept(self) -> None:
        left = tuple(f"daemon {number}" for number in range(self._daemons))
        stuck = tuple(str(worker) for worker in self.world.workers if worker.agent is self)
        self.post(node.Swept(left + stuck, self.clock()))
