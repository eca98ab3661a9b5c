"""Part of the agent that inspects running workers: it captures their stacks, and checks whether they make progress.

It is made when it is first needed. It decides nothing, and waits for nothing: children ask the workers, and their answers
become events.

A worker makes progress if it, or a process below it, has written to its pipes, read or written files, started or ended a
process. A busy worker, which only computes, makes progress too, unless it waits in the same collective as at the check before:
the wait may be all that keeps the CPU busy. A worker that cannot be judged counts as making progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.record.seen import Sample
from ddplaunch.record.seen.merge import is_waiting, standing
from ddplaunch.system.errors import visible
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.ask import FIRST
from ddplaunch.system.process.child import RunningWorker
from ddplaunch.system.process.tree import Footprint, footprint

if TYPE_CHECKING:
    from ddplaunch.system.loop.loop import Pending

T = TypeVar("T")
_LATE = 5.0  # seconds that a child may take longer than it has, on a busy machine, before it is killed
_STUCK_WITHIN = 1.0  # seconds to find out whether workers still hang
_STACKS_WITHIN = 2.0  # seconds to find out what workers that compute wait for
_IDLE = 0.01  # of a CPU: threads that look from time to time whether something is to be done need less
_LEAST_CPU = 0.02  # seconds: two ticks of the clock
_LEAST_BYTES = 1 << 16  # that are more than one thread telling another to wake up


class StderrTails(Protocol):
    """What knows what workers have written."""

    def stderr_tail(self, rank: int) -> str:
        """Return the last lines of a worker's stderr."""


class Inspection:
    """Looks into the workers of one generation (start of all workers) after another; late answers about the last are dropped."""

    def __init__(self, loop: Loop, host: str, running: Mapping[int, RunningWorker], tails: StderrTails) -> None:
        """`running`, which the agent changes, are the workers of the present generation by rank; empty between two."""
        self._loop = loop
        self._host = host
        self._running = running
        self._tails = tails
        self.begin()

    def begin(self) -> None:
        """Forget what was seen of the last generation."""
        self._generation = object()
        self._before_stop: tuple[Sample, ...] = ()  # where the workers were when they had to end
        self.samples: tuple[Sample, ...] = ()  # the same, if the user is to see them
        self._observed_at = 0.0
        self._footprints: dict[int, Footprint] = {}  # at the last check, by rank
        self._last_waited_in: dict[int, object] = {}  # by rank of a worker that was busy: the collective

    def capture(
        self,
        workers: Iterable[RunningWorker],
        within: float,
        reply: Callable[[T | None], None],
        *,
        convert_samples: Callable[[Sequence[Sample]], T],
        native: bool = False,
        stacks: bool = True,
        ras: bool = False,
    ) -> Pending[T | None]:
        """Capture the stacks of these workers and of the processes below them in so many seconds.

        A child of the agent asks them; there `convert_samples` makes the value for `reply`, which gets None if no child can be.
        `native`: with frames of C. Without `stacks`, only torch is asked about collectives, and no process is signalled.
        `ras`: with what NCCL tells of all ranks. Return the question, by which the caller can give it up.
        """
        found = list(workers)
        files: list[int] = []  # into which workers write their stacks; in the child, descriptors FIRST, FIRST + 1, ...
        targets: list[tuple[RunningWorker, int | None]] = []  # with the number of its file in the child
        for worker in found:
            file = None
            if worker.stacks is not None and stacks:
                file = FIRST + len(files)
                files.append(worker.stacks)
            targets.append((worker, file))
        until, host, tails = time.monotonic() + within, self._host, self._tails

        def question() -> T:  # in the child, where `file` is open, or None of a worker that writes no stacks
            from ddplaunch.launcher.look.stacks import Target, capture_stacks
            from ddplaunch.record.seen.reasons import last_error  # the loop does not wait for imports

            asked = [Target(worker.rank, worker.pid, file, worker.recorder_socket) for worker, file in targets]
            samples = capture_stacks(asked, until=until, host=host, native=native, stacks=stacks, ras=ras)
            # stderr is the worker's, and may say why it hangs; not so of `one.child`, a process below the worker
            samples = [
                one if one.child else replace(one, said=last_error(tails.stderr_tail(one.rank))) for one in samples
            ]
            return convert_samples(samples)

        return self.ask(question, within, reply, files)

    def ask(
        self,
        question: Callable[[], T],
        within: float,
        reply: Callable[[T | None], None],
        descriptors: Sequence[int] = (),
    ) -> Pending[T | None]:
        """Have a child answer a question about the workers; `reply` gets None if the child fails, or there is no room for it."""

        def guarded() -> T | None:
            try:
                return question()
            except Exception:  # noqa: BLE001 - whatever it is, it is no reason to end a job
                return None

        return self._loop.ask(guarded, None, reply, descriptors, within + _LATE)

    # --- where workers are that have to end

    def capture_before_stop(self, wanted: node.CaptureStacks) -> None:
        """Find out where the workers are before a stop."""
        reply = partial(self._on_stacks_before_stop, self._generation, silently=wanted.silently)
        workers = (worker for rank, worker in self._running.items() if rank not in wanted.but)
        self.capture(workers, wanted.within, reply, convert_samples=tuple, ras=wanted.asks_nccl)

    def _on_stacks_before_stop(self, generation: object, samples: Sequence[Sample] | None, *, silently: bool) -> None:
        """Keep the stacks of this generation, and post which workers wait in a collective."""
        if generation is self._generation and self._running:  # those of the generation before have ended by themselves
            self._before_stop = tuple(samples or ())
            self.samples = () if silently else self._before_stop
            known = _of_workers(self._before_stop)
            waiting = frozenset(rank for rank, sample in known.items() if is_waiting(sample))
            self._loop.post(node.StacksCaptured(self._loop.now(), frozenset(known), waiting))

    def find_stuck(self, ranks: Collection[int]) -> None:
        """Find out which of these workers stand where they did when their stacks were captured before the stop."""
        running = [self._running[rank] for rank in ranks if rank in self._running]
        self.capture(running, _STUCK_WITHIN, partial(self._on_stuck, self._generation), convert_samples=tuple)

    def _on_stuck(self, generation: object, samples: Sequence[Sample] | None) -> None:
        """Post which workers stand where they stood when their stacks were captured before the stop."""
        if generation is self._generation and self._running:
            before, now = _of_workers(self._before_stop), _of_workers(samples or ())
            stuck = frozenset(rank for rank in before.keys() & now if standing(before[rank]) == standing(now[rank]))
            self.samples = self._before_stop if stuck else self.samples
            self._loop.post(node.StuckFound(stuck, self._loop.now()))

    @property
    def stacks(self) -> bytes:
        """A text for the run folder: where the workers were when they had to end; empty if that is not known."""
        if not self.samples:
            return b""
        from ddplaunch.record.seen.merge import lines, merge

        text = "\n".join(map(str, lines(merge(self.samples, threads=True), "", threads=True)))
        return visible(f"{text}\n").encode(errors="replace")

    # --- whether workers make progress

    def check_progress(self, has_written: Callable[[int, float], bool], *, asks: bool) -> None:
        """Post whether any worker has made progress since the last check, at once or after the busy workers have answered.

        `has_written` says whether a rank has written to its pipes since a time. `asks`: busy workers are signalled for their
        stacks; else only torch's recorders are read, and a worker with a terminal counts as making progress.
        """
        running = {rank: worker for rank, worker in self._running.items() if worker.look() is None}
        before, since = self._footprints, self._observed_at
        self._observed_at, self._footprints = self._loop.now(), _footprints(running)
        idle_cpu = max(_LEAST_CPU, _IDLE * (self._observed_at - since))  # seconds that a worker needs while it waits
        busy = []
        for rank, worker in running.items():
            cannot_be_judged = rank not in before or (worker.terminal and not asks)
            # of what it reads or writes, files too; a terminal passes no pipe of ours, so that each byte may be output
            least_bytes = 1 if worker.terminal else _LEAST_BYTES
            now = self._footprints[rank]
            if cannot_be_judged or has_written(rank, since) or _has_progressed(before[rank], now, least_bytes):
                self._last_waited_in.clear()  # no stack is read now: the next ones, compared with none, count as progress
                return self._post_checked(True)
            if now.cpu_seconds - before[rank].cpu_seconds > idle_cpu:
                busy.append(worker)
        if not busy:
            return self._post_checked(False)
        # a busy worker may compute, or spin in a collective: its stack, or torch's record of its collectives, tells which
        waits_in_collective = is_waiting if asks else _is_in_collective
        reply = partial(self._on_busy_stacks, self._generation, busy, waits_in_collective)
        self.capture(busy, _STACKS_WITHIN, reply, convert_samples=tuple, stacks=asks)
        return None

    def _on_busy_stacks(
        self,
        generation: object,
        busy: Sequence[RunningWorker],
        waits_in_collective: Callable[[Sample], bool],
        samples: Sequence[Sample] | None,
    ) -> None:
        """Post whether any busy worker has made progress: one that waits where it waited at the last check has made none."""
        if generation is self._generation and self._running:
            now = {one.rank: standing(one) for one in samples or () if not one.child and waits_in_collective(one)}
            progressed = any(one.rank not in now or now[one.rank] != self._last_waited_in.get(one.rank) for one in busy)
            self._last_waited_in = now
            # what a worker did to answer is no progress
            self._footprints |= _footprints({one.rank: one for one in busy})
            self._post_checked(progressed)

    def _post_checked(self, progressed: bool) -> None:
        self._loop.post(node.ProgressChecked(progressed, self._loop.now()))


def _of_workers(samples: Iterable[Sample]) -> dict[int, Sample]:
    """Return the samples of workers whose stacks are known, by rank."""
    return {one.rank: one for one in samples if one.main and not (one.child or one.ended)}


def _footprints(running: Mapping[int, RunningWorker]) -> dict[int, Footprint]:
    return {rank: footprint(worker.pid) for rank, worker in running.items()}


def _has_progressed(before: Footprint, now: Footprint, least_bytes: int) -> bool:
    """Whether a worker has done something besides computing; one that is stopped (`is_held`) is not to blame, and counts."""
    return now.is_held or now.pids != before.pids or now.transferred - before.transferred >= least_bytes


def _is_in_collective(sample: Sample) -> bool:
    """Whether a worker has called a collective that is not completed."""
    return any(not (call.done or call.is_p2p) for group in sample.groups or () for call in group.calls)
