"""The last step of an agent: how long it waits for files."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.launcher.node.shutdown import Shutdown
from ddplaunch.launcher.node.signals import SignalOrigin, SignalSource
from ddplaunch.reach.pipes import FrontPipes, OutputQueue
from ddplaunch.record.file_queue import PROGRESS, FileQueue
from tests.loops import FakeLoop


class Reporter:
    """Takes note that files were left."""

    left = False

    def report_folder(self, *, leaves: bool) -> None:
        self.left = leaves


@pytest.fixture
def pipes() -> Iterator[FrontPipes]:
    """Both sides in one process."""
    pipes = FrontPipes.make()
    yield pipes
    for fd in (*pipes.signals, *pipes.requests, *pipes.replies, pipes.lease):
        os.close(fd)
    for sock in (*pipes.output, *pipes.spared):
        sock.close()


@pytest.fixture
def files() -> Iterator[FileQueue]:
    """Of a disk that takes nothing."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    shared = os.memfd_create("shared")
    os.pwrite(shared, bytes(PROGRESS), 0)
    yield FileQueue(ours, shared, os.getpid())
    its.close()


def test_who_asks_again_for_the_end_does_not_wait_for_the_disk(pipes: FrontPipes, files: FileQueue) -> None:
    stops, loop = frozenset({signal.SIGINT}), FakeLoop()
    files.attach(loop)
    signals = SignalSource(loop, pipes, stops=stops, end_within=60)

    def interrupted() -> None:
        signals.received(os.read(pipes.signals[0], 1)[0], SignalOrigin.FRONT)

    loop.watch(pipes.signals[0], interrupted)
    context: Any = SimpleNamespace(queue=OutputQueue(loop, pipes.output[1]), files=files, reporter=Reporter())
    pipes.pass_on(signal.SIGINT)
    shutdown = Shutdown(loop, context, signals, pipes, None)
    shutdown.leave_early()
    assert files.is_busy
    assert not files.has_hung
    assert context.reporter.left
    files.close()
