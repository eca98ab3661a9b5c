"""The three questions about the workers of a running job, and what a node answers to each. Pure.

An observer asks the coordinator (`requests.py`), which asks all nodes over the control channel. Each answers for its own workers.
No time is one of a clock: each says how long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.record.seen import MAX_MEMBERS, MAX_THREADS, Arrivals, Sample, Stack
from ddplaunch.spec.outcome import Frame, Progress
from ddplaunch.system.fields import Duration, Keyword, Line, Number, Piece, Size

# --- when the workers came to their collectives


MAX_SERIES = 100_000  # workers and groups


class AskArrivals(Struct, frozen=True, tag="arrivals"):
    """When the workers came to their last collectives."""

    within: Annotated[float, Meta(ge=0, le=30)] = 2.0  # seconds that they have to say so
    # of the steps only every so many, as far as so many are known
    every: Annotated[int, Meta(ge=1, le=MAX_MEMBERS)] = 1


class NodeArrivals(Struct, frozen=True, tag="arrivals"):
    """All workers of a node that tell."""

    # nanoseconds that the time of day is ahead of CLOCK_MONOTONIC
    wall: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    series: Annotated[tuple[Arrivals, ...], Meta(max_length=MAX_SERIES)]


# --- where the workers are


MAX_PROCESSES = 20_000
MAX_STACKS = 100_000


class AskStacks(Struct, frozen=True, tag="stacks"):
    """Where the workers are."""

    within: Annotated[float, Meta(ge=0, le=30)] = 1.0  # seconds that they have to say so
    threads: bool = False  # all of them, not only the main one
    native: bool = False  # with frames of C, by py-spy
    frames: bool = True  # else only what torch tells of collectives, for which no worker gets a signal


class NodeStacks(Struct, frozen=True, tag="stacks"):
    """All workers of a node, by rank. Most threads stand where others do: each stack is sent once, apart from the threads."""

    stacks: Annotated[tuple[Stack, ...], Meta(max_length=MAX_STACKS)]
    # which of the stacks each thread has, in the order of the processes and of their threads
    of_threads: Annotated[tuple[Number, ...], Meta(max_length=MAX_PROCESSES * MAX_THREADS)]
    processes: Annotated[tuple[Sample, ...], Meta(max_length=MAX_PROCESSES)]

    def __post_init__(self) -> None:
        threads = sum(len(process.threads) for process in self.processes)
        if len(self.of_threads) != threads or max(self.of_threads, default=-1) >= len(self.stacks):
            raise ValueError("threads without a stack")

    @classmethod
    def of(cls, samples: Iterable[Sample], *, threads: bool) -> NodeStacks:
        """Return the answer with these samples; without `threads`, only with their main threads."""
        indices: dict[tuple[Frame, ...], int] = {(): 0}  # of stacks; the first one is the empty stack

        def index(stack: tuple[Frame, ...]) -> int:
            is_full = len(indices) == MAX_STACKS  # then another new stack is sent as an empty one
            return indices.get(stack, 0) if is_full else indices.setdefault(stack, len(indices))

        of_threads: list[int] = []
        processes = []
        for sample in list(samples)[:MAX_PROCESSES]:
            kept = [thread for thread in sample.threads if threads or thread.is_main]
            of_threads += [index(thread.frames) for thread in kept]
            processes.append(replace(sample, host="", threads=tuple(replace(thread, frames=()) for thread in kept)))
        return cls(tuple(indices), tuple(of_threads), tuple(processes))

    def samples(self, host: str) -> list[Sample]:
        """Return the samples as they were seen; `host` is the node's name as the coordinator knows it."""
        stacks = iter(self.of_threads)

        def whole(process: Sample) -> Sample:
            threads = tuple(replace(thread, frames=self.stacks[next(stacks)]) for thread in process.threads)
            return replace(process, host=host, threads=threads)

        return list(map(whole, self.processes))


# --- how the workers are, and all questions together


MAX_WORKERS = 20_000  # of one node in an answer, which is less than a frame holds


class AskStatus(Struct, frozen=True, tag="status"):
    """How the workers are."""


class WorkerStatus(Struct, frozen=True, array_like=True):
    """One worker; what cannot be known of it is 0 or None."""

    rank: Number
    local_rank: Number
    pid: Number  # 0: not started yet; it may be another's once the worker has ended
    device: Line
    state: Keyword  # waiting, running, stopping, debugged, suspended, traced, uninterruptible, ended
    how: Line  # it ended: "exit status 3"; "" before
    seconds: Duration  # since it was started
    cpu_seconds: Duration  # user and system, of it and the children that it waited for
    rss: Size  # bytes
    quiet: Duration | None  # seconds since it last wrote to stdout or stderr; None: never, or not through us
    written: Size = 0  # bytes that it has written there
    last: Piece = ""  # the end of it: a line, or a state of a bar
    progress: Progress | None = None
    gpu: Number | None = None  # percent of the time in which its GPUs computed, whoever used them
    gpu_memory: Size | None = None  # bytes in use there


class NodeStatus(Struct, frozen=True, tag="status"):
    """All workers of a node, by rank."""

    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=MAX_WORKERS)]
    folder: Piece = ""  # where the node keeps their logs; "": nothing is kept


class NoAnswer(Struct, frozen=True, tag="none"):
    """A node has not answered: why, as a predicate: "has not answered within 2 s"."""

    reason: Line


Question = AskStatus | AskStacks | AskArrivals
Answer = NodeStatus | NodeStacks | NodeArrivals | NoAnswer

# --- as orders of the coordinator to an agent, and reports of an agent


class Ask(Struct, frozen=True, tag="ask"):
    """An order: answer a question about the workers of this node under this number."""

    number: Number
    question: Question


class Forget(Struct, frozen=True, tag="forget"):
    """An order: the question of this number need not be answered any more, since whoever asked is gone."""

    number: Number


class Answered(Struct, frozen=True, tag="answered"):
    """A report: the answer to the question of this number."""

    number: Number
    answer: Answer


class StacksAtEnd(Struct, frozen=True, tag="stacks_at_end"):
    """A report that precedes the end of a generation: where the workers of this node were when they had to end."""

    generation: Number
    stacks: NodeStacks
