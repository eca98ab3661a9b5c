"""A listening socket in a loop, where there are too few descriptors to accept."""

import errno
import os
import resource
import selectors
import socket

from ddplaunch.net.acceptor import PAUSE, Acceptor


def test_without_a_free_descriptor_nothing_is_accepted_for_a_second_and_nothing_is_lost():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepted, why, soft_hard = [], [], resource.getrlimit(resource.RLIMIT_NOFILE)
    with selectors.SelectSelector() as selector, socket.create_connection(listener.getsockname()):
        acceptor = Acceptor(
            listener, selector, lambda sock, _: accepted.append(sock), clock=lambda: 100.0, paused=why.append
        )
        acceptor.start()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, soft_hard[1]))
        try:
            [(key, _)] = selector.select(10)
            key.data()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
        assert ([error.errno for error in why], acceptor.deadline) == ([errno.EMFILE], 100 + PAUSE)
        acceptor.start()
        acceptor.expire(100 + PAUSE / 2)
        assert not selector.get_map()
        acceptor.expire(100 + PAUSE)
        assert acceptor.deadline is None
        [(key, _)] = selector.select(10)
        key.data()
        assert len(accepted) == 1
        acceptor.close()
        acceptor.close()
        assert not selector.get_map()
    accepted[0].close()
