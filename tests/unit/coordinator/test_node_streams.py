"""A stream belongs to the agent that it leads to: no other writes into it, and it ends with that agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.launcher.job.questions import NodeStreams
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.system.loop.loop import Loop

Sent = list[tuple[Sequence[int], object]]


@pytest.fixture
def sent() -> Sent:
    return []


@pytest.fixture
def left() -> list[int]:
    """The agents of which no stream was left, in this order."""
    return []


@pytest.fixture
def streams(sent: Sent, left: list[int]) -> Iterator[NodeStreams]:
    loop = Loop()
    coordinator: Any = SimpleNamespace(
        order=lambda ids, order: sent.append((ids, order)), on_last_stream_ended=left.append
    )
    streams = NodeStreams(loop, coordinator)
    yield streams
    streams.close()
    loop.close()


@pytest.fixture
def client(streams: NodeStreams) -> Iterator[socket.socket]:
    """The client of a stream to agent 7, the first."""
    near, far = socket.socketpair()
    far.setblocking(False)
    streams.open(7, near, b"request", 60.0, b"late")
    with far:
        yield far


def test_a_stream_is_written_by_its_own_agent_only(streams, client, sent, left):
    assert sent == [((7,), Chunk(1, b"request"))]
    streams.on_chunk(8, Chunk(1, b"false"))
    streams.on_chunk(8, Chunk(1))
    streams.on_chunk(7, Chunk(2, b"of no stream"))
    streams.on_chunk(7, Chunk(1, b"said"))
    assert client.recv(100) == b"said"
    assert 7 in streams
    assert 8 not in streams
    streams.on_chunk(7, Chunk(1))
    assert client.recv(100) == b""
    assert left == [7]
    assert 7 not in streams


def test_a_stream_ends_with_its_agent(streams, client, left):
    near, other = socket.socketpair()
    with other:
        streams.open(8, near, b"request", 60.0, b"late")
        streams.drop_departed({8: None})
        assert client.recv(100) == b""
        assert left == [7]
        assert 8 in streams
