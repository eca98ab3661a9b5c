"""How long the workers are held up by a reader that does not read; a real socket pair, and a loop whose time is set."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ddplaunch.reach.pipes import FULL, READER_TIMEOUT, STDOUT, Backpressure, OutputQueue
from tests.loops import FakeLoop


class Bed:
    """A queue, the end that takes from it, and what holds the workers up."""

    def __init__(self, front: socket.socket, agent: socket.socket) -> None:
        self.loop = FakeLoop()
        self.front = front
        self.queue = OutputQueue(self.loop, agent)
        self.backpressure = Backpressure(self.loop, self.queue)

    def wait(self, seconds: float = 0.0, *, logged: bool = True) -> str:
        """Let the loop go round until so much time has passed, and return what happens to the workers' output then."""
        until = self.loop.now() + seconds
        while self.loop.now() < until:
            self.backpressure.update(logged=logged)
            ends = self.loop.timer(until, lambda: None)
            self.loop.run_once()
            ends.cancel()
        self.backpressure.update(logged=logged)
        return "held" if self.backpressure.holds else "dropped" if self.backpressure.mutes else "shown"

    def read(self) -> None:
        """Have the front take a message."""
        self.front.recv(1 << 17)
        self.loop.turn()


@pytest.fixture
def bed() -> Iterator[Bed]:
    front, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.setblocking(False)
    with front, agent:
        yield Bed(front, agent)


def test_a_queue_with_room_holds_nobody_up(bed):
    bed.queue.put(STDOUT, bytes(FULL // 4))
    assert bed.wait() == "shown"
    assert bed.loop.deadline is None


def test_a_full_queue_holds_the_workers_up_until_the_reader_is_stuck_for_long(bed):
    bed.queue.put(STDOUT, bytes(2 * FULL))
    assert bed.wait() == "held"
    assert bed.wait(READER_TIMEOUT - 0.1) == "held"
    assert bed.wait(0.1) == "dropped"
    assert bed.loop.deadline is None


def test_a_slow_reader_is_waited_for(bed):
    bed.queue.put(STDOUT, bytes(2 * FULL))
    bed.wait(1.0)
    sent = bed.queue.sent
    while bed.queue.sent == sent:
        bed.read()
    assert bed.wait(READER_TIMEOUT) == "held"
    assert bed.wait(READER_TIMEOUT) == "dropped"


def test_what_no_log_has_is_never_dropped(bed):
    bed.queue.put(STDOUT, bytes(2 * FULL))
    assert bed.wait(3 * READER_TIMEOUT, logged=False) == "held"


def test_when_a_log_fails_while_output_is_dropped_nothing_more_is(bed):
    bed.queue.put(STDOUT, bytes(2 * FULL))
    assert bed.wait(READER_TIMEOUT) == "dropped"
    assert bed.wait(logged=False) == "held"
    assert bed.wait(READER_TIMEOUT, logged=False) == "held"


def test_a_reader_that_comes_back_gets_everything_from_there_on(bed):
    bed.queue.put(STDOUT, bytes(2 * FULL))
    assert bed.wait(READER_TIMEOUT) == "dropped"
    while bed.queue.size:
        bed.read()
    assert bed.wait() == "shown"
    assert bed.loop.deadline is None


def test_messages_hold_whole_lines_and_those_that_wait_are_joined(bed):
    line = b"x" * 99 + b"\n"
    while not bed.queue.size:
        bed.queue.put(STDOUT, line * 1000)
    for _ in range(10):
        bed.queue.put(STDOUT, line)
    messages = []
    while bed.queue.size:
        messages.append(bed.front.recv(1 << 17))
        bed.loop.turn()
    assert all(message[:1] == STDOUT and message.endswith(b"\n") and len(message) <= 65537 for message in messages)
    assert len(messages[-1]) > 10 * len(line)
