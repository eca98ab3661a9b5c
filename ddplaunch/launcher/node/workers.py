"""The workers of this node in one generation (a start of all): the agent starts, reads, signals, reaps them. Decides nothing."""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.node.context import WorkerSetup
from ddplaunch.launcher.node.events import WorkerEnded
from ddplaunch.launcher.node.starter import CannotStart, Starter, WorkerPipes
from ddplaunch.launcher.output.sinks import Output
from ddplaunch.plan.variables import init_file
from ddplaunch.spec import error_file
from ddplaunch.spec.outcome import Progress, WorkerError, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.console.streams import Stream, Written
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import RunningWorker, StartError
from ddplaunch.system.process.terminal import awaited_input
from ddplaunch.system.process.tree import HARMLESS, Process, descendants, others_by_group

if TYPE_CHECKING:
    from ddplaunch.launcher.node.services import Mps

_LONGEST_STDERR_TAIL = 8192  # characters of stderr that the failure report gets
# seconds that Slurm may take from its list of a step's processes to the signal for the last of them
LISTED_BY_CLUSTER_WITHIN = 0.1


class Workers:
    """The workers of one generation on this node; the end of each is posted as `WorkerEnded`."""

    def __init__(
        self, loop: Loop, setup: WorkerSetup, starter: Starter, output: Output, running: dict[int, RunningWorker]
    ) -> None:
        """Make the workers of `setup`, of which `start` starts some at a time; `running` gets each that was started, by rank."""
        self._loop = loop
        self._setup = setup
        self._starter = starter
        self._output = output
        self._plans = {worker.rank: worker for worker in setup.plan.workers}
        self.waiting = deque(self._plans)  # ranks that are yet to be started
        self.running = running  # dead ones included until they are reaped
        self._ended_ranks: set[int] = set()
        self._raised_ranks: set[int] = set()  # those whose exception `newly_raised` has returned
        self._pipes = WorkerPipes(loop, output, workers=len(self._plans))
        self._mps = _start_mps(loop, setup)
        reader = next((worker.rank for worker in setup.plan.workers if worker.stdin), None)  # the rank with our stdin
        if reader is not None and os.isatty(0):  # it may ask its user something
            output.expect_prompts(reader, lambda: awaited_input(running[reader].pid) if reader in running else None)
        self._copy_lines_to_filtered_logs()

    def _copy_lines_to_filtered_logs(self) -> None:
        """Have lines that contain certain texts copied to torchrun's filtered logs, if its options ask for that."""
        setup = self._setup
        if not any(setup.duplicated.values()):
            return
        logs = setup.folder.open_logs(setup.folder.filtered_names(setup.generation), None)
        headers = {rank: f"[{setup.role}{rank}]:" for rank in self._plans}  # as torchrun writes them
        for stream, log in zip(Stream, logs or (), strict=False):  # no logs: nothing is kept
            if needles := setup.duplicated.get(stream):
                self._output.duplicate(headers, stream, needles, log)

    @property
    def host(self) -> str:
        """The name of this node."""
        return self._setup.plan.workers[0].host

    @property
    def seconds_silent(self) -> Mapping[int, float]:
        """How many seconds ago each worker has last written to its pipes, by rank; without those that have not."""
        now = self._loop.now()
        return {rank: max(0.0, now - at) for rank, at in self._output.written_at.items()}

    @property
    def written(self) -> dict[int, Written]:
        """What each worker has written to its pipes, by rank; without those that have written nothing."""
        return {rank: self._written(rank, seconds) for rank, seconds in self.seconds_silent.items()}

    def _written(self, rank: int, seconds_silent: float) -> Written:
        return Written(seconds_silent, self._output.written[rank], self._output.last_line(rank))

    @property
    def progress(self) -> dict[int, Progress]:
        """How far each worker is, by rank: as its script says, else its progress bar; workers that show neither are left out."""
        setup = self._setup
        found: dict[int, Progress] = {}
        for rank in self.running:
            if (by_script := setup.error_files.progress(setup.generation, rank)) is not None:
                found[rank] = by_script
        for rank, written in self.written.items():
            if rank in found:
                continue
            last_line, seconds_ago = written.last, written.seconds
            if (by_bar := error_file.progress_of_bar(last_line, seconds_ago)) is not None:
                found[rank] = by_bar
        return found

    def has_written(self, rank: int, since: float) -> bool:
        """Whether this worker has written to its pipes since then (on the loop's clock), or may have waited until it could."""
        return self._output.written_at.get(rank, since) > since or self._pipes.were_paused(since)

    def has_terminal(self, rank: int) -> bool:
        """Whether this worker writes to the terminal itself."""
        return self._plans[rank].terminal

    @property
    def pids(self) -> frozenset[int]:
        """The processes of all workers, dead ones included until they are reaped."""
        return frozenset(worker.pid for worker in self.running.values())

    @property
    def ended(self) -> frozenset[int]:
        """The pids of workers that are known to have ended, and are not reaped yet: no process is below them."""
        ended = (self.running[rank] for rank in self._ended_ranks)
        return frozenset(worker.pid for worker in ended if worker.child.is_kept)

    @property
    def may_have_joined(self) -> bool:
        """Whether any worker has a process group, as far as that is known: torch's recorder is there from then on."""
        return not self._setup.records_collectives or self._setup.error_files.has_recorder(self._setup.generation)

    @property
    def may_start(self) -> bool:
        """Whether a worker is to be started, and what serves it (MPS) is there, or known not to come."""
        return bool(self.waiting) and (self._mps is None or not self._mps.is_starting)

    def start(self, most: int) -> list[tuple[int, int]]:
        """Start the next of the `waiting` workers, at most so many; return the rank and the pid of each that was started.

        Raises:
            CannotStart: the machine has run out of something, or what serves the workers (MPS) did not start.
        """
        ranks = list(islice(self.waiting, most))
        if self._mps is not None and self._mps.why_not_started:
            raise CannotStart(self._mps.why_not_started, exitcodes.USAGE, ranks[0])
        try:
            mps_variables = self._mps.variables if self._mps else {}
            plans = [self._plans[rank] for rank in ranks]
            started = self._starter.start(plans, self._setup, self._pipes, mps_variables)
        except StartError as error:
            # workers that are made ready together hold more open files than those that run: one at a time, they may all start
            if len(ranks) > 1 and error.errno in (errno.EMFILE, errno.ENFILE):
                return self.start(1)
            raise CannotStart.of(error, ranks[error.index]) from None
        for running in started:  # the first of these ranks
            self.waiting.popleft()
            self.running[running.rank] = running
            self._loop.watch(running.ended, partial(self._loop.post, WorkerEnded(running.rank)))
        return [(running.rank, running.pid) for running in started]

    def pause_output(self, paused: bool) -> None:
        """Stop reading the pipes of the workers, or go on."""
        self._pipes.pause(paused)

    def host_store(self) -> None:
        """Have torch's store at MASTER_PORT hosted here."""
        from ddplaunch.launcher.node.services import host_store  # few jobs need it

        host_store(self._setup)

    def drain(self, rank: int) -> None:
        """Take in all that a worker has written so far."""
        if not self.has_terminal(rank):
            self._pipes.drain(rank)

    # --- ends

    def exit_of(self, rank: int, at: float) -> WorkerExit | None:
        """Return how a worker ended, by CLOCK_MONOTONIC `at`, after reading all that it wrote before; None while it lives.

        Raises:
            CannotStart: it ended before it became its program.
        """
        running, plan, folder = self.running[rank], self._plans[rank], self._setup.folder
        end = running.look()
        if end is None:
            return None
        self._loop.unwatch(running.ended)
        self._ended_ranks.add(rank)
        program = (plan.wrap or plan.argv)[0]
        if (not_started := running.why_not_started(program)) is not None:
            raise CannotStart.of(not_started, rank)
        self._pipes.drain(rank)
        exception = error_file.content(self._setup.error_file(rank))  # as the worker recorded it; empty: it did not
        if exception:
            folder.keep_exception(self._setup.generation, rank, plan.local_rank, exception)
        seconds_silent = self.seconds_silent.get(rank)  # None: it has written nothing to its pipes
        written = self._written(rank, seconds_silent) if seconds_silent is not None else None
        _, stderr_log = folder.log_names(self._setup.generation, rank, plan.local_rank)
        path_of_whole_folder = folder.whole  # None: the log may be incomplete
        return WorkerExit(
            rank=rank,
            local_rank=plan.local_rank,
            host=plan.host,
            pid=running.pid,
            device=plan.device,
            code=end.code,
            signal=end.signal,
            core_dumped=end.core_dumped,
            at=at,
            seconds=at - running.started_at,
            stopped_with=running.stopped_with,
            stopped_at=running.stopped_at,
            error=error_file.parse(exception),
            stderr_tail=_shortened(self._output.tail(rank)),
            log=f"{path_of_whole_folder}/{stderr_log}" if path_of_whole_folder and not plan.terminal else None,
            progress=self._setup.error_files.progress(self._setup.generation, rank),  # as the script says
            bar=error_file.progress_of_bar(written.last, written.seconds) if written is not None else None,
            quiet=seconds_silent,  # before the end
        )

    def newly_raised(self) -> Iterable[tuple[int, WorkerError]]:
        """Return the exceptions that workers have recorded since this was last asked, each with the rank."""
        for rank, error in self._raised(self.running.keys() - self._raised_ranks):
            self._raised_ranks.add(rank)
            yield rank, error

    def recorded_and_not_ended(self) -> Iterable[tuple[int, WorkerError]]:
        """Return the exceptions that workers have recorded, and not ended since, each with the rank."""
        return self._raised({rank for rank, worker in self.running.items() if worker.look() is None})

    def _raised(self, ranks: AbstractSet[int]) -> Iterable[tuple[int, WorkerError]]:
        """Return the exceptions that those of these ranks have recorded which have recorded any."""
        for rank in sorted(self._setup.error_files.written(self._setup.generation) & ranks):
            if (error := error_file.read(self._setup.error_file(rank))) is not None:
                yield rank, error

    # --- signals

    def forward(self, signum: int, ranks: Iterable[int]) -> None:
        """Send a signal to the groups of these workers, as far as they still live."""
        alive = [self.running[rank] for rank in ranks if rank in self.running and self.running[rank].look() is None]
        members = self._members_to_signal(signum, alive)
        for running in alive:
            running.signal(signum, members.get(running.pid))

    def end(self, signum: int, ranks: Collection[int], at: float, *, by_cluster: bool = False) -> None:
        """Send the process groups of these workers a signal that is meant to end them, at this CLOCK_MONOTONIC time.

        A group may outlive its worker, so dead workers count, too.
        `by_cluster`: the cluster has sent it to all processes that it listed, so only workers that have just started lack it.
        """
        if signum == signal.SIGINT:
            self._output.note_interrupt()
        addressed = [self.running[rank] for rank in ranks if rank in self.running]
        # of groups with a process that cleans up after others, which gets no signal
        members = self._members_to_signal(signum, addressed)
        for running in addressed:
            had_it = by_cluster and at - running.started_at > LISTED_BY_CLUSTER_WITHIN
            running.end(signum, at, members.get(running.pid), had_it=had_it)
        for running in addressed:  # only once all have the signal, since this takes time
            running.count_written()  # from now on, for a line about those that still run

    def _members_to_signal(self, signum: int, addressed: Iterable[RunningWorker]) -> Mapping[int, tuple[Process, ...]]:
        """Return, by its worker's pid, the members to signal of each group with a process that tidies up after others.

        Every other group gets the signal whole.
        """
        if signum in HARMLESS or not any(running.reaches_group(signum) for running in addressed):
            return {}
        return others_by_group([*descendants(os.getpid()), *self._starter.leftovers()])

    def written_since_stop(self, ranks: Iterable[int]) -> Mapping[int, int]:
        """How many bytes each of these workers has written since it was asked to end."""
        return {rank: self.running[rank].written_since_stop() for rank in ranks if rank in self.running}

    def suspend(self, suspended: bool) -> None:
        """Send SIGSTOP or SIGCONT to every worker's process group."""
        for worker in self.running.values():
            worker.signal(signal.SIGSTOP if suspended else signal.SIGCONT)

    @property
    def has_stopped(self) -> bool:
        """Whether every worker is stopped, or has ended."""
        return all(worker.child.has_stopped for worker in self.running.values())

    # --- the end of the generation

    def keep_stacks(self, text: bytes) -> None:
        """Write where the workers were to the folder of the run."""
        self._setup.folder.keep_stacks(self._setup.generation, text)

    def dismiss_services(self) -> None:
        """Ask what served the workers to end, as far as it does not by itself."""
        if self._mps is not None:
            self._mps.dismiss()

    def reap(self, exits: Iterable[WorkerExit], at: float) -> list[WorkerExit]:
        """Release all that this generation held, at this time of the loop's clock; return `exits` with what each worker used."""
        exit_of_rank = {exit.rank: exit for exit in exits}
        self._pipes.close(at)
        for rank, running in self.running.items():
            self._loop.unwatch(running.ended)  # still watched of a worker that could not be killed
            usage = running.reap()
            if rank in exit_of_rank:
                used = {"peak_rss": usage.peak_rss, "cpu_seconds": usage.cpu_seconds}
                exit_of_rank[rank] = replace(exit_of_rank[rank], **used)
        if self._mps is not None:
            self._mps.remove()
        self._output.close_filters()
        self.running.clear()
        self._ended_ranks.clear()
        init = init_file(self._setup.plan, self._setup.generation)  # torch's file with --init-method file
        if init is not None and self._setup.plan.node_rank == 0:  # all nodes share it, and one removes it
            self._setup.folder.remove(init)
        return list(exit_of_rank.values())


def _start_mps(loop: Loop, setup: WorkerSetup) -> Mps | None:
    if setup.mps_control is None:
        return None
    from ddplaunch.launcher.node.services import Mps  # few jobs need it

    # removed with that folder when this process is killed
    folder = f"{setup.error_files.folder}/mps-{setup.generation}"
    return Mps(loop, setup.mps_control, setup.env, folder)


def _shortened(stderr: str) -> str:
    """Return the end of what a worker wrote to stderr; after a crash, the lines that explain the crash."""
    if len(stderr) <= _LONGEST_STDERR_TAIL:
        return stderr
    try:
        from ddplaunch.record.seen.dump import shortened  # few workers write so much
    except Exception:  # noqa: BLE001 - its file may be gone, or of another version: the job ends as ever
        return stderr[-_LONGEST_STDERR_TAIL:]
    return shortened(stderr, _LONGEST_STDERR_TAIL)
