"""At which address a coordinator says that a node can be reached."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddplaunch.control.handshake import Key
from ddplaunch.control.peer import Peer
from ddplaunch.coordinator.connections import Connections, Terms
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedCoordinator


@pytest.mark.parametrize(
    ("peers", "reached"),
    [
        ([("127.0.0.1", "127.0.0.1")], ["127.0.0.1"]),
        ([("10.0.0.2", "10.0.0.1"), ("10.0.0.3", "10.0.0.1")], ["10.0.0.2", "10.0.0.3"]),
        # a name of this host may lead to 127.0.1.1, where other hosts would find themselves
        ([("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "10.0.0.1")], ["10.0.0.1", "10.0.0.2"]),
        ([("::1", "::1"), ("fd00::2", "fd00::1")], ["fd00::1", "fd00::2"]),
    ],
)
def test_a_node_on_the_host_of_the_coordinator_is_reached_from_other_hosts_where_that_is(
    peers: list[tuple[str, str]], reached: list[str]
) -> None:
    loop = FakeLoop()
    terms = Terms(
        max_nodes=3, run_id="", address=None, key=Key(b"key"), listen="127.0.0.1", ports=(0,), has_front=False,
        heartbeat_timeout=10.0,
    )  # fmt: skip
    nothing: Any = lambda *_: None  # noqa: E731 - one line for five callbacks
    connections = Connections(
        loop, terms, received=nothing, lost=nothing, dropped=nothing, refused=nothing, answered=nothing, counts=bool
    )
    for address, local_address in peers:
        peer: Any = PlayedCoordinator()
        peer.address, peer.local_address = address, local_address
        connections._on_opened(cast(Peer, peer))
    assert [connections.address(id) for id in connections.ids] == reached
    connections.close()
