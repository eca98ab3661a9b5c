"""The messages between agents and the coordinator, as typed values. Pure: bytes to values and back, nothing else.

Whatever does not fit its type exactly, or contradicts itself, is refused, whichever side has sent it. Times are CLOCK_MONOTONIC
seconds of the host that sends them. Sizes are bounded twice: by the frame, and here by the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ddplaunch.control.fields import (
    MAX_SEATS,
    Backend,
    Duration,
    Host,
    Keyword,
    Line,
    Name,
    Number,
    Piece,
    Port,
    Seconds,
    Signal,
    Size,
    Status,
    Text,
    Workers,
    decoder,
)
from ddplaunch.control.questions import Answer, NoAnswer, Question
from ddplaunch.control.stack_answers import NodeStacks

_MAX_RANKS = 2**31 - 1  # of a job; ranks are C ints in torch


class NodeFacts(Struct, frozen=True):
    """What should be equal on all nodes; "" where it is not known."""

    ddplaunch: Line
    python: Line
    torch: Line
    script: Line  # a digest of the program's file
    nnodes: Line  # as it was asked for


class Seat(Struct, frozen=True):
    """One agent of a generation, as all of them see it."""

    host: Host
    workers: Workers


class Hello(Struct, frozen=True, tag="hello"):
    """An agent to the coordinator: its identity and its resources."""

    place: Number | None  # the node rank it has been given; None: any
    seat: Seat
    backend: Backend  # what it would choose on its own
    backend_reason: Line
    reached: Host  # the host name or address under which it reached the coordinator
    facts: NodeFacts


class Seats(Struct, frozen=True, array_like=True):
    """So many nodes in a row with equally many workers each."""

    nodes: Annotated[int, Meta(ge=1, le=MAX_SEATS)]
    workers: Workers


class Begin(Struct, frozen=True, tag="begin"):
    """The coordinator to an agent: start your workers."""

    generation: Number
    place: Number
    # by place; one by one they would be most of all that is sent
    seats: Annotated[tuple[Seats, ...], Meta(max_length=MAX_SEATS)]
    run_id: Name
    address: Host  # MASTER_ADDR
    port: Port  # MASTER_PORT
    backend: Backend
    backend_reason: Line
    restarts: Number  # how many of --max-restarts are used

    def __post_init__(self) -> None:
        if self.nnodes > MAX_SEATS or self.place >= self.nnodes:
            raise ValueError(f"place {self.place} of {self.nnodes} seats")
        if sum(alike.nodes * alike.workers for alike in self.seats) > _MAX_RANKS:
            raise ValueError("more ranks than there can be")

    @property
    def nnodes(self) -> int:
        """How many seats there are."""
        return sum(alike.nodes for alike in self.seats)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of workers of each node, by place."""
        return tuple(alike.workers for alike in self.seats for _ in range(alike.nodes))


class Stopping(Struct, frozen=True, tag="stopping"):
    """An agent to the coordinator: my workers are being stopped."""

    why: Literal["FAILED", "SIGNALLED", "FRONT_LOST"]
    signum: Annotated[int, Meta(ge=0, le=64)]
    by_cluster: bool = False


class Noticed(Struct, frozen=True, tag="noticed"):
    """An agent to the coordinator: it received a signal that announces the end."""

    signum: Signal


class Escalate(Struct, frozen=True, tag="escalate"):
    """An agent to the coordinator: kill now, a further stop signal was received."""

    signum: Signal


class Still(Struct, frozen=True, tag="still"):
    """An agent to the coordinator: none of its workers has moved for so many seconds."""

    seconds: Duration


class Held(Struct, frozen=True, tag="held"):
    """An agent to the coordinator: a debugger holds a worker of it, or does no longer."""

    held: bool


class RequestStore(Struct, frozen=True, tag="request_store"):
    """An agent to the coordinator: a worker waits for torch's store, which no process of node 0 hosts."""


class Watch(Struct, frozen=True, tag="watch"):
    """A front that has started the agents to the coordinator: it has no workers, but forwards the user's signals."""


class Forward(Struct, frozen=True, tag="forward"):
    """Forward this signal to the workers: from such a front to the coordinator, from there to the agents."""

    signum: Signal


class Stop(Struct, frozen=True, tag="stop"):
    """The coordinator to an agent: stop your workers with this signal."""

    signum: Signal
    time_is_up: bool = False
    by_cluster: bool = False


class Kill(Struct, frozen=True, tag="kill"):
    """The coordinator to an agent: kill your workers."""


class FrameSeen(Struct, frozen=True, array_like=True):
    """A line of a traceback."""

    file: Piece
    line: Number
    function: Piece
    source: Piece


class Error(Struct, frozen=True, array_like=True):
    """The exception that ended a worker."""

    type: Piece
    message: Text
    traceback: Text
    frames: Annotated[tuple[FrameSeen, ...], Meta(max_length=100)]
    at: Seconds | None


class Exit(Struct, frozen=True, array_like=True):
    """The end of one worker; the fields of `outcome.WorkerExit`."""

    rank: Number
    local_rank: Number
    pid: Number
    device: Line
    code: Status | None
    signal: Signal | None
    at: Seconds
    seconds: Duration
    stopped_with: Signal | None
    stopped_at: Seconds | None
    core_dumped: bool
    peak_rss: Size
    cpu_seconds: Duration
    error: Error | None
    stderr_tail: Text
    log: Line | None

    def __post_init__(self) -> None:
        if (self.code is None) == (self.signal is None):
            raise ValueError("a worker ends with a status or by a signal")


class StartFailure(Struct, frozen=True):
    """A worker that could not be started."""

    rank: Number
    reason: Line
    status: Annotated[int, Meta(ge=1, le=255)]
    errno: Number


class _Ended(Struct, frozen=True, tag="ended"):
    generation: Number
    exits: tuple[Exit, ...]
    start_failure: StartFailure | None
    left: Annotated[tuple[Line, ...], Meta(max_length=100)]  # processes that could not be ended
    oom_kills: Number  # while the job ran
    shm: tuple[Size, Size] | None  # bytes of /dev/shm, and how many of them are free
    log_folder: Line | None
    oom_kills_of_machine: bool = False  # not of the node's cgroup alone


class Ended(_Ended, frozen=True, tag="ended"):
    """An agent to the coordinator: nothing of this generation is left here."""

    stacks: NodeStacks | None = None  # where the workers were when they had to end


class Quit(Struct, frozen=True, tag="quit"):
    """The coordinator to an agent: the job has ended, and so should you."""

    status: Status
    why: Keyword
    text: Text  # for the user; "" if there is none
    requeue: Annotated[int, Meta(ge=0, le=64)] = 0  # the notice after which the job should be requeued
    is_watched: bool = False  # a front that has started the agents is connected and does that, not node 0


class Ask(Struct, frozen=True, tag="ask"):
    """The coordinator to an agent: a question about its workers, to be answered under this number."""

    number: Number
    question: Question


class Forget(Struct, frozen=True, tag="forget"):
    """The coordinator to an agent: the question of this number need not be answered any more."""

    number: Number


class _Answered(Struct, frozen=True, tag="answered"):
    number: Number


class Answered(_Answered, frozen=True, tag="answered"):
    """An agent to the coordinator: the answer to the question of this number."""

    answer: Answer


class Ping(Struct, frozen=True, tag="ping"):
    """The coordinator to an agent: a heartbeat, to be answered."""

    sent: Seconds


class Pong(Struct, frozen=True, tag="pong"):
    """An agent to the coordinator: the answer, at `at` by its clock."""

    sent: Seconds  # as it came
    at: Seconds


ToCoordinator = (
    Hello | Watch | Stopping | Noticed | Escalate | Still | Held | RequestStore | Forward | Ended | Answered | Pong
)
ToAgent = Begin | Stop | Kill | Forward | Quit | Ask | Forget | Ping

encode = msgspec.json.Encoder().encode
for_coordinator: Callable[[bytes], ToCoordinator] = decoder(ToCoordinator)
for_agent: Callable[[bytes], ToAgent] = decoder(ToAgent)
_without_words: Callable[[bytes], _Ended | _Answered] = decoder(_Ended | _Answered)


def for_coordinator_without_words(payload: bytes) -> Answered | Ended:
    """Return what is left of a malformed message without what it tells of its workers, of which a job can do without all.

    Raises:
        Malformed: what is left is malformed too, or it is no such message.
    """
    left = _without_words(payload)
    if isinstance(left, _Answered):
        return Answered(left.number, NoAnswer("has sent a malformed answer"))
    return Ended(**msgspec.structs.asdict(left))
