"""A stream arrives as it was sent, is never kept beyond its window, and ends on both sides whichever ends it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from ddplaunch.reach.channel.streams import CHUNK, WINDOW, Chunk, Streams
from ddplaunch.system.loop.loop import Loop


class Side:
    """The owner of the streams of one side."""

    def __init__(self) -> None:
        self.sent: list[Chunk] = []  # and not yet delivered

    def send_chunk(self, chunk: Chunk) -> None:
        self.sent.append(chunk)

    def on_stream_ended(self, number: int) -> None:
        """Nobody needs to know."""


class Pair(NamedTuple):
    loop: Loop
    sent: tuple[list[Chunk], list[Chunk]]  # by each side, and not yet delivered
    sides: tuple[Streams, Streams]
    ends: tuple[socket.socket, socket.socket]  # of the programs on either side

    def turn(self, *, until_quiet: bool = True) -> None:
        """Carry over what was sent, until nothing more moves."""
        while True:
            self.loop.timer(self.loop.now(), lambda: None)
            self.loop.run_once()
            moved = False
            for of, to in ((0, 1), (1, 0)):
                for chunk in list(self.sent[of]):
                    self.sent[of].remove(chunk)
                    self.sides[to].take(chunk)
                    moved = True
            if not (moved and until_quiet):
                return


@pytest.fixture
def pair() -> Iterator[Pair]:
    loop = Loop()
    owners = Side(), Side()
    sides = Streams(loop, owners[0]), Streams(loop, owners[1])
    ends = []
    with ExitStack() as stack:
        for side in sides:
            near, far = socket.socketpair()
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            far.setblocking(False)
            side.add(1, near)
            ends.append(stack.enter_context(far))
        yield Pair(loop, (owners[0].sent, owners[1].sent), sides, (ends[0], ends[1]))
        for side in sides:
            side.close()
        loop.close()


def read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 20)
    except BlockingIOError:
        return b""


def test_bytes_arrive_in_both_directions_and_the_end_comes_behind_them(pair: Pair) -> None:
    for at in (0, 1):
        data, arrived = bytes(range(256)) * 5000, b""
        rest = memoryview(data)
        while len(arrived) < len(data):
            if rest:
                try:
                    rest = rest[pair.ends[at].send(rest) :]
                except BlockingIOError:
                    pass
            pair.turn()
            arrived += read(pair.ends[1 - at])
        assert arrived == data
    pair.ends[0].send(b"last")
    pair.ends[0].close()
    pair.turn()
    assert read(pair.ends[1]) == b"last"
    pair.turn()
    assert 1 not in pair.sides[0]
    assert 1 not in pair.sides[1]
    assert pair.ends[1].recv(1) == b""


def test_who_is_not_read_keeps_a_window_and_no_more(pair: Pair) -> None:
    piece = b"x" * CHUNK
    given = 0
    for _ in range(20 * WINDOW):
        try:
            given += pair.ends[0].send(piece)
        except BlockingIOError:
            pass
        pair.turn()
    room = 1 << 20  # of the sockets themselves
    assert given <= 2 * WINDOW * CHUNK + room
    arrived = 0
    while arrived < given:
        pair.turn()
        arrived += len(read(pair.ends[1]))
    assert pair.ends[0].send(b"more")


def test_a_side_that_knows_no_window_loses_its_stream(pair: Pair) -> None:
    for _ in range(10 * WINDOW):
        pair.sides[1].take(Chunk(1, b"x" * CHUNK))
    assert 1 not in pair.sides[1]
    assert pair.sent[1][-1].ends
    pair.sides[1].take(Chunk(1, b"late"))
    pair.sides[1].take(Chunk(7))


def test_who_hears_nothing_in_time_gives_up_and_who_hears_anything_does_not(pair: Pair) -> None:
    far = []
    for number, within in ((2, 0.0), (3, 60.0), (4, 0.0)):
        near, other = socket.socketpair()
        other.setblocking(False)
        far.append(other)
        pair.sides[0].add(number, near, within, b"it does not answer")
    pair.sides[0].take(Chunk(4, b"it does"))
    pair.turn()
    assert [read(sock) for sock in far] == [b"it does not answer", b"", b"it does"]
    assert [number in pair.sides[0] for number in (2, 3, 4)] == [False, True, True]
    assert len(pair.sides[0]) == 3
    for sock in far:
        sock.close()


def test_who_finishes_a_stream_says_the_last_word(pair: Pair) -> None:
    pair.sides[0].finish(1, b"it does not answer")
    pair.turn()
    assert read(pair.ends[0]) == b"it does not answer"
    assert pair.ends[1].recv(1) == b""
