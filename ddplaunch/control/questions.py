"""What is asked about a running job, and what each node answers: values for the control channel and the socket of a run. Pure.

A question goes to all nodes; each answers for its own workers. No time is one of a clock: each says how long.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.control.arrival_answers import AskArrivals, NodeArrivals
from ddplaunch.control.stack_answers import AskStacks, NodeStacks
from ddplaunch.fields import Duration, Keyword, Line, Number, Size

MAX_WORKERS = 20_000  # of one node in an answer, which is less than a frame holds


class AskStatus(Struct, frozen=True, tag="status"):
    """How the workers are."""


class WorkerStatus(Struct, frozen=True, array_like=True):
    """One worker; what cannot be known of it is 0 or None."""

    rank: Number
    local_rank: Number
    pid: Number  # 0: not started yet
    device: Line
    state: Keyword  # waiting, running, stopping, debugged, suspended, traced, uninterruptible, ended
    how: Line  # it ended: "exit status 3"; "" before
    seconds: Duration  # since it was started
    cpu_seconds: Duration  # user and system, of it and the children that it waited for
    rss: Size  # bytes
    quiet: Duration | None  # seconds since it last wrote to stdout or stderr; None: never, or not through us


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
