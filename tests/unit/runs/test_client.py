"""The side of a conversation with a run that asks."""

import socket
import threading
import time

import pytest

from ddplaunch.reach.channel.handshake import pack
from ddplaunch.record.window import requests
from ddplaunch.tools.runs import client


def test_a_pause_of_everything_uses_up_no_time_for_the_first_reply(monkeypatch):
    paused, clock_gettime = 0.0, time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock_gettime(which) + paused)
    ours, theirs = socket.socketpair()

    def answer() -> None:
        nonlocal paused
        theirs.recv(1)
        paused = 1000.0
        theirs.sendall(pack(requests.encode(requests.Done(3))))

    teller = threading.Thread(target=answer)
    teller.start()
    with ours, theirs:
        assert next(client.replies_of(ours, requests.StopRun(), 60)) == requests.Done(3)
        teller.join()


def test_a_run_that_is_silent_is_waited_for_no_longer():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        next(client.replies_of(ours, requests.StopRun(), 0.01))
