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
from ddplaunch.spec.order import Order
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import (
    MAX_AGENTS,
    Duration,
    Host,
    Keyword,
    Line,
    Number,
    Status,
    Text,
    decoder,
    text,
)

_Pid = Annotated[int, Meta(ge=2, le=2**22)]  # the kernel's PID_MAX_LIMIT
_Ticks = Annotated[int, Meta(ge=0, le=2**62)]


class HostOrder(Struct, frozen=True):
    """To a host: the job, and the host's part in it."""

    job: Order
    token: Line  # the secret of this job, which authenticates its agents to each other
    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    node_rank: Number
    typed_on: Host  # where the command was typed that coordinates the job
    hosts: Annotated[tuple[Host, ...], Meta(max_length=MAX_AGENTS)]  # names by node rank
    cluster: Line
    min_nodes: Number
    endpoint: Endpoint  # of the workers
    screen: Screen  # where the command was typed
    heartbeat_timeout: Duration  # seconds without a frame after which the workers are ended
    simulated: Keyword | None  # "divide" or "share": all nodes are simulated on this machine
    killed: tuple[Number, ...] = ()  # ranks that --chaos kills

    def __post_init__(self) -> None:
        if self.node_rank >= len(self.hosts):
            raise ValueError(f"node rank {self.node_rank} of {len(self.hosts)} hosts")


class Ready(Struct, frozen=True, tag="ready"):
    """From a host: it has all that the job needs."""


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


Report = Ready | Worker | OrderRefused | AgentEnded

encode = msgspec.json.Encoder().encode
order: Callable[[bytes], HostOrder] = decoder(HostOrder)
chunk: Callable[[bytes], Chunk] = decoder(Chunk)
report: Callable[[bytes], Report] = decoder(Report)


def refusal(error: LaunchError) -> OrderRefused:
    """The answer to the dispatcher by an error because of which nothing was started."""
    hint = None if error.hint is None else text(error.hint)
    return OrderRefused(message=text(error.message), hint=hint, status=error.status)
