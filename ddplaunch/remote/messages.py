"""The messages between the dispatcher and the agents that it starts, as typed values. Pure.

Both are the same version of ddplaunch. Texts of the operating system (arguments, variables, paths) travel as bytes: they
need not be UTF-8.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=1, le=65535)]


class Order(Struct, frozen=True):
    """To a host: the job, and the host's part in it."""

    token: str  # the secret of this job, which authenticates its agents to each other
    arguments: tuple[bytes, ...]  # options and program, as on a command line
    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    node_rank: int
    hosts: tuple[str, ...]  # names by node rank
    cluster: str
    min_nodes: int
    port: int | None  # MASTER_PORT
    port_reason: str
    address: str | None  # MASTER_ADDR; None: as the other nodes reach node 0
    address_reason: str
    terminals: tuple[str, ...]  # which of "OUT" and "ERR" are a terminal where the command was typed
    colour: tuple[str, ...]  # which of them get colours
    heartbeat_timeout: float  # seconds without a frame after which the workers are ended
    simulated: str | None  # "divide" or "share": all nodes are simulated on this machine
    reports_to_caller: bool = False  # the first host reports the outcome to the caller of `launch()`


class CoordinatorAddress(Struct, frozen=True):
    """To all hosts but the first: where the coordinator listens."""

    addresses: tuple[str, ...]  # in the order to try
    port: Port


class Addresses(Struct, frozen=True, tag="addresses"):
    """From the first host: the addresses under which others may reach it."""

    addresses: tuple[str, ...]


class Ready(Struct, frozen=True, tag="ready"):
    """From any other host: it has all that the job needs."""


class Listening(Struct, frozen=True, tag="listening"):
    """From the first host: the coordinator listens."""

    port: Port


class Begun(Struct, frozen=True, tag="begun"):
    """From a host: a generation begins."""

    world_size: int


class Worker(Struct, frozen=True, tag="worker"):
    """From a host: a worker was started."""

    rank: int
    pid: int


class Refused(Struct, frozen=True, tag="refused"):
    """From a host: the job cannot run there."""

    message: str
    hint: str | None
    status: int


class Ended(Struct, frozen=True, tag="ended"):
    """From a host: nothing of the job is left there."""

    status: int


class FinalReport(Struct, frozen=True, tag="final_report"):
    """The failure report or summary that is printed last; from a host but the first, that the first was lost."""

    text: str


class FailureText(Struct, frozen=True, tag="failure_text"):
    """From the first host, for the caller of `launch()`: the failure report as text."""

    text: str


class Outcome(Struct, frozen=True, tag="outcome"):
    """From the first host, for the caller of `launch()`: how the job ended."""

    status: int


Report = Addresses | Ready | Listening | Begun | Worker | Refused | Ended | FinalReport | FailureText | Outcome

Malformed = msgspec.MsgspecError  # what the decoders raise

encode = msgspec.json.Encoder().encode
order = msgspec.json.Decoder(Order).decode
coordinator = msgspec.json.Decoder(CoordinatorAddress).decode
report = msgspec.json.Decoder(Report).decode
