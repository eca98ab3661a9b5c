"""Samples as they are sent between nodes, and back. Pure; trusts no number that arrives.

Whatever a sample holds, what is made of it here is valid: no receiver refuses it for what a worker has written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import asdict

from ddplaunch.control.questions import (
    MAX_CALLS,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_PROCESSES,
    MAX_RANKS,
    MAX_SETS,
    MAX_STACKS,
    MAX_THREADS,
    NodeStacks,
    SentCall,
    SentFrame,
    SentGroup,
    SentProcess,
    SentThread,
    StacksAtEnd,
)
from ddplaunch.fields import line, number, piece, size, text
from ddplaunch.stacks import Call, Group, Sample, Thread
from ddplaunch.supervise.outcome import Frame

T = TypeVar("T", bound=Hashable)
_NATIVE = 20_000  # characters of a process
_MOST_AT_END = 1 << 20  # bytes


class _Table(Generic[T]):
    """Values by their places, equal ones once, and no more than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.places: dict[T, int] = {}

    def place(self, value: T) -> int:
        """Return the place of a value; where the table is full, one at which a receiver finds nothing."""
        if len(self.places) == self._most:
            return self.places.get(value, self._most)
        return self.places.setdefault(value, len(self.places))


def sent(samples: Iterable[Sample], *, threads: bool) -> NodeStacks:
    """Return samples as they are sent; without `threads` only the main ones."""
    stacks, members = _Table[tuple[Frame, ...]](MAX_STACKS), _Table[tuple[int, ...]](MAX_SETS)
    processes = tuple(_process(sample, stacks, members, threads) for sample in list(samples)[:MAX_PROCESSES])
    return NodeStacks(
        stacks=tuple(
            tuple(
                SentFrame(piece(frame.file), number(frame.line), piece(frame.function)) for frame in stack[:MAX_FRAMES]
            )
            for stack in stacks.places
        ),
        members=tuple(tuple(map(number, ranks[:MAX_RANKS])) for ranks in members.places),
        processes=processes,
    )


def stacks_at_end(generation: int, samples: Sequence[Sample]) -> StacksAtEnd | None:
    """Return the report of these samples at the end of a generation; None if they are too many for a message."""
    stacks = sent(samples, threads=False)
    return StacksAtEnd(generation, stacks) if len(msgspec.json.encode(stacks)) <= _MOST_AT_END else None


def _process(
    sample: Sample, stacks: _Table[tuple[Frame, ...]], members: _Table[tuple[int, ...]], with_threads: bool
) -> SentProcess:
    threads = [thread for thread in sample.threads if with_threads or thread.is_main]
    return SentProcess(
        rank=number(sample.rank),
        pid=number(sample.pid),
        child=line(sample.child),
        threads=tuple(
            SentThread(stacks.place(thread.frames), piece(thread.name), thread.is_main)
            for thread in threads[-MAX_THREADS:]  # the main one is the last
        ),
        state=piece(sample.state),
        ended=sample.ended,
        groups=None if sample.groups is None else tuple(_group(group, members) for group in sample.groups[:MAX_GROUPS]),
        native=text(sample.native, _NATIVE),
        ras=text(sample.ras, _NATIVE),
    )


def _group(group: Group, members: _Table[tuple[int, ...]]) -> SentGroup:
    calls = tuple(
        SentCall(
            number=size(call.number),
            operation=piece(call.operation),
            inputs=piece(call.inputs),
            outputs=piece(call.outputs),
            done=call.done,
            is_p2p=call.is_p2p,
            at=size(call.at),
        )
        for call in group.calls[-MAX_CALLS:]
    )
    return SentGroup(piece(group.name), piece(group.title), members.place(group.members), calls)


def received(node: NodeStacks, host: str) -> list[Sample]:
    """Return the samples of a node on `host`."""
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
