"""At which address the workers of all nodes meet, as a coordinator on node 0 has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import SELF_ID
from ddplaunch.launcher.job.agents import Agent, Agents
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.listen import _own_names
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.peer import Peer
from ddplaunch.reach.silence import Keepalive
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedCoordinator
from tests.unit.coordinator.test_incoming import HELLO

TERMS = Terms(
    keepalive=Keepalive(max_nodes=3, timeout=10.0), run_id="", address=None, key=Key(b"key"), listen="127.0.0.1", ports=(0,),
)  # fmt: skip


def connections_of(peers: Sequence[tuple[str, str]]) -> Connections:
    """Return the connections of a coordinator with peers at these addresses, and the addresses of its own that they reached."""
    receiver: Any = SimpleNamespace(on_refused=None)  # nobody is refused, nor says anything
    connections = Connections(FakeLoop(), TERMS, receiver)
    for address, local_address in peers:
        peer: Any = PlayedCoordinator()
        peer.address, peer.local_address = address, local_address
        connections.on_opened(cast(Peer, peer))
    return connections


FIRST, SECOND = ("10.0.0.2", "10.0.0.1"), ("10.0.0.3", "10.0.0.1")
BY_CABLE = ("10.1.0.2", "10.1.0.1")  # through another card
HERE = ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("names", "peers", "said", "meets"),
    [
        (("a",), [FIRST, SECOND], ["a", "a"], "a"),
        (("a",), [FIRST, SECOND, SECOND], ["evil", "a", "a"], "a"),
        (("a",), [FIRST], ["evil"], "10.0.0.1"),
        (("a", "10.1.0.1"), [BY_CABLE, SECOND], ["10.1.0.1", "10.1.0.1"], "10.1.0.1"),
        ((), [FIRST, SECOND, BY_CABLE], ["10.0.0.2", "a", "a"], "10.0.0.1"),
        (("a",), [HERE, HERE, FIRST], ["localhost", "localhost", "evil"], "10.0.0.1"),
        (("localhost",), [HERE, HERE, FIRST], ["localhost", "localhost", "a"], "10.0.0.1"),
        ((), [HERE], ["evil"], "127.0.0.1"),
        (("127.0.0.1",), [HERE], ["127.0.0.1"], "127.0.0.1"),
        (("a",), [("fd00::2", "fd00::1")], ["fd00::2"], "fd00::1"),
        (("a", "b"), [], [], "a"),
        ((), [], [], "127.0.0.1"),
    ],
    ids=[
        "under the name that this node knows for its own",
        "as the others do",
        "where the kernel of this node has the connection, if the name is not its own",
        "of several own ones where most reach it",
        "where most do, though they know it by names of their own",
        "not where this host alone does",
        "not where this host alone does, though this node was told that name of itself",
        "unless all are on this host",
        "by its address there",
        "over IPv6",
        "alone by its own name",
        "alone, on this host",
    ],
)
def test_workers_meet_at_a_name_or_an_address_that_node_0_knows_for_its_own(
    names: tuple[str, ...], peers: list[tuple[str, str]], said: list[str], meets: str
) -> None:
    connections = connections_of(peers)
    nobody: Any = None  # no agent waits, and none is refused
    agents = Agents(replace(TERMS, names=names, run_id="run"), connections, nobody)
    agents.add_own(replace(HELLO, reached="b"))
    agents.by_id |= {
        id: Agent(replace(HELLO, reached=reached)) for id, reached in zip(connections.ids, said, strict=True)
    }
    assert agents.agree((SELF_ID, *connections.ids)).address == meets
    agents.close()


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (("rendezvous.example",), ("rendezvous.example",)),
        ((os.uname().nodename, "another"), (os.uname().nodename,)),
        (("192.0.2.7", "127.0.0.1"), ("127.0.0.1",)),
        (("192.0.2.7", "another"), ()),
    ],
    ids=["the only one, as it was typed", "of the nodes of a step this one", "of addresses its own", "none"],
)
def test_of_several_addresses_for_node_0_it_knows_its_own(addresses: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert _own_names(addresses) == names
