"""The doctor that is started on each node: what whoever is in the place of node 0, or of a node, has it do, which is little."""

import json
import socket
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.cli.job import parse, resolve
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach import agents as starting
from ddplaunch.reach.channel.handshake import Server
from tests.process.speaker import Speaker, Visitor, key_of
from tests.unit import builders

ONLY = ("doctor", "--only", "limits")
NO_TOKEN = "note: no token: any process that reaches node 0, or listens where node 0 should, "


def order_of(nodes, rank: int) -> bytes:
    """The order of node 0 to the node with this rank."""
    spec = resolve(parse([str(word) for word in (*nodes.static(2, 1), "train.py")]), {}, None)
    allocation = discover(ClusterFacts(spec=spec, env={}, hostname="here", here=builders.Host()))
    hosts = tuple(Host(name=name) for name in ("node-0", "node-1"))
    agents = starting.agents(
        spec,
        {},
        replace(allocation, hosts_to_start_on=hosts, starter="simulate"),
        sys.executable,
        "doctor",
        token="secret",
        module="none",
    )
    return agents[rank].order()


class Node0(Speaker):
    """Whoever listens where node 0 should, with what it needs for that."""

    def asks(self, request: dict[str, Any], within: float = 5.0) -> None:
        """Send a request."""
        self.say({"number": 1, "request": request, "within": within})

    def next(self) -> dict[str, Any]:
        """Wait for the next message of the node."""
        assert self._session is not None
        while (frame := self._decoder.take()) is None:
            data = self.sock.recv(1 << 16)
            assert data, "closed"
            self._decoder.feed(data)
        message: dict[str, Any] = json.loads(self._session.open(frame))
        return message


@pytest.fixture
def node_0(nodes, program):
    """Be in the place of node 0 for a node of the doctor, which has no token; its hello has come and its order is sent."""
    with socket.create_server(("127.0.0.1", nodes.port + 1)) as listener:
        nodes.node(*ONLY, *nodes.static(2, 1), cwd=nodes.home)
        connection, _ = listener.accept()
    with connection:
        false = Node0(connection, Server(key_of(nodes, program("behave"))))
        false.say(order_of(nodes, 1))
        assert false.next()["node_rank"] == 1
        assert NO_TOKEN in nodes.started[0].err
        yield false


MEASURE = {"type": "measure", "node_rank": 0, "addresses": ["127.0.0.1"], "ports": [9], "seconds": 0.1}
FILE = {"type": "handle_file"}
REFUSED = {
    "a file that it names": FILE | {"step": "remove", "name_digits": "precious"},
    "to make a file": FILE | {"step": "make"},
    "to remove a file": FILE | {"step": "remove"},
    "to look for no file": FILE | {"step": "look"},
    "to look elsewhere": FILE | {"step": "look", "name_digits": "../../etc/passwd"},
    "to send for ever": MEASURE | {"seconds": 1e9},
    "a thousand addresses": MEASURE | {"addresses": ["127.0.0.1"] * 1000},
    "a port of none": MEASURE | {"ports": [0]},
    "a name that leads elsewhere": MEASURE | {"addresses": ["\u001b[2J"]},
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
def test_whoever_listens_first_has_no_file_made_or_removed_and_no_end_of_work(nodes, node_0, request_):
    (nodes.home / "precious").write_text("work of weeks")
    before = {path for path in nodes.home.rglob("*") if "doctor" in path.name}
    node_0.asks(request_)
    node_0.is_shown_out()
    assert nodes.statuses() == [121]
    assert "error: node 0 does not examine this node: what it asks is refused: " in nodes.started[0].err
    assert (nodes.home / "precious").read_text() == "work of weeks"
    assert {path for path in nodes.home.rglob("*") if "doctor" in path.name} == before


@pytest.mark.parametrize(("within", "times"), [(1e9, 1), (20.0, 50)], ids=["for ever", "at once"])
def test_it_gets_no_time_without_end_and_no_crowd_of_children(nodes, node_0, within, times):
    look = {"number": 1, "request": FILE | {"step": "look", "name_digits": "0" * 16}, "within": within}
    node_0.shout(b"".join(node_0.sealed(look) for _ in range(times)))
    node_0.is_shown_out()
    assert nodes.statuses() == [121]


def test_a_node_listens_at_no_port_that_is_not_that_of_its_job(nodes, node_0):
    node_0.asks({"type": "introduce", "ports": [nodes.port, nodes.port + 2, nodes.port + 3]}, 20.0)
    assert node_0.next()["reply"]["ports"] == [nodes.port]
    node_0.sock.close()
    assert nodes.statuses() == [0]


def test_what_is_no_order_for_this_node_is_none(nodes, program):
    with socket.create_server(("127.0.0.1", nodes.port + 1)) as listener:
        nodes.node(*ONLY, *nodes.static(2, 1), cwd=nodes.home)
        connection, _ = listener.accept()
    with connection:
        Node0(connection, Server(key_of(nodes, program("behave")))).say(order_of(nodes, 0))
        assert nodes.statuses() == [121]
    assert "its order is for node 0" in nodes.started[0].err


FINDING: dict[str, Any] = {"severity": "broken", "title": "bad", "check": "limits", "evidence": "", "hint": ""}
REPORT: dict[str, Any] = {"ddplaunch": "1", "host": "visitor", "python": "", "seconds": 1.0, "checks": []}


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        ([FINDING | {"evidence": "x" * 100_000}], "other: lost: sent a malformed reply ("),
        ([FINDING | {"title": f"bad {number}"} for number in range(10_000)], "other: lost: sent a malformed reply ("),
        ([FINDING | {"title": "\x1b[2Jbad"}], "other: lost: sent a malformed reply ("),
        ([FINDING | {"evidence": "\x1b[2Jbad", "hint": "\nerror: lost"}], "\\x1b[2Jbad"),
    ],
    ids=["a long text", "a flood", "a terminal in a line", "a terminal in a text"],
)
def test_what_a_node_says_of_itself_neither_floods_nor_commands_the_terminal(nodes, program, findings, said):
    node = nodes.node(*ONLY, *nodes.static(2, 0), cwd=nodes.home)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, program("behave")))
    visitor.say({"ddplaunch": __version__, "host": "other", "node_rank": 1})
    answer(visitor, examine={**REPORT, "findings": findings})
    visitor.sock.close()
    (result,) = nodes.ends(node)
    assert "\x1b[2J" not in result.out
    assert "\nerror: lost" not in result.out
    assert said in " ".join(result.out.split())
    assert len(result.out) < 20_000


def answer(visitor: Visitor, **replies: dict[str, Any]) -> None:
    """Answer questions of the doctor by their kinds, and that nothing else is known."""
    session, decoder = visitor._session, visitor._decoder
    assert session is not None
    while True:
        while (frame := decoder.take()) is not None:
            asked = json.loads(session.open(frame))
            if "number" not in asked:
                continue  # the order
            reply = replies.get(asked["request"]["type"])
            visitor.say({"number": asked["number"]} | ({"reply": reply} if reply else {"why_none": "nothing is known"}))
        try:
            data = visitor.sock.recv(1 << 16)
        except ConnectionResetError:
            return
        if not data:
            return
        decoder.feed(data)


@pytest.mark.parametrize("by", ["rank", "endpoint"])
def test_two_nodes_examine_each_other_and_leave_no_file(nodes, by):
    meeting = [nodes.static(2, rank) if by == "rank" else [*nodes.c10d(2), "--node-rank", rank] for rank in range(2)]
    first = nodes.node(*ONLY, *meeting[0], cwd=nodes.home)
    nodes.node(*ONLY, *meeting[1], cwd=nodes.home)
    assert nodes.statuses() == [0, 0], first.err + first.out
    assert NO_TOKEN in first.err
    assert "2 nodes: " in first.out
    assert "names" not in first.out
    assert list(nodes.home.rglob(".ddplaunch-doctor-*")) == []


def test_nobody_connects_to_an_address_that_a_node_names(nodes, program):
    node = nodes.node(*ONLY, *nodes.static(2, 0), cwd=nodes.home)
    nodes.listens(1)
    with socket.create_server(("127.0.0.77", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        facts = {
            "host": "other",
            "addresses": ["127.0.0.77"],
            "kernel_port": port,
            "ports": [],
            "python": "3",
        }
        visitor = Visitor(nodes.port + 1, key_of(nodes, program("behave")))
        visitor.say({"ddplaunch": __version__, "host": "other", "node_rank": 1})
        answer(visitor, introduce=facts | {"torch": "", "nccl": False})
        visitor.sock.close()
        nodes.ends(node)
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_connections_that_say_nothing_keep_nobody_out(nodes, program):
    nodes.node(*ONLY, *nodes.static(2, 0), cwd=nodes.home)
    nodes.listens(1)
    silent = [Visitor(nodes.port + 1, key_of(nodes, program("behave"))) for _ in range(300)]
    nodes.node(*ONLY, *nodes.static(2, 1), cwd=nodes.home)
    assert nodes.statuses() == [0, 0], nodes.started[0].err
    for one in silent:
        one.sock.close()
