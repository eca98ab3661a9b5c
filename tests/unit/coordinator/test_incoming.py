"""What a coordinator answers to an agent that comes late."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job.members import Members
from ddplaunch.launcher.decide.node import ReportStopping
from ddplaunch.launcher.job.agents import Agent, member_of
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.messages import GivenUp, Hello, NodeFacts, Ping, Pong, encode, for_agent
from ddplaunch.launcher.job.orders import Goodbye, JobEnd, NodeEnd
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.outcome import Traces, Why
from ddplaunch.system import exitcodes
from tests.loops import FakeLoop
from tests.unit.coordinator.played import PlayedCoordinator

HELLO = Hello(
    requested_rank=None,
    host="c",
    workers=1,
    backend="gloo",
    backend_reason="",
    reached="b",
    facts=NodeFacts(ddplaunch="1", python="3", torch="2", script="", nnodes="1:3"),
)


TERMS = Terms(
    keepalive=Keepalive(max_nodes=3, timeout=10.0),
    run_id="run-1",
    address=None,
    key=Key(b"key"),
    listen="127.0.0.1",
    ports=(0,),
)
NO_TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
STATE = job.State(policy=job.Policy(min_nodes=1, max_nodes=3))
FULL = Members.of(job.Member(id=id, host="c", workers=1, requested_rank=None) for id in range(3))


def incoming_for(state: job.State, events: list[Any]) -> Any:
    coordinator = SimpleNamespace(state=state, feed=events.append, print=print)
    return Incoming(FakeLoop(), TERMS, cast(Any, coordinator))


def test_an_agent_for_which_there_is_no_place_does_not_take_the_coordinator_for_ended() -> None:
    connections, peer = incoming_for(STATE, [])._connections, PlayedCoordinator()
    connections._most_peers = 0
    connections.on_opened(peer)
    connections.close()
    assert peer.got == ["given_up"]


def test_who_wants_a_rank_that_is_taken_waits_until_all_others_have_answered() -> None:
    fed = list[Any]()
    incoming = incoming_for(replace(STATE, members=FULL), fed)
    incoming._connections._connections[1] = SimpleNamespace(answered=-inf, peer=SimpleNamespace(close=list))
    incoming.on_message(3, HELLO)
    incoming._admit_waiting()
    assert fed == []
    incoming._connections._connections[1].answered = inf
    incoming._admit_waiting()
    incoming.agents.close()
    assert len(fed) == 1


def test_who_waits_is_forgotten_when_the_job_ends_as_the_one_before_joins() -> None:
    fed = list[Any]()
    incoming = incoming_for(STATE, fed)

    def ends(event: Any) -> None:
        fed.append(event)
        incoming.agents.waiting.clear()

    incoming._coordinator.feed = ends
    member = member_of(3, HELLO)
    incoming.agents.waiting.update({3: member, 4: replace(member, id=4)})
    incoming._admit_waiting()
    incoming.agents.close()
    assert len(fed) == 1


@pytest.mark.parametrize("has_one_command", [False, True])
def test_who_is_told_to_stop_while_it_waits_leaves_as_it_is_or_ends_the_job_of_one_command(
    has_one_command: bool,
) -> None:
    fed, released = list[Any](), list[Any]()
    incoming = incoming_for(replace(STATE, policy=replace(STATE.policy, has_one_command=has_one_command)), fed)
    incoming._coordinator.release = lambda *release: released.append(release)
    incoming.agents.by_id[3] = Agent(HELLO)
    incoming.agents.waiting[3] = member_of(3, HELLO)
    incoming.on_message(3, ReportStopping(Why.SIGNALLED, 15))
    incoming.agents.close()
    assert ([type(event) for event in fed], released) == (
        ([job.StopRequested], []) if has_one_command else ([], [(3, 15)])
    )


def test_a_coordinator_that_has_left_the_job_admits_nobody_who_still_waits() -> None:
    fed = list[Any]()
    incoming = incoming_for(replace(STATE, members=FULL), fed)
    incoming.on_message(3, HELLO)
    incoming.agents.leave(15, "")
    incoming._admit_waiting()
    assert fed == []


@pytest.mark.parametrize(
    ("phase", "ages", "silent"),
    [(job.Phase.RUNNING, (0.4, 9.0, 2.5), 2), (job.Phase.RUNNING, (0.4, 1.0, 1.9), 0), (job.Phase.STOPPING, (9.0,), 0)],
    ids=["two of three", "none", "all, which the first loss has said already"],
)
def test_with_a_node_that_is_lost_it_is_told_how_many_others_are_silent(
    phase: job.Phase, ages: tuple[float, ...], silent: int
) -> None:
    fed = list[Any]()
    members = Members.of(job.Member(id=id, host="c", workers=1, requested_rank=None) for id in range(len(ages) + 2))
    incoming = incoming_for(replace(STATE, members=members, phase=phase), fed)
    for age in (9.0, *ages):
        incoming._connections.on_opened(cast(Any, PlayedCoordinator()))
        connection = incoming._connections._connections[incoming._connections._last_id]
        connection.heard_at = incoming._loop.now() - age
    incoming._connections.drop(1)
    incoming.on_lost(1, "silent for 9 s", 0.0)
    incoming.agents.close()
    assert [event.others_silent for event in fed] == [silent]


PONG = Pong(0.0, 8.0)


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([replace(HELLO, last_generation=2_000_000)], "claims to have begun generation 2000000"),
        ([replace(HELLO, last_term=2**60)], f"of term {2**60}, far ahead of the clock here"),
        ([HELLO, NodeEnd(5, (), None, (), NO_TRACES)], "(the end of generation 5, which has not begun)"),
        ([HELLO, PONG], "(an answer to a ping that was not sent)"),
        ([replace(HELLO, at=9.0), "pong"], "(a renewal from before the last one)"),
        ([HELLO, "pong", "pong"], "(an answer to a ping that was not sent)"),
    ],
    ids=["generation", "term", "its end", "a ping", "an older renewal", "a ping twice"],
)
def test_a_node_that_lies_about_itself_is_lost_with_a_word_on_that(claims: list[Any], said: str) -> None:
    fed, sent, peer = list[Any](), list[Any](), PlayedCoordinator()
    peer.send = lambda payload: sent.append(for_agent(payload))  # type: ignore[method-assign]
    incoming = incoming_for(STATE, fed)
    incoming._connections.on_opened(peer)
    (ping,) = sent
    for claim in claims:
        incoming._connections._on_payload(1, encode(Pong(ping.sent, 8.0) if claim == "pong" else claim))
    incoming.agents.close()
    assert isinstance(fed[-1], job.AgentLost)
    assert said in fed[-1].reason
    assert sent[-1] == GivenUp(fed[-1].reason, may_return=False)


def test_each_ping_echoes_the_last_renewal_that_has_come() -> None:
    sent, peer = list[Any](), PlayedCoordinator()
    peer.send = lambda payload: sent.append(for_agent(payload))  # type: ignore[method-assign]
    incoming = incoming_for(STATE, [])
    connections = incoming._connections
    connections.on_opened(peer)
    connections._on_payload(1, encode(replace(HELLO, at=7.0)))
    connections._ping(1)
    connections._on_payload(1, encode(Pong(sent[0].sent, 8.0)))
    connections._ping(1)
    assert connections.renewed_at(1) == incoming._loop.now()
    incoming.agents.close()
    assert [message.answered for message in sent if isinstance(message, Ping)] == [0.0, 7.0, 8.0]


@pytest.mark.parametrize("has_one_command", [True, False])
def test_who_comes_after_the_end_gets_the_end_of_the_job_that_started_it_or_is_refused(has_one_command: bool) -> None:
    fed, sent, peer = list[Any](), list[Any](), PlayedCoordinator()
    peer.send = lambda payload: sent.append(for_agent(payload))  # type: ignore[method-assign]
    incoming = incoming_for(replace(STATE, policy=replace(STATE.policy, has_one_command=has_one_command)), fed)
    incoming.agents.end_job(JobEnd(143, "signalled"), ())
    incoming._connections.on_opened(peer)
    incoming._connections._on_payload(1, encode(HELLO))
    incoming.agents.close()
    if has_one_command:
        assert (sent[-1], fed) == (JobEnd(143, "signalled"), [])
    else:
        assert [type(event) for event in fed] == [job.Joined]
        ended = replace(STATE, phase=job.Phase.ENDED)
        assert job.step(ended, fed[0])[1] == (job.Refuse(1, "the job has ended", exitcodes.RENDEZVOUS),)


def test_an_agent_that_drops_its_coordinator_may_have_workers_until_its_lease_is_over() -> None:
    """It loses a host that is silent earlier than that, and its workers may save meanwhile."""
    fed, peer = list[Any](), PlayedCoordinator()
    incoming = incoming_for(STATE, fed)
    incoming._connections.on_opened(peer)
    for message in (HELLO, Goodbye("has heard nothing", has_ended=False)):
        incoming._connections._on_payload(1, encode(message))
    incoming.agents.close()
    assert isinstance(fed[-1], job.AgentLost)
    assert not fed[-1].has_ended
