"""The guard of a run, seen from the agent, with the other side of its connection in the hands of the test."""

import errno
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ddplaunch.launcher.workers import servers
from ddplaunch.launcher.workers.servers import Fork, Guard, ServerLost
from ddplaunch.system.process.child import StartError, Stdio, Usage
from ddplaunch.system.process.linux import unread
from tests.conftest import until

NOTHING = Usage(0, 0.0)


@pytest.fixture
def sides() -> Iterator[tuple[Guard, socket.socket, int]]:
    """A guard that is ready, its side of the connection, and the pipe that it holds open for as long as it lives."""
    ours, theirs = socket.socketpair()
    guard = Guard(ours, 2)
    theirs.settimeout(60)
    theirs.sendall(f"guard {os.getpid()}\nready\n".encode())
    guard.read()
    guard.send_surroundings()
    _, (folder, output, life), _, _ = socket.recv_fds(theirs, 8, 3)
    os.close(folder)
    os.close(output)
    with theirs:
        yield guard, theirs, life
    guard.close()


def test_after_one_answer_that_does_not_come_none_is_waited_for_nor_taken_for_another(sides, monkeypatch):
    guard, other, life = sides
    other.sendall(b"usage 3 0.5\n")
    assert guard.reap(100) == Usage(3072, 0.5)
    monkeypatch.setattr(servers, "ANSWER_TIMEOUT", 0.01)
    assert guard.reap(101) == NOTHING
    monkeypatch.setattr(servers, "ANSWER_TIMEOUT", 600)
    other.sendall(b"usage 7 0.5\n")
    assert guard.reap(102) == NOTHING
    guard.read()
    assert guard.reap(103) == NOTHING
    os.close(life)


def test_a_pause_of_everything_in_the_middle_of_an_answer_gives_none_up(sides, monkeypatch):
    guard, other, life = sides
    paused, clock_gettime = 0.0, time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock_gettime(which) + paused)
    monkeypatch.setattr(time, "monotonic", lambda: time.clock_gettime(time.CLOCK_MONOTONIC))

    def answer() -> None:
        nonlocal paused
        other.recv(1)
        paused = 1000.0
        other.sendall(b"pid 1\n")
        until(lambda: not unread(guard.fileno()), "the first line to be read")
        other.sendall(b"usage 7 0.5\n")

    teller = threading.Thread(target=answer)
    teller.start()
    assert guard.reap(100) == Usage(7168, 0.5)
    teller.join()
    os.close(life)


def test_an_answer_that_comes_in_lines_without_an_end_is_waited_for_no_longer(sides, monkeypatch):
    guard, other, life = sides
    monkeypatch.setattr(servers, "ANSWER_TIMEOUT", 0.2)
    given_up, most = threading.Event(), 500
    lines = 0

    def tell() -> None:
        nonlocal lines
        while lines < most and not given_up.wait(0.01):
            other.sendall(b"pid 1\n")
            lines += 1

    teller = threading.Thread(target=tell)
    teller.start()
    assert guard.reap(100) == NOTHING
    given_up.set()
    teller.join()
    assert lines < most
    os.close(life)


def test_one_that_takes_no_request_is_waited_for_as_one_that_does_not_answer(sides, monkeypatch):
    guard, _, life = sides
    with socket.socket(fileno=os.dup(guard.fileno())) as full, suppress(BlockingIOError):
        while True:
            full.send(bytes(1 << 16))
    monkeypatch.setattr(servers, "ANSWER_TIMEOUT", 0.01)
    with pytest.raises(ServerLost, match="it does not answer"):
        guard.fork([Fork(("python", "bootstrap.py"), {}, Stdio(0, 1, 2))])
    os.close(life)


def test_one_that_ends_with_a_request_unread_has_ended_like_any_other(sides):
    guard, other, life = sides
    other.close()
    with pytest.raises(ServerLost, match="it has ended"):
        guard.read()
    os.close(life)


def test_one_that_has_ended_is_asked_nothing_even_while_what_it_has_left_is_ended(sides):
    guard, other, life = sides
    assert not guard.has_ended
    os.close(life)
    assert guard.has_ended
    other.sendall(b"usage 7 0.5\n")
    assert guard.reap(100) == NOTHING


def test_one_that_is_closed_has_ended_whatever_file_has_its_number(sides):
    guard, _, life = sides
    guard.close()
    os.close(life)
    pipes = [os.pipe() for _ in range(3)]
    for _, write in pipes:
        os.write(write, b"x")
    assert guard.has_ended
    assert [os.read(read, 2) for read, _ in pipes] == [b"x"] * 3
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)


def test_whichever_file_cannot_be_opened_its_worker_is_named_and_no_other_file_is_left_open(sides):
    guard, other, life = sides
    other.setblocking(False)
    fork = Fork(("python", "bootstrap.py"), {}, Stdio(0, 1, 2))
    opened = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed, children, request = [], [], b"the first"
    for limit in range(3, soft):
        if request:
            other.sendall(f"pid {os.getpid()}\npid {os.getpid()}\nforked\n".encode())
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            children = guard.fork([fork, fork])
            break
        except StartError as error:
            failed.append((error.errno, error.index))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir("/proc/self/fd") == opened
        request = b""
        with suppress(BlockingIOError):
            request = other.recv(1 << 16)  # without the descriptors
    while children:
        children.pop().abandon()
    steps = [place for place, _ in itertools.groupby(failed)]
    assert steps == [(errno.EMFILE, place) for place in (0, 1, 0, 1)]  # the pipes of each, and then its process
    os.close(life)
