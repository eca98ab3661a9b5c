"""Whoever reaches a live coordinator: the job runs to its end, and each visitor that is refused is told of once."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.cli.main import parse, resolve
from ddplaunch.cluster.discover import discover
from ddplaunch.control.frames import Decoder, pack
from ddplaunch.control.handshake import Client, Handshake, Key, Server, Session
from ddplaunch.coordinator import join
from ddplaunch.coordinator.coordinator import QUIT_TIMEOUT
from ddplaunch.devices.node import inspect
from ddplaunch.plan.make import make_plan
from tests.conftest import until


class Speaker:
    """One end of a connection that can say anything; if it takes part in the handshake, it does so rightly."""

    def __init__(self, sock: socket.socket, handshake: Handshake | None = None) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._session = self._introduce(handshake) if handshake is not None else None

    def _introduce(self, handshake: Handshake) -> Session:
        if handshake.opening:
            self.sock.sendall(pack(handshake.opening))
        while True:
            while (payload := self._decoder.take()) is not None:
                step = handshake.receive(payload)
                if step.reply is not None:
                    self.sock.sendall(pack(step.reply))
                if step.session is not None:
                    self._decoder.trust()
                    return step.session
            self._decoder.feed(self.sock.recv(1 << 16))

    def sealed(self, message: dict[str, Any] | bytes) -> bytes:
        """Sign a message."""
        assert self._session is not None
        return self._session.seal(message if isinstance(message, bytes) else json.dumps(message).encode())

    def say(self, message: dict[str, Any] | bytes) -> None:
        """Send a message, signed."""
        self.shout(self.sealed(message))

    def hear(self, kind: str) -> dict[str, Any]:
        """Wait for a message of this kind, and answer meanwhile as agents do."""
        assert self._session is not None
        while True:
            while (frame := self._decoder.take()) is not None:
                message: dict[str, Any] = json.loads(self._session.open(frame))
                if message["type"] == kind:
                    return message
                if message["type"] == "ping":
                    self.say({"type": "pong", "sent": message["sent"], "at": time.monotonic()})
            data = self.sock.recv(1 << 16)
            assert data, f"closed, and waited for {kind}"
            self._decoder.feed(data)

    def is_shown_out(self) -> None:
        """Wait until the coordinator closes the connection."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def shout(self, data: bytes) -> None:
        """Send as much of this as is taken."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass


class Visitor(Speaker):
    """A connection to the coordinator; with the key it has introduced itself."""

    def __init__(self, port: int, key: Key | None = None) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        super().__init__(sock, Client(key) if key is not None else None)


@pytest.fixture
def visit(nodes, program):
    """Give visitors to a job of 2 nodes that runs; in the end it must have ended well."""
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
    assert time.monotonic() - gone < QUIT_TIMEOUT + 10


@pytest.fixture
def refusals(nodes):
    """End the job, and give what node 0 has said about visitors."""

    def refusals() -> list[str]:
        _end(nodes)
        said = (line.removeprefix("ddplaunch: ") for line in nodes.started[0].err.splitlines())
        return [line for line in said if not re.match(r"\d+ workers on ", line)]

    return refusals


def key_of(nodes, *flags: object) -> Key:
    """The key of the job, as an agent of its finds it."""
    spec = resolve(parse("run", [str(word) for word in (*nodes.static(2, 1), *flags)]), {}, None)
    node = inspect(spec, {})
    allocation = discover(spec, {}, node.host, read=lambda path: Path(path).read_text())
    draft = make_plan(spec, allocation, node, run_id="")
    return join.prepare(spec, allocation, draft, {}, torch="").key


def hello(place: int | None = None, host: str = "visitor", workers: int = 1, **facts: str) -> dict[str, Any]:
    names = ("ddplaunch", "python", "torch", "script", "nnodes")
    return {
        "type": "hello",
        "place": place,
        "seat": {"host": host, "workers": workers},
        "backend": "gloo",
        "backend_reason": "",
        "reached": "127.0.0.1",
        "facts": {name: facts.get(name, "") for name in names},
    }


def ended(generation: int = 0, exits: object = ()) -> dict[str, Any]:
    return {
        "type": "ended",
        "generation": generation,
        "exits": exits,
        "start_failure": None,
        "left": (),
        "oom_kills": 0,
        "shm": None,
        "log_folder": None,
    }


END = [1, 0, 4711, "cpu", 7, None, 5.0, 1.0, None, None, False, 0, 0.0, None, "", None]
STOPPING = {"type": "stopping", "why": "SIGNALLED", "signum": 15}
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
                {"ddplaunch": 1, "nonce": "A" * 43 + "=", "proof": "A" * 43 + "="}, separators=(",", ":")
            ).encode()
        )
    )
    other.is_shown_out()
    assert sorted(refusals()) == [
        FROM + "protocol 99, here 1: install the same ddplaunch on all nodes",
        FROM + "wrong token, or another job",
    ]


# --- with the key: it is not the coordinator's fault


def test_who_sends_no_message_of_ours_is_shown_out_and_told_of(visit, refusals):
    payloads = {
        "nothing": b"",
        "random bytes": b"\x00\xff" * 50,
        "deep JSON": b"[" * 100_000,
        "NaN": b'{"type":"hello","place":NaN}',
        "infinity": b'{"type":"pong","sent":1e999,"at":0}',
        "not UTF-8": b'{"type":"stopping","why":"\xff\xfe","signum":2}',
        "a long name": json.dumps(hello(host="x" * 2000)).encode(),
        "no workers": json.dumps(hello(workers=0)).encode(),
        "a negative place": json.dumps(hello(place=-1)).encode(),
        "a great place": json.dumps(hello(place=1 << 40)).encode(),
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
    assert refusals() == [FROM + "sent a malformed message (unexpected text - at `$.seat.host`)"]
    assert "\x1b" not in nodes.started[0].err


def test_who_was_refused_has_nothing_more_to_say(visit, refusals, nodes):
    for message in (STOPPING, {"type": "escalate", "signum": 2}, ended(), ended(5), hello(1)):
        visitor = visit(knows_the_key=True)
        visitor.say(hello(1))
        visitor.hear("quit")
        visitor.say(message)
        visitor.sock.shutdown(socket.SHUT_WR)
        visitor.is_shown_out()
    assert len(refusals()) == 1  # of equal ones, one is enough
    assert not nodes.events_of(0, "node_stopping")


def test_who_only_watches_is_none_of_a_job_that_nobody_watches(visit, refusals):
    visitor = visit(knows_the_key=True)
    visitor.say({"type": "watch"})
    visitor.is_shown_out()
    assert refusals() == [FROM + "is no agent"]


def test_connections_that_never_say_hello_are_counted(visit, refusals):
    visitors = [visit(knows_the_key=True) for _ in range(70)]
    for visitor in visitors[64:]:
        visitor.is_shown_out()
    assert refusals() == [FROM + "too many connections"]


# --- an agent that has lost its mind


@pytest.fixture
def member(nodes, program):
    """The second agent of a job of 2 nodes is the test's own."""
    flags = (program("behave"), "0=done_when_told", "1=done")
    node = nodes.node(*nodes.static(2, 0), *flags)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, *flags))
    visitor.say(hello(1))
    begin = visitor.hear("begin")
    assert (begin["place"], begin["generation"]) == (1, 0)
    (nodes.home / "signs" / "ready-1").touch()
    nodes.sign("ready-0")
    yield visitor
    visitor.sock.close()
    assert node.has_ended


def test_the_end_of_another_generation_is_none(member, nodes):
    member.say(ended(generation=1))
    member.say(ended(generation=7))
    (nodes.home / "signs" / "go").touch()
    until(lambda: nodes.events_of(0, "swept"), "the end of the workers")
    time.sleep(0.1)  # nothing is to happen
    assert not nodes.events_of(0, "job_ended")
    member.say(ended())
    assert member.hear("quit")["status"] == 0
    member.sock.close()
    assert nodes.statuses() == [0]


def test_an_end_that_is_told_again_and_again_counts_once(member, nodes):
    member.say(ended(exits=[[*END[:4], 0, *END[5:]]]))
    for _ in range(20):
        member.say(ended(exits=[END]))
    (nodes.home / "signs" / "go").touch()
    assert member.hear("quit")["status"] == 0
    member.sock.close()
    assert nodes.statuses() == [0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello(1), "sent hello twice"),
        (b"{", "sent a malformed message ("),
        (b"\xff" * 1000, "sent a malformed message ("),
        (ended(exits=[[0, *END[1:]]]), "sent a malformed message (the end of workers that are not its own)"),
        (ended(exits=[END, END]), "sent a malformed message (the end of workers that are not its own)"),
    ],
    ids=["hello twice", "half a message", "random bytes", "the end of others", "two ends of one"],
)
def test_an_agent_that_talks_nonsense_is_a_node_lost(member, nodes, message, words):
    member.say(message)
    member.is_shown_out()
    assert nodes.statuses() == [122]
    assert f"error: node 1 (visitor) was lost: {words}" in nodes.started[0].err


def test_an_altered_message_is_not_taken_for_the_agents(member, nodes):
    sealed = bytearray(member.sealed(STOPPING))
    sealed[10] ^= 1
    member.sock.sendall(sealed)
    member.is_shown_out()
    assert nodes.statuses() == [122]
    assert "error: node 1 (visitor) was lost: sent a frame with a wrong signature" in nodes.started[0].err


def test_an_agent_that_is_silent_from_the_beginning_is_given_up(nodes, program):
    flags = ("--heartbeat-timeout", "1s", program("behave"), "0=done_when_told", "1=done")
    nodes.node(*nodes.static(2, 0), *flags)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, *flags))
    visitor.say(hello(1))
    visitor.hear("begin")
    assert nodes.statuses() == [122]
    visitor.sock.close()
    assert "error: node 1 (visitor) was lost: silent for 1 s" in nodes.started[0].err


# --- a stranger who listened where node 0 should have, in a job without a token


def begin(hello: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "begin",
        "generation": 0,
        "place": 1,
        "seats": [{"host": "stranger", "workers": 1}, hello["seat"]],
        "run_id": "run",
        "address": "127.0.0.1",
        "port": 4242,
        "backend": "gloo",
        "backend_reason": "",
        "restarts": 0,
        **fields,
    }


MANY = [{"host": "stranger", "workers": 1}, {"host": "stranger", "workers": 65536}]
ORDERS = {
    "a folder elsewhere": ([{"run_id": "../../../elsewhere"}], "unexpected text - at `$.run_id`"),
    "no path at all": ([{"run_id": "a\0b"}], "unexpected text - at `$.run_id`"),
    "a terminal": ([{"address": "\x1b[2J"}], "unexpected text - at `$.address`"),
    "workers of others": ([{"seats": MANY}], "place 1 is another node's"),
    "another node's place": ([{"place": 0}], "place 0 is another node's"),
    "no such place": ([{"place": 7}], "place 7 of 2 seats"),
    "two generations at once": ([{}, {"generation": 1}], "generation 1 after 0"),
}


@pytest.mark.parametrize(("orders", "said"), ORDERS.values(), ids=ORDERS)
def test_whoever_listens_first_cannot_make_an_agent_write_elsewhere_or_break_it(nodes, program, orders, said):
    (nodes.home / "elsewhere").mkdir()
    flags = (program("behave"), "all=done_when_told")
    with socket.create_server(("127.0.0.1", nodes.port + 1)) as listener:
        node = nodes.node(*nodes.static(2, 1), *flags)
        connection, _ = listener.accept()
        with connection:
            stranger = Speaker(connection, Server(key_of(nodes, *flags)))
            hello = stranger.hear("hello")
            for order in orders:
                stranger.say(begin(hello, **order))
            stranger.is_shown_out()
            nodes.ends()
    assert nodes.statuses() == [122]
    assert f"was lost: the coordinator sent a malformed message ({said})\n" in node.err
    assert not list((nodes.home / "elsewhere").iterdir())
