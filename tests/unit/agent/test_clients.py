"""What becomes of the connection of a client that has asked for a stream."""

from __future__ import annotations

import os
import resource
import socket

from ddplaunch.launcher.node.clients import Client
from ddplaunch.reach.channel.handshake import LIMIT, Decoder
from ddplaunch.record.window import requests
from tests.loops import FakeLoop


def test_a_connection_is_handed_over_without_a_free_descriptor() -> None:
    loop = FakeLoop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    near, far = socket.socketpair()
    near.setblocking(False)
    client = Client(loop, near, 1)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        given = client.hand_over(requests.Done())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert given is not None
    client.close()
    client.send(requests.Done())
    with given, far:
        decoder = Decoder(LIMIT)
        decoder.feed(far.recv(1 << 16))
        frame = decoder.take()
        assert frame is not None
        assert requests.decode_reply(frame) == requests.Done()
        assert decoder.take() is None, "the client has given the socket up"
        assert given.send(b"more") == 4
