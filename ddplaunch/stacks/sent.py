"""Samples as they are sent between nodes, and back. Pure; bounds what is sent, and trusts no number that arrives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from msgspec.structs import asdict

from ddplaunch.control.fields import line, number, piece, text
from ddplaunch.control.stack_answers import (
    MAX_PROCESSES,
    NodeStacks,
    SentCall,
    SentFrame,
    SentGroup,
    SentProcess,
    SentThread,
)
from ddplaunch.stacks import Call, Group, Sample, Thread
from ddplaunch.supervise.outcome import Frame

T = TypeVar("T", bound=Hashable)
_NATIVE = 20_000  # characters of a process


class _Table(Generic[T]):
    """Values by their places, equal ones once."""

    def __init__(self) -> None:
        self.places: dict[T, int] = {}

    def place(self, value: T) -> int:
        """The place of a value."""
        return self.places.setdefault(value, len(self.places))


def sent(samples: Iterable[Sample], *, threads: bool) -> NodeStacks:
    """Give samples as they are sent; without `threads` only the main ones."""
    stacks, members = _Table[tuple[Frame, ...]](), _Table[tuple[int, ...]]()
    processes = tuple(_process(sample, stacks, members, threads) for sample in list(samples)[:MAX_PROCESSES])
    return NodeStacks(
        stacks=tuple(
            tuple(SentFrame(piece(frame.file), number(frame.line), piece(frame.function)) for frame in stack)
            for stack in stacks.places
        ),
        members=tuple(tuple(map(number, ranks)) for ranks in members.places),
        processes=processes,
    )


def _process(
    sample: Sample, stacks: _Table[tuple[Frame, ...]], members: _Table[tuple[int, ...]], threads: bool
) -> SentProcess:
    return SentProcess(
        rank=sample.rank,
        pid=sample.pid,
        child=line(sample.child),
        threads=tuple(
            SentThread(stacks.place(thread.frames), piece(thread.name), thread.is_main)
            for thread in sample.threads
            if threads or thread.is_main
        ),
        state=piece(sample.state),
        ended=sample.ended,
        groups=None if sample.groups is None else tuple(_group(group, members) for group in sample.groups),
        native=text(sample.native, _NATIVE),
        ras=text(sample.ras, _NATIVE),
    )


def _group(group: Group, members: _Table[tuple[int, ...]]) -> SentGroup:
    calls = tuple(
        SentCall(
            call.number, piece(call.operation), piece(call.inputs), piece(call.outputs), call.done, call.is_p2p, call.at
        )
        for call in group.calls
    )
    return SentGroup(piece(group.name), piece(group.title), members.place(group.members), calls)


def received(node: NodeStacks, host: str) -> list[Sample]:
    """Give the samples of a node on `host`."""
    stacks = [tuple(Frame(**asdict(frame)) for frame in stack) for stack in node.stacks]
    samples = []
    for process in node.processes:
        threads = (
            Thread(frames=_at(stacks, thread.stack), name=thread.name, is_main=thread.is_main)
            for thread in process.threads
        )
        groups = None if process.groups is None else tuple(_received_group(group, node) for group in process.groups)
        samples.append(Sample(host=host, **{**asdict(process), "threads": tuple(threads), "groups": groups}))
    return samples


def _received_group(group: SentGroup, node: NodeStacks) -> Group:
    calls = tuple(Call(**asdict(call)) for call in group.calls)
    return Group(name=group.name, title=group.title, members=_at(node.members, group.members), calls=calls)


def _at(table: Sequence[tuple[T, ...]], place: int) -> tuple[T, ...]:
    return table[place] if place < len(table) else ()
