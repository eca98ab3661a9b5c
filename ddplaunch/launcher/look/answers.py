"""The answers of a node about its workers: valid, whatever a worker has written, and no longer than a message may be."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ddplaunch.launcher.look.sampler import GpuUse
from ddplaunch.plan import WorkerPlan
from ddplaunch.reach.channel.handshake import LIMIT
from ddplaunch.record.seen import Sample
from ddplaunch.record.window.questions import (
    MAX_SERIES,
    MAX_WORKERS,
    Answer,
    NoAnswer,
    NodeArrivals,
    NodeStacks,
    NodeStatus,
    StacksAtEnd,
    WorkerStatus,
)
from ddplaunch.record.window.requests import encode
from ddplaunch.spec.outcome import Progress, WorkerExit
from ddplaunch.system.console.streams import Written
from ddplaunch.system.fields import line, piece
from ddplaunch.system.process.child import End, RunningWorker
from ddplaunch.system.process.tree import usage

_LONGEST_LINE = 100  # characters of a worker's last line
_ROOM = 4096  # bytes of a frame for what is around an answer
_MOST_AT_END = 1 << 20  # bytes
_STATES = {"D": "uninterruptible", "T": "suspended", "t": "traced"}  # by the letter of proc(5)
_GPUS_UNKNOWN = GpuUse(None, None)


def status(
    plans: Sequence[WorkerPlan],
    running: Mapping[int, RunningWorker],
    exits: Sequence[WorkerExit],
    written: Mapping[int, Written],
    progress: Mapping[int, Progress],
    debugged: frozenset[int],
    gpus: Mapping[int, GpuUse],
    folder: str,
) -> Answer:
    """Return what each worker of `plans` does, or how it ended.

    A worker that is in neither `running` nor `exits` has not been started yet. `written` and `progress` lack workers of which
    nothing is known. `debugged` are the ranks that a debugger holds, `folder` has the logs of this node.
    """
    now = time.monotonic()
    ended = {exit.rank: exit for exit in exits}
    workers = []
    for plan in plans[:MAX_WORKERS]:
        if plan.rank in ended and plan.rank not in running:
            workers.append(_of_reaped(ended[plan.rank]))
            continue
        rank, worker, output = plan.rank, running.get(plan.rank), written.get(plan.rank)
        used = usage(worker.pid) if worker is not None else None  # None: /proc does not know the process any more
        gpu = gpus.get(rank, _GPUS_UNKNOWN) if worker is not None else _GPUS_UNKNOWN
        # below, `line` and `piece` make any text valid and short
        state, how = _state(worker, used.state if used is not None else "", rank in debugged)
        workers.append(
            WorkerStatus(
                rank=rank,
                local_rank=plan.local_rank,
                pid=worker.pid if worker is not None else 0,
                device=line(plan.device),
                state=state,
                how=how,
                seconds=max(0.0, now - worker.started_at) if worker is not None else 0.0,
                cpu_seconds=used.cpu_seconds if used is not None else 0.0,
                rss=used.rss if used is not None else 0,
                quiet=output.seconds if output is not None else None,
                written=output.size if output is not None else 0,
                last=piece(output.last, _LONGEST_LINE) if output is not None else "",
                progress=progress.get(rank),
                gpu=gpu.percent,
                gpu_memory=gpu.memory,
            )
        )
    return _bounded(NodeStatus(tuple(workers), piece(folder)))


def _of_reaped(exit: WorkerExit) -> WorkerStatus:
    """Return how a worker ended whose process is reaped, as the agent does once all workers of the node have ended."""
    return WorkerStatus(
        rank=exit.rank,
        local_rank=exit.local_rank,
        pid=exit.pid,
        device=line(exit.device),
        state="ended",
        how=line(str(End(exit.code, exit.signal, exit.core_dumped))),
        seconds=exit.seconds,
        cpu_seconds=exit.cpu_seconds,
        rss=0,
        quiet=None,
        progress=exit.progress,
    )


def _state(worker: RunningWorker | None, kernel_state: str, debugged: bool) -> tuple[str, str]:
    """Return the state of a worker in a word, and how it ended, or ""; `kernel_state` is the state letter of proc(5)."""
    if worker is None:
        return "waiting", ""
    if (end := worker.look()) is not None:
        return "ended", line(str(end))
    if kernel_state in _STATES:
        return _STATES[kernel_state], ""
    if worker.stopped_with is not None:
        return "stopping", ""
    return ("debugged" if debugged else "running"), ""


def stacks(samples: Sequence[Sample], *, threads: bool) -> Answer:
    """Return where the workers are; without `threads`, or if all threads make too long an answer, by their main threads alone."""
    answer = _bounded(NodeStacks.of(samples, threads=threads))
    return _bounded(NodeStacks.of(samples, threads=False)) if isinstance(answer, NoAnswer) and threads else answer


def arrivals(recorders: Mapping[int, str], *, until: float, every: int) -> Answer:
    """Return when the workers of these recorders came to their collectives; see `read_arrivals`."""
    from ddplaunch.launcher.look.recorder import read_arrivals, wall_ahead  # only a child that asks workers needs it

    found = read_arrivals(recorders, until=until, every=every)
    return _bounded(NodeArrivals(wall_ahead(), tuple(found[:MAX_SERIES])))


def _bounded(answer: Answer) -> Answer:
    """Return the answer, or one that says that it is longer than a frame may be."""
    size = len(encode(answer))
    return answer if size <= LIMIT - _ROOM else NoAnswer(f"has an answer of {size} bytes, more than a message holds")


def stacks_at_end(generation: int, samples: Sequence[Sample]) -> StacksAtEnd | None:
    """Return the report of these samples at the end of a generation; None if they are too many for a message."""
    stacks = NodeStacks.of(samples, threads=False)
    return StacksAtEnd(generation, stacks) if len(encode(stacks)) <= _MOST_AT_END else None
