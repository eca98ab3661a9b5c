"""How the nodes of a generation reach and hear the first one, on real sockets, where the coordinator is on none of them."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.meeting import Meeting
from ddplaunch.launcher.job.orders import CannotLead, Lead, MeetAt, Reached
from ddplaunch.launcher.job.probe import REACHED_WITHIN, Probe
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.silence import Keepalive
from tests.loops import FakeLoop

KEY = key("a long secret", "job-1")
KEEPALIVE = Keepalive(max_nodes=3, timeout=4.0)
LEAD = Lead(1, 0, "", again=False)


class Node:
    """A node, all of whose reports are kept; its loop is one that a test puts forward."""

    def __init__(self, loop: FakeLoop, keepalive: Keepalive = KEEPALIVE) -> None:
        self.reports: list[Any] = []
        self.probe = Probe(loop, KEY, keepalive, cast(Any, self))

    def send(self, report: Any) -> None:
        """Take a report in place of the link to the coordinator."""
        assert messages.for_coordinator(messages.encode(report)) == report
        self.reports.append(report)


class Held:
    """A meeting of agents in whose place a test answers, with a first node of this name, that lives; and what follows."""

    def __init__(self, order: tuple[int, ...], name: str) -> None:
        self.name = name
        self.asked: list[tuple[int, Any]] = []  # each agent, by id
        self.fed: list[Any] = []
        self.begun: list[tuple[Any, ...]] = []  # order, port and address
        self.loop = FakeLoop(at=0.0)
        here: Any = self  # in place of the agents, their connections and the coordinator
        self.connections, self.feed = here, self.fed.append
        self.meeting = Meeting(self.loop, here, here, 1, order)

    def names_of(self, _id: int) -> tuple[str, ...]:
        return (self.name,)

    def ask(self, id: int, order: Any) -> None:
        self.asked.append((id, order))

    def ping_all(self) -> None:
        """The first node answers at once."""

    def has_answered_ping_all(self, _id: int) -> bool:
        return True

    def order_to_begin(self, *order: Any) -> None:
        self.begun.append(order)


class Nodes:
    """A first node and another one in one loop."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.loop._sleepless.patience = 0.02
        self.first, self.other = Node(self.loop), Node(self.loop)

    def until(self, done: Callable[[], bool], within: float = 5.0) -> None:
        end = time.monotonic() + within
        while not done():
            assert time.monotonic() < end
            self.loop.run_once()

    def meet(self, *addresses: str) -> MeetAt:
        self.first.probe.on_order(LEAD)
        (first,) = self.first.reports
        assert isinstance(first, MeetAt)
        self.other.probe.on_order(replace(first, addresses=addresses or ("127.0.0.1",)))
        return first

    def pass_time(self, seconds: float) -> None:
        end = self.loop.now() + seconds
        while self.loop.now() < end and self.loop.deadline is not None:
            self.loop.run_once()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.first.probe.close()
    nodes.other.probe.close()
    assert nodes.loop.is_idle
    nodes.loop.close()


def test_the_first_node_reserves_the_port_and_the_other_reaches_it(nodes: Nodes) -> None:
    first = nodes.meet("192.0.2.1", "127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", first.master_port))
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "127.0.0.1")]
    nodes.until(lambda: nodes.first.probe.address is not None)
    assert (nodes.first.probe.address, nodes.other.probe.address) == ("127.0.0.1", "127.0.0.1")


def test_a_port_that_is_taken(nodes: Nodes) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes.first.probe.on_order(Lead(1, port, "--master-port", again=True))
        nodes.first.probe.on_order(Lead(2, port, "--master-port", again=False))
    first, second = nodes.first.reports
    assert first == CannotLead(1, is_taken=True)
    assert isinstance(second, CannotLead)
    assert (second.meeting, second.is_taken) == (2, False)
    assert second.reason.startswith(f"--master-port {port} is taken")


def test_where_nobody_answers_the_reason_is_said_in_time(nodes: Nodes) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        began = nodes.loop.now()
        nodes.other.probe.on_order(MeetAt(1, 29500, ("127.0.0.1",), port))
        nodes.until(lambda: bool(nodes.other.reports), within=30.0)
    assert nodes.other.reports == [Reached(1, "", f"127.0.0.1:{port}: connection refused")]
    assert nodes.loop.now() - began == pytest.approx(REACHED_WITHIN, abs=1.5)


def test_a_name_that_is_looked_up_for_ever_keeps_nobody_from_an_address(nodes: Nodes) -> None:
    nodes.meet("gpu01", "127.0.0.1")  # no name server answers
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "127.0.0.1")]
    (asked,) = nodes.loop.questions
    assert not asked.pid  # nobody waits for the name any more


def test_a_name_that_is_looked_up_for_ever_keeps_nobody_from_another_name(nodes: Nodes) -> None:
    began = nodes.loop.now()
    nodes.meet("gpu01", "localhost")
    _, asked = nodes.loop.questions
    asked.answer_with(asked.question())
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "localhost")]
    assert nodes.loop.now() - began < 1.0
    assert not any(question.pid for question in nodes.loop.questions)


def test_a_name_that_is_known_late_is_dialed_beside_an_address_that_leads_nowhere(nodes: Nodes) -> None:
    nodes.meet("localhost", "192.0.2.1")
    nodes.pass_time(1.0)
    (asked,) = nodes.loop.questions
    asked.answer_with(asked.question())
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "localhost")]


def test_a_name_that_fails_is_looked_up_again_while_another_one_takes_long(nodes: Nodes) -> None:
    nodes.meet("gpu01", "localhost")
    hangs, asked = nodes.loop.questions
    asked.answer_with("Temporary failure in name resolution")
    nodes.until(lambda: len(nodes.loop.questions) > 2)
    again = nodes.loop.questions[2]
    assert hangs.pid
    again.answer_with(again.question())
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "localhost")]


def test_a_name_that_is_known_in_time_is_where_the_first_node_is_reached(nodes: Nodes) -> None:
    nodes.meet("localhost", "127.0.0.1")
    (asked,) = nodes.loop.questions
    asked.answer_with(asked.question())
    nodes.until(lambda: bool(nodes.other.reports))
    assert nodes.other.reports == [Reached(1, "localhost")]


def test_a_node_of_another_meeting_is_not_the_first_one(nodes: Nodes) -> None:
    nodes.first.probe.on_order(LEAD)
    nodes.other.probe.on_order(MeetAt(2, 29500, ("127.0.0.1",), nodes.first.reports[0].listen_port))
    nodes.until(lambda: bool(nodes.other.reports), within=30.0)
    (report,) = nodes.other.reports
    assert report.address == ""
    assert "wrong token" in report.reason


def test_a_first_node_that_answers_is_heard_for_ever_and_one_that_ends_is_not(nodes: Nodes) -> None:
    nodes.meet()
    nodes.until(lambda: bool(nodes.other.reports))
    nodes.pass_time(30.0)
    assert nodes.other.reports == [Reached(1, "127.0.0.1")]
    nodes.first.probe.close()
    nodes.until(lambda: len(nodes.other.reports) > 1)
    assert nodes.other.reports[1] == Reached(1, "", "connection closed")


def test_a_first_node_that_is_silent_is_lost(nodes: Nodes) -> None:
    nodes.meet()
    nodes.until(lambda: nodes.first.probe.address is not None and bool(nodes.other.reports))
    part: Any = nodes.first.probe._part
    for peer in part._peers:
        peer.received = lambda payload: None
    nodes.until(lambda: len(nodes.other.reports) > 1)
    assert nodes.other.reports[1] == Reached(1, "", "silent for 4 s")


def test_who_has_ended_reports_nothing_more_and_is_no_loss_to_others(nodes: Nodes) -> None:
    nodes.meet()
    nodes.until(lambda: bool(nodes.other.reports))
    nodes.first.probe.on_generation_ended()  # others may still run
    nodes.pass_time(6.0)
    assert nodes.other.reports == [Reached(1, "127.0.0.1")]
    nodes.other.probe.on_generation_ended()
    nodes.first.probe.close()
    assert nodes.other.reports == [Reached(1, "127.0.0.1")]


def test_a_meeting_is_over_once_all_have_answered_and_takes_no_address_that_was_not_given() -> None:
    held = Held((4, 5, 6), "gpu01")
    meeting = held.meeting
    meeting.begin(29500, "--master-port", again=False)
    meeting.on_report(5, MeetAt(1, 1, ("10.9.9.9",), 2))  # not the first one
    meeting.on_report(5, Reached(1, "10.9.9.9"))  # not asked yet
    meeting.on_report(4, MeetAt(1, 29500, ("10.0.0.1", "gpu01"), 4711))
    reach = MeetAt(1, 29500, ("gpu01", "10.0.0.1"), 4711)
    assert held.asked == [(4, Lead(1, 29500, "--master-port", again=False)), (5, reach), (6, reach)]
    meeting.on_report(5, Reached(1, "10.0.0.1"))
    assert held.loop.deadline is None
    meeting.on_report(6, Reached(1, "10.6.6.6"))
    held.loop.run_once()
    (unreached,) = held.fed
    assert unreached.nodes == ((6, "at 10.6.6.6, which is none of its addresses"),)
    assert held.begun == []


def test_a_node_that_has_reached_the_first_one_may_lose_it_before_all_have_met() -> None:
    held = Held((4, 5, 6), "gpu01")
    held.meeting.on_report(4, MeetAt(1, 29500, (), 4711))
    held.meeting.on_report(5, Reached(1, "gpu01"))
    held.meeting.on_report(5, Reached(1, "", "connection closed"))
    held.meeting.on_report(6, Reached(1, "gpu01"))
    held.loop.run_once()
    (unreached,) = held.fed
    assert unreached.nodes == ((5, "connection closed"),)
    held.meeting.on_report(6, Reached(0, "", "of an earlier meeting"))
    held.meeting.on_report(6, Reached(1, "", "silent for 10 s"))
    assert [event.reason for event in held.fed[1:]] == ["silent for 10 s"]


def test_who_is_called_by_a_loopback_address_is_reached_from_other_hosts_all_the_same() -> None:
    """As with `--hosts 127.0.0.1,gpu02`: the other node finds itself at that address, and nobody who has the key."""
    held = Held((1, 2), "127.0.0.1")
    held.meeting.on_report(1, MeetAt(1, 29500, ("10.0.0.1",), 4711))
    assert held.asked == [(2, MeetAt(1, 29500, ("127.0.0.1", "10.0.0.1"), 4711))]
    held.meeting.on_report(2, Reached(1, "10.0.0.1"))
    assert (held.begun, held.fed) == ([((1, 2), 29500, "10.0.0.1")], [])


def test_a_node_alone_meets_at_its_loopback_address_whatever_address_of_the_command_it_has_reached() -> None:
    held = Held((7,), "gpu01")
    held.meeting.on_report(7, MeetAt(1, 29500, ("10.0.0.1",), 4711))
    assert held.begun == [((7,), 29500, "127.0.0.1")]
