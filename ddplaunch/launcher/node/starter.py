"""How workers become processes of the agent, fresh or forked ones, with what they are given and the pipes that they write to."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.launcher.node.context import AgentContext, WorkerSetup
from ddplaunch.launcher.node.events import ChildEnded
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import environment
from ddplaunch.system import exitcodes
from ddplaunch.system.console.streams import Stream
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import (
    STACKS_FD,
    STACKS_SIGNAL,
    RunningWorker,
    StartError,
    Stdio,
    handled_signals,
    start,
)
from ddplaunch.system.process.linux import bounded_file, grow_pipe, unread

if TYPE_CHECKING:
    from ddplaunch.launcher.workers.forker import Forker
    from ddplaunch.record.file_queue import Log
    from ddplaunch.system.process.child import Child
    from ddplaunch.system.process.tree import Process

STACKS_SIZE = 1 << 20  # bytes, of a worker's stacks as faulthandler writes them: at most 100 threads of 100 frames
_LEAST_STACKS_SIZE = 1 << 16  # bytes, below which they are not worth it
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)
_MOST_READ_AT_ONCE = 1 << 16  # bytes read at once
_PIPE_SIZE = 1 << 18  # bytes that a worker can write before it blocks
# bytes of all pipes; above 64 MiB a user's further pipes are tiny (pipe-user-pages-soft, pipe(7))
_SIZE_OF_ALL_PIPES = 1 << 25


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


def stacks_file_size() -> tuple[int, str]:
    """Return the size of the file for the stacks of a worker, and ""; or 0, and why there can be no such file."""
    largest_file, open_files = (resource.getrlimit(of)[0] for of in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE))
    if open_files != resource.RLIM_INFINITY and open_files <= STACKS_FD:  # the number of its descriptor in the worker
        return 0, f"no more than {open_files} files may be open (`ulimit -n`)"
    if largest_file == resource.RLIM_INFINITY or largest_file >= STACKS_SIZE:
        return STACKS_SIZE, ""
    if largest_file < _LEAST_STACKS_SIZE:
        return 0, f"no file may be larger than {largest_file >> 10} KiB (`ulimit -f`)"
    return largest_file, ""


class Pipe:
    """One stream of one worker, on its way to `output`."""

    def __init__(self, loop: Loop, output: Output, rank: int, stream: Stream, size: int) -> None:
        self._loop = loop
        self._output = output
        self._stream = rank, stream
        self.fd, self.write_fd = os.pipe()
        self._has_ended = False
        os.set_blocking(self.fd, False)
        grow_pipe(self.fd, size)

    def started(self) -> None:
        """Close our copy of the writing end, so that the end of the stream can be seen."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def watch(self, watched: bool) -> None:
        """Read the stream, until its end, whenever there is something; or leave it alone."""
        if watched and not self._has_ended:
            self._loop.watch(self.fd, self._on_readable)
        else:
            self._loop.unwatch(self.fd)

    def _on_readable(self) -> None:
        """Read once from the pipe of a worker, or note its end. Called by the loop."""
        with suppress(BlockingIOError):
            if data := os.read(self.fd, _MOST_READ_AT_ONCE):
                self._received(data)
                return
            self._has_ended = True
            self._loop.unwatch(self.fd)
            self._output.end_stream(*self._stream, self._loop.now())

    def _received(self, data: bytes) -> None:
        self._output.on_output(*self._stream, data, self._loop.now())

    def drain(self) -> None:
        """Take in everything that was written so far, and no more: what a worker left behind may write for ever."""
        left = unread(self.fd)
        while left > 0:
            data = os.read(self.fd, min(_MOST_READ_AT_ONCE, left))
            left -= len(data)
            self._received(data)

    def finish(self, at: float) -> None:
        """Take in the rest, and close the pipe."""
        self._loop.unwatch(self.fd)
        self.drain()
        self._output.end_stream(*self._stream, at)
        self.close()

    def close(self) -> None:
        """Close both ends."""
        self.started()
        os.close(self.fd)


class WorkerPipes:
    """Stdout and stderr of each worker of a generation: read when there is something, left alone while output is paused."""

    def __init__(self, loop: Loop, output: Output, *, workers: int) -> None:
        self._loop = loop
        self._output = output
        self._size = min(_PIPE_SIZE, _SIZE_OF_ALL_PIPES // max(1, 2 * workers))
        self._pipes: dict[int, Mapping[Stream, Pipe]] = {}  # by rank
        self._paused = False
        self._paused_until = 0.0

    def make(self, rank: int) -> Mapping[Stream, Pipe]:
        """Return the pipes of a worker that is about to start. The caller passes them to `watch`, or closes them.

        Raises:
            OSError: there are too many open files.
        """
        made: dict[Stream, Pipe] = {}
        try:
            for stream in Stream:
                made[stream] = Pipe(self._loop, self._output, rank, stream, self._size)
        except OSError:
            _close(made.values())
            raise
        return made

    def watch(self, rank: int, pipes: Mapping[Stream, Pipe], logs: tuple[Log, Log] | None) -> None:
        """Read the pipes of a worker that has started, to `logs` as well; None: nothing of it is kept."""
        self._output.open(rank, logs)
        self._pipes[rank] = pipes
        for pipe in pipes.values():
            pipe.started()
            pipe.watch(not self._paused)

    def pause(self, paused: bool) -> None:
        """Stop reading, or go on."""
        if paused is not self._paused:
            self._paused = paused
            self._paused_until = self._loop.now()
            for pipes in self._pipes.values():
                for pipe in pipes.values():
                    pipe.watch(not paused)

    def were_paused(self, since: float) -> bool:
        """Whether reading was paused at any time since then: who writes to the pipes may have had to wait."""
        return self._paused or self._paused_until >= since

    def drain(self, rank: int) -> None:
        """Take in all that a worker has written so far."""
        for pipe in self._pipes[rank].values():
            pipe.drain()

    def close(self, at: float) -> None:
        """Take in the rest, and close all."""
        for pipes in self._pipes.values():
            for pipe in pipes.values():
                pipe.finish(at)
        self._pipes.clear()


def _close(pipes: Iterable[Pipe]) -> None:
    for pipe in pipes:
        pipe.close()


class _ReadyWorker(Struct, frozen=True):
    """A worker before its process, with all that the process is given."""

    plan: WorkerPlan
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdio: Stdio
    pipes: Mapping[Stream, Pipe]  # none of a worker that has the terminal
    recorder_socket: str  # path of the socket at which its torch tells of its collectives; "": there is none

    def close(self) -> None:
        """Release all, for a worker that is not started."""
        _close(self.pipes.values())
        if self.stdio.stacks is not None:
            os.close(self.stdio.stacks)


class Starter:
    """Starts workers. What forks them (a fork server) lives on, for the next generation, until `close`."""

    def __init__(self, loop: Loop, context: AgentContext) -> None:
        """Prepare to start workers; tell the user why none is forked as was asked, or why their stacks cannot be shown."""
        if context.inputs.why_cold:
            context.reporter.tell(context.inputs.why_cold)
        self._stacks_file_size, why_no_stacks = stacks_file_size()
        if why_no_stacks:
            context.reporter.warn(f"where workers are cannot be shown, as by `ddplaunch stacks`: {why_no_stacks}")
        self._loop = loop
        self._context = context
        self._handled: tuple[int, ...] = ()  # signals that the agent has a handler for, which no worker may inherit
        self._forker: Forker | None = None  # None: all workers are fresh processes

    def prepare(self, plan: Plan, caller: Mapping[str, str]) -> None:
        """Prepare a generation: if its workers are to be forked, make the fork server ready, in the caller's environment."""
        self._handled = handled_signals()
        if self._forker is None and plan.preload is not None:
            from ddplaunch.launcher.workers.forker import Forker  # most jobs need none

            # `warm`: an interpreter that is kept for further runs, which then forks; None: a fork server of this run does
            context = self._context
            front_pipe = context.queue.fileno()  # which the parent of forked workers keeps open
            self._forker = Forker(self._loop, context.reporter, self, context.inputs.warm, front_pipe)
        if self._forker is not None:
            self._forker.prepare(plan, caller, self._handled)

    def on_guard_over(self) -> None:
        """Have the ends of workers looked at: a guard was their parent, which has ended. Called by the forker."""
        self._loop.post(ChildEnded())

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started now."""
        return self._forker is None or self._forker.is_ready

    @property
    def pids(self) -> frozenset[int]:
        """The pid of the fork server, which is no leftover of a worker; empty without one."""
        return self._forker.pids if self._forker is not None else frozenset()

    def leftovers(self) -> list[Process]:
        """Return the processes that descend from workers and are not below the agent."""
        return self._forker.leftovers() if self._forker is not None else []

    def start(
        self, workers: Sequence[WorkerPlan], setup: WorkerSetup, pipes: WorkerPipes, mps_variables: Mapping[str, str]
    ) -> list[RunningWorker]:
        """Start the first of these workers, as many as can be; their output then comes through `pipes`.

        By `mps_variables` they find NVIDIA's MPS daemon; empty without one.

        Raises:
            StartError: the machine cannot create another process, or what it is given; its `index` says for which worker.
        """
        ready: list[_ReadyWorker] = []
        children: Sequence[Child] = ()  # of the first of these
        devnull = -1
        try:
            try:
                devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                ready.extend(self._make_ready(worker, setup, pipes, devnull, mps_variables) for worker in workers)
            except OSError as error:
                # fresh workers that are ready are started, after which each needs fewer files; forked ones only begin together
                if not ready or (self._forker is not None and self._forker.forks_workers):
                    number = error.errno or errno.EMFILE
                    raise StartError(number, "cannot open its pipes and files", index=len(ready)) from None
            children = self._make_processes(ready)
        finally:
            if devnull >= 0:
                os.close(devnull)
            for one in ready[len(children) :]:
                one.close()
        return [_as_running(one, child, setup, pipes) for one, child in zip(ready, children, strict=False)]

    def _make_ready(
        self, worker: WorkerPlan, setup: WorkerSetup, pipes: WorkerPipes, devnull: int, mps_variables: Mapping[str, str]
    ) -> _ReadyWorker:
        """Open the pipes and files of a worker, and return them with its command and environment; `devnull` is its stdin.

        Raises:
            OSError: there are too many open files, or there is no memory.
        """
        env = environment(
            setup.env,
            setup.plan,
            worker,
            generation=setup.generation,
            term=setup.term,  # greater than that of any generation before, in this run or an earlier one
            port=setup.port,
            error_file=setup.error_file(worker.rank),
            log_dir=str(setup.folder.path or ""),
            of_mps=mps_variables,
            of_terminal=setup.terminal_variables if worker.rank in setup.on_terminal else {},
        )
        recorder_socket = ""
        if setup.records_collectives:
            recorder_socket = setup.error_files.recorder(setup.generation, worker.rank)
        argv = worker.wrapped(str(setup.folder.path or "."))  # in the command of --wrap, which may name the folder
        stacks: int | None = None  # the file that the worker writes its stacks to
        if setup.plan.interpreter is not None:  # variables for our bootstrap in a Python program, see worker/
            if self._stacks_file_size:
                stacks = bounded_file("ddplaunch-stacks", self._stacks_file_size)
                env["DDPLAUNCH_STACKS"] = f"{STACKS_FD},{STACKS_SIGNAL}"
            env["DDPLAUNCH_RECORDER"] = recorder_socket
            env["DDPLAUNCH_NOTIFY"] = setup.error_files.notify  # the path of a pipe, to announce what befalls it
            if setup.plan.keep_warm is not None and worker.local_rank == 0:  # for advice on what to keep warm
                env["DDPLAUNCH_SLOW_IMPORTS"] = setup.error_files.slow_imports
            env["DDPLAUNCH_DEBUGGER"] = setup.debugger_of(worker.rank)
        if worker.terminal:  # it has the terminal itself, and no pipes
            return _ReadyWorker(worker, argv, env, Stdio(0, 1, 2, stacks), {}, recorder_socket)
        try:
            made = pipes.make(worker.rank)
        except BaseException:
            if stacks is not None:
                os.close(stacks)
            raise
        out, err = (made[stream].write_fd for stream in (Stream.OUT, Stream.ERR))
        stdin = 0 if worker.stdin else devnull
        return _ReadyWorker(worker, argv, env, Stdio(stdin, out, err, stacks), made, recorder_socket)

    def _make_processes(self, ready: Sequence[_ReadyWorker]) -> Sequence[Child]:
        """Make the processes of the first of these workers, as many as can be: by the fork server, or fresh where none forks.

        Nothing else is done between two forks: each page that is written after one is a fault of its own, and perhaps a copy.

        Raises StartError: no process could be made.
        """
        if self._forker is not None:
            from ddplaunch.launcher.workers.servers import Fork

            forks = [Fork(one.argv, one.env, one.stdio, one.plan.cpus) for one in ready]
            if children := self._forker.fork(forks):  # none if it has ended: then they are fresh
                return children
        fresh: list[Child] = []
        try:
            fresh.extend(
                start(one.argv, one.env, one.stdio, handled=self._handled, cpus=one.plan.cpus) for one in ready
            )
        except StartError:
            if not fresh:
                raise
        return fresh

    def fork_no_more(self) -> None:
        """End the fork server if it is not the parent of the workers: no generation will need it."""
        if self._forker is not None:
            self._forker.fork_no_more()

    def close(self) -> None:
        """End what forks the workers, if there is anything, for good."""
        if self._forker is not None:
            self._forker.close()


def _as_running(ready: _ReadyWorker, child: Child, setup: WorkerSetup, pipes: WorkerPipes) -> RunningWorker:
    """Open the logs of a worker that has got its process, have its pipes read, and return it as running."""
    worker = ready.plan
    logs = None
    if not worker.terminal:
        names = setup.folder.log_names(setup.generation, worker.rank, worker.local_rank)
        logs = setup.folder.open_logs(names, setup.log_limit)
    pipes.watch(worker.rank, ready.pipes, logs)
    is_python_itself = setup.plan.interpreter is not None and not worker.wrap
    return RunningWorker(
        worker.rank,
        child,
        time.monotonic(),
        by_itself=is_python_itself,  # else a wrapper, whose process group gets its signals
        terminal=worker.terminal,
        stacks=ready.stdio.stacks,
        recorder_socket=ready.recorder_socket,
    )
