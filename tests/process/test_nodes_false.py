"""An agent that breaks the protocol, and another program in the place of node 0: a holder of the key may do its part only."""

import fcntl
import socket
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Any

import pytest

from ddplaunch.launcher.node.questions import MAX_QUESTIONS
from ddplaunch.reach.channel.handshake import LIMIT, Decoder, Server, pack
from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import AskStatus, NoAnswer, NodeStatus
from ddplaunch.system.process.child import STACKS_FD
from ddplaunch.system.process.tree import children
from ddplaunch.tools.runs import client, find
from tests.conftest import PATIENCE, until
from tests.process.speaker import END, STOPPING, Speaker, Visitor, ended, hello, key_of, stacks_at_end

PROCESS = {"pid": 1, "state": "suspended"}
ENDED_WELL = [*END[:5], 0, *END[6:]]
OF_RANK_0 = {"stacks": [], "of_threads": [], "processes": [{"rank": 0, **PROCESS}]}

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
    assert (begin["agreed"]["index"], begin["number"]) == (1, 0)
    (nodes.home / "signs" / "ready-1").touch()
    nodes.sign("ready-0")
    yield visitor
    visitor.sock.close()
    assert node.has_ended


def let_end(nodes) -> None:
    """Have the worker of node 0 end."""
    (nodes.home / "signs" / "go").touch()
    until(lambda: nodes.events_of(0, "swept"), "the end of the workers")


def ends_well(member: Visitor, nodes, **exits: Any) -> None:
    """Have the other node end, and prove that the job has ended well."""
    member.say(ended(**exits))
    assert member.hear("quit")["status"] == 0
    member.sock.close()
    assert nodes.statuses() == [0]


def test_an_end_that_is_told_again_and_again_counts_once(member, nodes):
    member.say(ended(exits=[ENDED_WELL]))
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
        (stacks_at_end(OF_RANK_0), "sent a malformed message (the end of workers that are not its own)"),
        (ended(generation=7), "sent a malformed message (the end of generation 7, which has not begun)"),
        ({"type": "pong", "sent": 1.5, "at": 2.5}, "sent a malformed message (an answer to a ping that was not sent)"),
    ],
    ids=[
        "hello twice",
        "half a message",
        "random bytes",
        "the end of others",
        "two ends of one",
        "stacks of others",
        "the end of no generation",
        "an answer to nothing",
    ],
)
def test_an_agent_that_talks_nonsense_is_a_node_lost(member, nodes, message, words):
    member.say(message)
    member.is_shown_out()
    assert nodes.statuses() == [122]
    assert f"error: node 1 (visitor) was lost: {words}" in nodes.started[0].err


@pytest.mark.parametrize("asked", ["a question", "the end"])
def test_malformed_stacks_are_dropped_with_one_warning_and_the_node_is_kept(member, nodes, asked):
    malformed = {"type": "stacks", "stacks": [], "of_threads": [], "processes": [{"rank": -1, **PROCESS}]}
    for _ in range(2 if asked == "a question" else 0):
        member.say({"type": "answered", "number": 1, "answer": malformed})
    let_end(nodes)
    if asked == "the end":
        member.say(stacks_at_end(malformed))
    ends_well(member, nodes, exits=[ENDED_WELL])
    assert nodes.started[0].err.count("warning: what visitor has sent about its workers was dropped: ") == 1


def socket_of(nodes):
    """Where the socket of the job is."""
    [place] = until(
        lambda: [place for place in find.socket_paths(nodes.env) if nodes.folder.name in place.name], "a socket"
    )
    return place


WORKER_0 = [0, 0, 1, "cpu", "running", "", 1.0, 0.5, 4096, None]


@pytest.mark.parametrize(
    "answer", [{"type": "status", "workers": [WORKER_0]}, {"type": "stacks", **OF_RANK_0}], ids=["status", "stacks"]
)
def test_an_answer_about_workers_of_others_is_not_passed_on(member, nodes, answer):
    place = socket_of(nodes)

    def ask() -> dict[int | None, Any] | None:
        """The answers by node; None if another `ddplaunch ps` on this machine asked the run in between, or it was too busy."""
        member.sock.settimeout(0.5)  # less than from one ping to the next
        with suppress(TimeoutError):
            while True:
                member.hear("ask")
        member.sock.settimeout(PATIENCE)
        with place.connect() as sock:
            sock.settimeout(30)
            replies = client.replies_of(sock, AskStatus(), 30)
            assert isinstance(next(replies), requests.Run)
            member.say({"type": "answered", "number": member.hear("ask")["number"], "answer": answer})
            answers = {reply.node_rank: reply.answer for reply in replies if isinstance(reply, requests.NodeReply)}
        return None if NoAnswer("has not answered within 2 s") in answers.values() else answers

    answers = until(ask, "answers in time")
    assert isinstance(answers[0], NodeStatus)
    assert answers[1] == NoAnswer("speaks of workers that are not its own")
    dropped = "warning: what visitor has sent about its workers was dropped: it speaks"
    until(lambda: dropped in nodes.started[0].err, "the warning")
    let_end(nodes)
    ends_well(member, nodes, exits=[ENDED_WELL])


def heard_chunk(member: Visitor) -> dict[str, Any]:
    """Wait for a piece of a stream, or its end."""
    while (chunk := member.hear("chunk"))["taken"]:
        pass
    return chunk


def test_an_agent_holds_time_limits_only_while_a_client_is_connected_to_it(member, nodes):
    nobody = "it holds a worker in a debugger, and nobody debugs this job"
    with socket_of(nodes).connect() as sock:
        sock.settimeout(PATIENCE)
        sock.sendall(pack(requests.encode(requests.Request(requests.Attach(1)))))
        asked = member.hear("chunk")
        assert requests.decode_request(b64decode(asked["data"])[4:]).asked == requests.Attach(1)
        number = asked["number"]
        member.say({"type": "pause_limits", "paused": True})
        for reply in (requests.Done(), requests.Said("(Pdb) ", asks=True)):
            member.say({"type": "chunk", "number": number, "data": b64encode(pack(requests.encode(reply))).decode()})
        member.say({"type": "chunk", "number": number + 1, "data": "bm9uc2Vuc2U="})
        received, decoder = [], Decoder(LIMIT)
        while len(received) < 3:
            decoder.feed(sock.recv(1 << 16))
            while (frame := decoder.take()) is not None:
                received.append(frame)
        run, done, said = received
        assert isinstance(requests.decode_reply(run), requests.Run)
        assert requests.decode_reply(done) == requests.Done()
        assert requests.decode_said(said).text == "(Pdb) "
        assert nobody not in nodes.started[0].err
        sock.sendall(b"where\n")
        assert b64decode(heard_chunk(member)["data"]) == b"where\n"
    assert not heard_chunk(member)["data"], "the end"
    member.say({"type": "pause_limits", "paused": True})
    until(lambda: nobody in nodes.started[0].err, "the warning")
    let_end(nodes)
    ends_well(member, nodes, exits=[ENDED_WELL])


def test_nobody_switches_a_timeout_off_in_a_job_that_is_not_debugged(nodes, program):
    flags = ("--timeout", "2s", program("behave"), "0=done_when_told", "1=done")
    nodes.node(*nodes.static(2, 0), *flags)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, *flags))
    visitor.say(hello(1))
    visitor.hear("begin")
    visitor.say({"type": "pause_limits", "paused": True})
    visitor.hear("stop")
    visitor.say(ended(exits=[ENDED_WELL]))
    assert visitor.hear("quit")["why"] == "timed_out"
    visitor.sock.close()
    assert nodes.statuses() == [124]
    assert "visitor" in nodes.started[0].err


def test_what_takes_for_ever_to_compare_holds_up_no_report_for_long(nodes):
    script = nodes.home / "fails.py"
    script.write_text("raise ValueError('boom')\n")
    nodes.node(*nodes.static(2, 0), script)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, script))
    visitor.say(hello(1, workers=65_535))
    visitor.hear("begin")
    visitor.hear("stop")
    call = [1, "all_reduce", "", "", False, False, 1]
    processes = [
        {**PROCESS, "rank": rank, "groups": [[f"{rank}-{n}", "", "0-65535", -1, [call]] for n in range(256)]}
        for rank in range(1, 13)
    ]
    visitor.say(stacks_at_end({"stacks": [], "of_threads": [], "processes": processes}))
    visitor.say(ended())
    began = time.monotonic()
    assert visitor.hear("quit")["status"] == 1
    assert time.monotonic() - began < 20
    visitor.sock.close()
    assert nodes.statuses() == [1]
    assert "ValueError: boom" in nodes.started[0].err


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


@pytest.mark.parametrize("reached", ["192.0.2.7", "evil", "::ffff:192.0.2.7", "127.0.0.2"])
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
def test_no_node_says_where_the_workers_of_others_meet(nodes, program, nnodes, reached):
    meeting = (*nodes.c10d(nnodes), "--rdzv-conf", "last_call_timeout=60")
    flags = (program("place"),)
    node = nodes.node(*meeting, *flags)
    nodes.listens()
    visitor = Visitor(nodes.port, key_of(nodes, *flags, meeting=meeting))
    visitor.say(hello() | {"reached": reached})
    assert visitor.hear("begin")["agreed"]["address"] == "localhost"  # as was typed on node 0
    assert nodes.place(0)["MASTER_ADDR"] == "localhost"
    visitor.say(ended(exits=[ENDED_WELL]))
    assert visitor.hear("quit")["status"] == 0
    visitor.sock.close()
    assert nodes.statuses(node) == [0]


@pytest.mark.parametrize("host", ["gpu07", "localhost"])
@pytest.mark.parametrize("ends", ["closes", "fails"])
def test_nobody_comes_on_the_list_of_machines_that_have_failed_by_what_a_node_calls_itself(nodes, program, host, ends):
    flags = (program("behave"), "0=done_when_told")
    node = nodes.node(*nodes.static(2, 0), *flags)
    nodes.listens(1)
    visitor = Visitor(nodes.port + 1, key_of(nodes, *flags))
    visitor.say(hello(1, host=host))
    visitor.hear("begin")
    if ends == "fails":
        said = [*ENDED_WELL]
        said[5:7] = [1, None]
        said[14] = None
        said[15] = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
        visitor.say(STOPPING | {"why": "failed", "signum": 0})
        visitor.say(ended(exits=[said]))
        assert visitor.hear("quit")["status"] == 1
    visitor.sock.close()
    assert node.process.wait(PATIENCE) != 0
    assert bad_nodes.read(bad_nodes_file(nodes.env), time.time()) == []


# --- a stranger who listened where node 0 should have, in a job without a token


def begin(hello: dict[str, Any], **fields: Any) -> dict[str, Any]:
    agreed = {
        "run_id": "run",
        "index": 1,
        "agent_runs": [[1, 2], [1, hello["workers"]]],
        "address": "127.0.0.1",
        "backend": "gloo",
        "backend_reason": "",
    }
    order = {"type": "begin", "number": 0, "term": 0, "restarts": 0, "port": 4242}
    order |= {name: value for name, value in fields.items() if name not in agreed}
    return {
        **order,
        "agreed": fields.get("agreed", {**agreed, **{name: fields[name] for name in agreed if name in fields}}),
    }


MANY = [[1, 2], [1, 65536]]
ORDERS = {
    "a folder elsewhere": ([{"run_id": "../../../elsewhere"}], "unexpected text - at `$.agreed.run_id`"),
    "no path at all": ([{"run_id": "a\0b"}], "unexpected text - at `$.agreed.run_id`"),
    "a terminal": ([{"address": "\x1b[2J"}], "unexpected text - at `$.agreed.address`"),
    "workers of others": ([{"agent_runs": MANY}], "agent 1 has another number of workers"),
    "another node's agent": ([{"index": 0}], "agent 0 has another number of workers"),
    "no such agent": ([{"index": 7}], "agent 7 of 2 - at `$.agreed`"),
    "no agent": ([{"agreed": None}], "begins workers without saying which"),
    "two generations at once": ([{}, {"number": 1}], "generation 1 after 0"),
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


def test_of_hundreds_of_questions_few_are_answered_at_once_and_none_that_nobody_waits_for(nodes, program):
    flags = ("--nproc-per-node", 1, program("behave"), "all=done_when_told")
    with socket.create_server(("127.0.0.1", nodes.port + 1)) as listener:
        node = nodes.node(*nodes.static(2, 1), *flags)
        connection, _ = listener.accept()
        with connection:
            stranger = Speaker(connection, Server(key_of(nodes, *flags)))
            stranger.say(begin(stranger.hear("hello")))
            worker = int(nodes.sign("ready-2"))
            before = set(children(node.agent))
            with open(f"/proc/{worker}/fd/{STACKS_FD}", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # who asks for its stack waits for that
                for number in range(400):
                    stranger.say({"type": "ask", "number": number, "question": {"type": "stacks", "within": 30.0}})
                answers = [stranger.hear("answered") for _ in range(400 - MAX_QUESTIONS)]
                assert {answer["answer"]["type"] for answer in answers} == {"none"}
                assert len(set(children(node.agent)) - before) == MAX_QUESTIONS
                for number in range(400):
                    stranger.say({"type": "forget", "number": number})
                until(lambda: set(children(node.agent)) == before, "the end of who was asked")
            stranger.say({"type": "quit", "status": 1, "why": "failed", "text": "", "requeue": 0, "is_watched": False})
            nodes.ends()
    assert nodes.statuses() == [1]
