"""Whatever arrives is a message whose every field is what it says, or `Malformed`; no third thing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import Generation, NodeEnd
from ddplaunch.plan.ranks import ranks_of_all
from ddplaunch.system import fields
from ddplaunch.system.fields import Malformed
from tests.unit.hostile import altered, taken

EXIT = [
    3,
    1,
    "",
    9,
    "cpu",
    1,
    None,
    5.0,
    1.0,
    15,
    4.0,
    False,
    0,
    0.5,
    ["E", "m", "t", [["a.py", 1, "f", "x"]], 1.0],
    "",
    "l",
    [4, 10, [["loss", "0.5"]], "script", 1, 2.5, 0.5],
    [5, 10, [], "bar", 0, 0.0, 0.5],
    0.5,
]
WORKER = [3, 1, 9, "cpu", "running", "", 1.0, 0.5, 4096, None, 12, "epoch 1", None, 93, 1073741824]
STOP: dict[str, Any] = {
    "type": "stop",
    "signum": 15,
    "at": 1.5,
    "why": "timed_out",
    "by_cluster": False,
    "silent_for": 0.0,
    "another_node_ended": True,
    "job_stands_still": True,
}
HELLO = {
    "type": "hello",
    "requested_rank": 1,
    "host": "a",
    "workers": 2,
    "backend": "gloo",
    "backend_reason": "no accelerator",
    "reached": "10.0.0.1",
    "facts": {"ddplaunch": "1", "python": "3", "torch": "2", "script": "a.py", "nnodes": "2"},
    "last_generation": 3,
    "last_term": 7,
    "run_id": "run-1",
    "was_left": True,
    "at": 2.0,
}
BEGIN: dict[str, Any] = {
    "type": "begin",
    "number": 0,
    "term": 1795858200000,
    "restarts": 0,
    "port": 29500,
    "lease": 10.0,
    "agreed": {
        "run_id": "run-1",
        "index": 1,
        "agent_runs": [[2, 4]],
        "address": "fe80::1%eth0",
        "backend": "gloo",
        "backend_reason": "no accelerator",
    },
    "ranks_of_draft": [],
}
ENDED = {
    "type": "ended",
    "generation": 0,
    "exits": [EXIT],
    "start_failure": {"rank": 3, "host": "", "reason": "no such file", "status": 127, "errno": 2},
    "leftovers": ["pid 7 (python)"],
    "traces": {"oom_kills": 0, "oom_kills_of_machine": False, "shm": [64, 8], "log_folder": "/runs/1"},
}
PROCESS = {
    "rank": 0,
    "pid": 9,
    "threads": [[[], "", True, False]],
    "groups": [["0", "", "0-3", -1, [[1, "all_reduce", "", "", False, False, 0]]]],
}
TO_COORDINATOR: list[dict[str, Any]] = [
    HELLO,
    ENDED,
    {"type": "stopping", "why": "failed", "signum": 15, "by_cluster": True},
    {
        "type": "stacks_at_end",
        "generation": 0,
        "stacks": {"type": "stacks", "stacks": [[], [["a.py", 3, "f", ""]]], "of_threads": [1], "processes": [PROCESS]},
    },
    {"type": "noticed", "signum": 10},
    {"type": "escalate", "signum": 2},
    {"type": "idle", "seconds": 1.5},
    {"type": "pause_limits", "paused": True},
    {"type": "forward", "signum": 10},
    {"type": "pong", "sent": 1.0, "at": 2.0},
    {"type": "answered", "number": 1, "answer": {"type": "status", "workers": [WORKER], "folder": "/runs/1/node-0"}},
    {"type": "answered", "number": 1, "answer": {"type": "none", "reason": "was lost"}},
    {"type": "chunk", "number": 1, "data": "aGVsbG8=", "taken": 2},
    {"type": "goodbye", "reason": "has heard nothing from here", "has_ended": False},
]
TO_AGENT: list[dict[str, Any]] = [
    BEGIN,
    STOP,
    {"type": "kill", "at": 1.5},
    {"type": "forward", "signum": 10},
    {"type": "quit", "status": 1, "why": "failed", "text": "error: x\n", "requeue": 10},
    {"type": "ping", "sent": 1.0, "host_limit": 5.0, "answered": 2.0},
    {"type": "ask", "number": 1, "question": {"type": "status"}},
    {"type": "forget", "number": 1},
    {"type": "chunk", "number": 1, "data": "aGVsbG8=", "taken": 2},
    {"type": "given_up", "reason": "silent for 10 s", "may_return": True},
    {"type": "left_by_node_0", "signum": 15, "why_unfit": ""},
    {"type": "left_by_node_0", "signum": 0, "why_unfit": "exit status 4"},
]
CASES = [(messages.for_coordinator, message) for message in TO_COORDINATOR] + [
    (messages.for_agent, message) for message in TO_AGENT
]
ids = [str(message["type"]) for _, message in CASES]


@pytest.mark.parametrize(("decode", "message"), CASES, ids=ids)
def test_what_fits_is_taken(decode: Callable[[bytes], Any], message: object) -> None:
    assert json.loads(messages.encode(decode(json.dumps(message).encode()))) == message


@pytest.mark.parametrize(("decode", "message"), CASES, ids=ids)
def test_a_hostile_value_in_any_field_is_refused_or_harmless(decode: Callable[[bytes], Any], message: object) -> None:
    for payload in altered(message):
        is_harmless(taken(decode, payload))


def is_harmless(message: Any) -> None:
    """Prove of a message that was taken that it does not reach beyond what it may, and that it can be handled."""
    match message:
        case Generation(agreed=agreed) if agreed is not None:
            assert os.path.normpath(f"/runs/{agreed.run_id}").startswith("/runs/")
            assert os.path.dirname(f"/runs/{agreed.run_id}") == "/runs"
            for text in (agreed.run_id, agreed.address):
                assert text
                assert text.isprintable()
            assert agreed.ranks == ranks_of_all(agreed.agents)[agreed.index]
        case NodeEnd():
            assert messages.on_our_clock(message, "a", 1.0) is not None


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps).map(str.encode))
def test_arbitrary_bytes_raise_nothing_but_one_error(payload: bytes) -> None:
    taken(messages.for_coordinator, payload)
    taken(messages.for_agent, payload)


@pytest.mark.parametrize(
    "payload", [b"[" * 200_000, b'{"type":"kill","at":1,"x":' + b"[" * 200_000, b'{"type":"\\ud800"}']
)
def test_deep_and_broken_json_is_refused_in_the_same_way(payload: bytes) -> None:
    with pytest.raises(Malformed):
        messages.for_agent(payload)


def test_no_job_has_more_ranks_than_torch_can_count() -> None:
    for agents, said in (
        ([[40_000, 65536]], "more ranks than there can be"),
        ([[65_537, 1]], "<= 65536"),
        ([[65_536, 1]] * 2, "of 131072"),
    ):
        many = {**BEGIN, "agreed": {**BEGIN["agreed"], "agent_runs": agents}}
        with pytest.raises(Malformed, match=said):
            messages.for_agent(json.dumps(many).encode())


@pytest.mark.parametrize("term", [-1, 2**63, "9", None])
def test_a_term_that_is_no_number_of_64_bits_is_refused(term: object) -> None:
    with pytest.raises(Malformed, match="term"):
        messages.for_agent(json.dumps({**BEGIN, "term": term}).encode())


def test_a_place_beyond_the_seats_is_refused() -> None:
    with pytest.raises(Malformed, match="agent 7 of 2"):
        messages.for_agent(json.dumps({**BEGIN, "agreed": {**BEGIN["agreed"], "index": 7}}).encode())


def test_a_node_stops_by_itself_for_reasons_of_its_own_only() -> None:
    with pytest.raises(Malformed, match="no node stops by itself with the reason node_lost"):
        messages.for_coordinator(b'{"type":"stopping","why":"node_lost","signum":15}')


@pytest.mark.parametrize(("code", "signal"), [(None, None), (1, 9)])
def test_a_worker_ends_with_a_status_or_by_a_signal(code: int | None, signal: int | None) -> None:
    with pytest.raises(Malformed):
        messages.for_coordinator(json.dumps({**ENDED, "exits": [[*EXIT[:5], code, signal, *EXIT[7:]]]}).encode())


@given(st.text())
def test_what_is_made_fit_is_taken(text: str) -> None:
    hello = {**HELLO, "host": fields.host(text), "backend_reason": fields.line(text), "reached": fields.host(text)}
    assert isinstance(messages.for_coordinator(json.dumps(hello).encode()), messages.Hello)


def test_what_fits_is_not_changed() -> None:
    assert [fields.line("größer, 日本"), fields.host("größer-1.example")] == ["größer, 日本", "größer-1.example"]
    assert [fields.piece("a\tb"), fields.text("a\n\x1b[1mb"), fields.bounded_number(7)] == ["a\tb", "a\n\x1b[1mb", 7]
