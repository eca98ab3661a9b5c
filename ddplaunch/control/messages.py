"""The messages between agents and the coordinator, as typed values. Pure: bytes to values and back, nothing else.

Whatever does not fit its type exactly is refused. Times are CLOCK_MONOTONIC
seconds of the host that sends them. Sizes are bounded twice: by the frame, and here by the type.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Line = Annotated[str, Meta(max_length=1000)]
Text = Annotated[str, Meta(max_length=200_000)]
Number = Annotated[int, Meta(ge=0, le=2**31)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


class NodeFacts(Struct, frozen=True):
    """What should be equal on all nodes; "" where it is not known."""

    ddplaunch: Line
    python: Line
    torch: Line
    script: Line  # a digest of the program's file
    nnodes: Line  # as it was asked for


class Seat(Struct, frozen=True):
    """One agent of a generation, as all of them see it."""

    host: Line
    workers: Annotated[int, Meta(ge=1, le=65536)]


class Hello(Struct, frozen=True, tag="hello"):
    """An agent to the coordinator: its identity and its resources."""

    place: Number | None  # the node rank it has been given; None: any
    seat: Seat
    backend: Line  # what it would choose on its own
    backend_reason: Line
    reached: Line  # the host name or address under which it reached the coordinator
    facts: NodeFacts


class Begin(Struct, frozen=True, tag="begin"):
    """The coordinator to an agent: start your workers."""

    generation: Number
    place: Number
    seats: tuple[Seat, ...]  # by place
    run_id: Line
    address: Line  # MASTER_ADDR
    port: Annotated[int, Meta(ge=1, le=65535)]  # MASTER_PORT
    backend: Line
    backend_reason: Line
    restarts: Number  # how many of --max-restarts are used


class Stopping(Struct, frozen=True, tag="stopping"):
    """An agent to the coordinator: my workers are being stopped."""

    why: Line
    signum: Annotated[int, Meta(ge=0, le=64)]


class Noticed(Struct, frozen=True, tag="noticed"):
    """An agent to the coordinator: it received a signal that announces the end."""

    signum: Annotated[int, Meta(ge=1, le=64)]


class Escalate(Struct, frozen=True, tag="escalate"):
    """An agent to the coordinator: kill now, a further stop signal was received."""

    signum: Annotated[int, Meta(ge=1, le=64)]


class Watch(Struct, frozen=True, tag="watch"):
    """A front that has started the agents to the coordinator: it has no workers, but forwards the user's signals."""


class Forward(Struct, frozen=True, tag="forward"):
    """Forward this signal to the workers: from such a front to the coordinator, from there to the agents."""

    signum: Annotated[int, Meta(ge=1, le=64)]


class Stop(Struct, frozen=True, tag="stop"):
    """The coordinator to an agent: stop your workers with this signal."""

    signum: Annotated[int, Meta(ge=1, le=64)]
    time_is_up: bool = False


class Kill(Struct, frozen=True, tag="kill"):
    """The coordinator to an agent: kill your workers."""


class FrameSeen(Struct, frozen=True, array_like=True):
    """A line of a traceback."""

    file: Line
    line: Number
    function: Line
    source: Line


class Error(Struct, frozen=True, array_like=True):
    """The exception that ended a worker."""

    type: Line
    message: Text
    traceback: Text
    frames: tuple[FrameSeen, ...]
    at: Seconds | None


class Exit(Struct, frozen=True, array_like=True):
    """The end of one worker; the fields of `outcome.WorkerExit`."""

    rank: Number
    local_rank: Number
    pid: Number
    device: Line
    code: Annotated[int, Meta(ge=0, le=255)] | None
    signal: Annotated[int, Meta(ge=1, le=64)] | None
    at: Seconds
    seconds: Seconds
    stopped_with: Number | None
    stopped_at: Seconds | None
    core_dumped: bool
    peak_rss: int
    cpu_seconds: Seconds
    error: Error | None
    stderr_tail: Text
    log: Line | None


class StartFailure(Struct, frozen=True):
    """A worker that could not be started."""

    rank: Number
    reason: Line
    status: Annotated[int, Meta(ge=1, le=255)]


class Ended(Struct, frozen=True, tag="ended"):
    """An agent to the coordinator: nothing of this generation is left here."""

    generation: Number
    exits: tuple[Exit, ...]
    start_failure: StartFailure | None
    left: Annotated[tuple[Line, ...], Meta(max_length=100)]  # processes that could not be ended
    oom_kills: Number  # while the job ran
    shm: tuple[int, int] | None  # bytes of /dev/shm, and how many of them are free
    log_folder: Line | None


class Quit(Struct, frozen=True, tag="quit"):
    """The coordinator to an agent: the job has ended, and so should you."""

    status: Annotated[int, Meta(ge=0, le=255)]
    why: Line
    text: Text  # for the user; "" if there is none
    requeue: Annotated[int, Meta(ge=0, le=64)] = 0  # the notice after which the job should be requeued
    is_watched: bool = False  # a front that has started the agents is connected and does that, not node 0


class Ping(Struct, frozen=True, tag="ping"):
    """The coordinator to an agent: a heartbeat, to be answered."""

    sent: Seconds


class Pong(Struct, frozen=True, tag="pong"):
    """An agent to the coordinator: the answer, at `at` by its clock."""

    sent: Seconds  # as it came
    at: Seconds


ToCoordinator = Hello | Watch | Stopping | Noticed | Escalate | Forward | Ended | Pong
ToAgent = Begin | Stop | Kill | Forward | Quit | Ping

Malformed = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what the two decoders raise

encode = msgspec.json.Encoder().encode
for_coordinator = msgspec.json.Decoder(ToCoordinator).decode
for_agent = msgspec.json.Decoder(ToAgent).decode
