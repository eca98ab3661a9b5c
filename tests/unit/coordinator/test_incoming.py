"""What a coordinator answers to an agent that comes late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job.members import Members
from ddplaunch.launcher.decide.job.state import End
from ddplaunch.launcher.decide.job.succession import Succession
from ddplaunch.launcher.decide.node import ReportStopping
from ddplaunch.launcher.job.agents import member_of
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.messages import Anew, Hello, NodeFacts, Ping, Running, encode, for_agent
from ddplaunch.launcher.job.orders import JobEnd, NodeEnd
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.spec.outcome import Traces, Why
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
    votes=(Vote(1, 2),),
)


TERMS = Terms(
    max_nodes=3,
    run_id="run-1",
    address=None,
    key=Key(b"key"),
    listen="127.0.0.1",
    ports=(0,),
    has_front=False,
    heartbeat_timeout=10.0,
)
NO_TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
STATE = job.State(policy=job.Policy(min_nodes=1, max_nodes=3))


def incoming_for(state: job.State, events: list[Any]) -> Any:
    coordinator = SimpleNamespace(state=state, feed=events.append, take_up=lambda _: None)
    return Incoming(FakeLoop(), TERMS, cast(Any, coordinator), print)


def test_who_has_lost_node_0_and_comes_when_the_job_has_ended_learns_how_it_has_ended() -> None:
    sent = list[Any]()
    incoming = incoming_for(STATE, sent)
    end = JobEnd(status=130, why="signalled")
    incoming.agents.end(end, ())
    incoming.agents.send = lambda ids, order: sent.append((ids, order))  # no connection is there
    incoming._on_message(3, replace(HELLO, run_id="run-1", votes=()))  # a spare has none
    incoming.agents.close()
    assert sent == [((3,), end)]


def test_a_coordinator_that_has_ended_the_job_here_alone_takes_nobody_back() -> None:
    fed = list[Any]()
    incoming = incoming_for(replace(STATE, end=End(is_cut_off=True)), fed)
    incoming._connections.drop = fed.append
    incoming._on_message(3, HELLO)
    incoming.agents.close()
    assert fed == [3]


def test_a_coordinator_that_may_not_go_on_yet_takes_back_who_may_let_it() -> None:
    fed = list[Any]()
    incoming = incoming_for(replace(STATE, succession=Succession(electorates=(Electorate(1, 3),))), fed)
    incoming._on_message(3, HELLO)
    incoming._admit_waiting()
    incoming.agents.close()
    assert [event.member.votes for event in fed] == [HELLO.votes]


def test_an_agent_for_which_there_is_no_place_does_not_take_the_coordinator_for_ended() -> None:
    connections, peer = incoming_for(STATE, [])._connections, PlayedCoordinator()
    connections._most = 0
    connections._on_opened(peer)
    connections.close()
    assert peer.got == ["given_up"]


@pytest.mark.parametrize(("term", "run_id", "sent"), [(0, "run-1", [Anew()]), (1, "run-1", []), (1, "run-2", [Anew()])])
def test_a_coordinator_was_started_anew_if_it_has_announced_nothing_or_has_another_run(
    term: int, run_id: str, sent: list[Any]
) -> None:
    told = list[Any]()
    incoming = incoming_for(replace(STATE, succession=Succession(term=term)), [])
    incoming._connections.send = lambda _id, payload: told.append(for_agent(payload))
    incoming._on_message(3, replace(HELLO, run_id=run_id))
    incoming.agents.close()
    assert told == sent


def test_who_has_lost_a_coordinator_is_taken_back_once_all_others_have_answered() -> None:
    fed = list[Any]()
    incoming = incoming_for(STATE, fed)
    incoming._connections._connections[1] = SimpleNamespace(
        heartbeat=SimpleNamespace(unanswered=1), peer=SimpleNamespace(close=list)
    )
    incoming._on_message(3, HELLO)
    incoming._admit_waiting()
    assert fed == []
    incoming._connections._connections[1].heartbeat.unanswered = 0
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
    member = member_of(3, HELLO, is_new=True)
    incoming.agents.waiting.update({3: member, 4: replace(member, id=4)})
    incoming._admit_waiting()
    incoming.agents.close()
    assert len(fed) == 1


@pytest.mark.parametrize("dispatched", [False, True])
def test_who_is_told_to_stop_while_it_waits_leaves_as_it_is_or_ends_the_job_of_one_command(dispatched: bool) -> None:
    fed, released = list[Any](), list[Any]()
    incoming = incoming_for(replace(STATE, policy=replace(STATE.policy, dispatched=dispatched)), fed)
    incoming._coordinator.release = lambda *release: released.append(release)
    incoming.agents.hellos[3] = HELLO
    incoming.agents.waiting[3] = member_of(3, HELLO)
    incoming._on_message(3, ReportStopping(Why.SIGNALLED, 15))
    incoming.agents.close()
    assert ([type(event) for event in fed], released) == (([job.StopRequested], []) if dispatched else ([], [(3, 15)]))


def test_what_a_node_of_the_last_coordinator_leaves_behind_counts_though_its_ranks_are_unknown() -> None:
    fed = list[Any]()
    incoming = incoming_for(STATE, fed)
    incoming.agents.hellos[3] = replace(HELLO, runs=Running(1, 1))
    incoming._on_message(3, NodeEnd(1, (), None, ("rank 1 (pid 7)",), NO_TRACES))
    incoming.agents.close()
    assert [event.leftovers for event in fed] == [("rank 1 (pid 7)",)]


def test_a_node_that_comes_back_with_a_process_that_nothing_ends_runs_no_other_generation() -> None:
    fed, refused = list[Any](), list[Any]()
    incoming = incoming_for(STATE, fed)
    incoming._coordinator.refuse = lambda *refusal: refused.append(refusal)
    incoming.agents.hellos[3] = HELLO
    incoming._late.add(3)
    incoming._on_message(3, NodeEnd(0, (), None, ("rank 1 (pid 7)",), NO_TRACES))
    incoming.agents.close()
    assert (fed, refused) == ([], [(3, "what is left of its workers would run beside others: rank 1 (pid 7)", 122)])


def test_the_end_of_workers_is_not_missed_while_there_is_no_place_for_their_node() -> None:
    """Its connection from before may still count as a member."""
    full = Members.of(job.Member(id=id, host="c", workers=1, requested_rank=None) for id in range(3))
    fed = list[Any]()
    incoming = incoming_for(replace(STATE, members=full, succession=Succession(gather_until=9.0)), fed)
    incoming._on_message(3, replace(HELLO, runs=Running(0, 1)))
    incoming._on_message(3, NodeEnd(0, (), None, (), NO_TRACES))
    incoming._coordinator.state = STATE
    incoming._admit_waiting()
    incoming.agents.close()
    assert [(event.member.id, event.member.runs) for event in fed] == [(3, False)]


@pytest.mark.parametrize(("known", "answered"), [((1,), 7.0), ((1, 2), 0.0), ((), 0.0)])
def test_who_takes_over_says_at_once_that_the_hello_of_a_node_has_come_unless_it_may_go_on_without_it(
    known: tuple[int, ...], answered: float
) -> None:
    """It may be lost before its next ping, and what its end proves depends on that."""
    sent, peer = list[Any](), PlayedCoordinator()
    peer.send = lambda payload: sent.append(for_agent(payload))  # type: ignore[method-assign]
    incoming = incoming_for(replace(STATE, succession=Succession(gather_until=9.0)), [])

    def admit(event: Any) -> None:
        electorates = tuple(Electorate(term, 3) for term in known)
        succession = Succession(electorates=electorates)
        incoming._coordinator.state = replace(STATE, members=Members.of([event.member]), succession=succession)

    incoming._coordinator.feed = admit
    incoming._connections._on_opened(peer)
    incoming._connections._on_payload(1, encode(replace(HELLO, at=7.0)))
    incoming.agents.close()
    assert [message.answered for message in sent if isinstance(message, Ping)] == [0.0, answered]


def test_a_coordinator_that_has_left_the_job_admits_nobody_who_still_waits() -> None:
    fed = list[Any]()
    incoming = incoming_for(STATE, fed)
    incoming._on_message(3, HELLO)
    incoming.agents.hand_over(15, "")
    incoming._admit_waiting()
    assert fed == []


@pytest.mark.parametrize(
    ("votes", "kept"),
    [
        ((Vote(2, 2),), (Vote(2, 2),)),
        ((Vote(1, 2), Vote(2, 1)), (Vote(2, 1),)),
        ((Vote(2, 2), Vote(3, 1)), (Vote(2, 2),)),
        ((Vote(2, 2), Vote(7, 0)), ()),
        ((Vote(7, 0),), ()),
    ],
    ids=[
        "the same electorate",
        "and that before, since it was lost as the generation began",
        "and one that was announced here and taken back",
        "and that of another coordinator",
        "another one alone",
    ],
)
def test_who_is_taken_back_votes_unless_another_coordinator_may_have_begun_with_it(
    votes: tuple[Vote, ...], kept: tuple[Vote, ...]
) -> None:
    fed, told = list[Any](), list[Any]()
    incoming = incoming_for(replace(STATE, succession=Succession(term=4, electorates=(Electorate(2, 3),))), fed)
    incoming.agents.announced_terms |= {2, 3, 4}
    incoming.agents.introduce = lambda id, votes: told.append((id, votes))
    incoming._join(member_of(3, replace(HELLO, votes=votes), is_new=True))
    incoming.agents.close()
    (joined,) = fed
    assert joined.member.votes == kept
    assert told == [(3, kept)]


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
        incoming._connections._on_opened(cast(Any, PlayedCoordinator()))
        connection = incoming._connections._connections[incoming._connections._last_id]
        connection.answered_at = incoming._loop.now() - age
    incoming._connections.drop(1)
    incoming._on_lost(1, "silent for 9 s", False, 0.0)
    incoming.agents.close()
    assert [event.silent for event in fed] == [silent]
