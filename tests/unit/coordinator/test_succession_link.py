"""What a node does that has lost the coordinator: whom it follows, how long it looks, and when it takes an agent for ended."""

from __future__ import annotations

from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job import succession
from ddplaunch.launcher.decide.job.state import End
from ddplaunch.launcher.decide.job.succession import AT_ONCE
from ddplaunch.launcher.job import listen, messages
from ddplaunch.launcher.job.messages import Candidate, Deserted, Ended, GivenUp, HandedOver, Ping, Succession
from ddplaunch.launcher.job.orders import Generation
from ddplaunch.launcher.job.remote_link import CONNECTION_REFUSED
from ddplaunch.launcher.job.succession_link import SuccessionLink
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.peer import CLOSED, RESET
from ddplaunch.reach.silence import seconds_to_look
from ddplaunch.spec.outcome import Why
from tests.loops import FakeLoop
from tests.unit.coordinator.played import HISTORY
from tests.unit.coordinator.test_incoming import HELLO

NODES = {rank: (f"10.0.0.{rank}", 4000) for rank in range(3)}
SPARE = 3  # takes over from nobody


class Peer:
    """The side of a connection that this node has."""

    local_address = "10.0.0.9"

    def __init__(self, rank: int) -> None:
        self.address = NODES[rank][0]
        self.sent: list[Any] = []
        self.is_open = True

    def send(self, payload: bytes) -> None:
        self.sent.append(messages.for_coordinator(payload))

    def close(self) -> None:
        self.is_open = False


def state_of_coordinator(gather_until: float | None) -> job.State:
    policy = job.Policy(min_nodes=1, max_nodes=3)
    return job.State(policy=policy, succession=succession.Succession(gather_until=gather_until))


class Bed:
    """The link of the node with this rank, which has lost nothing yet; node 0 is the coordinator."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.inherited, self.dialed = FakeLoop(), list[Any](), list[Any]()
        monkeypatch.setattr(listen, "take_over", self._take_over)
        self.coordinator: Any = SimpleNamespace(
            state=state_of_coordinator(1.0), close=lambda: None, told=[], take=lambda *_: None
        )
        self.coordinator.last_one_ended = lambda: self.coordinator.told.append("ended")
        self.coordinator.desert = lambda: self.coordinator.told.append("deserts")
        spec = SimpleNamespace(heartbeat_timeout=10.0, may_shorten_silence=False, rdzv_timeout=60.0, spares=0)
        rendezvous = SimpleNamespace(source=None, listen="127.0.0.1")
        allocation = SimpleNamespace(start=())
        request: Any = SimpleNamespace(spec=spec, rendezvous=rendezvous, allocation=allocation, key=Key(b"key"))
        self.link = SuccessionLink(request, lambda _: HELLO, self.loop, SimpleNamespace())  # type: ignore[arg-type]
        self.link._dialer = self  # type: ignore[assignment]
        self.reached: Any = None
        self.open(0)
        votes = {rank: (Vote(1, rank),) for rank in NODES}
        candidates = tuple(
            Candidate(votes=votes[rank], host=f"n{rank}", address=NODES[rank][0], port=4000) for rank in (1, 2)
        )
        told = Succession(
            run_id="run-1",
            host="n0",
            coordinator=votes[0],
            votes=votes.get(rank, ()),
            candidates=candidates,
            electorates=(Electorate(1, 3),),
            history=HISTORY,
        )
        self.hear(told)
        self.is_kept()

    def _take_over(self, _request: object, inheritance: Any, *_: object) -> Any:
        inheritance.listening.close()
        self.inherited.append(inheritance)
        return self.coordinator

    def set_targets(self, targets: Any) -> None:
        self.dialed = [address for _, address in targets]

    def stop(self) -> None:
        self.dialed = []

    def open(self, rank: int) -> Peer:
        self.reached, self.peer = (2, NODES[rank]), Peer(rank)
        self.link._on_opened(self.peer)  # type: ignore[arg-type]
        return self.peer

    def is_kept(self) -> None:
        """The coordinator has this node, and says that its answers come."""
        self.hear(Ping(0.0, 10.0))
        self.hear(Ping(0.0, 10.0, self.peer.sent[-1].at))

    def hear(self, message: Any) -> None:
        self.link._on_message(messages.encode(message))

    def wait(self, seconds: float) -> None:
        """Let time pass in steps, so that none of it is a pause of this process."""
        for _ in range(int(2 * seconds)):
            self.loop._sleepless.time += 0.5
            self.loop.post(None)
            self.loop.run_once()

    def refuses(self, rank: int, *, after: float = 0.0) -> None:
        self.wait(after)
        self.link._on_refused(f"{NODES[rank][0]}:4000", CONNECTION_REFUSED)


@pytest.fixture
def beds(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Bed] = []

    def make(rank: int) -> Bed:
        made.append(Bed(rank, monkeypatch))
        return made[-1]

    yield make
    for bed in made:
        bed.link.close()


def test_who_takes_over_knows_of_the_ends_that_the_coordinator_alone_saw(beds: Any) -> None:
    bed = beds(1)
    bed.hear(Ended((Vote(1, 2), Vote(7, 0))))
    bed.link._on_closed(CLOSED)
    (inheritance,) = bed.inherited
    assert inheritance.succession.electorates == (Electorate(1, 3, ended=(2,)),)


def test_who_is_given_up_looks_for_the_others(beds: Any) -> None:
    bed = beds(2)
    bed.hear(GivenUp("silent for 10 s"))
    assert (bed.link.end, bed.dialed) == (None, [NODES[1], NODES[0]])


@pytest.mark.parametrize(("after", "has_ended"), [(2.5, True), (AT_ONCE + 0.5, False)])
def test_a_refusal_proves_an_end_only_before_that_node_can_have_gone_on_with_others(
    beds: Any, after: float, has_ended: bool
) -> None:
    bed = beds(2)
    bed.link._lose_coordinator("connection reset", has_ended=False)
    bed.refuses(1, after=after)
    (inheritance,) = bed.inherited
    assert not inheritance.ended, "it may have lost node 0 long ago, have gone on with others, and have finished"
    bed.refuses(0)
    assert bed.coordinator.told == ["ended"] * has_ended


def test_a_refusal_proves_no_end_of_a_node_that_was_silent_before(beds: Any) -> None:
    bed = beds(2)
    bed.wait(AT_ONCE + 0.5)
    bed.link._lose_coordinator("silent for 3.5 s", has_ended=False)
    bed.refuses(1)
    assert not bed.inherited[0].ended


def test_once_a_node_that_took_over_is_lost_too_a_refusal_proves_only_its_own_end(beds: Any) -> None:
    bed = beds(2)
    bed.link._lose_coordinator("connection reset", has_ended=False)
    bed.wait(AT_ONCE + 0.5)
    bed.open(1)
    bed.is_kept()
    bed.link._lose_coordinator("connection reset", has_ended=False)
    bed.refuses(0)
    assert bed.link._ended == set()
    bed.refuses(1)
    assert bed.link._ended == {f"{NODES[1][0]}:4000"}


def test_a_coordinator_learns_that_this_node_is_to_end_though_an_earlier_one_knew_it(beds: Any) -> None:
    bed = beds(2)
    bed.link.send(node.ReportStopping(Why.SIGNALLED, 2))
    peer = bed.open(1)
    bed.link.take(Generation(number=0, term=7, restarts=0, port=1, agreed=None))
    assert peer.sent[-1] == node.ReportStopping(Why.SIGNALLED, 2)


def test_the_end_of_a_node_that_took_over_is_not_that_of_node_0(beds: Any) -> None:
    bed = beds(2)
    bed.link._lose_coordinator("silent for 10 s", has_ended=False)
    bed.open(1)
    bed.link._lose_coordinator("silent for 10 s", has_ended=False)
    bed.refuses(1)
    assert not bed.inherited[0].lost_has_ended
    assert bed.dialed == [NODES[0]]


def test_who_took_over_waits_as_long_as_its_coordinator_does(beds: Any) -> None:
    bed = beds(1)
    bed.hear(HandedOver(15))
    bed.wait(100.0)
    assert bed.inherited[0].lost_has_ended
    assert bed.link.end is None


@pytest.mark.parametrize("waits", [True, False])
def test_who_took_over_follows_another_only_while_it_waits_for_the_others(beds: Any, waits: bool) -> None:
    bed = beds(1)
    bed.link._lose_coordinator("silent for 10 s", has_ended=False)
    bed.coordinator.state = state_of_coordinator(1.0 if waits else None)
    peer = bed.open(0)
    assert peer.is_open == waits
    assert bed.coordinator.told == ["deserts"] * waits


def test_a_coordinator_that_follows_another_has_not_ended(beds: Any) -> None:
    bed = beds(2)
    bed.link._lose_coordinator("connection closed", has_ended=True)
    peer = bed.open(1)
    bed.is_kept()
    bed.hear(Deserted())
    assert isinstance(peer.sent[-1], Deserted)
    bed.refuses(1)
    (inheritance,) = bed.inherited
    assert (inheritance.ended, [one.host for one in inheritance.refused]) == ((), ["n1"])


def test_a_coordinator_that_follows_another_passes_on_that_the_job_is_stopped(beds: Any) -> None:
    bed = beds(2)
    bed.link._lose_coordinator("connection closed", has_ended=True)
    bed.refuses(1)
    bed.coordinator.state = replace(state_of_coordinator(1.0), end=End(halted=True), why=Why.SIGNALLED, signum=2)
    bed.link.send(node.ReportStopping(Why.SIGNALLED, 2))
    hello, stopping = bed.open(1).sent
    assert (hello.stop.signum, hello.stop.why) == (2, Why.SIGNALLED)
    assert stopping == node.ReportStopping(Why.SIGNALLED, 2)


def test_a_node_that_is_to_end_does_so_when_it_loses_the_coordinator(beds: Any) -> None:
    bed = beds(2)
    bed.link.send(node.ReportStopping(Why.SIGNALLED, 2))
    bed.link.take(Generation(number=0, term=7, restarts=0, port=1, agreed=None))  # which crosses the report
    bed.link._lose_coordinator("connection closed", has_ended=True)
    assert bed.link.end.status == 130


def test_who_has_reached_the_node_that_takes_over_waits_for_it_as_long_as_it_speaks(beds: Any) -> None:
    bed = beds(SPARE)
    bed.link._on_closed(CLOSED)
    bed.open(1)
    for _ in range(100):
        bed.wait(1.0)
        bed.hear(Ping(0.0, 10.0))
    assert bed.link.end is None


def test_who_has_lost_that_node_too_looks_no_longer_than_before(beds: Any) -> None:
    bed = beds(SPARE)
    bed.link._on_closed(CLOSED)
    bed.wait(20.0)
    bed.open(1)
    bed.link._on_closed(RESET)
    bed.wait(seconds_to_look(10.0) - 0.5)
    assert bed.link.end is None
    bed.wait(0.5)
    assert bed.link.end and bed.link.end.status == 122


def test_a_worker_that_fails_because_node_0_is_lost_does_not_end_its_node(beds: Any) -> None:
    bed = beds(SPARE)
    bed.link._on_closed(CLOSED)
    bed.link.send(node.ReportStopping(Why.FAILED, 0))
    assert bed.link.end is None
    bed.link.send(node.ReportStopping(Why.SIGNALLED, SIGTERM))
    assert bed.link.end and bed.link.end.status == 143


@pytest.mark.parametrize("known", ["hello", "answer", ""])
def test_the_end_of_a_coordinator_that_may_have_gone_on_without_this_node_proves_nothing(beds: Any, known: str) -> None:
    """This node was dropped, comes back, and sees how the connection is closed."""
    bed = beds(1)
    bed.link._lose_coordinator("connection reset", has_ended=False)
    bed.link.coordinator.state = state_of_coordinator(1.0)
    bed.wait(AT_ONCE + 0.5)
    hello = bed.open(0).sent[-1]
    if known == "hello":
        bed.hear(Ping(0.0, 10.0, hello.at))
    elif known:
        bed.is_kept()
    bed.link._on_closed(CLOSED)
    assert bed.inherited[-1].lost_has_ended is bool(known)


def test_an_agent_that_is_in_the_order_twice_does_not_look_for_itself(beds: Any) -> None:
    """It had come again before the coordinator knew that its first connection was broken."""
    bed = beds(2)
    other, own = bed.link._succession.candidates
    bed.link._succession = replace(bed.link._succession, candidates=(replace(other, address=own.address), own))
    bed.link._on_closed(CLOSED)
    assert (len(bed.inherited), bed.dialed) == (1, [])
