"""The conversation with a worker, as the worker of the test wants it; and how clocks are compared."""

import json
import socket
from collections.abc import Callable

import pytest

from ddplaunch.reach.channel.handshake import pack
from ddplaunch.record.window import requests
from ddplaunch.system.loop.stream import Decoder
from ddplaunch.tools.profile.ranks import Alignment, Ping, Rank, Wish, align

HELLO = {"phase": "hello", "boot_id": "b"}


@pytest.fixture
def rank(tmp_path):
    """The rank, its worker's end of the connection, and what makes the rank take what the worker says."""
    ours, its = socket.socketpair()
    ours.setblocking(False)
    made: Rank = Rank(3, ours, Wish(1.0, 0, memory=False), str(tmp_path))

    def says(*messages: object) -> Rank:
        for message in messages:
            its.sendall(pack(message if isinstance(message, bytes) else json.dumps(message).encode()))
            made.read()
        return made

    decoder = Decoder(1000)
    decoder.feed(its.recv(1000))
    assert requests.decode_request(decoder.take() or b"").asked == requests.Attach(3, profiles=True)
    yield made, its, says
    for each in (ours, its, made.trace, made.memory):
        each.close()


def pongs(its: socket.socket, says: Callable[..., Rank], number: int = 8) -> None:
    """Answer all pings."""
    for at in range(number):
        assert json.loads(its.recv(1000).splitlines()[-1]) == {"type": "ping", "number": at}
        says([at, 10])


def test_a_worker_is_asked_for_its_time_begins_makes_its_trace_and_sends_it(rank):
    made, its, says = rank
    says(requests.encode(requests.Done()))
    assert json.loads(its.recv(1000)) == {"type": "profile", "steps": 0, "memory": False}
    says(HELLO)
    pongs(its, says)
    assert json.loads(its.recv(1000)) == {"type": "begin"}
    assert says({"phase": "recording"}).phase == "recording"
    assert says({"phase": "made", "size": 5}).phase == "made"
    pongs(its, says)
    assert made.is_made
    assert says(b"\0trace", b"\1memory", {"phase": "sent"}).phase == "sent"
    made.trace.seek(0)
    made.memory.seek(0)
    assert (made.trace.read(), made.memory.read()) == (b"trace", b"memory")


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([requests.encode(requests.RequestRefused("rank 3 has ended"))], "has ended"),
        (
            [requests.encode(requests.RequestRefused("rank 3 runs no Python in its main thread just now", True))],
            "runs no Python in its main thread just now",
        ),
        ([b"\xff"], "says what this version does not understand"),
        ([requests.encode(requests.Done()), b"[" * 3000], "says what this version does not understand"),
        ([requests.encode(requests.Done()), {**HELLO, "size": -1}], "says what this version does not understand"),
        ([requests.encode(requests.Done()), [0, -1]], "says what this version does not understand"),
        ([requests.encode(requests.Done()), b"\0" + b"x"], "sends more than 1 GiB"),
        ([requests.encode(requests.Done()), {"phase": "failed", "why": "has no torch"}], "has no torch"),
    ],
)
def test_a_rank_that_fails_says_why(rank, messages, why):
    _, _, says = rank
    made = says(*messages)
    assert (made.phase, made.is_over) == ("failed", True)
    assert made.why.startswith(why)


def test_what_comes_in_a_wrong_order_changes_nothing(rank):
    _, _, says = rank
    says(requests.encode(requests.Done()))
    made = says({"phase": "sent"}, {"phase": "made", "size": 1}, {"phase": "recording"}, [0, 1])
    assert (made.phase, made.pings_before) == ("asked", [])


def test_a_worker_that_ends_is_left_out(rank):
    made, its, _ = rank
    its.close()
    made.read()
    assert made.why == "has ended, or was lost"


def test_the_quickest_answer_tells_how_far_a_clock_is_ahead_and_how_wrong_that_may_be():
    before = [Ping(0, 5_000_900, 2_000), Ping(10_000, 5_010_050, 10_100), Ping(20_000, 5_029_000, 29_000)]
    assert align(before, [Ping(90_000, 5_090_500, 91_000)], ranks_share_clock=False) == Alignment(
        5_000_000, 50, steady=True
    )
    assert align(before, [], ranks_share_clock=True) == Alignment()


def test_a_clock_that_is_elsewhere_afterwards_was_set():
    assert not align([Ping(0, 50, 100)], [Ping(1_000, 60_001_050, 1_100)], ranks_share_clock=False).steady
