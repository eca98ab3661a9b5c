"""The messages between the dispatcher and the agents that it starts, as typed values. Pure.

Both are the same version of ddplaunch, but a host may be under another user's control: a report that does not fit its type
exactly is refused. Texts of the operating system (arguments, variables, paths) travel as bytes: they need not be UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ddplaunch.plan.cluster import Endpoint
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import (
    MAX_AGENTS,
    Duration,
    Host,
    Keyword,
    Line,
    Number,
    Piece,
    Port,
    Status,
    Text,
    decoder,
    text,
)

_Pid = Annotated[int, Meta(ge=2, le=2**22)]  # the kernel's PID_MAX_LIMIT
_Ticks = Annotated[int, Meta(ge=0, le=2**62)]
MAX_ADDRESSES = 100
_Addresses = Annotated[tuple[Host, ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]


class Order(Struct, frozen=True):
    """To a host: the job, and the host's part in it."""

    token: Line  # the secret of this job, which authenticates its agents to each other
    given: tuple[tuple[bytes, bytes, bytes, bytes, bytes], ...]  # options, each as the fields of `Given`
    program: tuple[bytes, ...]  # and its arguments
    env: tuple[tuple[bytes, bytes], ...]
    # variables: the name, the value, the file that it is from or b""
    for_workers: tuple[tuple[bytes, bytes, bytes], ...]
    cwd: bytes
    node_rank: Number
    hosts: Annotated[tuple[Host, ...], Meta(max_length=MAX_AGENTS)]  # names by node rank
    cluster: Line
    min_nodes: Number
    endpoint: Endpoint  # of the workers
    screen: Screen  # where the command was typed
    heartbeat_timeout: Duration  # seconds without a frame after which the workers are ended
    simulated: Keyword | None  # "divide" or "share": all nodes are simulated on this machine
    killed: tuple[Number, ...] = ()  # ranks that --chaos kills
    reports_to_caller: bool = False  # the first host reports the outcome to the caller of `launch()`

    def __post_init__(self) -> None:
        if self.node_rank >= len(self.hosts):
            raise ValueError(f"node rank {self.node_rank} of {len(self.hosts)} hosts")


class CoordinatorAddress(Struct, frozen=True):
    """To all hosts but the first: where the coordinator listens."""

    addresses: _Addresses  # in the order to try
    port: Port


class Connect(Struct, frozen=True):
    """To the host of the coordinator: connect this stream to the socket of the run there."""

    number: Number
    folder: Piece
    name: Piece


class Addresses(Struct, frozen=True, tag="addresses"):
    """From the first host: the addresses under which others may reach it."""

    addresses: _Addresses


class Ready(Struct, frozen=True, tag="ready"):
    """From any other host: the host has all that the job needs."""


class Listening(Struct, frozen=True, tag="listening"):
    """From the first host: the coordinator listens. From another: its agent has taken over, and waits for the others."""

    port: Port


class Coordinates(Struct, frozen=True, tag="coordinates"):
    """From a host whose agent has taken over: it begins a generation."""


class Registered(Struct, frozen=True, tag="registered"):
    """From the host of the coordinator: where the socket of the run lies there."""

    folder: Piece
    name: Piece


class Begun(Struct, frozen=True, tag="begun"):
    """From a host: the first of its generations begins."""

    world_size: Number


class GenerationBegun(Struct, frozen=True, tag="generation"):
    """From a host: a generation begins there."""

    number: Number


class Worker(Struct, frozen=True, tag="worker"):
    """From a host: a worker was started."""

    rank: Number
    pid: _Pid


class OrderRefused(Struct, frozen=True, tag="refused"):
    """From a host: the job cannot run there."""

    message: Text
    hint: Text | None
    status: Annotated[int, Meta(ge=1, le=255)]


class AgentEnded(Struct, frozen=True, tag="ended"):
    """From a host: nothing of the job is left there, except for processes that write to a disk that hangs."""

    status: Status
    spared: tuple[tuple[_Pid, _Ticks], ...] = ()  # these processes: pid and start


class FinalReport(Struct, frozen=True, tag="final_report"):
    """The failure report or summary that is printed last; from a host without the coordinator, that this was lost."""

    text: Text


class FailureText(Struct, frozen=True, tag="failure_text"):
    """From the host of the coordinator, for the caller of `launch()`: the failure report as text."""

    text: Text


class Outcome(Struct, frozen=True, tag="outcome"):
    """From the host of the coordinator, for the caller of `launch()`: how the job ended."""

    status: Status


FromCoordinator = Addresses | Listening | Coordinates | Registered | FailureText | Outcome
Report = FromCoordinator | Ready | Begun | GenerationBegun | Worker | OrderRefused | AgentEnded | FinalReport

encode = msgspec.json.Encoder().encode
order: Callable[[bytes], Order] = decoder(Order)
coordinator: Callable[[bytes], CoordinatorAddress] = decoder(CoordinatorAddress)
connect: Callable[[bytes], Connect] = decoder(Connect)
chunk: Callable[[bytes], Chunk] = decoder(Chunk)
report: Callable[[bytes], Report] = decoder(Report)


def refusal(error: LaunchError) -> OrderRefused:
    """The answer to the dispatcher by an error because of which nothing was started."""
    hint = None if error.hint is None else text(error.hint)
    return OrderRefused(message=text(error.message), hint=hint, status=error.status)
