"""What the command that was typed and the agents that it started elsewhere tell each other, as typed values. Pure.

Both are the same version of ddplaunch. Texts of the operating system (words, variables, paths) travel as bytes, since they
need not be UTF-8.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=1, le=65535)]


class Order(Struct, frozen=True):
    """To a host: what to do there."""

    token: str  # by which the agents of this job know each other
    words: tuple[bytes, ...]  # options and program, as on a command line
    env: tuple[tuple[bytes, bytes], ...]
    cwd: bytes
    place: int  # node rank
    hosts: tuple[str, ...]  # names by node rank
    cluster: str
    least: int  # nodes
    port: int | None  # MASTER_PORT
    port_reason: str
    address: str | None  # MASTER_ADDR; None: as the other nodes reach node 0
    address_reason: str
    terminals: tuple[str, ...]  # which of "OUT" and "ERR" are a terminal where the command was typed
    colour: tuple[str, ...]  # which of them get colours
    silence: float  # seconds without a word from there after which the workers are ended
    simulated: str | None  # "divide" or "share": this machine plays all nodes
    answers: bool = False  # the first host tells whoever called for the job how it ended


class Meet(Struct, frozen=True):
    """To all hosts but the first: where the coordinator listens."""

    addresses: tuple[str, ...]  # in the order to try
    port: Port


class Addresses(Struct, frozen=True, tag="addresses"):
    """From the first host: under which addresses others may reach it."""

    addresses: tuple[str, ...]


class Ready(Struct, frozen=True, tag="ready"):
    """From any other host: all is there that the job needs."""


class Listening(Struct, frozen=True, tag="listening"):
    """From the first host: the coordinator listens."""

    port: Port


class Begun(Struct, frozen=True, tag="begun"):
    """From a host: a generation of so many workers in all begins."""

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


class LastWords(Struct, frozen=True, tag="last_words"):
    """What the user reads last: from the first host how the job ended, from any other that the first was lost."""

    text: str


class Said(Struct, frozen=True, tag="said"):
    """From the first host, for whoever called for the job: why it ended, in words."""

    text: str


class Outcome(Struct, frozen=True, tag="outcome"):
    """From the first host, for whoever called for the job: how it ended."""

    status: int


Report = Addresses | Ready | Listening | Begun | Worker | Refused | Ended | LastWords | Said | Outcome

Malformed = msgspec.MsgspecError  # what the decoders raise

encode = msgspec.json.Encoder().encode
order = msgspec.json.Decoder(Order).decode
meet = msgspec.json.Decoder(Meet).decode
report = msgspec.json.Decoder(Report).decode
