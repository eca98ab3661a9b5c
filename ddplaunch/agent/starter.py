"""How workers become processes, fresh ones or forked from a warm interpreter, and what they are given. Watches none of them."""

from __future__ import annotations

import errno
import os
import selectors
import time
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch import exitcodes
from ddplaunch.agent.setup import WorkerSetup
from ddplaunch.agent.worker_pipes import WorkerPipes, close
from ddplaunch.output.display import Stream
from ddplaunch.output.sinks import Output
from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import environment, of_fork_server
from ddplaunch.process import clock
from ddplaunch.process.linux import bounded_file
from ddplaunch.process.pump import Pump
from ddplaunch.process.start import STACKS_FD, STACKS_SIGNAL, StartError, Stdio, handled_signals, start
from ddplaunch.process.worker import RunningWorker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.process.child import Child
    from ddplaunch.process.fork_server import ForkServer
    from ddplaunch.process.guard import Guard, GuardedChild
    from ddplaunch.process.tree import Process
    from ddplaunch.warm.find import Place

SLOW = 10.0  # seconds of imports that are worth a word
STACKS_SIZE = 1 << 20  # bytes, of a worker's stacks as faulthandler writes them: at most 100 threads of 100 frames
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)


class CannotStart(Exception):
    """A worker could not be started; `status` is what the command should end with."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status

    @classmethod
    def of(cls, error: StartError) -> CannotStart:
        """Give it for what kept a process from its start."""
        return cls(str(error), exitcodes.NOT_FOUND if error.errno in _NOT_FOUND else exitcodes.NOT_EXECUTABLE)


class Starter:
    """Starts workers; `note` prints a sentence for the user. What forks them lives on, for the next generation, until `close`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        note: Callable[[str], None],
        child_ended: Callable[[], None] = lambda: None,
        warm: Place | None = None,
        why_cold: str = "",
        output: int = -1,
    ) -> None:
        """`warm` is the interpreter that is kept warm, `why_cold` a sentence about it; a guard keeps `output` open.

        `child_ended` is called when nothing is left any more of what a guard that was killed has left.
        """
        if why_cold:
            note(why_cold)
        self._selector = selector
        self._note = note
        self._child_ended = child_ended
        self._warm = warm  # until it is not to be used any more
        self._output = output
        self._is_asked = True
        self._handled: tuple[int, ...] = ()
        self._server: ForkServer | Guard | None = None
        self._guard: Guard | None = None  # the parent of workers, even where it forks no more
        self._wanted: tuple[object, ...] | None = None  # what the server was started for, or failed to be
        self._start_server: Callable[[], ForkServer]
        self._why_lost = ""  # while no worker has had to do without it
        self.deadline: float | None = None  # when `expire` is to be called at the latest

    def prepare(self, plan: Plan, caller: Mapping[str, str]) -> None:
        """Make ready for a generation: start the fork server, if this plan needs one, and none that fits is there already."""
        self._handled = handled_signals()
        if plan.preload is None:
            return self.close()
        self._is_asked = plan.preload_is_asked
        argv, env = plan.workers[0].argv, of_fork_server(caller, plan)
        wanted = (argv[0], plan.preload, env)
        if wanted == self._wanted:
            return None
        if self._wanted is not None:
            self._warm = None  # it was found for the first generation
        self.close()
        self._wanted = wanted
        from ddplaunch.process.fork_server import ForkServer  # most jobs need none

        self._start_server = partial(ForkServer, argv, env, plan.preload, handled=self._handled)
        return self._begin()

    def _begin(self) -> None:
        """Have what is to fork the workers made ready."""
        from ddplaunch.process.fork_requests import ServerLost

        within = SLOW
        try:
            if self._warm is None:
                self._server = self._start_server()
            else:
                from ddplaunch.warm import find

                self._server = find.guard_at(self._warm, self._output)
                within = SLOW if self._warm.is_new else find.ANSWER_WITHIN
        except (StartError, ServerLost) as error:
            return self._lose(str(error))
        self._selector.register(self._server, selectors.EVENT_READ, partial(self._readable, self._server))
        self.deadline = clock.now() + within
        return None

    def expire(self, now: float) -> None:
        """Say, once, that the imports take long: without them no worker is started. What is warm already has them."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            if self._server is None or self._server.is_ready:
                return
            if self._warm is not None and not self._warm.is_new:
                self._lose("it does not answer")
                return
            imports = (
                f"the fork server (pid {self._server.pid})" if self._server.pid else "the interpreter to be kept warm"
            )
            self._note(f"{imports} has been importing for {SLOW:g} s; --start-method spawn does without it")

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started now."""
        return self._server is None or self._server.is_ready

    @property
    def pids(self) -> frozenset[int]:
        """The process of the server, which is no leftover of a worker."""
        return frozenset(() if self._server is None else (self._server.pid,))

    def left(self) -> list[Process]:
        """Give what is below a guard, which is not below us."""
        return self._guard.left() if self._guard is not None else []

    def start(
        self, worker: WorkerPlan, setup: WorkerSetup, pipes: WorkerPipes, output: Output, of_mps: Mapping[str, str]
    ) -> RunningWorker:
        """Start a worker, whose output then comes through `pipes`; `of_mps` are the variables by which it finds MPS.

        Raises:
            StartError: the machine cannot create another process.
            OSError: there are too many open files, or there is no memory for what it is given.
        """
        folder, generation = setup.folder, setup.generation
        env = environment(
            setup.env,
            setup.plan,
            worker,
            generation=generation,
            port=setup.port,
            error_file=setup.error_file(worker.rank),
            log_dir=str(folder.path or ""),
            of_mps=of_mps,
        )
        is_python = setup.plan.interpreter is not None
        recorder = setup.error_files.recorder(generation, worker.rank) if setup.has_recorder else ""
        devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        pumps: dict[Stream, Pump] = {}
        stacks: int | None = None
        try:
            if is_python:
                stacks = bounded_file("ddplaunch-stacks", STACKS_SIZE)
                env["DDPLAUNCH_STACKS"] = f"{STACKS_FD},{STACKS_SIGNAL}"
                env["DDPLAUNCH_RECORDER"] = recorder
                env["DDPLAUNCH_DEBUGGER"] = setup.debugger_of(worker.rank)
            if worker.terminal:
                stdio = Stdio(0, 1, 2, stacks)
                output.open(worker.rank, None)
            else:
                pumps = pipes.make(worker.rank)
                stdin = 0 if worker.stdin else devnull
                stdio = Stdio(stdin, pumps[Stream.OUT].write_fd, pumps[Stream.ERR].write_fd, stacks)
                names = folder.log_names(generation, worker.rank, worker.local_rank)
                output.open(worker.rank, folder.open_logs(names, setup.log_limit))
            child = self._make_process(worker, env, stdio)
        except BaseException:
            close(pumps)
            if stacks is not None:
                os.close(stacks)
            raise
        finally:
            os.close(devnull)
        pipes.watch(worker.rank, pumps)
        return RunningWorker(
            worker.rank, child, time.monotonic(), by_itself=is_python, stacks=stacks, recorder=recorder
        )

    def _make_process(self, worker: WorkerPlan, env: Mapping[str, str], stdio: Stdio) -> Child | GuardedChild:
        if self._server is not None:
            from ddplaunch.process.fork_requests import ServerLost

            try:
                return self._server.fork(worker.argv, env, stdio, cpus=worker.cpus)
            except ServerLost as error:
                self._give_up(str(error))
        if self._why_lost and self._is_asked:
            self._note(f"workers are started as fresh processes, not by the fork server: {self._why_lost}")
        self._why_lost = ""
        return start(worker.argv, env, stdio, handled=self._handled, cpus=worker.cpus)

    def _readable(self, server: ForkServer | Guard) -> None:
        from ddplaunch.process.fork_requests import ServerLost

        try:
            server.read()
        except ServerLost as error:
            if server is self._guard:
                self._selector.unregister(server)
                self._guard.is_over = True
                self._give_up(str(error))
                self._child_ended()
            else:
                self._lose(str(error))
            return
        if server.is_ready:
            self.deadline = None
            if self._warm is not None:
                self._guard = server  # type: ignore[assignment]  # what is warm has no other
        while server.notes and self._is_asked:
            self._note(f"not imported by the fork server: {server.notes.pop(0)}")

    def _lose(self, why: str) -> None:
        """Do without what was to fork the workers: without what is warm by a server, without that by fresh processes."""
        self._give_up(why)
        if self._warm is not None:
            self._warm = None
            self._why_lost = ""
            self._note(f"the interpreter that is kept warm is not used, and another one imports anew: {why}")
            self._begin()

    def _give_up(self, why: str) -> None:
        self._why_lost = why
        self._end()

    def fork_no_more(self) -> None:
        """End what forks the workers if it is not their parent."""
        if self._guard is None:
            self.close()

    def close(self) -> None:
        """End what forks the workers, if there is anything, for good."""
        self._wanted = None
        self._end()
        guard, self._guard = self._guard, None
        if guard is not None:
            if not guard.is_over:
                self._selector.unregister(guard)
            guard.close()

    def _end(self) -> None:
        server, self._server, self.deadline = self._server, None, None
        if server is not None and server is not self._guard:
            self._selector.unregister(server)
            server.close()
