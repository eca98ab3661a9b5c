"""A simulated agent: the real `Agent`, with a real link and perhaps a real coordinator, over workers that are played.

Stands for `generations.py`, `workers.py` and `signals.py` of `launcher/node/`, and for what looks for processes that workers
left behind.
"""

from __future__ import annotations

from functools import partial
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import TYPE_CHECKING, Any, cast

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import Phase, teardown
from ddplaunch.launcher.job.join import join
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.messages import NodeFacts
from ddplaunch.launcher.node.agent import Agent
from ddplaunch.plan.cluster import Rendezvous
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.spec.outcome import StartFailure, Traces, WorkerError
from tests.simulator.world import Killed, Process, Silent, Violation, Worker, World, address_of
from tests.unit.builders import worker_exit
from tests.unit.supervise.phases import checked

if TYPE_CHECKING:
    from tests.simulator.coordinator import SimulatedCoordinator

AT_WORK = (Phase.RUNNING, Phase.SETTLING)
STOPS = frozenset({int(SIGINT), int(SIGTERM), int(SIGHUP), int(SIGQUIT)})
TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
SLACK = 1.0  # seconds by which the clock may take a pause for time


class SimulatedAgent(Agent):
    """The agent of a node, with the coordinator if that is here."""

    link: Link

    def __init__(self, world: World, number: int) -> None:
        scenario = world.scenario
        self.world, self.number = world, number
        self.follows: SimulatedCoordinator | None = None  # when it ends
        self.is_disturbed = False  # it, its link or the coordinator was paused, cut or killed
        self.was_killed = False
        self.is_stuck = number == scenario.stuck
        self.status: int | None = None
        self.fuse: int | None = None  # actions until it is killed
        self.start_fails = False
        self.why_unfit = ""
        self.was_impatient = False  # it has ended without the coordinator
        self._unstarted: frozenset[int] = frozenset()
        self._daemons = 0  # processes that workers left behind
        self._stopping_since: float | None = None

        self._loop = self.process = Process(self)
        self.process.handle = self.handle
        silent: Any = Silent()
        self._run_socket = self._shutdown = silent
        self._reporter: Any = Silent(traces=TRACES, stopped=lambda _signum: "")
        self._spec: Any = Silent(
            spares=world.scenario.policy.spares,
            health_check="check" if scenario.health_check else None,
            straggler_check=0.0,
            heartbeat_timeout=scenario.heartbeat_timeout,
            may_shorten_silence=False,
            rdzv_timeout=scenario.policy.rdzv_timeout,
            local_addr=None,
        )
        inputs = Silent(spec=self._spec, env=self, node=Silent(host=str(self)))
        self._context: Any = Silent(inputs=inputs, queue=silent)
        self._generations: Any = Silent(
            workers=None,
            inspected=None,
            debugged=None,
            silent=0.0,
            output=silent,
            plan=Silent(nnodes=scenario.policy.max_nodes),
            begin=self._start_workers,
            start_no_more=lambda: setattr(self, "_unstarted", frozenset()),
            reap=self._reap,
        )
        self._health = None
        self._reports_job = True  # nobody outside is told
        self._job: Any = Silent(inputs=inputs)
        self._exits = []
        policy = node.Policy(
            ranks=frozenset(range(scenario.workers)),
            stop_signals=STOPS,
            grace_period=scenario.grace_period,
            stacks_within=scenario.stacks_within,
            progress_interval=1.5 if scenario.policy.hang_timeout else 0.0,
            notices=scenario.policy.notices,
        )
        self._state = node.State(policy=policy)
        self._deadline = self._loop.timer(None, self._on_deadline)
        self._rest = self._loop.timer(None, self._on_deadline, may_rest=True)

    def __str__(self) -> str:
        return f"agent-{self.number}"

    def join(self) -> None:
        scenario = self.world.scenario
        reasons = {"backend": "", "master_port": ""}
        request: Any = Silent(
            spec=self._spec,
            allocation=Silent(
                name=str(self),
                node_rank=self.number if scenario.ranked or self.number == 0 else None,
                nnodes=(scenario.policy.min_nodes, scenario.policy.max_nodes),
                task=None,
                has_front=False,
                endpoint=Silent(address=None),
            ),
            draft=Silent(
                workers=range(scenario.workers), backend="gloo", reasons=reasons, master_port=None, run_id="run"
            ),
            rendezvous=Rendezvous(addresses=(address_of(0),), ports=(1,), coordinator=self.number == 0),
            key=Key(b""),
            facts=NodeFacts("", "", "", "", ""),
            listening=None,
        )
        self._link = self.link = join(request, self._loop, self._reporter)

    # --- its end

    def act(self) -> None:
        """Be killed here, if that is due: between two actions."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    def kill(self, *, power_fails: bool = False) -> None:
        """Be killed: the kernel ends its workers, and closes its connections; or lose power, so that nobody learns of it."""
        if self.process.is_alive:
            self.world.note(self, "is killed")
            self._leave(silently=power_fails)

    def exit_if_over(self) -> None:
        if self.state.phase is not Phase.ENDED or not self.link.is_over:
            return
        self.status = self.state.end.status
        self.world.note(self, f"exits with {self.status}")
        if any(worker.agent is self and not self.is_stuck for worker in self.world.workers):
            raise Violation(f"nothing is left: {self} exits while its workers run")
        self.follows = self.followed()
        self.link.close()
        opened: list[object] = [socket for (number, _), socket in self.world.sockets.items() if number == self.number]
        opened += [one for one in self.process.dialers if one._attempts or one._next.is_set]
        opened += [peer for peer in self.world.peers if peer.process is self.process and peer._is_open]
        if opened:
            raise Violation(f"nothing is left: {self} exits with {opened}")
        self._leave(silently=False)

    @property
    def is_told(self) -> bool:
        """Whether it knows who may take over."""
        return getattr(self.link, "_succession", None) is not None

    def followed(self) -> SimulatedCoordinator | None:
        """Return the coordinator that this agent has, or is connected to."""
        peer = getattr(self.link, "_peer", None)
        link = self.link if peer is None or self.link.coordinator is not None else peer.other.process.agent.link
        return cast("SimulatedCoordinator | None", link.coordinator)

    def _leave(self, *, silently: bool) -> None:
        self.process.end(silently=silently)
        for worker in self._mine():
            worker.end(None, 9)

    def _exit(self, status: int) -> None:
        self.was_impatient = self.link.end is None
        super()._exit(status)

    # --- the decision

    @property
    def _state(self) -> node.State:
        return self.state

    @_state.setter
    def _state(self, state: node.State) -> None:
        """Take the state after a step; raise Violation if nothing would ever happen any more, or a stop takes too long."""
        checked(getattr(self, "state", state), (state, ()))
        self.state = state
        is_stopping = state.phase not in (*AT_WORK, Phase.WAITING, Phase.ENDED)
        is_empty = state.phase in AT_WORK and not state.alive and not state.pending
        if (is_stopping or is_empty) and state.deadline is None:
            raise Violation(f"nothing waits without a deadline: {self} in {state.phase.name}")
        since = self._loop.now() if self._stopping_since is None else self._stopping_since
        self._stopping_since = since if is_stopping else None
        self.check_stop()

    def check_stop(self) -> None:
        """Raise Violation if what is stopped is not gone in time."""
        scenario, since, process = self.world.scenario, self._stopping_since, self.process
        if since is None or process.is_paused or not process.is_alive:
            return
        limit = scenario.grace_period + scenario.stacks_within + 2 * teardown.KILL_TIMEOUT + SLACK
        limit += teardown.TIDY_TIMEOUT + teardown.SWEEP_GRACE
        if self.world.now - process.clock._missed - since > limit:
            raise Violation(f"what is stopped is gone in time: {self} stops for more than {limit:g} s")

    def handle(self, event: Any) -> None:
        self.act()
        super().handle(event)

    def _step(self, event: node.Event) -> None:
        self.world.note(self, event)
        if isinstance(event, node.GenerationBegun) and self.state.phase is not Phase.WAITING:
            raise Violation(f"no worker of two generations runs on one node: {self} begins in {self.state.phase.name}")
        super()._step(event)
        if isinstance(event, node.KillOrdered) and self.state.phase in (*AT_WORK, Phase.STOPPING):
            raise Violation(f"a kill reaches nodes that stop, and ends them: {self} in {self.state.phase.name}")

    def _report(self, report: Any) -> None:
        self.world.note(self, f"reports {type(report).__name__}")
        super()._report(report)

    # --- workers

    def _mine(self, ranks: frozenset[int] | None = None) -> list[Worker]:
        return [one for one in self.world.workers if one.agent is self and (ranks is None or one.rank in ranks)]

    def _act_on(self, _workers: object, action: node.Action) -> None:
        """Have workers do what follows from an action, and questions about them answered."""
        world, loop = self.world, self._loop
        match action:
            case node.StopWorkers(signum, ranks):
                for worker in self._mine(ranks):
                    worker.signal(signum)
            case node.KillWorkers(ranks):
                for worker in self._mine(ranks):
                    worker.kill()
            case node.ForwardSignal(signum, ranks):
                for worker in self._mine(ranks):
                    world.soon(3.0, worker.end, 0)
            case node.CaptureStacks(within):
                if world.dice.random() < 0.8:
                    waiting = self.state.alive if world.dice.random() < 0.5 else frozenset[int]()
                    self._later(within, lambda at: node.StacksCaptured(at, self.state.alive, waiting))
            case node.FindStuck(ranks):
                self._later(1.0, lambda at: node.StuckFound(ranks, at))
            case node.Observe():
                self._later(0.3, lambda at: node.Observed(not world.hangs, at))
            case node.FindRaised():
                for worker in self._mine():
                    if worker.has_raised:
                        error = WorkerError(type="ValueError", message="boom", traceback="", at=worker.born)
                        loop.post(node.WorkerRaised(worker.rank, error, loop.now(), lingers=True))

    def _later(self, most: float, event: Any) -> None:
        """Post what `event` gives for a time, within so many seconds."""
        self.world.soon(most, self.process.do, lambda: self._loop.post(event(self._loop.now())))

    def _start_workers(self) -> None:
        self._generations.workers, self._daemons, self._unstarted = self, 0, self.state.pending
        for rank in sorted(self.state.pending):
            self.world.soon(0.5, self.process.do, partial(self._start, self.state.generation, rank))

    def _start(self, generation: int, rank: int) -> None:
        if generation != self.state.generation or rank not in self._unstarted:
            return
        self._unstarted -= {rank}
        if self.start_fails:
            self.start_fails = False
            self._loop.post(node.StartFailed(StartFailure(rank, str(self), "no room", 126), self._loop.now()))
        else:
            Worker(self, generation, rank)
            self._loop.post(node.WorkerStarted(rank, self._loop.now()))

    def _reap(self, state: node.State) -> list[Any]:
        workers, self._generations.workers = self._generations.workers, None
        return [] if workers is None else list(state.exits)

    def worker_ended(self, worker: Worker, code: int | None, signum: int | None, error: WorkerError | None) -> None:
        stopped_with, stopped_at = worker.stopped or (None, None)
        self._daemons += self.world.scenario.program == "daemons"
        now, of = self.world.now, {"host": str(self), "error": error, "seconds": self.world.now - worker.born}
        exit = worker_exit(worker.rank, code, signum, at=now, stopped_with=stopped_with, stopped_at=stopped_at, **of)

        def learn() -> None:
            if worker.generation == self.state.generation and worker.rank in self.state.alive:
                self._loop.post(node.WorkerExited(exit, self._loop.now()))

        self.world.soon(0.01, self.process.do, learn)

    def _sweep(self, signum: int = 0, **_: bool) -> None:
        if signum and self._daemons and (signum == 9 or self.world.dice.random() < 0.5):
            self.world.soon(1.0, self.process.do, self._daemons_end)
        left = (*(f"daemon {number}" for number in range(self._daemons)), *map(str, self._mine()))
        self._loop.post(node.Swept(left, self._loop.now()))

    def _daemons_end(self) -> None:
        self._daemons = 0
        if self.state.phase is Phase.SWEEPING:
            self._sweep()
