"""Reads what a profiled rank has sent: torch's trace, what torch's recorders know of collectives, where its main thread was.

A worker may send anything. What is malformed makes `Malformed`; what lies outside of the time of the profile is dropped.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import IO, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from ddplaunch.record.seen.recorder import call_of, name_and_title_of
from ddplaunch.record.trace import Span, Spans, difference, union
from ddplaunch.system.fields import Malformed, Number, Piece, Size, check_density, decoder

_MOST = 100_000  # samples, and entries of recorders
_PIECE = 1 << 20  # bytes
# a trace as torch writes it has a twentieth of its size once it is packed, and an entry for each 50 bytes at most
_MOST_EXPANSION = 64  # a trace may be so many times as large as it was packed
_ALWAYS_ALLOWED = 16 << 20  # bytes that any trace may have
_BYTES_OF_EVENT = 350  # that an Event takes
_TIMES_TRACE = 6  # times the memory of a trace that its events may take
_OVERHANG = 60_000_000_000  # nanoseconds for which something may reach out of the profile, before it or after it
_MOST_APART = 2_000_000  # nanoseconds between the calls that torch records of one collective
_FEW_COLLECTIVES = 10  # of which no pace can be told
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a device does
# how slices on the side of the CPU begin
_NAMES_OF_COLLECTIVES = ("c10d::", "record_param_comms", "nccl:", "gloo:", "mpi:", "xccl:", "ucc:")
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
    """Nanoseconds of the rank's time of day, and of its CLOCK_MONOTONIC (`mono`)."""

    asked: Size  # when it was to begin
    began: Size
    ended: Size
    stopped: Size  # when torch had stopped recording
    saved: Size  # when its trace was written
    mono_asked: Size  # at `asked`
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


class Sample(NamedTuple):
    """Where the main thread was found; times in nanoseconds of the common clock."""

    began: int  # to look for it there, once it had been seen elsewhere
    seen: int  # there for the last time
    where: str  # "/home/ada/train.py:88"


class Recorded(Struct, kw_only=True):
    """What is known of one rank; times in nanoseconds of the common clock."""

    rank: int
    host: str
    events: list[Event]
    began: int
    ended: int
    starting: int  # nanoseconds for which the start kept the program, or may have
    stopping: int  # the same of making the trace and writing it
    on_device: bool  # a device did something; else all is of the CPU
    computes: Spans
    communicates: Spans
    loads_data: Spans
    steps: list[int]  # the ends of optimizer steps
    collectives: list[Collective]
    samples: list[Sample]
    groups: Mapping[str, int]  # their sizes
    slowdown: float | None = None  # of collectives, against just before; 0.1: a tenth longer
    unnumbered: int = 0  # collectives in the trace that no recorder has numbered
    clock_moved: int = 0  # nanoseconds by which the time of day was set meanwhile

    def sampled(self) -> Iterator[tuple[Sample, int, int]]:
        """Yield each sample, when it began, and when the next one began, the last until the end of the profile."""
        for sample, following in zip_longest(self.samples, self.samples[1:]):
            yield sample, sample.began, self.ended if following is None else following.began


_decode_head = decoder(_Head)
_decode_trace = decoder(_Trace)


def unpacked(file: IO[bytes], most: int) -> bytearray:
    """Return what a file holds that is compressed by zlib.

    Raises:
        Malformed: it is damaged, or unpacks to more than `most` bytes, or to more than anything of ours of its size would.
    """
    packed_size = file.seek(0, os.SEEK_END)
    most = min(most, max(_ALWAYS_ALLOWED, _MOST_EXPANSION * packed_size))
    file.seek(0)
    unpacker, made = zlib.decompressobj(), bytearray()
    try:
        while data := file.read(_PIECE):
            made += unpacker.decompress(data, most + 1 - len(made))
            if len(made) > most or unpacker.unconsumed_tail:
                raise Malformed(f"is longer than {most} bytes, unpacked from {packed_size}")
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
    check_density(first)  # a short text may decode to gigabytes of values
    head: _Head = _decode_head(first)
    check_density(data, end_of_head, container=_BYTES_OF_EVENT, times=_TIMES_TRACE)  # the same of the trace
    trace: _Trace = _decode_trace(memoryview(data)[end_of_head:])
    times = head.times
    began, ended = times.began - ahead, times.ended - ahead
    events = _events(trace, ahead, began, ended)
    slices = [event for event in events if event.ph == "X"]
    on_device = any(event.cat in _KERNELS for event in slices)
    collectives, unnumbered = _collectives(slices, head.entries, ahead, began, ended, on_device=on_device)
    activity = _of_device(slices) if on_device else _of_cpu(slices, collectives)
    return Recorded(
        rank=rank,
        host=host,
        events=events,
        began=began,
        ended=ended,
        starting=max(0, times.began - times.asked),
        stopping=max(0, times.saved - times.ended),
        on_device=on_device,
        computes=activity.computes,
        communicates=activity.communicates,
        loads_data=activity.loads_data,
        steps=_steps(slices),
        collectives=collectives,
        samples=[Sample(begin - ahead, seen - ahead, where) for begin, seen, where in head.samples],
        groups=head.groups,
        slowdown=_slowdown(head.entries, times),
        unnumbered=unnumbered,
        # what went by on the time of day beside what went by on the monotonic clock
        clock_moved=abs((times.stopped - times.asked) - (times.mono_stopped - times.mono_asked)),
    )


def _events(trace: _Trace, ahead: int, began: int, ended: int) -> list[Event]:
    """Return a trace's entries of the time of the profile, in nanoseconds of the common clock, and what holds names ("M")."""
    base = trace.baseTimeNanoseconds - ahead
    kept = []
    for event in trace.traceEvents:
        event.ts = event.ts * 1e3 + base
        event.dur = max(0.0, event.dur * 1e3)
        # what began before the profile, or ends after it, has a part in it
        is_inside = began - _OVERHANG <= event.ts and event.ts + event.dur <= ended + _OVERHANG
        is_of_process = isinstance(event.pid, int) and event.cat != "Trace"  # torch's own marks belong to no process
        if event.ph == "M" or (is_inside and is_of_process):
            args = bytes(event.args)
            if not args.isascii():  # the names of kernels and files may be in any encoding
                event.args = msgspec.Raw(args.decode(errors="replace").encode())
            kept.append(event)
    return kept


class _Activity(NamedTuple):
    """What a rank did when. What overlaps counts once, see `division`."""

    computes: Spans
    communicates: Spans
    loads_data: Spans


def _of_device(slices: Sequence[Event]) -> _Activity:
    """Return what a rank did whose device computes: kernels that compute hide collectives, and both hide the loading of data."""
    kernels = [event for event in slices if event.cat in _KERNELS]
    computes = union(_span(event) for event in kernels if not _is_of_nccl(event))
    communicates = union(_span(event) for event in kernels if _is_of_nccl(event))
    loads_data = difference(difference(_data_loading(slices), computes), communicates)
    return _Activity(computes, difference(communicates, computes), loads_data)


def _of_cpu(slices: Sequence[Event], collectives: Sequence[Collective]) -> _Activity:
    """Return what a rank did that computes on the CPU: the loading of data hides operations, and both hide collectives."""
    loads_data = _data_loading(slices)
    operations = (
        event for event in slices if event.cat == "cpu_op" and not event.name.startswith(_NAMES_OF_COLLECTIVES)
    )
    computes = difference(union(map(_span, operations)), loads_data)
    calls = [_span(event) for event in slices if event.name.startswith(_NAMES_OF_COLLECTIVES)]
    communicates = union([*calls, *((one.arrived, one.ended) for one in collectives)])
    return _Activity(computes, difference(difference(communicates, computes), loads_data), loads_data)


def _data_loading(slices: Sequence[Event]) -> Spans:
    return union(_span(event) for event in slices if event.name.startswith(_LOADS))


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
    """Return by how much longer collectives took to follow each other in the profile than before: 0.1 for a tenth.

    `entries` are torch's recorder of collectives. None where it has too few of them.
    """

    def interval(begin: int, end: int) -> float | None:
        """Return the mean time from one collective to the next between two moments."""
        created = (entry.get("time_created_ns") for entry in entries)
        known = sorted(at for at in created if isinstance(at, int) and begin <= at < end)
        return (known[-1] - known[0]) / (len(known) - 1) if len(known) > _FEW_COLLECTIVES else None

    length = times.ended - times.began
    before, during = interval(times.asked - length, times.asked), interval(times.began, times.ended)
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
    """Join the calls in torch's recorder (`entries`) with their slices in the trace.

    Also return how many collectives only the trace has. The rank's clock, by which the recorder tells time, is `ahead`.
    """
    found = []
    in_trace = _InTrace(slices, on_device=on_device)
    calls = [(call.at - ahead, call, entry) for entry in entries if (call := call_of(entry)) is not None]
    for at, call, entry in sorted(calls, key=itemgetter(0)):
        is_of_two_ranks = call.is_p2p  # for which no other rank waits
        if is_of_two_ranks or not began <= at < ended:
            continue
        event = in_trace.take_next(call.operation, at)
        if event is None:
            continue
        begin, end = _span(event)
        group, _title = name_and_title_of(entry.get("process_group"))
        found.append(
            Collective(
                group=group,
                number=call.number,
                operation=call.operation,
                tensors=call.inputs or call.outputs,
                arrived=begin if on_device else min(at, begin),  # the kernel begins later than its call
                ended=end,
                event=event,
            )
        )
    return found, in_trace.untaken


class _InTrace:
    """The events of a rank's trace that are collectives: for gloo what its threads did, for NCCL the kernels."""

    def __init__(self, slices: Sequence[Event], *, on_device: bool) -> None:
        """Find the marks that torch makes for each collective ("gloo:all_reduce"), and what leads from them to kernels.

        A call on the side of the CPU lies in the mark, and has a number in common with its kernel.
        """
        self._on_device = on_device
        kernels = {}
        if on_device:
            kernels = {_correlation(event): event for event in slices if event.cat == "kernel" and _is_of_nccl(event)}
        marks: dict[str, list[Event]] = {}  # by operation
        self._calls: list[tuple[float, Event]] = []  # when something was called, and its kernel, in the order of time
        for event in sorted(slices, key=lambda event: event.ts):
            backend, _, operation = event.name.partition(":")
            if event.cat == "user_annotation" and operation and backend in ("gloo", "nccl"):
                marks.setdefault(operation, []).append(event)
            if kernels and event.name.startswith(_NAMES_OF_COLLECTIVES):
                kernel = kernels.get(_correlation(event))
                if kernel is not None:
                    self._calls.append((event.ts, kernel))
        self._marks = {operation: iter(events) for operation, events in marks.items()}
        self.untaken = sum(map(len, marks.values()))  # marks that no call has had yet

    def take_next(self, operation: str, at: int) -> Event | None:
        """Take the next event of an operation that was called at this time; None if the trace has none."""
        for mark in self._marks.get(operation, iter(())):
            if mark.ts + mark.dur >= at:
                self.untaken -= 1
                return self._kernel(mark.ts) if self._on_device else mark
        return None

    def _kernel(self, called: float) -> Event | None:
        """Return the kernel of what was called at this time: of the nearest call, unless that is too far."""
        index = bisect_left(self._calls, called, key=itemgetter(0))
        neighbours = self._calls[max(0, index - 1) : index + 1]
        nearest = min(neighbours, key=lambda call: abs(call[0] - called), default=None)
        if nearest is None:
            return None
        at, kernel = nearest
        return kernel if abs(at - called) <= _MOST_APART else None


def _correlation(event: Event) -> object:
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
