"""How an agent looks for the node that takes over, and when it stops looking."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddplaunch.cluster import Rendezvous
from ddplaunch.control.handshake import Key
from ddplaunch.control.peer import CLOSED, RESET, Peer
from ddplaunch.coordinator.messages import Deserted, Hello, NodeFacts, Ping
from ddplaunch.coordinator.succession_link import SuccessionLink
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import Why
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedCoordinator, succession

HEARTBEAT = 10.0
PING = Ping(1.0, HEARTBEAT)
HELLO = Hello(
    requested_rank=None,
    host="c",
    workers=1,
    backend="gloo",
    backend_reason="",
    reached="b",
    facts=NodeFacts(ddplaunch="1", python="3", torch="2", script="", nnodes="1:3"),
)


class Link(SuccessionLink):
    """One that dials nobody: the test connects it. It never takes over itself, as a spare."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        spec = SimpleNamespace(heartbeat_timeout=HEARTBEAT, may_shorten_silence=False, rdzv_timeout=600.0, spares=0)
        rendezvous = Rendezvous(addresses=("10.0.0.1",), ports=(1,), coordinator=False, listen="127.0.0.1")
        request: Any = SimpleNamespace(spec=spec, rendezvous=rendezvous, key=Key(b"key"))
        super().__init__(request, lambda _: HELLO, self.loop, cast(Any, None))

    def aim_at(self, *_: object) -> None:
        """Look nowhere."""

    def reaches(self) -> PlayedCoordinator:
        coordinator = PlayedCoordinator()
        self._on_opened(cast(Peer, coordinator))
        return coordinator


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    link.reaches().says(succession("b", "c"))
    yield link
    link.close()


def test_who_has_reached_the_node_that_takes_over_waits_for_it_as_long_as_it_speaks(link: Link) -> None:
    cast(Any, link._peer).closed(CLOSED)
    successor = link.reaches()
    for _ in range(100):
        link.loop.pass_time(1.0)
        successor.says(PING)
    assert link.end is None


def test_who_has_lost_that_node_too_looks_no_longer_than_before(link: Link) -> None:
    cast(Any, link._peer).closed(CLOSED)
    link.loop.pass_time(20.0)
    link.reaches().closed(RESET)
    link.loop.pass_time(2 * HEARTBEAT + 9.9)
    assert link.end is None
    link.loop.pass_time(0.2)
    assert link.end is not None
    assert link.end.status == 122


def test_a_worker_that_fails_because_node_0_is_lost_does_not_end_its_node(link: Link) -> None:
    cast(Any, link._peer).closed(CLOSED)
    link.send(node.ReportStopping(Why.FAILED, 0))
    assert link.end is None
    link.send(node.ReportStopping(Why.SIGNALLED, SIGTERM))
    assert link.end is not None
    assert link.end.status == 143


def test_a_coordinator_that_gives_way_to_another_has_not_ended(link: Link) -> None:
    followed = cast(Any, link._peer)
    followed.says(Deserted())
    assert (link.is_reached, link._lost_has_ended) == (False, False)
    assert followed.got[-1] == "deserted"


def test_a_node_that_took_over_too_early_sends_its_followers_elsewhere(link: Link) -> None:
    done: list[str] = []
    link.coordinator = cast(
        Any, SimpleNamespace(desert=lambda: done.append("deserted"), state=SimpleNamespace(gather_until=1.0))
    )
    link.reaches()
    assert (done, link.coordinator) == (["deserted"], None)
