"""A listening socket in a loop, where there are too few descriptors to accept."""

from __future__ import annotations

import errno
import os
import resource
import socket

from ddplaunch.system.loop.loop import PAUSE, Acceptor
from tests.loops import FakeLoop


class Accepted:
    """The connections of an acceptor, and why it took none."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self.errors: list[OSError] = []

    def on_connection(self, sock: socket.socket, _address: object) -> None:
        self.connections.append(sock)

    def on_pause(self, error: OSError) -> None:
        self.errors.append(error)


def test_without_a_free_descriptor_nothing_is_accepted_for_a_second_and_nothing_is_lost():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepted, soft_hard = Accepted(), resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = FakeLoop()
    with socket.create_connection(listener.getsockname()):
        acceptor = Acceptor(loop, listener, accepted)
        acceptor.start()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, soft_hard[1]))
        try:
            loop.until(lambda: accepted.errors)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
        assert [error.errno for error in accepted.errors] == [errno.EMFILE]
        acceptor.start()
        loop.pass_time(PAUSE / 2)
        assert not loop.watches(listener)
        loop.pass_time(PAUSE / 2)
        loop.until(lambda: accepted.connections)
        assert len(accepted.connections) == 1
        acceptor.close()
        acceptor.close()
        assert loop.is_idle
    accepted.connections[0].close()
