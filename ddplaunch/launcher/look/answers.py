"""The answers of a node about its workers, as they are sent, and what their receiver makes of them.

Whatever a worker has written, the answer here is valid, so that no receiver refuses it; and a receiver trusts no number that
arrives.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import asdict

from ddplaunch.launcher.look.sampler import GpuUse
from ddplaunch.plan import WorkerPlan
from ddplaunch.reach.channel.handshake import LIMIT
from ddplaunch.record.seen import Call, Group, Sample, Thread
from ddplaunch.record.seen.reasons import LONGEST
from ddplaunch.record.window.questions import (
    MAX_CALLS,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_PROCESSES,
    MAX_RANKS,
    MAX_SETS,
    MAX_STACKS,
    MAX_THREADS,
    MAX_WORKERS,
    Answer,
    NoAnswer,
    NodeStacks,
    NodeStatus,
    SentCall,
    SentFrame,
    SentGroup,
    SentProcess,
    SentThread,
    StacksAtEnd,
    WorkerStatus,
)
from ddplaunch.record.window.requests import encode
from ddplaunch.spec.outcome import Frame, Progress, WorkerExit
from ddplaunch.system.console.streams import Written
from ddplaunch.system.fields import line, number, piece, size, text
from ddplaunch.system.process.child import End, RunningWorker
from ddplaunch.system.process.tree import usage

T = TypeVar("T", bound=Hashable)
_LONGEST = 100  # characters of a worker's last line
_ROOM = 4096  # bytes of a frame for what is around an answer
_NATIVE = 20_000  # characters of a process
_MOST_AT_END = 1 << 20  # bytes
_STATES = {"D": "uninterruptible", "T": "suspended", "t": "traced"}  # by the letter of proc(5)


# --- answers


def status(
    plans: Sequence[WorkerPlan],
    running: Mapping[int, RunningWorker],
    exits: Sequence[WorkerExit],
    written: Mapping[int, Written],
    progress: Mapping[int, Progress],
    debugged: frozenset[int],
    gpus: Mapping[int, GpuUse],
) -> Answer:
    """Return what each worker does, or how it ended; `debugged`: those that have a debugger."""
    now = time.monotonic()
    ended = {exit.rank: exit for exit in exits}
    workers = []
    for plan in plans[:MAX_WORKERS]:
        if plan.rank in ended and plan.rank not in running:
            workers.append(_of_ended(ended[plan.rank]))
            continue
        rank, worker, output = plan.rank, running.get(plan.rank), written.get(plan.rank)
        used = usage(worker.pid) if worker is not None else None
        gpu = gpus.get(rank, GpuUse(None, None)) if worker is not None else GpuUse(None, None)
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
                last=piece(output.last, _LONGEST) if output is not None else "",
                progress=progress.get(rank),
                gpu=gpu.percent,
                gpu_memory=gpu.memory,
            )
        )
    return _bounded(NodeStatus(tuple(workers)))


def _of_ended(exit: WorkerExit) -> WorkerStatus:
    """Return how a worker ended of which the kernel knows nothing any more: the others of its node have ended as well."""
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


def _state(worker: RunningWorker | None, kernel: str, debugged: bool) -> tuple[str, str]:
    """Return the state of a worker in a word, and how the worker ended; `kernel` is the state letter of proc(5)."""
    if worker is None:
        return "waiting", ""
    if (end := worker.look()) is not None:
        return "ended", line(str(end))
    if kernel in _STATES:
        return _STATES[kernel], ""
    if worker.stopped_with is not None:
        return "stopping", ""
    return ("debugged" if debugged else "running"), ""


def stacks(samples: Sequence[Sample], *, threads: bool) -> Answer:
    """Return where the workers are; without `threads`, or where those of all are too many, by their main threads alone."""
    answer = _bounded(sent(samples, threads=threads))
    return _bounded(sent(samples, threads=False)) if isinstance(answer, NoAnswer) and threads else answer


def arrivals(recorders: Mapping[int, str], *, until: float, every: int) -> Answer:
    """Return when the workers of these recorders came to their collectives; see `read_arrivals`."""
    from ddplaunch.launcher.look.arrivals import read_arrivals  # only a child that asks workers needs it

    return _bounded(read_arrivals(recorders, until=until, every=every))


def _bounded(answer: Answer) -> Answer:
    """Return the answer, if it is no longer than a frame may be."""
    size = len(encode(answer))
    return answer if size <= LIMIT - _ROOM else NoAnswer(f"has an answer of {size} bytes, more than a message holds")


# --- samples


class _Table(Generic[T]):
    """Values by their indices, equal ones once, and no more than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.indices: dict[T, int] = {}

    def index(self, value: T) -> int:
        """Return the index of a value; where the table is full, one at which a receiver finds nothing."""
        if len(self.indices) == self._most:
            return self.indices.get(value, self._most)
        return self.indices.setdefault(value, len(self.indices))


def sent(samples: Iterable[Sample], *, threads: bool) -> NodeStacks:
    """Return samples in the form of the answer; without `threads`, only with their main threads."""
    stacks, members = _Table[tuple[Frame, ...]](MAX_STACKS), _Table[tuple[int, ...]](MAX_SETS)
    processes = tuple(_process(sample, stacks, members, threads) for sample in list(samples)[:MAX_PROCESSES])
    return NodeStacks(
        stacks=tuple(
            tuple(
                SentFrame(piece(frame.file), number(frame.line), piece(frame.function)) for frame in stack[:MAX_FRAMES]
            )
            for stack in stacks.indices
        ),
        members=tuple(tuple(map(number, ranks[:MAX_RANKS])) for ranks in members.indices),
        processes=processes,
    )


def stacks_at_end(generation: int, samples: Sequence[Sample]) -> StacksAtEnd | None:
    """Return the report of these samples at the end of a generation; None if they are too many for a message."""
    stacks = sent(samples, threads=False)
    return StacksAtEnd(generation, stacks) if len(msgspec.json.encode(stacks)) <= _MOST_AT_END else None


def _process(
    sample: Sample, stacks: _Table[tuple[Frame, ...]], members: _Table[tuple[int, ...]], with_threads: bool
) -> SentProcess:
    """Return a process as the answer holds it; stacks and members that several processes share are sent once."""
    threads = [thread for thread in sample.threads if with_threads or thread.is_main]
    return SentProcess(
        rank=number(sample.rank),
        pid=number(sample.pid),
        child=line(sample.child),
        threads=tuple(
            SentThread(stacks.index(thread.frames), piece(thread.name), thread.is_main)
            for thread in threads[-MAX_THREADS:]  # the main one is the last
        ),
        state=piece(sample.state),
        ended=sample.ended,
        groups=None if sample.groups is None else tuple(_group(group, members) for group in sample.groups[:MAX_GROUPS]),
        native=text(sample.native, _NATIVE),
        ras=text(sample.ras, _NATIVE),
        said=text(sample.said, LONGEST),
    )


def _group(group: Group, members: _Table[tuple[int, ...]]) -> SentGroup:
    """Return a process group as the answer holds it, with its latest calls."""
    calls = tuple(
        SentCall(
            number=size(call.number),
            operation=piece(call.operation),
            inputs=piece(call.inputs),
            outputs=piece(call.outputs),
            done=call.done,
            is_p2p=call.is_p2p,
            at=size(call.at),
        )
        for call in group.calls[-MAX_CALLS:]
    )
    return SentGroup(piece(group.name), piece(group.title), members.index(group.members), calls)


def received(node: NodeStacks, host: str) -> list[Sample]:
    """Return the samples in the answer of a node; `host` is the node's name as the coordinator knows it."""
    stacks = [tuple(Frame(**asdict(frame)) for frame in stack) for stack in node.stacks]
    samples = []
    for process in node.processes:
        threads = (
            Thread(frames=_at(stacks, thread.stack), name=thread.name, is_main=thread.is_main)
            for thread in process.threads
        )
        groups = None if process.groups is None else tuple(_received_group(group, node) for group in process.groups)
        samples.append(Sample(host=host, **{**asdict(process), "threads": tuple(threads), "groups": groups}))
    return samples


def _received_group(group: SentGroup, node: NodeStacks) -> Group:
    calls = tuple(Call(**asdict(call)) for call in group.calls)
    return Group(name=group.name, title=group.title, members=_at(node.members, group.members), calls=calls)


def _at(table: Sequence[tuple[T, ...]], index: int) -> tuple[T, ...]:
    return table[index] if index < len(table) else ()
