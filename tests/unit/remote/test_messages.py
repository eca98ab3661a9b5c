"""What a host reports, and what it is told: a message whose every field is what it says, or `Malformed`."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.reach import order as orders
from ddplaunch.reach import protocol
from ddplaunch.system.fields import Malformed
from tests.unit.hostile import altered, taken

REPORTS: list[dict[str, Any]] = [
    {"type": "ready"},
    {"type": "worker", "rank": 3, "pid": 4711},
    {"type": "refused", "message": "no such file", "hint": None, "status": 2},
    {"type": "ended", "status": 1, "spared": [[4711, 815]]},
]
TEXT = b64encode(b"x\xff").decode()
ORDER = {
    "job": {"given": [[TEXT] * 5], "program": [TEXT], "for_workers": [[TEXT, TEXT, TEXT]]},
    "token": "t",
    "env": [[TEXT, TEXT]],
    "cwd": TEXT,
    "node_rank": 1,
    "typed_on": "login",
    "hosts": ["a", "b"],
    "cluster": "ssh",
    "min_nodes": 2,
    "endpoint": {"address": None, "address_reason": "", "port": 29500, "port_reason": "--master-port"},
    "screen": {
        "terminals": ["stdout"],
        "colour": ["stderr"],
        "links": False,
        "live": ["stderr"],
        "has_rows": False,
        "columns": 80,
        "lines": 24,
    },
    "heartbeat_timeout": 10.0,
    "simulated": None,
    "killed": [3],
}
CASES: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
    *((protocol.report, report) for report in REPORTS),
    (protocol.order, ORDER),
    (protocol.chunk, {"type": "chunk", "number": 1, "data": TEXT, "taken": 2}),
]


@pytest.mark.parametrize(("decode", "message"), CASES, ids=[str(message.get("type")) for _, message in CASES])
def test_what_fits_is_taken_and_a_hostile_value_in_any_field_is_refused_or_harmless(decode, message) -> None:
    assert json.loads(protocol.encode(decode(json.dumps(message).encode()))) == message
    for payload in altered(message):
        match taken(decode, payload):
            case protocol.Worker(_, pid):
                assert pid > 1  # nobody signals init, or all processes
            case protocol.HostOrder() as order:
                assert order.node_rank < len(order.hosts)
                orders.allocation(order)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_one_error(payload: bytes) -> None:
    for decode in (protocol.report, protocol.order, protocol.chunk):
        with suppress(Malformed):  # of text that happens to be a message nothing is refused
            decode(payload)
