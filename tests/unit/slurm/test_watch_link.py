"""How the command that has started a step follows the coordinator from node to node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from signal import SIGINT
from socket import AF_INET
from typing import Any, cast

import pytest

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.elsewhere.slurm.watch_link import WatchLink
from ddplaunch.launcher.elsewhere.slurm.watcher import QUIT_TIMEOUT, Watcher
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agents
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.orders import CoordinatorLost, JobEnd
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.channel.peer import CLOSED, Peer
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.silence import seconds_to_follow
from ddplaunch.reach.slurm.srun import StepJob
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedCoordinator, succession

HEARTBEAT = 10.0
LOST_OTHERS = JobEnd(status=122, why="node_lost", text="error: node 1 was lost\n")
FINISHED = JobEnd(status=0, why="finished")


class Link(WatchLink):
    """One that dials nobody: the test connects it."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.looked_at: list[Sequence[messages.Candidate]] = []
        super().__init__(self.loop, key=Key(b"key"), heartbeat_timeout=HEARTBEAT, may_shorten_silence=True)

    def aim_at(self, candidates: Sequence[messages.Candidate], *_others: object) -> None:
        self.looked_at.append(candidates)

    def reaches(self, *names: str) -> PlayedCoordinator:
        """Reach a coordinator, which says that these nodes take over after it, if there are any."""
        coordinator = PlayedCoordinator()
        self._on_opened(cast(Peer, coordinator))
        if names:
            coordinator.says(succession(*names))
        return coordinator


@pytest.fixture
def link() -> Link:
    return Link()


def test_the_status_comes_from_the_node_that_has_taken_over(link: Link) -> None:
    link.reaches("b", "c").closed(CLOSED)
    link.loop.pass_time(0.0)
    assert [type(event) for event in link.loop.events] == [CoordinatorLost]
    assert [[one.host for one in looked_at] for looked_at in link.looked_at] == [["b", "c"]]
    assert (link.is_reached, link.is_looking) == (False, True)
    successor = link.reaches("c")
    assert (successor.got[0], link.is_looking) == ("watch", False)
    successor.says(FINISHED)
    assert link.end == FINISHED
    assert link.loop.is_idle


def test_a_silent_coordinator_is_lost_too(link: Link) -> None:
    link.reaches("b")
    link.loop.pass_time(HEARTBEAT)
    assert link.is_looking


def test_a_node_that_yields_to_one_before_it_is_no_longer_followed(link: Link) -> None:
    link.reaches("b", "c").closed(CLOSED)
    link.reaches().closed(CLOSED)
    assert len(link.looked_at) == 2
    assert link.is_looking


def test_nodes_that_a_coordinator_has_lost_are_looked_for_before_its_end_is_believed(link: Link) -> None:
    link.reaches("b", "c").says(LOST_OTHERS)
    assert (link.end, link.is_looking) == (None, True)
    link.loop.pass_time(seconds_to_follow(HEARTBEAT) - 0.1)
    assert link.end is None
    link.loop.pass_time(0.1)
    assert link.end == LOST_OTHERS
    assert link.loop.is_idle


def test_they_are_looked_for_no_longer_than_the_step_lasts(link: Link) -> None:
    link.reaches("b", "c").closed(CLOSED)
    link.give_up()
    assert link.end is not None
    assert (link.end.status, link.end.text) == (122, f"error: the coordinator (node 0) was lost: {CLOSED}\n")
    assert link.loop.is_idle


def test_a_successor_that_ends_without_the_others_is_not_asked_again(link: Link) -> None:
    link.reaches("b", "c").closed(CLOSED)
    link._dialer.reached = AF_INET, ("10.0.0.2", 4002)
    link.reaches().says(LOST_OTHERS)
    assert [[one.host for one in looked_at] for looked_at in link.looked_at] == [["b", "c"], ["b"]]


def test_any_other_end_is_believed_at_once(link: Link) -> None:
    link.reaches("b", "c").says(FINISHED)
    link.give_up()
    assert link.end == FINISHED


def test_a_job_in_which_no_node_takes_over_ends_at_once(link: Link) -> None:
    link.reaches().closed(CLOSED)
    assert link.end is not None
    assert link.end.why == "lost"


# --- signals of the user meanwhile


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    """The loop of the command, in a step whose srun runs."""
    pipes = FrontPipes.make()
    step = StepJob(
        argv=(),
        env={},
        host="a",
        ports=(),
        token="",
        name="",
        signals=frozenset({SIGINT}),
        stops=frozenset({SIGINT}),
        sent_again=frozenset(),
        heartbeat_timeout=HEARTBEAT,
        may_shorten_silence=True,
        grace_period=30.0,
        open_files=(0, 0),
        notices=frozenset(),
        requeue=cast(Any, None),
    )
    watcher = Watcher(FakeLoop(), step, pipes)
    monkeypatch.setattr(watcher._link, "aim_at", lambda _: None)
    yield watcher
    for fd in (*pipes.signals, *pipes.requests, *pipes.replies, *pipes.start):
        os.close(fd)
    for sock in (*pipes.output, *pipes.spared):
        sock.close()


def reached(watcher: Watcher) -> PlayedCoordinator:
    coordinator = PlayedCoordinator()
    watcher._link._on_opened(cast(Peer, coordinator))
    watcher._loop.run_once()
    watcher._send_pending()
    return coordinator


@pytest.mark.parametrize("sent_before", [True, False])
def test_a_stop_that_may_be_lost_with_the_coordinator_is_sent_to_the_next(watcher: Watcher, sent_before: bool) -> None:
    interrupt = node.SignalReceived(SIGINT, watcher._loop.now())
    first = reached(watcher)
    first.says(succession("b", "c"))
    if sent_before:
        watcher._on_event(interrupt)
        assert first.got[-1] == "stopping"
    first.closed(CLOSED)
    watcher._loop.run_once()
    if not sent_before:
        watcher._on_event(interrupt)
    # workers save, since all nodes have lost the coordinator
    assert watcher._end_by.at == watcher._loop.now() + 30.0 + QUIT_TIMEOUT
    assert reached(watcher).got == ["watch", "stopping"]


# --- the other side


class Connections:
    """Those of a coordinator that takes over, which nobody reads."""

    port = 4000
    ids = ()

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send(self, id: int, payload: bytes) -> None:
        self.sent.append((id, messages.for_agent(payload)))

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def agents() -> Agents:
    loop, nobody = FakeLoop(), cast(Any, None)
    retry = loop.timer(None, lambda: None)
    return Agents(loop, nobody, cast(Any, Connections()), print, requeues_after_sigterm=False, retry=retry)


@pytest.mark.parametrize("comes", [True, False])
def test_a_coordinator_that_takes_over_waits_only_so_long_for_the_command(agents: Agents, comes: bool) -> None:
    loop, missed = cast(FakeLoop, agents._loop), list[str]()
    agents.expect_watcher(5.0, lambda: missed.append("missed"))
    loop.pass_time(4.9)
    if comes:
        agents.watch(7)
    loop.pass_time(0.2)
    assert missed == ([] if comes else ["missed"])


@pytest.mark.parametrize("comes", [True, False])
def test_a_job_that_ends_before_the_command_has_come_waits_for_it(agents: Agents, comes: bool) -> None:
    nobody = cast(Any, None)
    coordinator = Coordinator(agents._loop, job.State(policy=job.Policy(min_nodes=2, max_nodes=3)), nobody, nobody)
    coordinator._agents, coordinator._has_ended = agents, True
    agents.expect_watcher(5.0, lambda: None)
    assert not coordinator.is_over
    if comes:
        agents.watch(7)
    else:
        cast(FakeLoop, agents._loop).pass_time(5.0)
    assert coordinator.is_over


def test_a_coordinator_that_yields_waits_for_no_command(agents: Agents) -> None:
    missed: list[str] = []
    agents.expect_watcher(5.0, lambda: missed.append("missed"))
    agents.close()
    cast(FakeLoop, agents._loop).pass_time(6.0)
    assert missed == []


def test_a_command_that_connects_late_learns_who_takes_over_and_how_the_job_has_ended(agents: Agents) -> None:
    agents._announced = succession("b")
    agents.end(FINISHED, ())
    agents.watch(7)
    assert cast(Any, agents.connections).sent == [(7, succession("b")), (7, FINISHED)]
