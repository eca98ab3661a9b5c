"""How long the workers are held up by a reader that does not read; a real socket pair, made-up times."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from ddplaunch.agent.pipes import FULL, STDOUT, STUCK, Outbox, Tie, Valve


@pytest.fixture
def reader() -> Iterator[tuple[Outbox, socket.socket]]:
    """An outbox and the end that takes from it."""
    front, agent = Tie.make().output
    with front, agent:
        yield Outbox(agent), front


@pytest.fixture
def valve(reader: tuple[Outbox, socket.socket]) -> Iterator[Valve]:
    with selectors.DefaultSelector() as selector:
        yield Valve(reader[0], selector)


def take_all(outbox: Outbox, front: socket.socket) -> None:
    while outbox.size:
        front.recv(1 << 17)
        outbox.flush()


def test_an_outbox_with_room_holds_nobody_up(reader, valve):
    outbox, _ = reader
    outbox.put(STDOUT, bytes(FULL // 4))
    assert valve.mind(None, True, 0.0) is False
    assert valve.deadline is None


def test_a_full_outbox_holds_the_workers_up_until_the_reader_is_stuck_for_long(reader, valve):
    outbox, _ = reader
    outbox.put(STDOUT, bytes(2 * FULL))
    assert valve.mind(None, True, 10.0) is False
    assert valve.deadline == 10.0 + STUCK
    assert valve.mind(None, True, 10.0 + STUCK - 0.1) is False
    assert valve.mind(None, True, 10.0 + STUCK) is True
    assert valve.deadline is None


def test_a_slow_reader_is_waited_for(reader, valve):
    outbox, front = reader
    outbox.put(STDOUT, bytes(2 * FULL))
    valve.mind(None, True, 10.0)
    front.recv(1 << 17)
    outbox.flush()
    assert valve.mind(None, True, 10.0 + STUCK) is False
    assert valve.deadline == 10.0 + 2 * STUCK


def test_what_no_log_has_is_never_dropped(reader, valve):
    outbox, _ = reader
    outbox.put(STDOUT, bytes(2 * FULL))
    valve.mind(None, False, 10.0)
    assert valve.mind(None, False, 10.0 + STUCK) is False


def test_when_a_log_fails_while_output_is_dropped_nothing_more_is(reader, valve):
    outbox, _ = reader
    outbox.put(STDOUT, bytes(2 * FULL))
    valve.mind(None, True, 10.0)
    assert valve.mind(None, True, 10.0 + STUCK) is True
    assert valve.mind(None, False, 20.0) is False
    assert valve.mind(None, False, 20.0 + STUCK) is False


def test_a_reader_that_comes_back_gets_everything_from_there_on(reader, valve):
    outbox, front = reader
    outbox.put(STDOUT, bytes(2 * FULL))
    valve.mind(None, True, 10.0)
    assert valve.mind(None, True, 10.0 + STUCK) is True
    take_all(outbox, front)
    assert valve.mind(None, True, 30.0) is False
    assert valve.deadline is None
