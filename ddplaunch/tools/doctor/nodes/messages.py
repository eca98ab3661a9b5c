"""The requests of the doctor (on node 0) to the program that examines each node, and the replies. Pure.

The order of a job comes first, see `reach/protocol.py`. A node may be under another user's control: a reply that does not
fit the type which its request asks for is refused, and what is shown of one is filtered where it is shown.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from ddplaunch.system.fields import Duration, Host, Line, Number, Port, Seconds, decoder
from ddplaunch.tools.doctor import Report

MAX_PORTS = 8
MAX_ADDRESSES = 32
MAX_SENDING = 1.0  # seconds
MAX_WITHIN = 60.0  # seconds
_Ports = Annotated[tuple[Port, ...], Meta(min_length=1, max_length=MAX_PORTS)]
_Addresses = Annotated[tuple[Host, ...], Meta(max_length=MAX_ADDRESSES)]


class Introduce(Struct, frozen=True, tag="introduce"):
    """Say what this node is, and listen for the others: on a port that the kernel chooses, and on these."""

    ports: Annotated[tuple[Port, ...], Meta(max_length=MAX_PORTS - 1)] = ()


class Facts(Struct, frozen=True, kw_only=True):
    """What a node is, and where it listens."""

    host: Host  # as the node calls itself
    addresses: _Addresses  # under which others may reach it
    kernel_port: Port  # that the kernel has chosen
    ports: Annotated[
        tuple[Port, ...], Meta(max_length=MAX_PORTS - 1)
    ]  # of those asked for, at which it listens as well
    python: Line
    torch: Line  # "" if there is none
    nccl: bool
    folder_problem: Line = ""  # why the folder of the command cannot be entered here; "" if it can
    script_digest: Line = ""  # "" if the command has no script
    script_problem: Line = ""  # why it cannot be read


class TellTime(Struct, frozen=True, tag="tell_time"):
    """Say what the clock of this node shows."""


class Time(Struct, frozen=True):
    """The clock of a node."""

    seconds: Seconds  # since 1970


class Examine(Struct, frozen=True, tag="examine"):
    """Run the checks of one machine."""

    only: Line | None = None  # names of checks


# at the end of the name of a file that node 0 has made; no message holds the whole name
NameDigits = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class HandleFile(Struct, frozen=True, tag="handle_file"):
    """Make, look for or remove a file in the run folder and in the current one: nodes that see node 0's file share the folder."""

    step: Literal["make", "look", "remove"]
    name_digits: NameDigits | None = None  # of the file to look for; None: node 0 makes and removes one of its own


class Shared(Struct, frozen=True, kw_only=True):
    """In which folders the file is now: of runs, the current one. None: it cannot be said."""

    runs: bool | None
    current: bool | None
    name_digits: NameDigits


class Meet(Struct, frozen=True, tag="meet"):
    """Resolve the name of node 0, as this node knows it, and say at which of its addresses node 0 answers, on this port."""

    port: Port


class Met(Struct, frozen=True, kw_only=True):
    """What a name of node 0 leads to."""

    addresses: _Addresses = ()
    reached: Host | None = None  # the address where node 0 has answered; None: at none of them
    error: Line = ""  # why there is no address, or node 0 does not answer


class Measure(Struct, frozen=True, tag="measure"):
    """Measure the way from this node to another one, which listens at these addresses and ports."""

    node_rank: Number
    addresses: _Addresses
    ports: _Ports
    seconds: Annotated[float, Meta(ge=0, le=MAX_SENDING)]  # for which data are sent


class Blocked(Struct, frozen=True):
    """A port that does not answer."""

    port: Port
    why: Line


class Way(Struct, frozen=True, kw_only=True):
    """The way from one node to another: what was reached, how fast."""

    address: Host | None = None  # where the other node has answered; None: nowhere
    blocked: Annotated[tuple[Blocked, ...], Meta(max_length=MAX_PORTS)] = ()
    latency: Duration = 0.0  # seconds for a round trip, the median of several
    speed: Duration = 0.0  # bytes a second that the other node has confirmed
    # share of the packets that were lost on the way; None: too few were sent to know
    resent: Annotated[float, Meta(ge=0, le=1)] | None = None
    mtu: Number = 0  # bytes of the largest packet on this way; 0: not known


Request: TypeAlias = Introduce | TellTime | Examine | HandleFile | Meet | Measure
Reply: TypeAlias = Facts | Time | Report | Shared | Met | Way  # to each kind of request, in the same order


class Asked(Struct, frozen=True):
    """A request, and the seconds in which it has to be answered."""

    number: Number
    request: Request
    within: Annotated[float, Meta(ge=0, le=MAX_WITHIN)]


class Answered(Struct, frozen=True):
    """The reply to the request of this number, or why there is none."""

    number: Number
    reply: Raw = Raw(b"null")  # encoded; the asker knows of which kind it is
    why_none: Line | None = None  # None: there is a reply


asked = decoder(Asked)
answered = decoder(Answered)


def encode(message: Asked | Answered | Reply) -> bytes:
    """Encode a message, or the reply in one."""
    return msgspec.json.encode(message)
