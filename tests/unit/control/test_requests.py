"""Between a client and a run, and to the viewer of --live, come messages of ours or `Malformed`; no third thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window import requests
from ddplaunch.system.fields import Malformed
from tests.unit.hostile import altered, taken

RUN = {
    "type": "run",
    "run_id": "20261122-1",
    "host": "gpu01",
    "pid": 9,
    "folder": "/runs/1",
    "command": "train.py --lr 0.1",
    "phase": "running",
    "seconds": 1.5,
    "world_size": 8,
    "nnodes": 2,
    "generation": 1,
    "restarts": 1,
    "max_restarts": 3,
    "ddplaunch": "0.1.0",
    "idle_for": 61.5,
    "idle_why": "rank 3 has not reached all_reduce",
    "steps_per_second": 2.5,
    "steps": 412,
    "straggler": "rank 3 comes last",
    "spares": "c",
    "over_ssh": ["a", "me@b"],
    "python": "/usr/bin/python3",
}
TO_AGENT: list[dict[str, Any]] = [
    {"asked": {"type": "status"}, "within": 2.0, "protocol": requests.PROTOCOL},
    {"asked": {"type": "stop"}, "within": 2.0, "protocol": requests.PROTOCOL},
    {"asked": {"type": "attach", "rank": 3, "profiles": True}, "within": 2.0, "protocol": requests.PROTOCOL},
]
TO_CLIENT: list[dict[str, Any]] = [
    RUN,
    {"type": "node", "node_rank": None, "host": "a", "answer": {"type": "none", "reason": "was lost"}},
    {"type": "done", "status": 130},
    {"type": "elsewhere", "run_id": "20261122-1", "host": "a", "srun_job": "7+1"},
    {"type": "refused", "reason": "too many", "runs_no_python": False},
]
TO_VIEWER: list[dict[str, Any]] = [{"place": "L3J1bnMAc29ja2V0", "columns": 80, "lines": 24, "snapshot": True}]
CASES = [
    (decode, message)
    for decode, messages in [
        (requests.decode_request, TO_AGENT),
        (requests.decode_reply, TO_CLIENT),
        (requests.decode_said, [{"text": "(Pdb) ", "asks": True, "ends": False}]),
        (requests.decode_draw, TO_VIEWER),
    ]
    for message in messages
]


@pytest.mark.parametrize(("decode", "message"), CASES, ids=lambda value: getattr(value, "__name__", str(value)[:40]))
def test_what_fits_is_taken_and_a_hostile_value_in_any_field_is_refused_or_harmless(
    decode: Callable[[bytes], Any], message: dict[str, Any]
) -> None:
    assert json.loads(requests.encode(decode(json.dumps(message).encode()))) == message
    for payload in altered(message):
        taken(decode, payload)


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps).map(str.encode))
def test_arbitrary_bytes_raise_nothing_but_one_error(payload: bytes) -> None:
    taken(requests.decode_request, payload)
    taken(requests.decode_reply, payload)
    taken(requests.decode_said, payload)
    taken(requests.decode_draw, payload)


def test_a_later_protocol_is_recognized_whatever_its_requests_look_like() -> None:
    assert requests.protocol_of(b'{"protocol": 7, "asked": ["something", "new"]}').protocol == 7
    with pytest.raises(Malformed):
        requests.protocol_of(b'{"protocol": "7"}')


def test_a_reply_of_an_unknown_kind_is_no_answer_of_a_node_although_it_names_one() -> None:
    for kind in ("progress", "run"):
        with pytest.raises(Malformed):
            requests.decode_reply(json.dumps({"type": kind, "node_rank": 0, "host": "a"}).encode())


def test_a_viewer_asks_at_a_path_that_is_no_text() -> None:
    for place, path in [(b"/runs/\xff\0socket", ("/runs/\udcff", "socket")), (b"\0name", ("", "name"))]:
        draw = requests.decode_draw(requests.encode(requests.Draw(place, 80, 24)))
        assert draw.socket_path == SocketPath(*path)
