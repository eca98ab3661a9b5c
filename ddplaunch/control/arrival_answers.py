"""When the workers of a node came to their collectives, as it is sent: numbers and times as differences. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.fields import Duration, Number, Piece, Size

MAX_MEMBERS = 4096  # characters of the ranks of a group: each node sends them with each reading
MAX_CALLS = 100_000
MAX_ENTRIES = 2000  # of a worker: its recorders keep 500 each, unless its user wants more
MAX_SETS = 4096  # of ranks
MAX_SERIES = 100_000  # workers and groups
_MAX_RANKS = 65536

Gaps = Annotated[tuple[Size, ...], Meta(max_length=MAX_CALLS)]  # each from the one before, the first one from zero
Members = Annotated[str, Meta(max_length=MAX_MEMBERS, pattern=r"\A[0-9,-]*\Z")]  # ranks as ranges: "0-8191"


class AskArrivals(Struct, frozen=True, tag="arrivals"):
    """When the workers came to their last collectives."""

    within: Annotated[float, Meta(ge=0, le=30)] = 2.0  # seconds that they have to say so
    every: Annotated[int, Meta(ge=1, le=_MAX_RANKS)] = 1  # of the steps only every so many, as far as so many are known


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
