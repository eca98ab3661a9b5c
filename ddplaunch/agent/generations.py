"""The workers of this node, one generation after another, and what a generation holds: setup, output, workers.

It does what was decided and reports what came of it; it decides nothing.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ddplaunch.agent.pipes import OutputQueue
from ddplaunch.agent.setup import AgentSetup, WorkerSetup
from ddplaunch.agent.starter import CannotStart, Starter
from ddplaunch.agent.workers import Workers
from ddplaunch.coordinator.link import Generation
from ddplaunch.errors import LaunchError, visible
from ddplaunch.process import clock
from ddplaunch.process.linux import FolderWatch
from ddplaunch.report.reporter import Reporter
from ddplaunch.supervise import node
from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.outcome import StartFailure, WorkerExit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.agent.debuggers import Debuggers
    from ddplaunch.agent.observer import Observer
    from ddplaunch.agent.stack_taker import StackTaker
    from ddplaunch.control.questions import Answer, Question
    from ddplaunch.process.apart import AskApart
    from ddplaunch.process.tree import Process
    from ddplaunch.process.worker import RunningWorker
    from ddplaunch.stacks import Sample


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
        """`joined` is called once in a generation, when a worker has made a process group; None: nobody wants to know."""
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
        self._taker: StackTaker | None = None
        self._observer: Observer | None = None
        self._debuggers: Debuggers | None = None
        self.samples: tuple[Sample, ...] = ()  # where the workers were when they had to end
        self._joined = joined
        self._errors = FolderWatch()
        if self._errors.fd >= 0:
            selector.register(self._errors.fd, selectors.EVENT_READ, self._file_written)

    # --- its start

    def prepare(self, generation: Generation, address: str | None) -> None:
        """Take what the coordinator has set for the next one, and the address of this node that the others reach."""
        self._next = generation, address
        self.samples = ()

    def begin(self) -> None:
        """Make all ready for the workers of the next generation, which are started one by one."""
        self._observer = None
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
            self._errors.begin(setup.error_files.folder)
            if self._joined is not None:
                self._errors.begin(setup.error_files.recorders, once=True)
            self._ready = generation, setup
        if self._setup.inputs.spec.debug_on_error or self._setup.inputs.spec.debugpy_ranks:
            self.debuggers.listen()

    def go_on(self) -> None:
        """Go on with the start once the place of the logs is known, or will not be known soon."""
        if self._ready is None or not self._ready[1].folder.is_settled:
            return
        (generation, setup), self._ready = self._ready, None
        if generation.agreed is not None:
            self.output = self._setup.output(self._queue, setup.plan)  # ranks may have changed
        self.workers = Workers(
            setup,
            self._starter,
            self.output,
            self._selector,
            self._ended,
            clock.now,
            self._ask_apart,
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
        debuggers = self._debuggers.deadline if self._debuggers is not None else None
        return soonest(self.output.deadline, self._starter.deadline, debuggers)

    def expire(self, now: float) -> None:
        """Show output that has waited; say what has taken long."""
        self.output.flush(now)
        self._starter.expire(now)
        if self._debuggers is not None:
            self._debuggers.expire(now)

    def start_next(self) -> None:
        """Start one worker more."""
        if self._ready is not None:  # the place of the logs has become known since the last `go_on`
            self.go_on()
            return
        assert self.workers is not None
        rank = self.workers.waiting.popleft()
        try:
            pid = self.workers.start(rank)
        except CannotStart as error:
            failure = StartFailure(rank, self.workers.host, str(error), error.status)
            self._feed(node.StartFailed(failure, clock.now()))
        else:
            self._reporter.worker_started(rank, pid)
            self._feed(node.WorkerStarted(rank, clock.now()))
        if not self.workers.waiting and self._setup.is_last_generation:
            self._starter.fork_no_more()

    def start_no_more(self) -> None:
        """Leave out the workers that were not started yet."""
        self._ready = None
        if self.workers is not None:
            self.workers.waiting.clear()

    # --- while it lives

    def _file_written(self) -> None:
        folders = self._errors.drain()
        if self._setup.error_files.recorders in folders and self._joined is not None:
            self._joined()
        if self._setup.error_files.folder not in folders:
            return
        if self._setup.error_files.takes_request():
            self._feed(node.StoreWanted(clock.now()))
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
        if self.workers is None:
            return
        match action:
            case node.ForwardSignal(signum, ranks):
                self.workers.forward(signum, ranks)
                if signum == signal.SIGWINCH:
                    self.output.show_bars_again(clock.now())
            case node.StopWorkers(signum, ranks, by_cluster):
                if self._debuggers is not None:
                    self._debuggers.detach_all()
                self.workers.end(signum, ranks, time.monotonic(), by_cluster=by_cluster)
            case node.TakeStacks(if_joined=True) if not self.workers.may_have_joined:
                self._feed(node.StacksTaken(clock.now()))
            case node.TakeStacks(within):
                self._stack_taker.take(self.workers.running.values(), within, partial(self._stacks_taken, self.workers))
            case node.Observe(asks):
                if self._observer is None:
                    from ddplaunch.agent.observer import Observer  # most jobs need none

                    self._observer = Observer(self._stack_taker)
                self._observer.look(self.workers, partial(self._observed, self.workers), asks=asks)
            case node.NameRunning(ranks, left):
                self._reporter.still_running(self.workers.written_since_stop(ranks), left)
            case node.KillWorkers(ranks):
                self.workers.end(signal.SIGKILL, ranks, time.monotonic())
            case node.LookForRaised():
                for rank, error in self.workers.lingering():
                    self._feed(node.WorkerRaised(rank, error, clock.now(), lingers=True))
            case node.HostStore():
                self.workers.host_store()
            case node.LendTerminal(rank):
                self.workers.drain(rank)
                self.output.hide(True)
                self.debuggers.lend_terminal(rank)
            case node.ShowOutput():
                self.output.hide(False)
            case node.RefuseTerminal(rank):
                self.debuggers.refuse_terminal(rank)
            case node.Suspend() | node.Resume():
                self.workers.suspend(isinstance(action, node.Suspend))
                self.output.show_bars_again(clock.now())  # when the job goes on, the shell has written to the screen

    def answer(self, question: Question, reply: Callable[[Answer], None]) -> None:
        """Answer a question about the workers, now or later, by a call of `reply`; not at all if that fails."""
        try:
            from ddplaunch.agent.answers import answer  # only a job that is looked into needs it

            answer(question, self.workers, self._setup.draft, self._stack_taker, reply)
        except Exception as error:  # noqa: BLE001 - such as files of another version: no reason to end a job
            self._reporter.print(f"warning: a question could not be answered: {type(error).__name__}: {error}")

    def _stacks_taken(self, workers: Workers, samples: Sequence[Sample] | None) -> None:
        if workers is self.workers:  # those of the generation before have ended by themselves
            self.samples = tuple(samples or ())
            self._feed(node.StacksTaken(clock.now()))

    def _observed(self, workers: Workers, moved: bool) -> None:
        if workers is self.workers:
            self._feed(node.Observed(moved, clock.now()))

    def _listening(self, ports: Mapping[int, int]) -> None:
        """Print how to connect to the workers that wait for a client of debugpy, once all of them do."""
        here = (
            {worker.rank for worker in self._setup.draft.workers} if self.workers is None else set(self.workers.running)
        )
        if ports.keys() >= here & (self._setup.inputs.spec.debugpy_ranks or frozenset()):
            from ddplaunch.report.launch_json import announcement

            self._reporter.write(announcement(ports))

    @property
    def debuggers(self) -> Debuggers:
        """Where workers ask for what a debugger needs."""
        if self._debuggers is None:
            from ddplaunch.agent.debuggers import Debuggers  # few jobs are debugged

            def running() -> Mapping[int, RunningWorker]:
                return self.workers.running if self.workers is not None else {}

            self._debuggers = Debuggers(self._setup.debug_address, self._selector, running, self._feed, self._listening)
        return self._debuggers

    @property
    def _stack_taker(self) -> StackTaker:
        if self._taker is None:
            from ddplaunch.agent.stack_taker import StackTaker  # most jobs need none

            self._taker = StackTaker(self._selector, self._setup.draft.workers[0].host)
        return self._taker

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
        return self._starter.pids | (self._taker.pids if self._taker is not None else frozenset())

    def left(self) -> list[Process]:
        """Give what descends from workers that are no descendants of ours."""
        return self._starter.left()

    # --- its end

    def dismiss_services(self) -> None:
        """Ask what served the workers to end, as far as it does not by itself."""
        if self.workers is not None:
            self.workers.dismiss_services()

    def reap(self, state: node.State, now: float) -> list[WorkerExit]:
        """Release all that the generation held, and give the ends of its workers."""
        workers, self.workers = self.workers, None
        if workers is not None and self.samples:
            from ddplaunch.stacks.merge import lines, merge

            text = "\n".join(lines(merge(self.samples, threads=True), "", threads=True))
            workers.keep_stacks(visible(f"{text}\n").encode(errors="replace"))
        return workers.reap(state.exits, now) if workers is not None else []

    def close(self) -> None:
        """Release what is kept from one generation to the next."""
        if self._taker is not None:
            self._taker.close()
        if self._debuggers is not None:
            self._debuggers.close()
        self._starter.close()
