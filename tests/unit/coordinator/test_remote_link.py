"""What an agent says of a node 0 that it has not reached, and what it does about one that it has lost."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.link import Lease
from ddplaunch.launcher.job.messages import LeftByNode0
from ddplaunch.launcher.job.orders import Generation, Leased, LookingForCoordinator, NodeEnd, Waits
from ddplaunch.launcher.job.remote_link import CoordinatorElsewhere, RemoteLink
from ddplaunch.plan import AgentRun, Agreed
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.outcome import CLOSED, Traces, Why
from tests.loops import FakeLoop
from tests.unit.coordinator.test_incoming import HELLO

CONNECTION_REFUSED = "connection refused"
TOKEN = "wrong token, or another job"
NODE_0 = CoordinatorElsewhere(
    key=Key(b"key"), first_message=HELLO, keepalive=Keepalive(timeout=10.0), rdzv_timeout=60.0
)
PROTOCOL = "protocol 2, here 1: install the same ddplaunch on all nodes"
SILENT = "no answer in 2 s"


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ([], "it has not answered"),
        ([CONNECTION_REFUSED, CONNECTION_REFUSED], "a:0: connection refused"),
        ([CONNECTION_REFUSED, SILENT, CONNECTION_REFUSED], "a:1: no answer in 2 s"),
        ([SILENT, CLOSED], "a:1: connection closed"),
        ([TOKEN, CONNECTION_REFUSED, CLOSED, SILENT], f"a:0: {TOKEN}"),
        ([SILENT, PROTOCOL, SILENT], f"a:1: {PROTOCOL}"),
        ([PROTOCOL, TOKEN], f"a:1: {TOKEN}"),
    ],
)
def test_of_all_that_went_wrong_what_tells_most_is_said(reasons: list[str], said: str) -> None:
    loop = FakeLoop()
    link = RemoteLink(loop, replace(NODE_0, keepalive=Keepalive(timeout=30.0), rdzv_timeout=10.0))
    link._search.places = (("a", 29501),)
    for port, reason in enumerate(reasons):
        link._search.refusals.add(f"a:{port}", reason)
    loop.pass_time(10.0)
    link.close()
    *looking, end = loop.events
    assert [type(event) for event in looking] == [LookingForCoordinator]
    assert f" at a, port 29501 ({said})\n" in end.text
    assert link.end == end
    assert loop.deadline is None


def test_what_was_said_is_replaced_by_what_comes_then() -> None:
    """Once the cable of this node is in again, "no route to host" is no longer why node 0 is not reached."""
    loop = FakeLoop()
    link = RemoteLink(loop, replace(NODE_0, keepalive=Keepalive(timeout=30.0)))
    link._search.places = (("a", 29501),)
    link._search.refusals.add("a:0", "no route to host")
    loop.pass_time(3.0)
    loop.pass_time(30.0)
    link._search.refusals.add("a:0", CONNECTION_REFUSED)
    loop.pass_time(30.0)
    link.close()
    assert ["no route" in event.text for event in loop.events] == [True, True, False]


# --- a coordinator that is lost, where node 0 may come back


class Peer:
    """The side of a connection that this node has."""

    address, local_address = "10.0.0.1", "10.0.0.9"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_open = True
        self.host_silent = 0.0
        self.is_in_vain = False

    def send(self, payload: bytes) -> None:
        self.sent.append(messages.for_coordinator(payload))

    def host_silence(self) -> float:
        return self.host_silent

    def sends_in_vain(self) -> bool:
        return self.is_in_vain

    def close(self) -> None:
        self.is_open = False


class Bed:
    """The link of node 1, which has reached node 0; the lease runs by a clock that also counts pauses."""

    def __init__(
        self, *, how_back: str = "for it to come back", command_host: str = "", is_leased: bool = True
    ) -> None:
        self.loop = FakeLoop()
        self.link = RemoteLink(
            self.loop,
            replace(NODE_0, how_back=how_back, command_host=command_host),
            Lease(10.0, lambda: self.loop._sleepless.time) if is_leased else None,
        )
        self.dialed = 0
        self.link._search._dialer = self  # type: ignore[assignment]
        self.link._search.places = (("10.0.0.1", 4000),)
        self.handled: list[Any] = []
        self.left = inf  # seconds for which the workers may live, as the front was told
        self.loop.handle = self.handle
        self.peer = self.open()

    def handle(self, event: Any) -> None:
        if isinstance(event, Leased):
            self.left = event.left
        else:
            self.handled.append(event)

    def set_targets(self, _: Any) -> None:
        self.dialed += 1

    def stop(self) -> None:
        """Nobody is dialed."""

    def open(self) -> Peer:
        self.peer = Peer()
        self.link.on_found(self.peer, "10.0.0.1")  # type: ignore[arg-type]
        return self.peer

    def hear(self, message: Any) -> None:
        self.link._on_message(messages.encode(message))

    def begin(self, number: int = 0, lease: float = 0.0) -> None:
        agreed = Agreed(
            run_id="r", index=1, agent_runs=(AgentRun(2, 1),), address="a", backend="gloo", backend_reason=""
        )
        self.hear(Generation(number=number, term=number, restarts=0, port=1, lease=lease, agreed=agreed))

    def ping(self) -> None:
        """Hear a ping that echoes the last renewal."""
        renewal = next(one.at for one in reversed(self.peer.sent) if isinstance(one, messages.Hello | messages.Pong))
        self.hear(messages.Ping(0.0, 10.0, renewal))

    def end_workers(self, *leftovers: str) -> None:
        number = self.link._orders_of_last.generation if self.link._orders_of_last is not None else 0
        self.link.send(NodeEnd(number, (), None, leftovers, Traces(oom_kills=0, shm=None, log_folder=None)))

    def wait(self, seconds: float) -> None:
        """Let time pass in steps, so that none of it is a pause of this process."""
        for _ in range(int(2 * seconds)):
            self.loop._sleepless.time += 0.5
            self.loop.post(None)
            self.loop.run_once()

    def pause(self, seconds: float) -> None:
        """Let this process not run for so long, and come by then."""
        self.loop.timer(self.loop.now() + 0.5, lambda: None)
        self.loop._sleepless.patience = 0.0
        self.loop._sleepless.time += seconds
        self.loop.run_once()

    def take_events(self) -> list[Any]:
        self.loop._hand_over_events()
        found = [one for one in self.handled if one is not None]
        self.handled.clear()
        return found


LOST = [
    pytest.param(lambda bed: bed.link._on_closed(CLOSED), "is lost: connection closed", id="its process has ended"),
    pytest.param(lambda bed: bed.hear(LeftByNode0(15)), "leaves (SIGTERM)", id="it leaves"),
    pytest.param(lambda bed: bed.hear(LeftByNode0(0)), "is lost: its ddplaunch has ended", id="its command is gone"),
    pytest.param(lambda bed: bed.hear(LeftByNode0(0, "x")), "is lost: its health check failed: x", id="it is unfit"),
]


@pytest.mark.parametrize(("lose", "how"), LOST)
def test_a_lost_coordinator_is_looked_for_once_nothing_of_the_workers_is_left(lose: Any, how: str) -> None:
    bed = Bed()
    bed.begin(3)
    bed.take_events()
    lose(bed)
    waits, stop = bed.take_events()
    assert waits == Waits(f"node 0 (10.0.0.1) {how}; waiting up to 1 min for it to come back")
    assert (stop.signum, stop.why) == (15, Why.COORDINATOR)
    assert (bed.dialed, bed.peer.is_open) == (0, False)
    bed.end_workers()
    assert bed.dialed == 1
    bed.open()
    assert bed.take_events() == [Waits("node 0 (10.0.0.1) is reached again")]
    assert bed.peer.sent[0].last_generation == 3
    bed.begin(4)
    assert [type(event) for event in bed.take_events()] == [Generation]
    bed.link.close()


@pytest.mark.parametrize(("lose", "_how"), LOST)
def test_where_node_0_does_not_come_back_its_loss_ends_the_node(lose: Any, _how: str) -> None:
    bed = Bed(how_back="")
    bed.begin()
    lose(bed)
    assert bed.link.end is not None
    assert bed.link.end.status == 122
    assert bed.link.end.text.startswith("error: the coordinator (node 0) was lost: ")
    bed.link.close()


def test_a_node_that_was_started_by_a_command_says_that_it_has_lost_the_command() -> None:
    bed = Bed(how_back="", command_host="login1")
    bed.begin()
    bed.link._on_closed(CLOSED)
    assert bed.link.end is not None
    assert bed.link.end.text == "error: the coordinator (the command on login1) was lost: connection closed\n"
    bed.link.close()


def test_without_workers_it_is_looked_for_at_once_and_the_search_is_reported_again_and_again() -> None:
    bed = Bed()
    bed.link._on_closed(CLOSED)
    assert bed.dialed == 1
    bed.take_events()
    bed.wait(31.0)
    (said,) = bed.take_events()
    assert said.text == (
        "looking for node 0 at 10.0.0.1, port 4000 (it has not answered). Waiting up to 30 s more for it to come back"
    )
    bed.wait(30.0)
    assert bed.link.end is not None
    assert (bed.link.end.status, bed.link.end.why) == (122, "lost")
    assert "is lost: connection closed, and node 0 was not reached again within 60 s at " in bed.link.end.text


@pytest.mark.parametrize("echoes", [True, False])
def test_the_workers_are_killed_when_the_lease_is_over_whatever_was_lost_before(echoes: bool) -> None:
    bed = Bed()
    bed.begin()
    bed.wait(4.0)
    if echoes:
        bed.ping()
        bed.ping()
    bed.link._on_closed(CLOSED)
    bed.take_events()
    bed.wait(5.5)
    assert bed.take_events() == []
    bed.wait(5.0 if echoes else 1.0)
    assert [type(event) for event in bed.take_events()] == ([node.LeaseOver])
    bed.wait(10.0)
    assert bed.take_events() == []
    bed.link.close()


@pytest.mark.parametrize("is_leased", [True, False], ids=["a longer one is typed", "a fixed size is typed"])
def test_a_lease_lasts_no_longer_than_the_coordinator_waits_for_it(is_leased: bool) -> None:
    bed = Bed(is_leased=is_leased)
    bed.wait(1.0)
    bed.begin(lease=5.0)
    bed.take_events()
    bed.wait(3.5)
    assert bed.take_events() == []
    bed.wait(1.0)
    assert node.LeaseOver in [type(event) for event in bed.take_events()]
    bed.link.close()


def test_workers_that_have_ended_are_not_killed_later() -> None:
    bed = Bed()
    bed.begin()
    bed.link._on_closed(CLOSED)
    bed.end_workers()
    bed.take_events()
    bed.wait(15.0)
    assert bed.take_events() == []
    bed.link.close()


@pytest.mark.parametrize("how_back", ["for it to come back", ""])
def test_a_generation_that_comes_after_the_lease_is_refused_and_the_link_is_dropped_at_once(how_back: str) -> None:
    """The agent was stopped: neither it nor the coordinator has noticed yet."""
    bed = Bed(how_back=how_back)
    bed.begin()
    bed.end_workers()
    bed.take_events()
    bed.loop._sleepless.time += 10.5
    bed.begin(1)
    killed, *then = bed.take_events()
    assert isinstance(killed, node.LeaseOver)
    assert Generation not in map(type, then)
    assert isinstance(bed.peer.sent[-1], messages.Dropped)
    assert not bed.peer.is_open
    assert bed.dialed == bool(how_back)
    bed.link.close()


def test_the_front_is_told_until_when_the_workers_may_live() -> None:
    bed = Bed()
    bed.begin()
    told = [bed.left]
    bed.wait(4.0)
    bed.ping()
    bed.ping()
    told.append(bed.left)
    bed.wait(9.5)
    told.append(bed.left)
    bed.wait(1.0)
    told.append(bed.left)
    assert told == [10.0, 10.0, 10.0, inf]
    bed.link.close()


def test_a_node_that_is_not_heard_loses_its_lease_though_it_hears() -> None:
    bed = Bed()
    bed.begin()
    bed.ping()
    bed.take_events()
    for _ in range(9):
        bed.wait(1.0)
        bed.hear(messages.Ping(0.0, 10.0, bed.peer.sent[0].at))
    bed.wait(1.5)
    killed, waits, _ = bed.take_events()
    assert isinstance(killed, node.LeaseOver)
    assert waits.text == (
        "this node was not heard by node 0 (10.0.0.1) for 10 s, and other nodes may have gone on without it; "
        "looking for node 0 (10.0.0.1) for up to 1 min"
    )
    assert isinstance(bed.peer.sent[-1], messages.Dropped)
    bed.link.close()


@pytest.mark.parametrize(
    ("is_in_vain", "way"), [(False, ""), (True, ", and hears nothing from here")], ids=["both ways", "one way"]
)
def test_a_coordinator_that_is_silent_is_lost_when_the_lease_is_over(is_in_vain: bool, way: str) -> None:
    bed = Bed()
    bed.peer.is_in_vain = is_in_vain
    bed.begin()
    bed.take_events()
    bed.wait(1.0)
    bed.ping()
    bed.wait(9.5)
    killed, waits, _ = bed.take_events()
    assert isinstance(killed, node.LeaseOver)
    assert waits.text.startswith(f"node 0 (10.0.0.1) is lost: silent for 10 s{way}; waiting up to 1 min for it to come")
    bed.link.close()


@pytest.mark.parametrize(("seconds", "is_over"), [(9.0, False), (30.0, True)])
def test_after_a_pause_the_lease_is_looked_at_ahead_of_all_that_has_come_meanwhile(
    seconds: float, is_over: bool
) -> None:
    bed = Bed()
    bed.begin()
    bed.take_events()
    came = bed.loop.timer(bed.loop.now() + 0.1, lambda: bed.loop.post("what came meanwhile"))
    bed.pause(seconds)
    found = bed.take_events()
    if is_over:
        assert [type(event) for event in found[:2]] == [node.LeaseOver, Waits]
        assert "this node was paused for " in found[1].text
    else:
        assert found == ["what came meanwhile"]
    came.cancel()
    bed.link.close()


def test_a_job_that_needs_all_its_nodes_survives_any_pause() -> None:
    bed = Bed(how_back="", is_leased=False)
    bed.begin()
    bed.take_events()
    bed.pause(1000.0)
    assert (bed.take_events(), bed.link.end) == ([], None)
    bed.link.close()


@pytest.mark.parametrize("how_back", ["for it to come back", ""])
def test_nobody_waits_where_the_job_was_being_stopped_for_good(how_back: str) -> None:
    bed = Bed(how_back=how_back)
    bed.begin()
    bed.hear(messages.Ending(130))
    bed.hear(node.StopOrdered(2, 0.0, Why.SIGNALLED))
    bed.link._on_closed(CLOSED)
    assert bed.link.end is not None
    assert (bed.link.end.status, bed.link.end.why) == (130, "lost")
    said = "error: the coordinator (node 0) was lost: connection closed, while the job was being stopped\n"
    assert bed.link.end.text == said
    bed.link.close()


@pytest.mark.parametrize("follows", ["another generation", "no word of an end"])
def test_node_0_is_waited_for_where_another_generation_was_to_follow(follows: str) -> None:
    """As where a worker fails because the worker of node 0 is lost."""
    bed = Bed()
    bed.begin()
    if follows == "another generation":
        bed.hear(messages.Ending(122))
        bed.end_workers()
        bed.begin(1)
    bed.link.send(node.ReportStopping(Why.FAILED, 15))
    bed.link._on_closed(CLOSED)
    assert bed.link.end is None
    bed.link.close()


@pytest.mark.parametrize("lost_first", [False, True])
def test_who_stops_this_node_ends_it_though_node_0_is_waited_for(lost_first: bool) -> None:
    bed = Bed()
    bed.begin()
    steps = [lambda: bed.link._on_closed(CLOSED), lambda: bed.link.send(node.ReportStopping(Why.SIGNALLED, 2))]
    for step in steps if lost_first else reversed(steps):
        step()
    assert bed.link.end is not None
    assert (bed.link.end.status, bed.link.end.why) == (130, "signalled")
    bed.link.close()


@pytest.mark.parametrize(("reason", "may_return"), [("silent for 10 s", True), ("sent hello twice", False)])
def test_who_was_given_up_comes_back_unless_it_has_broken_the_rules(reason: str, may_return: bool) -> None:
    bed = Bed()
    bed.hear(messages.GivenUp(reason, may_return))
    assert (bed.link.end is None) is may_return
    if may_return:
        (waits, _) = bed.take_events()
        assert (
            waits.text
            == f"node 0 (10.0.0.1) goes on without this node: {reason}; looking for node 0 (10.0.0.1) for up to 1 min"
        )
    bed.link.close()


@pytest.mark.parametrize("was_paused", [True, False])
def test_who_is_given_up_after_a_pause_kills_its_workers_though_the_clock_of_its_lease_stood(was_paused: bool) -> None:
    bed = Bed(how_back="")
    bed.link._lease = Lease(10.0, bed.loop.now)  # as with --simulate
    bed.open()
    bed.begin()
    if was_paused:
        bed.pause(10.5)
    bed.hear(messages.GivenUp("silent for 10 s", True))
    assert [isinstance(event, node.LeaseOver) for event in bed.take_events()].count(True) == was_paused


def test_a_process_that_nothing_ends_keeps_the_node_from_coming_back() -> None:
    bed = Bed()
    bed.begin()
    bed.link._on_closed(CLOSED)
    bed.end_workers("rank 1 (pid 7)")
    assert bed.dialed == 0
    assert bed.link.end is not None
    assert bed.link.end.text.endswith(", and processes are left here that could not be ended: rank 1 (pid 7)\n")
    bed.link.close()


def test_an_echo_of_what_this_node_has_not_sent_ends_it() -> None:
    bed = Bed()
    bed.hear(messages.Ping(0.0, 10.0, 1e9))
    assert bed.link.end is not None
    assert "the coordinator sent a malformed message (echoes a renewal that was not sent)" in bed.link.end.text
    bed.link.close()
