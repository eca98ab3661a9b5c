"""What a run has left in its folder: how it began, its plan, its summary. Each file is read when somebody first asks for it.

A file may be damaged, missing, huge, from another version, or written by anybody: what cannot be read is empty. Changes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.folders import node_folders_of
from ddplaunch.system.fields import Duration, Number, Seconds, Size, Status, line
from ddplaunch.system.process.files import content, read_json

LONGEST = 64 << 20  # bytes of a file of lines that are read
_LONGEST_HEAD = 1 << 14  # bytes of the events in which the start of the job stands
_LONGEST_ERROR = 300  # characters of the first failure, in a sentence
NO_END = "was killed, or its record ends early"  # as on a full disk: neither leaves a summary

T = TypeVar("T")


def lines_of(data: bytes | None, kind: type[T]) -> Iterator[T | None]:
    """Yield lines of JSON as values of this type, and None for a line that is no such value; nothing for None as data.

    What stands behind the last newline may be half written, and is left out if it cannot be read.
    """
    decode = msgspec.json.Decoder(kind).decode

    def value(text: bytes) -> T | None:
        try:
            return decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    *lines, rest = (data or b"").split(b"\n")
    yield from map(value, lines)
    if rest and (last := value(rest)) is not None:
        yield last


class Reached(Struct, frozen=True):
    """How far a worker was, as it said last."""

    step: Size
    total: Size | None = None
    first_step: Size = 0  # of this generation
    seconds: Duration = 0.0  # from the first call to the last
    age: Duration = 0.0  # seconds from the last call to its end


class EventRow(Struct):
    """A line of events.jsonl, with the fields that are read; whoever wrote the line may have left out any."""

    event: str
    v: int = 0
    at: Annotated[float, Meta(ge=0, le=1e11)] = -1.0  # seconds since 1970
    mono: Annotated[float, Meta(ge=0, le=1e12)] = -1.0  # CLOCK_MONOTONIC of the node
    run_id: str = ""
    program: str = ""
    host: str = ""
    ddplaunch: str = ""
    generation: Number | None = None
    rank: Number | None = None
    pid: Number | None = None
    status: Status | None = None
    how: str = ""
    reason: str = ""
    seconds: Duration | None = None
    stopped_with: Number | None = None
    progress: Reached | None = None
    signal: int | str | None = None
    name: str = ""
    ranks: str = ""
    type: str = ""
    message: str = ""
    why: str = ""
    text: str | None = None
    error: str | None = None
    where: str | None = None
    follows: bool = False
    raised_at: Seconds | None = None
    wait: Duration | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the line has what each event of ddplaunch has."""
        return self.v >= 1 and self.at >= 0 and self.mono >= 0


class Node(Struct, dict=True):
    """What one node of a run has left in its folder, which is that of the run if there is no other node."""

    folder: str

    @cached_property
    def head(self) -> Sequence[EventRow]:
        """The first events: up to the start of the job, or up to a line that cannot be read."""
        found: list[EventRow] = []
        for event in lines_of(content(f"{self.folder}/events.jsonl", _LONGEST_HEAD), EventRow):
            if event is None:
                break
            found.append(event)
            if event.event == "job_started":
                break
        return found

    @property
    def start(self) -> EventRow | None:
        """The start of the job; None if the first events do not have it."""
        return self.head[-1] if self.head and self.head[-1].event == "job_started" else None

    def object(self, name: str) -> dict[str, Any]:
        """Return what "plan", "summary" or "about" holds."""
        found = read_json(f"{self.folder}/{name}.json")
        return found if isinstance(found, dict) else {}


class Run(Struct, dict=True):
    """What a run has left, of all nodes whose folders are here."""

    folder: str

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """Its nodes, by node rank."""
        return [*map(Node, node_folders_of(self.folder))]

    @cached_property
    def start(self) -> EventRow | None:
        """The start of the job, as the first node tells that knows it."""
        return next((node.start for node in self.nodes if node.start is not None), None)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan of the first node that has one."""
        return next(filter(None, (node.object("plan") for node in self.nodes)), {})

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary of the first node that was there at the last start: others may have been lost or left before."""
        found = [node.object("summary") for node in self.nodes]
        starts = [number if isinstance(number := each.get("restarts"), int) else 0 for each in found]
        return max(zip(starts, found, strict=True), key=lambda each: (bool(each[1]), each[0]))[1]

    @property
    def how_it_ended(self) -> str:
        """How it ended, as a predicate."""
        return f"has ended with status {self.status}" if self.status is not None else NO_END

    @property
    def status(self) -> int | None:
        """The exit status of the command; None: the run goes on, or ended before it could write a summary."""
        status: int | None = _value_of(self.summary.get("status"), Status)
        return status

    @property
    def seconds(self) -> float | None:
        """The time that the job took; None: it is not known."""
        seconds: float | None = _value_of(self.summary.get("seconds"), Duration)
        return seconds

    @property
    def first_failure(self) -> str:
        """What failed first, and where, as a sentence; "" if nothing did, or nothing is known of it."""
        failure = self.summary.get("first_failure")
        if not isinstance(failure, dict):
            return ""
        rank, how, error, host = (failure.get(name) for name in ("rank", "how", "error", "host"))
        there = f" on {line(str(host))}" if host and host != os.uname().nodename else ""
        what = line(str(error or how)[:_LONGEST_ERROR])
        return f"rank {rank}{there} failed: {what}" if _value_of(rank, Number) is not None else ""


def _value_of(found: object, kind: Any) -> Any:
    """Return what a file holds as a value of this type; None if it is none."""
    try:
        value = msgspec.convert(found, kind)
    except (msgspec.MsgspecError, OverflowError):
        return None
    return None if isinstance(value, float) and math.isnan(value) else value  # it is in no order, so within all bounds
