"""Whoever reaches a live coordinator: the job runs to its end, and each visitor that is refused is told of once."""

import json
import random
import re
import socket
import time
from contextlib import suppress

import pytest

from ddplaunch.launcher.job.coordinator import QUIT_TIMEOUT
from ddplaunch.reach.channel.handshake import PROTOCOL, pack
from tests.process.speaker import STOPPING, Visitor, ended, hello, key_of


@pytest.fixture
def visit(nodes, program):
    """Return visitors to a job of 2 nodes that runs; in the end it must have ended well."""
    flags = (program("behave"), "all=done_when_told")
    visitors: list[Visitor] = []
    nodes.static_nodes(2, *flags)
    nodes.signs("ready", 2)
    key = key_of(nodes, *flags)

    def visit(*, knows_the_key: bool = False) -> Visitor:
        visitor = Visitor(nodes.port + 1, key if knows_the_key else None)
        visitors.append(visitor)
        return visitor

    yield visit
    try:
        _end(nodes)
    finally:
        for visitor in visitors:
            visitor.sock.close()


def _end(nodes) -> None:
    """Let the job end, unless it has, and prove that it does so well and does not wait for strangers for long."""
    if all(node.has_ended for node in nodes.started):
        return
    (nodes.home / "signs" / "go").touch()
    assert nodes.statuses() == [0, 0], [node.err for node in nodes.started]
    gone = max(nodes.events_of(place, "swept")[0]["mono"] for place in range(2))
    assert time.monotonic() - gone < QUIT_TIMEOUT + 40


@pytest.fixture
def refusals(nodes):
    """End the job, and give what node 0 has said about visitors."""

    def refusals() -> list[str]:
        _end(nodes)
        said = (line.removeprefix("ddplaunch: ") for line in nodes.started[0].err.splitlines())
        return [
            line
            for line in said
            if not re.match(r"\w+: \d+ workers on |\d+ workers on |logs in |without a token", line)
        ]

    return refusals


FROM = "refused a connection from 127.0.0.1: "


# --- without the key


def test_strangers_are_shown_out_and_told_of_once(visit, refusals):
    noise = random.Random(3)
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 100_000,  # a frame of 4 GB
        pack(b"[" * 4000),
        pack(b'{"ddplaunch": NaN}'),
        pack(b'{"ddplaunch": "\xff\xfe"}'),
        b"\n" * 100_000,
        *(b"\xff" + noise.randbytes(noise.randrange(4, 9000)) for _ in range(30)),
    ):
        visitor = visit()
        visitor.shout(words)
        visitor.is_shown_out()
    assert refusals() == [FROM + "is not ddplaunch"]


def test_hundreds_of_half_open_connections_cost_an_agent_that_comes_late_nothing(visit, nodes, program, refusals):
    for _ in range(300):
        visit()
    late = nodes.node(*nodes.static(2, 1), program("place"))
    nodes.started.remove(late)
    assert nodes.statuses(late) == [2]
    assert "node rank 1 is taken" in late.err
    assert FROM + "too many unauthenticated connections" in refusals()


def test_another_job_or_protocol_is_refused_by_name(visit, refusals):
    visit().sock.sendall(pack(b'{"ddplaunch":99}'))
    other = visit()
    other.sock.sendall(
        pack(
            json.dumps(
                {"ddplaunch": PROTOCOL, "nonce": "A" * 43 + "=", "proof": "A" * 43 + "="}, separators=(",", ":")
            ).encode()
        )
    )
    other.is_shown_out()
    assert sorted(refusals()) == [
        FROM + f"protocol 99, here {PROTOCOL}: install the same ddplaunch on all nodes",
        FROM + "wrong token, or another job",
    ]


# --- with the key: it is not the coordinator's fault


def test_who_sends_no_message_of_ours_is_shown_out_and_told_of(visit, refusals):
    payloads = {
        "nothing": b"",
        "random bytes": b"\x00\xff" * 50,
        "deep JSON": b"[" * 100_000,
        "NaN": b'{"type":"hello","requested_rank":NaN}',
        "infinity": b'{"type":"pong","sent":1e999,"at":0}',
        "not UTF-8": b'{"type":"stopping","why":"\xff\xfe","signum":2}',
        "a long name": json.dumps(hello(host="x" * 2000)).encode(),
        "no workers": json.dumps(hello(workers=0)).encode(),
        "a negative rank": json.dumps(hello(requested_rank=-1)).encode(),
        "a great rank": json.dumps(hello(requested_rank=1 << 40)).encode(),
        "a message to agents": json.dumps({"type": "begin"}).encode(),
        "a long message": json.dumps("x" * 4_000_000).encode(),
    }
    for payload in payloads.values():
        visitor = visit(knows_the_key=True)
        visitor.say(payload)
        visitor.is_shown_out()
    told = refusals()
    assert len(told) == len(set(told)) >= 9  # of equal reasons one is enough
    assert all(line.startswith(FROM + "sent a malformed message (") for line in told), told


def test_who_does_not_say_hello_first_has_nothing_to_say(visit, refusals):
    for message in (STOPPING, {"type": "escalate", "signum": 2}, ended()):
        visitor = visit(knows_the_key=True)
        visitor.say(message)
        visitor.is_shown_out()
    assert refusals() == [FROM + "did not send hello first"]


def test_who_only_answers_and_never_says_hello_does_not_hold_up_the_end_for_long(visit):
    visitor = visit(knows_the_key=True)
    ping = visitor.hear("ping")
    visitor.say({"type": "pong", "sent": ping["sent"], "at": 5.0})


def test_a_place_out_of_range_is_refused(visit, refusals):
    places = (2, 7, (1 << 31) - 1)
    for place in places:
        visitor = visit(knows_the_key=True)
        visitor.say(hello(place))
        assert visitor.hear("quit")["status"] == 2
        visitor.sock.close()
    assert refusals() == [
        f"refused visitor: node rank {place}: the job has 2 nodes, node ranks 0 to 1" for place in places
    ]


def test_what_a_visitor_calls_itself_cannot_take_over_the_terminal(visit, refusals, nodes):
    visitor = visit(knows_the_key=True)
    visitor.say(hello(1, host="\x1b[2Jvisitor\r\n"))
    visitor.is_shown_out()
    assert refusals() == [FROM + "sent a malformed message (unexpected text - at `$.host`)"]
    assert "\x1b" not in nodes.started[0].err


def test_who_was_refused_has_nothing_more_to_say(visit, refusals, nodes):
    for message in (STOPPING, {"type": "escalate", "signum": 2}, ended(), ended(5), hello(1)):
        visitor = visit(knows_the_key=True)
        visitor.say(hello(1))
        visitor.hear("quit")
        visitor.say(message)
        with suppress(OSError):  # on a busy machine it may have been shown out by now
            visitor.sock.shutdown(socket.SHUT_WR)
        visitor.is_shown_out()
    assert len(refusals()) == 1  # of equal ones, one is enough
    assert not nodes.events_of(0, "node_stopping")


def test_connections_that_never_say_hello_are_counted(visit, refusals):
    visitors = [visit(knows_the_key=True) for _ in range(70)]
    for visitor in visitors[64:]:
        visitor.is_shown_out()
    assert refusals() == [FROM + "too many connections"]
