"""How long the workers are held up by a reader that does not read; a real socket pair, made-up times."""

from __future__ import annotations

import _socket
import selectors
from collections.abc import Iterator

import pytest

from ddplaunch.agent.pipes import FULL, READER_TIMEOUT, STDOUT, Backpressure, FrontPipes, OutputQueue


@pytest.fixture
def reader() -> Iterator[tuple[OutputQueue, _socket.socket]]:
    """An queue and the end that takes from it."""
    pipes = FrontPipes.make()
    front, agent = pipes.output
    yield OutputQueue(agent), front
    for end in (front, agent, *pipes.left):
        end.close()


@pytest.fixture
def backpressure(reader: tuple[OutputQueue, _socket.socket]) -> Iterator[Backpressure]:
    with selectors.DefaultSelector() as selector:
        yield Backpressure(reader[0], selector)


@pytest.fixture
def pauses() -> list[bool]:
    """What was asked of the workers' pipes, each time."""
    return []


def take_all(queue: OutputQueue, front: _socket.socket) -> None:
    while queue.size:
        front.recv(1 << 17)
        queue.flush()


def test_an_queue_with_room_holds_nobody_up(reader, backpressure, pauses):
    queue, _ = reader
    queue.put(STDOUT, bytes(FULL // 4))
    assert backpressure.update(pauses.append, True, 0.0) is False
    assert backpressure.deadline is None


def test_a_full_queue_holds_the_workers_up_until_the_reader_is_stuck_for_long(reader, backpressure, pauses):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    assert backpressure.update(pauses.append, True, 10.0) is False
    assert backpressure.deadline == 10.0 + READER_TIMEOUT
    assert backpressure.update(pauses.append, True, 10.0 + READER_TIMEOUT - 0.1) is False
    assert backpressure.update(pauses.append, True, 10.0 + READER_TIMEOUT) is True
    assert backpressure.deadline is None
    assert pauses == [True, True, False]


def test_a_slow_reader_is_waited_for(reader, backpressure, pauses):
    queue, front = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.update(pauses.append, True, 10.0)
    front.recv(1 << 17)
    queue.flush()
    assert backpressure.update(pauses.append, True, 10.0 + READER_TIMEOUT) is False
    assert backpressure.deadline == 10.0 + 2 * READER_TIMEOUT


def test_what_no_log_has_is_never_dropped(reader, backpressure, pauses):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.update(pauses.append, False, 10.0)
    assert backpressure.update(pauses.append, False, 10.0 + READER_TIMEOUT) is False


def test_when_a_log_fails_while_output_is_dropped_nothing_more_is(reader, backpressure, pauses):
    queue, _ = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.update(pauses.append, True, 10.0)
    assert backpressure.update(pauses.append, True, 10.0 + READER_TIMEOUT) is True
    assert backpressure.update(pauses.append, False, 20.0) is False
    assert backpressure.update(pauses.append, False, 20.0 + READER_TIMEOUT) is False


def test_a_reader_that_comes_back_gets_everything_from_there_on(reader, backpressure, pauses):
    queue, front = reader
    queue.put(STDOUT, bytes(2 * FULL))
    backpressure.update(pauses.append, True, 10.0)
    assert backpressure.update(pauses.append, True, 10.0 + READER_TIMEOUT) is True
    take_all(queue, front)
    assert backpressure.update(pauses.append, True, 30.0) is False
    assert backpressure.deadline is None
