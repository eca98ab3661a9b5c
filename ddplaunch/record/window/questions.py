"""What is asked about a running job, and what each node answers: values for the control channel and the socket of a run. Pure.

A question goes to all nodes; each answers for its own workers. No time is one of a clock: each says how long.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.spec.outcome import Progress
from ddplaunch.system.fields import Duration, Keyword, Line, Number, Piece, Size, Text

# --- when the workers came to their collectives: numbers and times as differences


MAX_MEMBERS = 4096  # characters of the ranks of a group: each node sends them with each reading
MAX_GAPS = 100_000
MAX_ENTRIES = 2000  # of a worker: its recorders keep 500 each, unless its user wants more
MAX_SETS = 4096  # of ranks
MAX_SERIES = 100_000  # workers and groups
MAX_RANKS = 65536  # of a group

Gaps = Annotated[tuple[Size, ...], Meta(max_length=MAX_GAPS)]  # each from the one before, the first one from zero
Members = Annotated[str, Meta(max_length=MAX_MEMBERS, pattern=r"\A[0-9,-]*\Z")]  # ranks as ranges: "0-8191"


class AskArrivals(Struct, frozen=True, tag="arrivals"):
    """When the workers came to their last collectives."""

    within: Annotated[float, Meta(ge=0, le=30)] = 2.0  # seconds that they have to say so
    every: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # of the steps only every so many, as far as so many are known


class SentArrivals(Struct, frozen=True, array_like=True):
    """The collectives of one worker in one group."""

    rank: Number
    group: Piece
    members: Number  # their place among the sets of ranks
    numbers: Gaps
    times: Gaps  # nanoseconds
    newest: Size
    newest_at: Size  # nanoseconds
    length: Number
    period: Duration


class NodeArrivals(Struct, frozen=True, tag="arrivals"):
    """All workers of a node that tell."""

    # nanoseconds that the time of day is ahead of CLOCK_MONOTONIC
    wall: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    members: Annotated[tuple[Members, ...], Meta(max_length=MAX_SETS)]
    series: Annotated[tuple[SentArrivals, ...], Meta(max_length=MAX_SERIES)]


# --- where the workers are: each stack and each set of ranks once


MAX_PROCESSES = 20_000
MAX_THREADS = 256  # of a process
MAX_FRAMES = 256  # of a thread
MAX_STACKS = 100_000
MAX_GROUPS = 256  # of a process
MAX_CALLS = 64  # of a group


class AskStacks(Struct, frozen=True, tag="stacks"):
    """Where the workers are."""

    within: Annotated[float, Meta(ge=0, le=30)] = 1.0  # seconds that they have to say so
    threads: bool = False  # all of them, not only the main one
    native: bool = False  # with frames of C, by py-spy
    frames: bool = True  # else only what torch tells of collectives, for which no worker gets a signal


class SentFrame(Struct, frozen=True, array_like=True):
    """One line of a stack."""

    file: Piece
    line: Number
    function: Piece


class SentThread(Struct, frozen=True, array_like=True):
    """One thread."""

    stack: Number  # its place among the stacks
    name: Piece
    is_main: bool


class SentCall(Struct, frozen=True, array_like=True):
    """One collective that was called."""

    number: Size
    operation: Piece
    inputs: Piece
    outputs: Piece
    done: bool
    is_p2p: bool
    at: Size


class SentGroup(Struct, frozen=True, array_like=True):
    """What was called in one process group."""

    name: Piece
    title: Piece
    members: Number  # their place among the sets of ranks
    calls: Annotated[tuple[SentCall, ...], Meta(max_length=MAX_CALLS)]


class SentProcess(Struct, frozen=True):
    """A worker, or what it has started."""

    rank: Number
    pid: Number
    child: Line
    threads: Annotated[tuple[SentThread, ...], Meta(max_length=MAX_THREADS)]
    state: Piece
    ended: bool
    groups: Annotated[tuple[SentGroup, ...], Meta(max_length=MAX_GROUPS)] | None
    native: Text
    ras: Text = ""
    said: Text = ""


class NodeStacks(Struct, frozen=True, tag="stacks"):
    """All workers of a node, by rank."""

    stacks: Annotated[
        tuple[Annotated[tuple[SentFrame, ...], Meta(max_length=MAX_FRAMES)], ...], Meta(max_length=MAX_STACKS)
    ]
    members: Annotated[tuple[Annotated[tuple[Number, ...], Meta(max_length=MAX_RANKS)], ...], Meta(max_length=MAX_SETS)]
    processes: Annotated[tuple[SentProcess, ...], Meta(max_length=MAX_PROCESSES)]


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
