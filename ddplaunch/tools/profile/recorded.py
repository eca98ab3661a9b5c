"""Reads what a rank has sent: the trace of torch, what torch's recorders know of its collectives, where its main thread was.

A worker may send anything. What is malformed makes `Malformed`; what lies outside of the time of the profile is dropped.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import IO, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.seen.recorder import call_of, title_of
from ddplaunch.record.spans import Span, Spans, beyond, union
from ddplaunch.system.fields import Malformed, Number, Piece, Size, check_density, decoder

_MOST = 100_000  # samples, and entries of recorders
_PIECE = 1 << 20  # bytes
# a trace as torch writes it has a twentieth of its size once it is packed, and an entry for each 50 bytes at most
_RATIO, _ANY_MAY_HAVE = 64, 16 << 20  # bytes
_OF_EVENT, _TIMES = 350, 6  # bytes that an Event takes; how many times the memory of a trace its events may take
_LATE = 60_000_000_000  # nanoseconds beyond the end of a profile that something in it may last
_MATCHES = 2_000_000  # nanoseconds between the calls that torch records of one collective
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a device does
_OF_COLLECTIVES = (
    "c10d::",
    "record_param_comms",
    "nccl:",
    "gloo:",
    "mpi:",
    "xccl:",
    "ucc:",
)  # names on the side of the CPU
_LOADS, _STEPS = "enumerate(DataLoader)#", "Optimizer.step#"  # names that torch gives

Micro = Annotated[float, Meta(ge=-1e16, le=1e16)]


class Event(Struct, gc=False):
    """One entry of torch's trace."""

    ph: Annotated[str, Meta(max_length=4)]
    name: str = ""
    cat: str | None = None
    pid: int | str = 0
    tid: int | str = 0
    ts: Micro = 0.0
    dur: Micro = 0.0
    id: int | str | None = None
    bp: str | None = None
    s: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Trace(Struct):
    traceEvents: list[Event]  # noqa: N815 - torch's name
    baseTimeNanoseconds: Annotated[int, Meta(ge=0, le=2**62)] = 0  # noqa: N815


class _Times(Struct):
    """Nanoseconds of the time of day, and of CLOCK_MONOTONIC at the first and the last."""

    asked: Size
    began: Size
    ended: Size
    stopped: Size
    saved: Size
    mono: Size
    mono_stopped: Size


class _Head(Struct):
    times: _Times
    samples: Annotated[tuple[tuple[Size, Size, Piece], ...], Meta(max_length=_MOST)]
    entries: Annotated[tuple[dict[str, Any], ...], Meta(max_length=_MOST)]
    groups: Annotated[dict[str, Number], Meta(max_length=_MOST)]


class Collective(Struct, kw_only=True):
    """One collective of one rank; times in nanoseconds of the common clock."""

    group: str
    number: int
    operation: str
    tensors: str
    arrived: int
    ended: int
    event: Event | None = None  # in the trace


class Recorded(Struct, kw_only=True):
    """What is known of one rank; times in nanoseconds of the common clock."""

    rank: int
    host: str
    events: list[Event]
    began: int
    ended: int
    starting: int  # how long the start, making the trace and writing it kept the program, or may have
    stopping: int
    on_device: bool
    computes: Spans
    communicates: Spans
    loads: Spans
    steps: list[int]  # the ends of optimizer steps
    collectives: list[Collective]
    samples: list[tuple[int, int, str]]
    groups: Mapping[str, int]  # their sizes
    slowdown: float | None = None  # of collectives, against just before; 0.1: a tenth longer
    unmatched: int = 0  # collectives in the trace that no recorder has numbered
    clock_moved: int = 0  # nanoseconds by which the time of day was set meanwhile


_head = decoder(_Head)
_trace = decoder(_Trace)


def unpacked(file: IO[bytes], most: int) -> bytearray:
    """Return what a file holds that is compressed by zlib, up to `most` bytes, and so many times its size as a trace may have.

    Raises:
        Malformed: it is damaged, or longer.
    """
    packed = file.seek(0, os.SEEK_END)
    most = min(most, max(_ANY_MAY_HAVE, _RATIO * packed))
    file.seek(0)
    unpacker, made = zlib.decompressobj(), bytearray()
    try:
        while data := file.read(_PIECE):
            made += unpacker.decompress(data, most + 1 - len(made))
            if len(made) > most or unpacker.unconsumed_tail:
                raise Malformed(f"is longer than {most} bytes, unpacked from {packed}")
    except zlib.error as error:
        raise Malformed(f"is damaged: {error}") from None
    if not unpacker.eof:
        raise Malformed("ends too early")
    return made


def read(data: bytes | bytearray, *, rank: int, host: str, ahead: int) -> Recorded:
    """Read what a rank has sent, with its times moved to the common clock: the rank's clock is `ahead` of that.

    Raises:
        Malformed: it is not what a worker of ours sends.
    """
    end_of_head = data.find(b"\n") + 1
    first = bytes(data[:end_of_head])
    check_density(first)
    head: _Head = _head(first)
    check_density(data, end_of_head, container=_OF_EVENT, times=_TIMES)
    trace: _Trace = _trace(memoryview(data)[end_of_head:])
    times, base = head.times, trace.baseTimeNanoseconds - ahead
    began, ended = times.began - ahead, times.ended - ahead
    events = []
    for event in trace.traceEvents:
        event.ts = event.ts * 1e3 + base  # nanoseconds from here on
        event.dur = max(0.0, event.dur * 1e3)
        is_inside = began - _LATE <= event.ts and event.ts + event.dur <= ended + _LATE
        if event.ph == "M" or (is_inside and isinstance(event.pid, int) and event.cat != "Trace"):
            if not (args := bytes(event.args)).isascii():  # the names of kernels and files may be in any encoding
                event.args = msgspec.Raw(args.decode(errors="replace").encode())
            events.append(event)
    slices = [event for event in events if event.ph == "X"]
    on_device = any(event.cat in _KERNELS for event in slices)
    collectives, unmatched = _collectives(slices, head.entries, ahead, began, ended, on_device=on_device)
    loads = union(_span(event) for event in slices if event.name.startswith(_LOADS))
    if on_device:
        kernels = [event for event in slices if event.cat in _KERNELS]
        computes = union(_span(event) for event in kernels if not _is_of_nccl(event))
        communicates = union(_span(event) for event in kernels if _is_of_nccl(event))
        loads = beyond(loads, computes)
    else:
        ours = (event for event in slices if event.cat == "cpu_op" and not event.name.startswith(_OF_COLLECTIVES))
        computes = beyond(union(map(_span, ours)), loads)
        calls = [_span(event) for event in slices if event.name.startswith(_OF_COLLECTIVES)]
        communicates = union([*calls, *((one.arrived, one.ended) for one in collectives)])
    return Recorded(
        rank=rank,
        host=host,
        events=events,
        began=began,
        ended=ended,
        starting=max(0, times.began - times.asked),
        stopping=max(0, times.saved - times.ended),
        on_device=on_device,
        computes=computes,
        communicates=beyond(beyond(communicates, computes), [] if on_device else loads),
        loads=loads if not on_device else beyond(loads, communicates),
        steps=_steps(slices),
        collectives=collectives,
        samples=[(begin - ahead, end - ahead, where) for begin, end, where in head.samples],
        groups=head.groups,
        slowdown=_slowdown(head.entries, times),
        unmatched=unmatched,
        clock_moved=abs((times.stopped - times.asked) - (times.mono_stopped - times.mono)),
    )


def _span(event: Event) -> Span:
    return int(event.ts), int(event.ts + event.dur)


def _is_of_nccl(event: Event) -> bool:
    return event.name.startswith(("nccl", "rccl"))


def _steps(slices: Sequence[Event]) -> list[int]:
    """Return the ends of the steps of the optimizer that did one first."""
    steps = [event for event in slices if event.cat == "user_annotation" and event.name.startswith(_STEPS)]
    first = min(steps, key=lambda event: event.ts, default=None)
    return sorted(_span(event)[1] for event in steps if first is not None and event.name == first.name)


def _slowdown(entries: Sequence[Mapping[str, Any]], times: _Times) -> float | None:
    """Compare how fast collectives followed each other before the profile and in it; None where too few are known."""

    def pace(low: int, high: int) -> float | None:
        known = sorted(
            at for entry in entries if isinstance(at := entry.get("time_created_ns"), int) and low <= at < high
        )
        return (known[-1] - known[0]) / (len(known) - 1) if len(known) > 10 else None

    span = times.ended - times.began
    before, during = pace(times.asked - span, times.asked), pace(times.began, times.ended)
    return during / before - 1 if before and during else None


def _collectives(
    slices: Sequence[Event],
    entries: Sequence[Mapping[str, Any]],
    ahead: int,
    began: int,
    ended: int,
    *,
    on_device: bool,
) -> tuple[list[Collective], int]:
    """Join the calls in the recorder with their slices in the trace; also return how many collectives only the trace has."""
    found = []
    places = _Places(slices, on_device=on_device)
    known = sorted((call.at - ahead, index) for index, entry in enumerate(entries) if (call := call_of(entry)))
    for at, index in known:
        call = call_of(entries[index])
        if call is None or call.is_p2p or not began <= at < ended:
            continue
        place = places.take(call.operation, at)
        if place is None:
            continue
        begin, end = _span(place)
        found.append(
            Collective(
                group=title_of(entries[index].get("process_group"))[0],
                number=call.number,
                operation=call.operation,
                tensors=call.inputs or call.outputs,
                arrived=begin if on_device else min(at, begin),
                ended=end,
                event=place,
            )
        )
    return found, places.left()


class _Places:
    """Where the collectives are in a trace: for gloo what its threads did, for NCCL the kernels."""

    def __init__(self, slices: Sequence[Event], *, on_device: bool) -> None:
        self._on_device = on_device
        self._taken = 0
        chosen: dict[str, list[Event]] = {}
        kernels = {}
        if on_device:
            kernels = {_external(event): event for event in slices if event.cat == "kernel" and _is_of_nccl(event)}
        calls = []  # on the side of the CPU, each with its kernel
        for event in sorted(slices, key=lambda event: event.ts):
            backend, _, operation = event.name.partition(":")
            if event.cat == "user_annotation" and operation and backend in ("gloo", "nccl"):
                chosen.setdefault(operation, []).append(event)
            if kernels and event.name.startswith(_OF_COLLECTIVES) and (kernel := kernels.get(_external(event))):
                calls.append((event.ts, kernel))
        self._calls = calls
        self._all = sum(map(len, chosen.values()))
        self._chosen = {name: iter(events) for name, events in chosen.items()}

    def take(self, operation: str, at: int) -> Event | None:
        """Return the next place of an operation that was called at this time."""
        for event in self._chosen.get(operation, iter(())):
            if event.ts + event.dur >= at:
                self._taken += 1
                return self._kernel(event.ts) if self._on_device else event
        return None

    def _kernel(self, called: float) -> Event | None:
        """Return the kernel of what was called at this time."""
        near = bisect_left(self._calls, called, key=itemgetter(0))
        found = min(self._calls[max(0, near - 1) : near + 1], key=lambda call: abs(call[0] - called), default=None)
        return found[1] if found is not None and abs(found[0] - called) <= _MATCHES else None

    def left(self) -> int:
        """Return how many were not taken."""
        return self._all - self._taken


def _external(event: Event) -> object:
    """Return the number by which torch joins what was called with what the device did."""
    number = details(event).get("External id")
    return number if isinstance(number, int) else None


def details(event: Event) -> dict[str, Any]:
    """Return what an entry of the trace tells besides; nothing where that cannot be read."""
    try:
        check_density(text := bytes(event.args))
        args = msgspec.json.decode(text)
    except (Malformed, ValueError, RecursionError):  # one of the second kind is of text that is not UTF-8
        return {}
    return args if isinstance(args, dict) else {}
