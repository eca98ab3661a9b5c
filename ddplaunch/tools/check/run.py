"""Runs the ranks that `ddplaunch check` checks, a few at a time, each in a process with a deadline, and reads their notes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan import variables
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import argv
from ddplaunch.plan.variables import without_other_places
from ddplaunch.record.seen.dump import parse_dump
from ddplaunch.spec.error_file import content, parse
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import say
from ddplaunch.system.exitcodes import of_signal
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.process import child, tree
from ddplaunch.system.process.child import Child, End, Stdio
from ddplaunch.system.process.command import do_nothing
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import become_subreaper, detach
from ddplaunch.system.process.tree import end_all
from ddplaunch.system.words import count, duration, signal_name
from ddplaunch.tools.check.notes import Trace, read_trace

_MOST_AT_ONCE = 4  # each holds a whole model
# seconds for a rank to end by itself after its deadline, before it is killed, and for a kill to take effect
_GRACE = 5.0
_OUTPUT_LIMIT = 64 << 10  # bytes of a rank's output that are kept
_UNUSED_PORT = "29500"  # torchrun's default
_LONGEST_STACKS = 4 << 20  # bytes
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Wanted(Struct, frozen=True, kw_only=True):
    """What is to be checked."""

    world_size: int
    nproc_per_node: int
    ranks: tuple[int, ...]
    steps: int
    seconds: float  # that a rank may take


class _Stopped(Exception):
    """A signal has ended the check."""


def run(spec: JobSpec, env: Mapping[str, str], node: Node, wanted: Wanted, *, tells_pace: bool) -> list[Trace] | int:
    """Run the ranks, the lowest first and alone, since others may get objects from it; return what they did.

    A number is the exit status, after a signal. `tells_pace`: say how long the first one took, and how many are to go.
    """
    become_subreaper()
    try:
        with _folder() as folder, _stoppable() as stop_fd:
            return _Runs(spec, env, node, wanted, folder, tells_pace).run(stop_fd)
    except _Stopped as stopped:
        return of_signal(stopped.args[0])


@contextmanager
def _folder() -> Iterator[str]:
    """Return a folder for the notes of the ranks; a child removes the folder when this process ends the block, or is killed."""
    folder = tempfile.mkdtemp(prefix="ddplaunch-check-")
    readable, writable = os.pipe2(os.O_CLOEXEC)  # the child waits for its end, and has no end of its own to write to
    # no signal comes until the child has blocked them itself
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if (pid := fork()) == 0:
            _remove_at_end(folder, readable)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        os.close(readable)
    try:
        yield folder
    finally:
        os.close(writable)
        os.waitpid(pid, 0)


def _remove_at_end(folder: str, pipe: int) -> NoReturn:
    """Wait for the end of the pipe, remove the folder, and exit."""
    try:
        detach(pipe)
        os.read(3, 1)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


@contextmanager
def _stoppable() -> Iterator[int]:
    """Return a descriptor that becomes readable when a signal asks this command to end; the signals' numbers are read from it."""
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    handlers_before = {
        signum: signal.signal(signum, do_nothing) for signum in _ENDING_SIGNALS if not _is_ignored(signum)
    }
    wakeup_fd_before = signal.set_wakeup_fd(writable)  # to which the interpreter writes the number of each signal
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(wakeup_fd_before)
        for signum, handler in handlers_before.items():
            signal.signal(signum, handler)
        os.close(readable)
        os.close(writable)


def _is_ignored(signum: int) -> bool:
    return signal.getsignal(signum) is signal.SIG_IGN


class _Rank:
    """A rank that runs."""

    def __init__(self, rank: int, process: Child, output: int, began: float) -> None:
        self.rank = rank
        self.process = process
        self.output = output  # descriptor of the pipe to which the rank writes stdout and stderr
        self.began = began  # of the loop's clock
        self.end_of_output = b""
        self.was_killed = False  # by us


class _Runs:
    """The ranks of one check: starts a process for each, a few at a time, and gathers what they did."""

    def __init__(
        self,
        spec: JobSpec,
        env: Mapping[str, str],
        node: Node,
        wanted: Wanted,
        folder: str,
        tells_pace: bool,
    ) -> None:
        """Prepare; the ranks write their notes into `folder`. `tells_pace`: say how long the first one took."""
        self._tells_pace = tells_pace
        self._spec = spec
        self._env = env
        self._node = node
        self._wanted = wanted
        self._folder = folder
        # DDPLAUNCH_TERM, which grows with each start; the same for all ranks
        self._term = variables.first_term(time.time())
        self._loop = Loop()
        self._not_started = deque(wanted.ranks)
        self._running: dict[int, _Rank] = {}
        self._traces: dict[int, Trace] = {}  # of ranks that have ended
        # a shell that was replaced by this command (`exec`) has left them: they are not ours to kill
        self._children_before = {process.pid for process in tree.descendants(os.getpid())}
        ranks_after_first = len(wanted.ranks) - 1  # the first one runs alone, before the others
        self._most_running = max(1, min(_MOST_AT_ONCE, node.hardware.usable_cpus, ranks_after_first))

    def run(self, stop_fd: int) -> list[Trace]:
        """Run all; raise _Stopped if a signal asks to end, whose number is read from `stop_fd`. No process is left."""
        self._loop.watch(stop_fd, partial(_raise_stopped, stop_fd))
        try:
            while self._not_started or self._running:
                first_has_ended = bool(self._traces)  # it runs alone, since the others may get objects that it has sent
                most_running = self._most_running if first_has_ended else 1
                while self._not_started and len(self._running) < most_running:
                    self._start(self._not_started.popleft())
                self._loop.run_once()
        finally:
            for one in list(self._running.values()):
                self._kill(one)
                tree.ends_within(one.process.pid, _GRACE)
                one.process.reap()
            self._end_leftovers()
            self._loop.close()
        return [self._traces[rank] for rank in self._wanted.ranks]

    def _start(self, rank: int) -> None:
        """Start the process of a rank, with a deadline; if that fails, the rank's trace says why."""
        readable, writable = os.pipe2(os.O_CLOEXEC)
        devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        local_rank = rank % self._wanted.nproc_per_node
        try:
            process = child.start(
                argv(self._spec, self._node, local_rank),
                self._environment(rank),
                Stdio(devnull, writable, writable),
                handled=child.handled_signals(),  # that get their default actions in the rank
            )
        except child.StartError as error:
            os.close(readable)
            self._traces[rank] = Trace(rank=rank, end="failed", how_it_ended=str(error))
            return
        finally:
            os.close(devnull)
            os.close(writable)
        os.set_blocking(readable, False)
        now = self._loop.now()
        one = self._running[rank] = _Rank(rank, process, readable, now)
        deadline = now + self._wanted.seconds  # at which the rank ends itself, if it still can
        timer = self._loop.timer(deadline + _GRACE, partial(self._kill, one))
        self._loop.watch(readable, partial(self._read, one))
        self._loop.watch(process.ended, partial(self._end, one, timer))

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables that a rank would have in the whole job, and those by which worker/check.py knows what to note.

        Devices are hidden if there are fewer than on a node of that job.
        """
        wanted, usable = self._wanted, self._node.hardware.usable_cpus
        node_rank, local_rank = divmod(rank, wanted.nproc_per_node)
        nnodes = -(-wanted.world_size // wanted.nproc_per_node)  # rounded up
        threads, _why = variables.threads(self._spec, usable, self._most_running, self._env.get("OMP_NUM_THREADS"))
        common = variables.common(
            self._spec, self._env, run_id="check", backend="gloo", address="127.0.0.1", omp=threads
        )
        place = variables.of_place(
            rank=rank,
            local_rank=local_rank,
            world_size=wanted.world_size,
            local_world_size=min(wanted.nproc_per_node, wanted.world_size - node_rank * wanted.nproc_per_node),
            node_rank=node_rank,
            nnodes=nnodes,
            role=self._spec.role,
        )
        has_device = len(self._node.devices) >= wanted.nproc_per_node
        hidden = {} if has_device else {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
        path = self._notes_path(rank)
        return {
            # `rank` is None: this command has several
            **without_other_places(self._env, rank=None, world_size=wanted.world_size),
            **hidden,
            **common,
            **place,
            "MASTER_PORT": _UNUSED_PORT,  # no rank connects to another
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": f"{path}.json",
            "DDPLAUNCH_INIT_METHOD": "env://",
            "DDPLAUNCH_LOG_DIR": "",
            "DDPLAUNCH_TERM": str(self._term),
            "DDPLAUNCH_DEVICE": str(self._node.devices[local_rank]) if has_device else "cpu",
            "DDPLAUNCH_CHECK": "1",
            "DDPLAUNCH_CHECK_NOTES": f"{wanted.steps},{wanted.seconds},{path}",
        }

    def _notes_path(self, rank: int) -> str:
        return f"{self._folder}/rank-{rank}"

    def _read(self, one: _Rank) -> None:
        """Read what a rank prints, and keep the end of it."""
        with suppress(BlockingIOError):
            data = os.read(one.output, _OUTPUT_LIMIT)
            one.end_of_output = (one.end_of_output + data)[-_OUTPUT_LIMIT:]
            if not data:
                self._loop.unwatch(one.output)

    def _kill(self, one: _Rank) -> None:
        """Kill a rank. Once the rank is gone, `_end_leftovers` ends the processes that the rank has started."""
        one.was_killed = True
        with suppress(ProcessLookupError):
            os.kill(one.process.pid, signal.SIGKILL)

    def _end(self, one: _Rank, timer: Timer) -> None:
        """Keep the trace of a rank whose process has ended, and end what it has left behind; `timer` would kill it."""
        timer.cancel()
        end = one.process.look()
        if end is None:
            return
        del self._running[one.rank]
        self._loop.unwatch(one.process.ended)
        if self._loop.watches(one.output):  # what it has printed last was not read yet
            self._read(one)
            self._loop.unwatch(one.output)
        os.close(one.output)
        one.process.reap()
        self._end_leftovers()
        trace = self._traces[one.rank] = self._trace(one, end)
        first, *others = self._wanted.ranks
        if self._tells_pace and one.rank == first and others:
            say(f"rank {first} took {duration(trace.seconds)}, {count(len(others), 'rank')} to go")

    def _trace(self, one: _Rank, ended: End) -> Trace:
        """Return what a rank has noted, and why it ended: by its notes, else late, well, with an exception, or with a status.

        Beside its notes a rank that is late writes its stacks into a file, and one that raises its exception.
        """
        path = self._notes_path(one.rank)
        trace = replace(
            read_trace(path, one.rank, self._wanted.world_size),
            seconds=self._loop.now() - one.began,
            output=one.end_of_output.decode(errors="replace"),
        )
        if trace.end != "ended":  # the notes say why it ended
            return trace
        stacks = content(f"{path}.late", _LONGEST_STACKS).decode(errors="replace")
        if one.was_killed or stacks:
            main = (thread.frames for thread in parse_dump(stacks) if thread.is_main)
            return replace(trace, end="late", frames=next(main, ()))
        if ended.code == 0:
            return trace
        how = f"exit status {ended.code}" if ended.signal is None else f"killed by {signal_name(ended.signal)}"
        error = parse(content(f"{path}.json"))
        return replace(trace, end="failed" if error is None else "raised", how_it_ended=how, error=error)

    def _end_leftovers(self) -> None:
        """End what ranks that have ended left behind, and wait until it is gone."""
        pids = {one.process.pid for one in self._running.values()} | self._children_before
        end_all(list(tree.descendants(os.getpid(), pids)), _GRACE)
        tree.reap(pids)


def _raise_stopped(stop_fd: int) -> None:
    """Raise the number of the signal that has come. Called by the loop."""
    raise _Stopped(os.read(stop_fd, 1)[0])


def default_ranks(world_size: int, nproc_per_node: int) -> tuple[int, ...]:
    """Return the ranks that most often differ: the first, the ends of the first node and of the job, one in the middle."""
    ranks = (0, 1, nproc_per_node - 1, nproc_per_node, world_size // 2, world_size - 1)
    return tuple(sorted({rank for rank in ranks if 0 <= rank < world_size}))
