"""What waits until the other side of a socket takes it."""

from __future__ import annotations

import os
import socket

import pytest

from ddplaunch.system.loop.stream import SendBuffer


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def everything(buffer: SendBuffer, theirs: socket.socket) -> bytes:
    """Read all, and have sent what waits meanwhile."""
    received = b""
    while True:
        try:
            received += theirs.recv(1 << 20)
        except BlockingIOError:
            if not buffer.size:
                return received
            buffer.flush()


@pytest.mark.parametrize("size", [1, 7, 4096, 70_000])
def test_what_has_no_room_waits_and_all_comes_in_its_order(pair, size):
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    buffer, sent = SendBuffer(ours), b""
    for number in range(200):
        pieces = b"%d" % number, bytes([number]) * size
        buffer.put(*pieces)
        sent += b"".join(pieces)
    assert buffer.size + buffer.sent == len(sent)
    assert buffer.size
    assert everything(buffer, theirs) == sent
    assert (buffer.size, buffer.sent) == (0, len(sent))


def test_messages_stay_apart_and_small_ones_that_wait_can_be_joined():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        buffer, messages = SendBuffer(ours), 0
        while not buffer.size:
            buffer.put(b"m", b"x" * 1000, joins=False)
            messages += 1
        buffer.put(b"m", b"y" * 1000, joins=False)
        assert buffer.extend(b"yy", most=1003)
        assert not buffer.extend(b"y", most=1003)
        received = []
        while True:
            try:
                received.append(theirs.recv(4096))
            except BlockingIOError:
                if not buffer.size:
                    break
                buffer.flush()
        assert received == [b"m" + b"x" * 1000] * messages + [b"m" + b"y" * 1002]


def test_a_pipe_is_written_to_as_well():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    buffer = SendBuffer(writer)
    buffer.put(b"a", b"b" * 100_000)
    assert os.read(reader, 10) == b"abbbbbbbbb"
    assert buffer.size == 100_001 - 65536
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        buffer.flush()
    os.close(writer)


def test_what_waits_can_be_taken_out_without_what_was_sent_of_it(pair):
    ours, theirs = pair
    buffer = SendBuffer(ours)
    data = os.urandom(1 << 20)
    buffer.put(data)
    buffer.put(b"end")
    received = theirs.recv(1 << 20)
    buffer.flush()
    rest = b"".join(buffer.take())
    while len(received) + len(rest) < len(data) + 3:
        received += theirs.recv(1 << 20)
    assert received + rest == data + b"end"
    assert (buffer.size, buffer.take()) == (0, [])
