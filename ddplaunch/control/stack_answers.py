"""Where the workers of a node are, as it is sent: each stack and each set of ranks once. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ddplaunch.fields import Line, Number, Piece, Size, Text

MAX_PROCESSES = 20_000
MAX_THREADS = 256  # of a process
MAX_FRAMES = 256  # of a thread
MAX_STACKS = 100_000
MAX_GROUPS = 256  # of a process
MAX_CALLS = 64  # of a group
MAX_SETS = 4096  # of ranks
MAX_RANKS = 65536  # of a group


class AskStacks(Struct, frozen=True, tag="stacks"):
    """Where the workers are."""

    within: Annotated[float, Meta(ge=0, le=30)] = 1.0  # seconds that they have to say so
    threads: bool = False  # all of them, not only the main one
    native: bool = False  # with frames of C, by py-spy


class SentFrame(Struct, frozen=True, array_like=True):
    """One line of a stack."""

    file: Piece
    line: Number
    function: Piece


class SentThread(Struct, frozen=True, array_like=True):
    """One thread."""

    stack: Number  # its place among the stacks
    name: Piece
    is_main: bool


class SentCall(Struct, frozen=True, array_like=True):
    """One collective that was called."""

    number: Size
    operation: Piece
    inputs: Piece
    outputs: Piece
    done: bool
    is_p2p: bool
    at: Size


class SentGroup(Struct, frozen=True, array_like=True):
    """What was called in one process group."""

    name: Piece
    title: Piece
    members: Number  # their place among the sets of ranks
    calls: Annotated[tuple[SentCall, ...], Meta(max_length=MAX_CALLS)]


class SentProcess(Struct, frozen=True):
    """A worker, or what it has started."""

    rank: Number
    pid: Number
    child: Line
    threads: Annotated[tuple[SentThread, ...], Meta(max_length=MAX_THREADS)]
    state: Piece
    ended: bool
    groups: Annotated[tuple[SentGroup, ...], Meta(max_length=MAX_GROUPS)] | None
    native: Text
    ras: Text = ""


class NodeStacks(Struct, frozen=True, tag="stacks"):
    """All workers of a node, by rank."""

    stacks: Annotated[
        tuple[Annotated[tuple[SentFrame, ...], Meta(max_length=MAX_FRAMES)], ...], Meta(max_length=MAX_STACKS)
    ]
    members: Annotated[tuple[Annotated[tuple[Number, ...], Meta(max_length=MAX_RANKS)], ...], Meta(max_length=MAX_SETS)]
    processes: Annotated[tuple[SentProcess, ...], Meta(max_length=MAX_PROCESSES)]
