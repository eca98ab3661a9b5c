"""How long the workers are held up by a reader that does not read; a real socket pair, made-up times."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from ddplaunch.agent.pipes import FULL, STDOUT, STUCK, Backpressure, FrontPipes, OutputQueue


@pytest.fixture
def reader() -> Iterator[tuple[OutputQueue, socket.socket]]:
    """An outbox and the end that takes from it."""
    front, agent = FrontPipes.make().output
    with front, agent:
        yield OutputQueue(agent), front


@pytest.fixture
def backpressure(reader: tuple[OutputQueue, socket.socket]) -> Iterator[Backpressure]:
    with selectors.DefaultSelector() as selector:
        yield Backpressure(reader[0], selector)


def take_all(queue: OutputQueue, front: socket.socket) -> None:
    while queue.size:
        front.recv(1 << 17)
        queue.flush()


def test_an_outbox_with_room_holds_nobody_up(reader, backpressure):
    queue, _ = reader
    queue.put(STDOUT, bytes(FULL // 4))
    assert backpressure.mind(None, True, 0.0) is False
    assert backpressure.deadline is None


def test_a_full_outbox_holds_the_workers_up_until_the_reader_is_stuck_for_long(reader, backpressure):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    assert backpressure.mind(None, True, 10.0) is False
    assert backpressure.deadline == 10.0 + STUCK
    assert backpressure.mind(None, True, 10.0 + STUCK - 0.1) is False
    assert backpressure.mind(None, True, 10.0 + STUCK) is True
    assert backpressure.deadline is None


def test_a_slow_reader_is_waited_for(reader, backpressure):
    queue, front = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.mind(None, True, 10.0)
    front.recv(1 << 17)
    queue.flush()
    assert backpressure.mind(None, True, 10.0 + STUCK) is False
    assert backpressure.deadline == 10.0 + 2 * STUCK


def test_what_no_log_has_is_never_dropped(reader, backpressure):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.mind(None, False, 10.0)
    assert backpressure.mind(None, False, 10.0 + STUCK) is False


def test_when_a_log_fails_while_output_is_dropped_nothing_more_is(reader, backpressure):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.mind(None, True, 10.0)
    assert backpressure.mind(None, True, 10.0 + STUCK) is True
    assert backpressure.mind(None, False, 20.0) is False
    assert backpressure.mind(None, False, 20.0 + STUCK) is False


def test_a_reader_that_comes_back_gets_everything_from_there_on(reader, backpressure):
    queue, front = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.mind(None, True, 10.0)
    assert backpressure.mind(None, True, 10.0 + STUCK) is True
    take_all(queue, front)
    assert backpressure.mind(None, True, 30.0) is False
    assert backpressure.deadline is None
