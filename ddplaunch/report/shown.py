"""Which workers and which of their streams the console shows. Pure data."""

from __future__ import annotations

from enum import Enum

from ddplaunch.record import record


class Stream(Enum):
    """One of the two streams that a worker writes to and the command passes on."""

    OUT = "stdout"
    ERR = "stderr"


BOTH = frozenset(Stream)

Chunks = list[tuple[Stream, bytes]]  # what to write where, in this order


@record(kw_only=True)
class Shown:
    """A worker of this node as the console knows it."""

    rank: int
    local_rank: int
    role: str = "default"  # torchrun's --role; only a prefix template names it
    streams: frozenset[Stream] = BOTH  # those that go to the console; empty: a hidden worker
