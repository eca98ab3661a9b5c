"""Whose connection it is: that of this user, who has not closed it; by all ways in which loopback is reached."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ddplaunch.worker import own_user

NOBODY = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listener(stack: ExitStack, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return stack.enter_context(socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::"))
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")


def connected(stack: ExitStack, there: socket.socket, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    client = stack.enter_context(socket.socket(family))
    client.connect((address, there.getsockname()[1]))
    return client


WAYS = [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]


@pytest.mark.parametrize(("listens_at", "reached_at"), WAYS)
def test_this_user_is_let_in_as_long_as_the_connection_is_open(stack, listens_at, reached_at):
    there = listener(stack, listens_at)
    client = connected(stack, there, reached_at)
    accepted = stack.enter_context(there.accept()[0])
    assert own_user.admits(accepted)
    client.sendall(b"words")
    client.close()
    assert accepted.recv(10) == b"words"  # which could be anybody's
    assert not own_user.admits(accepted)


@root_only
@pytest.mark.parametrize(("listens_at", "reached_at"), WAYS)
@pytest.mark.parametrize("stays", [True, False], ids=["open", "closed"])
def test_another_user_is_not(stack, listens_at, reached_at, stays):
    there = listener(stack, listens_at)
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        os.setuid(NOBODY)
        client = connected(stack, there, reached_at)
        client.sendall(b"words")
        if not stays:
            client.close()
        os.read(done, 1)
        os._exit(0)
    try:
        accepted = stack.enter_context(there.accept()[0])
        assert accepted.recv(10) == b"words"
        if not stays:
            assert accepted.recv(10) == b""
        assert not own_user.admits(accepted)
    finally:
        os.close(tell)
        os.close(done)
        os.waitpid(pid, 0)


def test_those_who_may_not_are_closed_and_the_next_is_accepted(stack):
    there = listener(stack, "127.0.0.1")
    left = connected(stack, there, "127.0.0.1")
    left.close()
    client = connected(stack, there, "127.0.0.1")
    accepted, address = own_user.accept(there)
    stack.enter_context(accepted)
    assert address == client.getsockname()


def test_a_port_is_ours_if_we_listen_there(stack):
    there = listener(stack, "127.0.0.1")
    port = there.getsockname()[1]
    assert own_user.is_listening_here(port)
    there.close()
    assert not own_user.is_listening_here(port)


def test_a_debugpy_that_is_started_in_another_way_is_refused(stack):
    port = listener(stack, "127.0.0.1").getsockname()[1]

    class Other:
        __version__ = "9.0"

        def listen(self, address: tuple[str, int]) -> tuple[str, int]:
            return address[0], port

    with pytest.raises(RuntimeError, match=r"cannot keep other users out of debugpy 9\.0"):
        own_user.listen(Other())
