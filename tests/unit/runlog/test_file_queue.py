"""What waits for the process that writes files: bounded, in order, and nobody's wait but that process's."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ddplaunch.record.file_queue import (
    END,
    EVENT,
    HANG_TIMEOUT,
    HEADER,
    HOLD,
    LIMIT,
    MISSING,
    OPEN,
    PROGRESS,
    RECHECK,
    WRITE,
    FileQueue,
    parse,
)
from tests.loops import FakeLoop

LINE = b"x" * 999 + b"\n"
PIECE = LINE * 32


@dataclass
class Writer:
    """The other side, which takes what we tell it to."""

    sock: socket.socket
    shared: int
    files: FileQueue
    loop: FakeLoop
    taken: bytearray = field(default_factory=bytearray)

    def take(self) -> None:
        """Take all that there is, with what is still to be sent."""
        while True:
            try:
                self.taken += self.sock.recv(1 << 20)
            except BlockingIOError:
                if not self.files.size:
                    return
                self.files._flush()

    def messages(self) -> list[tuple[bytes, int, bytes]]:
        """What has been taken: kinds, numbers of logs, contents."""
        found, at = [], 0
        while at < len(self.taken):
            kind, log, size = parse(bytes(self.taken[at : at + HEADER]))
            found.append((kind, log, bytes(self.taken[at + HEADER : at + HEADER + size])))
            at += HEADER + size
        return found

    def note(self, done: int) -> None:
        """Note progress."""
        os.pwrite(self.shared, done.to_bytes(8, "little"), 0)


@pytest.fixture
def writer() -> Iterator[Writer]:
    ours, its = socket.socketpair()
    ours.setblocking(False)
    its.setblocking(False)
    shared = os.memfd_create("test")
    os.pwrite(shared, bytes(PROGRESS), 0)
    writer = Writer(its, os.dup(shared), FileQueue(ours, shared), FakeLoop())
    writer.files.attach(writer.loop)
    yield writer
    writer.files.close()
    its.close()
    os.close(writer.shared)


def test_messages_arrive_in_their_order(writer):
    log = writer.files.open_log(b"{}")
    for number in range(1000):
        log.write(b"%d" % number * 100)
    writer.files.put(EVENT, b"event")
    writer.take()
    expected = [(WRITE, 1, b"%d" % number * 100) for number in range(1000)]
    assert writer.messages() == [(OPEN, 1, b"{}"), *expected, (EVENT, 0, b"event")]


def test_what_waits_is_bounded_and_what_is_dropped_is_counted_and_marked_in_each_log(writer):
    logs = [writer.files.open_log(b"{}") for _ in range(2)]
    pieces = 2 * LIMIT // len(PIECE)
    for number in range(pieces):
        logs[number % 2].write(PIECE)
    assert LIMIT - 2 * len(PIECE) < writer.files.size <= LIMIT
    assert not logs[0].is_kept
    writer.take()
    logs[0].write(LINE)
    assert logs[0].is_kept
    writer.take()
    written = [sum(len(data) for kind, log, data in writer.messages() if kind == WRITE and log == at) for at in (1, 2)]
    missing = [[int(data) for kind, log, data in writer.messages() if kind == MISSING and log == at] for at in (1, 2)]
    assert [len(each) for each in missing] == [1, 1]
    assert sum(written) + sum(map(sum, missing)) == pieces * len(PIECE) + len(LINE)
    assert writer.files.dropped_lines * len(LINE) == sum(map(sum, missing))


def test_the_end_always_has_room(writer):
    while writer.files.size < LIMIT:
        writer.files.put(EVENT, PIECE)
    for _ in range(100):
        writer.files.put(EVENT, PIECE)
    assert writer.files.size < LIMIT + (2 << 20)
    writer.files.end()
    writer.take()
    assert writer.messages()[-1] == (END, 0, b"")


def test_a_disk_hangs_when_two_looks_find_no_progress(writer):
    files = writer.files
    files.put(EVENT, b"x")
    writer.loop.pass_time(HANG_TIMEOUT + RECHECK - 0.1)
    assert not files.hangs
    writer.loop.pass_time(0.1)
    assert files.hangs
    assert writer.loop.deadline is None
    writer.note(HEADER + 1)
    files.put(EVENT, b"y")
    assert not files.hangs


def test_a_disk_that_has_taken_all_is_not_looked_at(writer):
    writer.files.put(EVENT, b"x")
    writer.note(HEADER + 1)
    writer.loop.pass_time(HANG_TIMEOUT)
    assert writer.loop.deadline is None


def test_a_slow_disk_does_not_hang_but_holds_the_workers(writer):
    files = writer.files
    log = files.open_log(b"{}")
    while files.size <= HOLD:
        log.write(PIECE)
    assert files.holds
    for done in range(1, 5):
        writer.note(done)
        writer.loop.pass_time(HANG_TIMEOUT)
        assert not files.hangs
    writer.loop.pass_time(HANG_TIMEOUT + RECHECK)
    assert files.hangs
    assert not files.holds


def test_what_is_left_waits_in_shared_memory(writer):
    for number in range(100):
        writer.files.put(EVENT, b"%d" % number * 10_000)
    writer.files.leave()
    while data := writer.sock.recv(1 << 20):
        writer.taken += data
    writer.taken += os.pread(writer.shared, 1 << 24, PROGRESS)
    assert [data for _, _, data in writer.messages()] == [b"%d" % number * 10_000 for number in range(100)]


def test_without_a_writer_everything_is_dropped():
    files = FileQueue()
    log = files.open_log(b"{}")
    log.write(LINE)
    log.close()
    files.end()
    assert (files.size, files.is_busy, log.is_kept) == (0, False, False)
