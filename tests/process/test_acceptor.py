"""A listening socket in a loop, where there are too few descriptors to accept."""

from __future__ import annotations

import errno
import os
import resource
import socket

from ddplaunch.system.loop.loop import PAUSE, Acceptor
from tests.loops import FakeLoop


def test_without_a_free_descriptor_nothing_is_accepted_for_a_second_and_nothing_is_lost():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepted, why, soft_hard = [], [], resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = FakeLoop()
    with socket.create_connection(listener.getsockname()):
        acceptor = Acceptor(loop, listener, lambda sock, _: accepted.append(sock), paused=why.append)
        acceptor.start()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, soft_hard[1]))
        try:
            loop.until(lambda: why)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
        assert [error.errno for error in why] == [errno.EMFILE]
        acceptor.start()
        loop.pass_time(PAUSE / 2)
        assert not loop.watches(listener)
        loop.pass_time(PAUSE / 2)
        loop.until(lambda: accepted)
        assert len(accepted) == 1
        acceptor.close()
        acceptor.close()
        assert loop.is_idle
    accepted[0].close()
