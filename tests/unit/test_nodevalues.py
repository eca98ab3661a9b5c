"""The grammars of values about nodes: what each takes, what it says otherwise, and that written values read the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch import nodevalues
from ddplaunch.spec import Fault
from ddplaunch.values import BadValue

RIGHT = [
    (nodevalues.nnodes, "3", (3, 3)),
    (nodevalues.nnodes, "1:4", (1, 4)),
    (nodevalues.host, "[::1]", "::1"),
    (nodevalues.host, "gpu-01.cluster", "gpu-01.cluster"),
    (nodevalues.endpoint, "", None),
    (nodevalues.endpoint, "gpu01", "gpu01"),
    (nodevalues.endpoint, "gpu01:29500", "gpu01:29500"),
    (nodevalues.endpoint, "[fe80::1%eth0]:29500", "[fe80::1%eth0]:29500"),
    (nodevalues.endpoint, "fe80::1", "fe80::1"),
    (nodevalues.rendezvous_settings, " join_timeout=60, is_host = 1", {"join_timeout": "60", "is_host": "1"}),
    (nodevalues.rendezvous_settings, "store_type=file=x", {"store_type": "file=x"}),
    (nodevalues.rendezvous_settings, "is_host=True,join_timeout=90", {"is_host": "1", "join_timeout": "90"}),
    (nodevalues.rendezvous_settings, "is_host=n,last_call_timeout=0", {"is_host": "0", "last_call_timeout": "0"}),
    (nodevalues.faults, "kill:5@2s", (Fault(kind="kill", target=5, after=2.0),)),
    (
        nodevalues.faults,
        "node:1@3, slow:0@500ms,hang:12@1m",
        (
            Fault(kind="node", target=1, after=3.0),
            Fault(kind="slow", target=0, after=0.5),
            Fault(kind="hang", target=12, after=60.0),
        ),
    ),
]

WRONG = [
    (nodevalues.nnodes, "0", "expected a number of nodes, or MIN:MAX"),
    (nodevalues.nnodes, "1:2:3", "expected a number of nodes, or MIN:MAX"),
    (nodevalues.nnodes, "2:", "expected a number of nodes, or MIN:MAX"),
    (nodevalues.nnodes, "3:2", "the least number of nodes is above the greatest, 2"),
    (nodevalues.host, "a:29500", "expected a host without a port"),
    (nodevalues.host, "a b", "expected a host name or an address"),
    (nodevalues.endpoint, "a:65536", "expected HOST or HOST:PORT"),
    (nodevalues.endpoint, ":29500", "expected HOST or HOST:PORT"),
    (nodevalues.rendezvous_settings, "join_timeout", "expected KEY=VALUE,KEY=VALUE"),
    (nodevalues.rendezvous_settings, "a=1,timeout=0", "timeout: expected a time above zero"),
    (
        nodevalues.rendezvous_settings,
        "join_timeout=long",
        "join_timeout: expected seconds, or a time such as 90s, 15m or 1h30m",
    ),
    (nodevalues.rendezvous_settings, "is_host=maybe", "is_host: expected 1 or 0"),
    (nodevalues.faults, "", '"" is not KIND:RANK@TIME'),
    (nodevalues.faults, "kill:5", '"kill:5" is not KIND:RANK@TIME'),
    (nodevalues.faults, "kill:-1@2s", '"kill:-1@2s" is not KIND:RANK@TIME'),
    (
        nodevalues.faults,
        "kill:\N{ARABIC-INDIC DIGIT THREE}@2s",
        '"kill:\N{ARABIC-INDIC DIGIT THREE}@2s" is not KIND:RANK@TIME',
    ),
    (nodevalues.faults, "kill:5@2s,", '"" is not KIND:RANK@TIME'),
    (nodevalues.faults, "burn:5@2s", '"burn:5@2s": expected "kill", "node", "hang" or "slow"'),
    (nodevalues.faults, "kill:5@soon", '"kill:5@soon": expected seconds, or a time such as 90s, 15m or 1h30m'),
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
    assert nodevalues.faults(nodevalues.write_faults(faults)) == tuple(faults)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_written_number_of_nodes_reads_the_same(least: int, more: int) -> None:
    nodes = (least, least + more)
    assert nodevalues.nnodes(nodevalues.write_nnodes(nodes)) == nodes
