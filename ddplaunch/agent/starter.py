"""How workers become processes, fresh ones or forked ones, and what they are given. Watches none of them."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch import exitcodes
from ddplaunch.agent.context import AgentContext, WorkerSetup
from ddplaunch.agent.events import ChildEnded
from ddplaunch.agent.worker_pipes import WorkerPipes, close
from ddplaunch.loop.loop import Loop
from ddplaunch.output.sinks import Output
from ddplaunch.output.streams import Stream
from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import environment
from ddplaunch.process.child import STACKS_FD, STACKS_SIGNAL, RunningWorker, StartError, Stdio, handled_signals, start
from ddplaunch.process.linux import bounded_file
from ddplaunch.process.pump import Pump

if TYPE_CHECKING:
    from ddplaunch.forking.forker import Forker
    from ddplaunch.process.child import Child
    from ddplaunch.process.tree import Process

STACKS_SIZE = 1 << 20  # bytes, of a worker's stacks as faulthandler writes them: at most 100 threads of 100 frames
_LEAST_STACKS_SIZE = 1 << 16  # bytes, below which they are not worth it
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)


class CannotStart(Exception):
    """A worker could not be started; `status` is what the command should end with."""

    def __init__(self, reason: str, status: int, rank: int, errno: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.rank = rank
        self.errno = errno

    @classmethod
    def of(cls, error: StartError, rank: int) -> CannotStart:
        """Return it for what kept a process from its start."""
        status = exitcodes.NOT_FOUND if error.errno in _NOT_FOUND else exitcodes.NOT_EXECUTABLE
        return cls(str(error), status, rank, error.errno)


def stacks_size() -> tuple[int, str]:
    """Return how large the file may be that each worker writes its stacks to; 0 where it can have none, and then why."""
    size, open_files = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE))
    if open_files != resource.RLIM_INFINITY and open_files <= STACKS_FD:
        return 0, f"no more than {open_files} files may be open (`ulimit -n`)"
    if size == resource.RLIM_INFINITY or size >= STACKS_SIZE:
        return STACKS_SIZE, ""
    if size < _LEAST_STACKS_SIZE:
        return 0, f"no file may be larger than {size >> 10} KiB (`ulimit -f`)"
    return size, ""


class Starter:
    """Starts workers. What forks them lives on, for the next generation, until `close`."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        if context.inputs.why_cold:
            context.reporter.tell(context.inputs.why_cold)
        self._stacks_size, why = stacks_size()
        if why:
            context.reporter.warn(f"where workers are cannot be shown, as by `ddplaunch stacks`: {why}")
        self._given = (loop, context)
        self._handled: tuple[int, ...] = ()
        self._forker: Forker | None = None

    def prepare(self, plan: Plan, caller: Mapping[str, str]) -> None:
        """Make ready for a generation: have what forks its workers made ready, if they are to be forked."""
        self._handled = handled_signals()
        if self._forker is None and plan.preload is not None:
            from ddplaunch.forking.forker import Forker  # most jobs need none

            loop, context = self._given
            self._forker = Forker(
                loop,
                context.reporter.print,
                context.inputs.warm,
                context.queue.fileno(),
                partial(loop.post, ChildEnded()),
            )
        if self._forker is not None:
            self._forker.prepare(plan, caller, self._handled)

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started now."""
        return self._forker is None or self._forker.is_ready

    @property
    def pids(self) -> frozenset[int]:
        """The process of what forks them, which is no leftover of a worker."""
        return self._forker.pids if self._forker is not None else frozenset()

    def left(self) -> list[Process]:
        """Return what descends from workers and is not below us."""
        return self._forker.left() if self._forker is not None else []

    def start(
        self,
        workers: Sequence[WorkerPlan],
        setup: WorkerSetup,
        pipes: WorkerPipes,
        output: Output,
        of_mps: Mapping[str, str],
    ) -> list[RunningWorker]:
        """Start the first of these workers, as many as can be; their output then comes through `pipes`.

        `of_mps` are the variables by which they find MPS.

        Raises:
            StartError: the machine cannot create another process, or what it is given.
        """
        starts: list[WorkerStart] = []
        children: Sequence[Child] = ()
        devnull = -1
        try:
            try:
                devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                starts.extend(
                    WorkerStart(worker, setup, pipes, devnull, of_mps, self._stacks_size) for worker in workers
                )
            except OSError as error:
                # fresh ones are started as far as there are files, of which they then hold fewer
                if not starts or (self._forker is not None and self._forker.is_there):
                    number = error.errno or errno.EMFILE
                    raise StartError(number, "cannot open its pipes and files", len(starts)) from None
            children = self._make_processes(starts)
        finally:
            if devnull >= 0:
                os.close(devnull)
            for one in starts[len(children) :]:
                one.close()
        return [one.started(child, output) for one, child in zip(starts, children, strict=False)]

    def _make_processes(self, starts: Sequence[WorkerStart]) -> Sequence[Child]:
        """Make those of the first of them, as many as can be made.

        Nothing else is done between two forks: each page that is written after one is a fault of its own, and perhaps a copy.
        """
        if self._forker is not None:
            from ddplaunch.forking.servers import Fork

            forks = [Fork(one.plan.argv, one.env, one.stdio, one.plan.cpus) for one in starts]
            if children := self._forker.fork(forks):
                return children
        fresh: list[Child] = []
        try:
            fresh.extend(
                start(one.plan.argv, one.env, one.stdio, handled=self._handled, cpus=one.plan.cpus) for one in starts
            )
        except StartError:
            if not fresh:
                raise
        return fresh

    def fork_no_more(self) -> None:
        """End what forks the workers if it is not their parent."""
        if self._forker is not None:
            self._forker.fork_no_more()

    def close(self) -> None:
        """End what forks the workers, if there is anything, for good."""
        if self._forker is not None:
            self._forker.close()


class WorkerStart:
    """A worker before its process: its holder calls `started` or `close`."""

    def __init__(
        self,
        worker: WorkerPlan,
        setup: WorkerSetup,
        pipes: WorkerPipes,
        devnull: int,
        of_mps: Mapping[str, str],
        stacks_size: int,
    ) -> None:
        """`devnull` is /dev/null, opened; `of_mps` are the variables by which it finds MPS.

        `stacks_size` are the bytes that its stacks may have; 0: there is no file for them.

        Raises:
            OSError: there are too many open files, or there is no memory for what it is given.
        """
        self.plan = worker
        self._setup = setup
        self._pipes = pipes
        self.env = environment(
            setup.env,
            setup.plan,
            worker,
            generation=setup.generation,
            port=setup.port,
            error_file=setup.error_file(worker.rank),
            log_dir=str(setup.folder.path or ""),
            of_mps=of_mps,
            of_terminal=setup.of_terminal if worker.rank in setup.on_terminal else {},
        )
        self._is_python = setup.plan.interpreter is not None
        self._recorder = setup.error_files.recorder(setup.generation, worker.rank) if setup.has_recorder else ""
        self._pumps: dict[Stream, Pump] = {}
        stacks: int | None = None
        if self._is_python:
            if stacks_size:
                stacks = bounded_file("ddplaunch-stacks", stacks_size)
                self.env["DDPLAUNCH_STACKS"] = f"{STACKS_FD},{STACKS_SIGNAL}"
            self.env["DDPLAUNCH_RECORDER"] = self._recorder
            self.env["DDPLAUNCH_NOTIFY"] = setup.error_files.notify
            if setup.plan.keep_warm is not None and worker.local_rank == 0:
                self.env["DDPLAUNCH_SLOW_IMPORTS"] = setup.error_files.slow_imports
            self.env["DDPLAUNCH_DEBUGGER"] = setup.debugger_of(worker.rank)
        self.stdio = Stdio(0, 1, 2, stacks)
        if not worker.terminal:
            try:
                self._pumps = pipes.make(worker.rank)
            except BaseException:
                self.close()
                raise
            out, err = (self._pumps[stream].write_fd for stream in (Stream.OUT, Stream.ERR))
            self.stdio = Stdio(0 if worker.stdin else devnull, out, err, stacks)

    def started(self, child: Child, output: Output) -> RunningWorker:
        """Return the worker that this process runs; the output of the process goes to `output`."""
        worker, setup = self.plan, self._setup
        logs = None
        if not worker.terminal:
            names = setup.folder.log_names(setup.generation, worker.rank, worker.local_rank)
            logs = setup.folder.open_logs(names, setup.log_limit)
        output.open(worker.rank, logs)
        self._pipes.watch(worker.rank, self._pumps)
        return RunningWorker(
            worker.rank,
            child,
            time.monotonic(),
            by_itself=self._is_python,
            terminal=worker.terminal,
            stacks=self.stdio.stacks,
            recorder=self._recorder,
        )

    def close(self) -> None:
        """Release all, for a worker that is not started."""
        close(self._pumps)
        if self.stdio.stacks is not None:
            os.close(self.stdio.stacks)
