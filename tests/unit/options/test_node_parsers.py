"""The grammars of values about nodes: what each takes, what it says otherwise, and that written values read the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.options import node_parsers
from ddplaunch.options.parsers import BadValue
from ddplaunch.spec import Fault

RIGHT = [
    (node_parsers.nnodes, "3", (3, 3)),
    (node_parsers.nnodes, "1:4", (1, 4)),
    (node_parsers.host, "[::1]", "::1"),
    (node_parsers.host, "gpu-01.cluster", "gpu-01.cluster"),
    (node_parsers.endpoint, "gpu01", "gpu01"),
    (node_parsers.endpoint, "gpu01:29500", "gpu01:29500"),
    (node_parsers.endpoint, "[fe80::1%eth0]:29500", "[fe80::1%eth0]:29500"),
    (node_parsers.endpoint, "fe80::1", "fe80::1"),
    (node_parsers.rendezvous_settings, " join_timeout=60, is_host = 1", {"join_timeout": "60", "is_host": "1"}),
    (node_parsers.rendezvous_settings, "'join_timeout=5,is_host=1'", {"join_timeout": "5", "is_host": "1"}),
    (node_parsers.rendezvous_settings, "store_type=file=x", {"store_type": "file=x"}),
    (node_parsers.rendezvous_settings, "is_host=True,join_timeout=90", {"is_host": "1", "join_timeout": "90"}),
    (node_parsers.rendezvous_settings, "is_host=n,last_call_timeout=0", {"is_host": "0", "last_call_timeout": "0"}),
    (node_parsers.faults, "kill:5@2s", (Fault(kind="kill", target=5, after=2.0),)),
    (
        node_parsers.faults,
        "node:1@3, slow:0@500ms,hang:12@1m",
        (
            Fault(kind="node", target=1, after=3.0),
            Fault(kind="slow", target=0, after=0.5),
            Fault(kind="hang", target=12, after=60.0),
        ),
    ),
]

WRONG = [
    (node_parsers.nnodes, "0", "expected a number of nodes, or MIN:MAX"),
    (node_parsers.nnodes, "1:2:3", "expected a number of nodes, or MIN:MAX"),
    (node_parsers.nnodes, "2:", "expected a number of nodes, or MIN:MAX"),
    (node_parsers.nnodes, "3:2", "MIN exceeds MAX"),
    (node_parsers.host, "a:29500", "expected a host without a port"),
    (node_parsers.host, "a b", "expected a host name or an address"),
    (node_parsers.endpoint, "a:65536", "expected HOST or HOST:PORT"),
    (node_parsers.endpoint, ":29500", "expected HOST or HOST:PORT"),
    (node_parsers.rendezvous_settings, "join_timeout", "expected KEY=VALUE,KEY=VALUE"),
    (node_parsers.rendezvous_settings, "a=1,timeout=0", "timeout: expected a time above zero"),
    (
        node_parsers.rendezvous_settings,
        "join_timeout=long",
        "join_timeout: expected seconds, or a time such as 90s, 15m or 1h30m",
    ),
    (node_parsers.rendezvous_settings, "is_host=maybe", "is_host: expected 1 or 0"),
    (node_parsers.faults, "", '"" is not KIND:RANK@TIME'),
    (node_parsers.faults, "kill:5", '"kill:5" is not KIND:RANK@TIME'),
    (node_parsers.faults, "kill:-1@2s", '"kill:-1@2s" is not KIND:RANK@TIME'),
    (
        node_parsers.faults,
        "kill:\N{ARABIC-INDIC DIGIT THREE}@2s",
        '"kill:\N{ARABIC-INDIC DIGIT THREE}@2s" is not KIND:RANK@TIME',
    ),
    (node_parsers.faults, "kill:5@2s,", '"" is not KIND:RANK@TIME'),
    (node_parsers.faults, "burn:5@2s", '"burn:5@2s": expected "kill", "node", "hang" or "slow"'),
    (node_parsers.faults, "kill:5@soon", '"kill:5@soon": expected seconds, or a time such as 90s, 15m or 1h30m'),
]


@pytest.mark.parametrize(("parse", "text", "value"), RIGHT)
def test_right_values_are_read(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(("parse", "text", "expected"), WRONG)
def test_wrong_values_say_what_was_expected(parse: Callable[[str], Any], text: str, expected: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse(text)
    assert str(caught.value) == expected


_FAULTS = st.builds(
    lambda kind, target, milliseconds: Fault(kind=kind, target=target, after=milliseconds / 1000),
    st.sampled_from(("kill", "node", "hang", "slow")),
    st.integers(0, 999_999_999),
    st.integers(0, 30 * 365 * 86_400_000 - 1),
)


@given(st.lists(_FAULTS, min_size=1, max_size=4))
def test_written_faults_read_the_same(faults: list[Fault]) -> None:
    assert node_parsers.faults(node_parsers.write_faults(faults)) == tuple(faults)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_written_number_of_nodes_reads_the_same(least: int, more: int) -> None:
    nodes = (least, least + more)
    assert node_parsers.nnodes(node_parsers.write_nnodes(nodes)) == nodes
