"""The console of a job on several hosts: equal messages of ours once, what workers write as it is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import cast

import pytest

from ddplaunch.launcher.elsewhere import console
from ddplaunch.launcher.elsewhere.console import Console
from ddplaunch.reach.connections import HostConnection
from ddplaunch.reach.pipes import BARS, OURS, STDERR, STDOUT, OutputQueue
from ddplaunch.system.loop.stream import FrameError
from tests.loops import FakeLoop

A, B = (cast(HostConnection, object()) for _ in "ab")  # it looks into none


class Shown:
    def __init__(self) -> None:
        self.read, self.written = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.loop = FakeLoop()
        self.console = Console(self.loop, OutputQueue(self.loop, self.written))

    def take(self) -> bytes:
        """The next message to the front: the stream, and the data."""
        return self.read.recv(1 << 17)


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    with made.read, made.written:
        yield made


@pytest.mark.parametrize("stream", [STDOUT, STDERR], ids=["stdout", "stderr"])
def test_an_equal_line_of_workers_on_two_hosts_is_shown_twice_whatever_it_looks_like(
    shown: Shown, stream: bytes
) -> None:
    for host in (A, B):
        shown.console.show(host, stream, b"error: the same\n")
        assert shown.take() == stream + b"error: the same\n"


def test_an_equal_message_of_ours_is_shown_once_but_as_often_as_its_first_host_sends_it(shown: Shown) -> None:
    for host in (A, B, A, B):
        shown.console.show(host, OURS, b"ddplaunch: full disk\n")
    shown.console.show(B, OURS, b"ddplaunch: the end\n")
    assert [shown.take() for _ in range(3)] == [
        STDERR + b"ddplaunch: full disk\n",
        STDERR + b"ddplaunch: full disk\n",
        STDERR + b"ddplaunch: the end\n",
    ]


def test_messages_of_long_ago_are_forgotten(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REMEMBERED", 2)
    for number in (0, 1, 2):
        shown.console.show(A, OURS, b"%d" % number)
        assert shown.take() == STDERR + b"%d" % number
    shown.console.show(B, OURS, b"0")
    assert shown.take() == STDERR + b"0"
    shown.console.show(B, OURS, b"2")
    shown.console.show(B, OURS, b"3")
    assert shown.take() == STDERR + b"3"


# --- progress bars


def test_the_bars_of_all_hosts_are_shown_as_those_of_one_and_gone_with_their_host(shown: Shown) -> None:
    shown.console.show(A, BARS, b"0 0 10%\n1 0 60%\n")
    shown.console.update([])
    assert shown.take() == BARS + b"0 0 10%\n1 0 60%\n"
    shown.console.show(B, BARS, b"2 0 30%\n3 0 90%\n")
    shown.console.update([])
    assert shown.loop.deadline is not None  # ten times a second is enough
    shown.console.forget_bars(A)
    assert shown.take() == BARS + b"2 0 30%\n3 0 90%\n"
    shown.console.show(B, BARS, b"\n")
    assert shown.take() == BARS + b"\n"


def test_a_host_that_sends_no_bars_as_bars_is_refused(shown: Shown) -> None:
    with pytest.raises(FrameError, match="no progress bars"):
        shown.console.show(A, BARS, b"0-99999999999 0 x\n")
