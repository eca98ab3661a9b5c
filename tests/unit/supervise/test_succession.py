"""Who may go on when the nodes of a job lose each other, and what a node that takes over goes on with."""

from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job import (
    SELF_ID,
    Acknowledged,
    AgentLost,
    Announce,
    BeginGeneration,
    CoordinatorEnded,
    DeadlineReached,
    EndJob,
    HandOver,
    Joined,
    NodeStopping,
    OwnUnfit,
    PastStop,
    Phase,
    Policy,
    Print,
    Release,
    State,
    StopNodes,
    StopRequested,
    rendezvous,
    starting,
    succession,
)
from ddplaunch.launcher.decide.job.limits import Limits
from ddplaunch.launcher.decide.job.restarts import Restarts
from ddplaunch.spec.outcome import Why
from ddplaunch.system import exitcodes
from tests.unit.supervise.job_histories import end, ended, history, member, met, stopping
from tests.unit.supervise.phases import job_step

ELASTIC = Policy(min_nodes=1, max_nodes=5, last_call=30.0, has_successors=True, may_leave=True)
LOST = "silent for 10 s"


def acknowledged(*ids: int, term: int = 1) -> list[Any]:
    return [Acknowledged(id, term, 31.0) for id in ids]


def begun(number: int) -> list[Any]:
    """A job of so many nodes, which all run."""
    return [*met(number), DeadlineReached(40.0), *acknowledged(*range(1, number))]


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_generation_begins_once_all_its_nodes_know_who_decides() -> None:
    waiting, actions = history(ELASTIC, [*met(3), DeadlineReached(40.0), *acknowledged(1)])
    assert waiting.phase is Phase.ANNOUNCING
    assert of(Announce, actions)[0].electorates == (Electorate(1, 3),)
    state, actions = history(ELASTIC, begun(3))
    assert [action.order for action in of(BeginGeneration, actions)] == [(0, 1, 2)]
    assert [one.votes for one in state.members.values()] == [(Vote(1, 0),), (Vote(1, 1),), (Vote(1, 2),)]


def test_an_acknowledgement_of_another_term_counts_for_nothing() -> None:
    state, _ = history(ELASTIC, [*met(2), DeadlineReached(40.0), *acknowledged(1, term=2)])
    assert state.phase is Phase.ANNOUNCING


def test_a_node_that_is_lost_before_it_knows_is_left_out() -> None:
    state, actions = history(
        ELASTIC,
        [*met(3), DeadlineReached(40.0), AgentLost(2, LOST, 41.0), *acknowledged(1, term=2)],
    )
    assert state.phase is Phase.RUNNING
    assert [action.order for action in of(BeginGeneration, actions)] == [(0, 1)]


def test_a_node_that_joins_while_the_others_learn_takes_part_too() -> None:
    state, _ = history(
        ELASTIC,
        [*met(2), DeadlineReached(40.0), Joined(member(2), 41.0), *acknowledged(1), *acknowledged(1, 2, term=2)],
    )
    assert (state.phase, state.generation.number, len(state.members.taking_part)) == (Phase.RUNNING, 0, 3)


def test_a_node_that_joins_while_the_others_learn_displaces_none_of_them() -> None:
    spare = replace(ELASTIC, min_nodes=2, max_nodes=3, spares=1)
    _, actions = history(
        spare, [Joined(member(0), 0.0), Joined(member(2), 1.0), Joined(member(1), 1.1), *acknowledged(2)]
    )
    assert [action.order for action in of(BeginGeneration, actions)] == [(0, 2)]


@pytest.mark.parametrize(("silent", "goes_on"), [(1, True), (2, True), (3, False)])
def test_a_coordinator_goes_on_with_as_many_nodes_as_may_be_going_on_elsewhere(silent: int, goes_on: bool) -> None:
    gone = [AgentLost(id, LOST, 50.0, has_ended=False) for id in range(1, 1 + silent)]
    left = [stopping(id, 51.0) for id in range(4) if id == SELF_ID or id > silent]
    state, actions = history(ELASTIC, [*begun(4), *gone, *left, DeadlineReached(60.0)])
    if goes_on:
        assert state.phase in (Phase.ANNOUNCING, Phase.RUNNING)
    else:
        (end,) = of(EndJob, actions)
        assert end.status == exitcodes.NODE_LOST
        assert "1 node of the last generation here, and 3 not known to have ended" in end.error


def test_nodes_that_have_ended_are_not_going_on_elsewhere() -> None:
    gone = [AgentLost(id, "connection closed", 50.0, has_ended=True) for id in (1, 2, 3)]
    state, _ = history(ELASTIC, [*begun(4), *gone, stopping(0, 51.0), DeadlineReached(60.0)])
    assert (state.phase, state.generation.number) == (Phase.RUNNING, 1)


def test_it_goes_on_without_a_node_only_when_that_would_not_take_its_end_for_that_of_the_job() -> None:
    """Else that node would count with those of the generation before, from which others have gone on meanwhile."""
    reset = AgentLost(1, "connection reset", 50.0, answered_at=49.5)
    over = [stopping(id, 50.1) for id in (0, 2, 3)]
    state, _ = history(ELASTIC, [*begun(4), reset, *over, DeadlineReached(50.2), DeadlineReached(53.4)])
    assert state.deadline == 49.5 + succession.AT_ONCE
    state = after(state, DeadlineReached(53.5), *acknowledged(2, 3, term=2))
    assert (state.phase, len(state.members.taking_part)) == (Phase.RUNNING, 3)
    silent = AgentLost(1, LOST, 50.0, answered_at=40.0)
    state, _ = history(ELASTIC, [*begun(4), silent, *over, DeadlineReached(50.2), *acknowledged(2, 3, term=2)])
    assert state.phase is Phase.RUNNING


def test_a_node_without_whose_vote_the_job_would_end_is_not_left_out_as_sick() -> None:
    def killed(id: int, at: float) -> list[Any]:
        failure = end(id, "abc"[id], at, code=None, signal=SIGKILL)
        return [NodeStopping(id, Why.FAILED, SIGTERM, at), ended(id, at, failure)]

    once = [*killed(2, 50.0), stopping(0, 51.0), stopping(1, 51.0), DeadlineReached(60.0), *acknowledged(1, 2, term=2)]
    twice = [
        *killed(2, 70.0),
        AgentLost(1, LOST, 71.0),
        stopping(0, 72.0),
        DeadlineReached(90.0),
        *acknowledged(2, term=3),
    ]
    state, _ = history(replace(ELASTIC, max_restarts=5), [*begun(3), *once, *twice])
    assert (state.phase, [member.host for member in state.members.taking_part]) == (Phase.RUNNING, ["a", "c"])


def test_nodes_that_have_left_are_not_going_on_elsewhere() -> None:
    told = [NodeStopping(id, Why.SIGNALLED, 15, 50.0) for id in (1, 2)]
    ends = [stopping(id, 51.0) for id in (1, 2, SELF_ID)]
    state, _ = history(ELASTIC, [*begun(3), *told, *ends, DeadlineReached(60.0)])
    assert (state.phase, state.generation.number) == (Phase.RUNNING, 1)


def test_newcomers_that_are_lost_before_they_know_decide_nothing() -> None:
    """Their generation was announced here, and is not begun."""
    joined = [Joined(member(id), 50.0) for id in (2, 3, 4)]
    lost = [AgentLost(id, "connection reset", 52.0) for id in (2, 3, 4)]
    state, _ = history(ELASTIC, [*begun(2), *joined, stopping(0, 51.0), stopping(1, 51.0), DeadlineReached(51.5)])
    state = after(
        replace(state, rendezvous=state.rendezvous.not_before(55.0)),
        *lost,
        DeadlineReached(55.0),
        Acknowledged(1, 3, 55.1),
    )
    assert (state.phase, len(state.members.taking_part)) == (Phase.RUNNING, 2)


def test_a_node_that_lets_it_go_on_knows_of_the_next_generation_also_if_it_takes_no_part() -> None:
    """It could let another coordinator go on with the same vote."""
    policy = replace(ELASTIC, max_nodes=4, spares=2)
    state = replace(taken_over(4, has_ended=True), policy=policy)
    state = after(state, follower(1, 2), follower(2, 3), *[stopping(id, 101.0) for id in range(3)])
    state = after(state, DeadlineReached(102.0), Acknowledged(1, 2, 102.0))
    assert (state.phase, [member.id for member in rendezvous.next_members(state.policy, state.members).values()]) == (
        Phase.ANNOUNCING,
        [0, 1],
    )
    assert after(state, Acknowledged(2, 2, 102.0)).phase is Phase.RUNNING
    again = after(state, AgentLost(2, LOST, 103.0))
    assert (again.phase, again.succession.term) == (Phase.ANNOUNCING, 3)


def test_a_node_that_is_lost_again_and_again_does_not_postpone_the_end_of_the_rendezvous() -> None:
    lost = AgentLost(3, "connection reset", 50.0, answered_at=49.9)
    state, _ = history(ELASTIC, [*begun(4), lost, *[stopping(id, 51.0) for id in (0, 1, 2)]])
    first = None
    for time in range(300):
        at, id = 51.0 + 3 * time, 4 + time % 2
        back = Joined(member(id, votes=(Vote(1, 3),)), at + 0.3)
        again = AgentLost(id, "connection reset", at + 3.0, answered_at=at + 2.9)
        state = after(state, back, *[DeadlineReached(at + tenth / 10) for tenth in range(4, 30)], again)
        first = first or state.rendezvous.deadline
        assert state.rendezvous.deadline in (first, None)
    assert state.phase is Phase.ENDED


def test_until_all_know_of_the_next_generation_the_nodes_of_the_last_one_decide_too() -> None:
    # of three nodes, two are cut off before they know that another has joined: they may go on by themselves
    joined: list[Any] = [Joined(member(3), 50.0), *(stopping(id, 51.0) for id in range(3)), DeadlineReached(51.0)]
    cut: list[Any] = [AgentLost(id, LOST, 60.0, has_ended=False) for id in (1, 2)]
    state, actions = history(ELASTIC, [*begun(3), *joined, *cut])
    assert state.phase is Phase.ENDED
    assert of(EndJob, actions)[0].status == exitcodes.NODE_LOST


@pytest.mark.parametrize("order", [(1, 2, SELF_ID), (SELF_ID, 1, 2)])
def test_a_coordinator_hands_over_to_nobody_when_all_are_told_to_leave(order: tuple[int, ...]) -> None:
    told = [NodeStopping(id, Why.SIGNALLED, 15, 50.0) for id in order]
    state, actions = history(
        replace(ELASTIC, replaceable=True), [*begun(3), *told, *(stopping(id, 51.0) for id in range(3))]
    )
    assert (state.end.status, of(HandOver, actions), of(Release, actions)) == (
        143,
        [],
        [Release(1, 15), Release(2, 15)],
    )


def test_a_coordinator_hands_over_to_no_spare() -> None:
    spare = [*begun(1), Joined(member(1), 45.0), NodeStopping(SELF_ID, Why.SIGNALLED, 15, 50.0), stopping(0, 51.0)]
    state, actions = history(replace(ELASTIC, max_nodes=2, spares=1), spare)
    assert (state.end.status, of(HandOver, actions), len(of(EndJob, actions))) == (143, [], 1)


def test_a_coordinator_that_is_told_to_leave_hands_over() -> None:
    told = [*begun(3), NodeStopping(SELF_ID, Why.SIGNALLED, 15, 50.0), stopping(1, 50.5), stopping(2, 50.5)]
    state, actions = history(ELASTIC, told)
    assert (state.phase, of(HandOver, actions)) == (Phase.STOPPING, []), "its workers may still save"
    assert of(StopNodes, actions)[-1].ids == (1, 2)
    state, actions = history(ELASTIC, [*told, stopping(0, 51.0)])
    assert of(HandOver, actions) == [HandOver(15)]
    assert of(Release, actions) == [Release(SELF_ID, 15)]
    assert (state.phase, state.end.status) == (Phase.ENDED, 143)


def test_who_has_taken_over_hands_over_while_it_waits_for_the_others() -> None:
    policy = replace(ELASTIC, min_nodes=1, replaceable=True)
    past = starting.history(history(ELASTIC, begun(4))[0], 45.0)
    state = starting.take_over(policy, past, (Electorate(1, 4),), 40.0, 50.0, 25.0)
    state = starting.without_coordinator(state, "node 0 (a): connection closed", (Vote(1, 0),), has_ended=True)
    told = NodeStopping(SELF_ID, Why.SIGNALLED, 15, 50.5)
    mine, other = (member(id, votes=(Vote(1, rank),), node_rank=rank) for id, rank in ((SELF_ID, 1), (2, 2)))
    for event in (Joined(mine, 50.0), stopping(SELF_ID, 50.1), Joined(other, 50.2), stopping(2, 50.3), told):
        state, actions = job_step(state, event)
    assert of(HandOver, list(actions)) == [HandOver(15)], "another node may be on its way to both"


def test_a_coordinator_that_leaves_waits_for_others_that_leave_so_that_all_know_of_their_end() -> None:
    told = [NodeStopping(id, Why.SIGNALLED, 15, 50.0) for id in (2, SELF_ID)]
    both = [*begun(3), *told, stopping(0, 51.0), stopping(1, 51.0)]
    assert of(HandOver, history(replace(ELASTIC, replaceable=True), both)[1]) == []
    for last in (stopping(2, 54.0), AgentLost(2, "connection closed", 54.0, has_ended=True)):
        assert of(HandOver, history(replace(ELASTIC, replaceable=True), [*both, last])[1]) == [HandOver(15)]


def test_a_coordinator_hands_over_to_nobody_where_too_few_would_be_left_to_go_on() -> None:
    lost: list[Any] = [AgentLost(1, LOST, 49.0, has_ended=False), NodeStopping(SELF_ID, Why.SIGNALLED, 15, 50.0)]
    state, actions = history(ELASTIC, [*begun(3), *lost, stopping(0, 51.0), stopping(2, 51.0)])
    assert (state.end.status, of(HandOver, actions), len(of(EndJob, actions))) == (143, [], 1)


def test_a_coordinator_that_is_told_to_leave_while_nodes_learn_who_decides_next_hands_over() -> None:
    joined: list[Any] = [Joined(member(3), 50.0), *(stopping(id, 51.0) for id in range(3)), DeadlineReached(51.0)]
    state, _ = history(ELASTIC, [*begun(3), *joined])
    assert (state.phase, len(state.succession.electorates)) == (Phase.ANNOUNCING, 2)
    told = NodeStopping(SELF_ID, Why.SIGNALLED, 15, 51.1)
    assert of(HandOver, history(ELASTIC, [*begun(3), *joined, told])[1]) == [HandOver(15)]


def test_a_coordinator_whose_node_is_unfit_hands_over_at_once_where_the_others_can_go_on() -> None:
    unfit = [*begun(3), OwnUnfit("no GPU")]
    state, actions = history(ELASTIC, unfit)
    assert (state.phase, state.end.status, of(HandOver, actions)) == (Phase.ENDED, 122, [HandOver(0, "no GPU")])
    for policy in (
        replace(ELASTIC, min_nodes=3, max_nodes=4, replaceable=False),
        replace(ELASTIC, has_successors=False),
    ):
        state, actions = history(policy, unfit)
        assert (state.phase, of(HandOver, actions)) == (Phase.RUNNING, [])


@pytest.mark.parametrize("end", [NodeStopping(1, Why.SIGNALLED, 2, 50.5), StopRequested(Why.TIMED_OUT, 15, 50.5)])
def test_a_coordinator_that_leaves_ends_the_job_that_is_to_end_meanwhile(end: Any) -> None:
    told = [*begun(3), NodeStopping(SELF_ID, Why.SIGNALLED, 15, 50.0), end]
    state, actions = history(ELASTIC, [*told, *(stopping(id, 51.0) for id in range(3))])
    assert (state.phase, of(HandOver, actions), len(of(EndJob, actions))) == (Phase.ENDED, [], 1)


@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("others", [2, 0])
def test_a_coordinator_without_the_command_that_was_typed_leaves_the_job_to_the_others(
    others: int, dispatched: bool
) -> None:
    lost = [AgentLost(id, LOST, 49.0, has_ended=False) for id in range(1, 3 - others)]
    cut: list[Any] = [*lost, NodeStopping(SELF_ID, Why.FRONT_LOST, 15, 50.0), stopping(0, 51.0)]
    state, actions = history(replace(ELASTIC, dispatched=dispatched, may_leave=False), [*begun(3), *cut])
    assert of(HandOver, actions) == [HandOver(0)]
    assert (state.phase, len(of(EndJob, actions))) == (Phase.ENDED, 1)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (NodeStopping(SELF_ID, Why.SIGNALLED, 2, 50.5), 130),
        (NodeStopping(1, Why.SIGNALLED, 15, 50.5, by_cluster=True), 143),
        (StopRequested(Why.SIGNALLED, 15, 50.5), 143),
        (StopRequested(Why.TIMED_OUT, 15, 50.5), 124),
    ],
)
@pytest.mark.parametrize(("least", "goes_on"), [(2, True), (3, False)])
def test_a_job_that_is_stopped_while_its_workers_end_after_a_loss_says_so_if_it_was_to_go_on(
    end: Any, status: int, least: int, goes_on: bool
) -> None:
    over = [AgentLost(2, LOST, 50.0), end, stopping(0, 51.0), stopping(1, 51.0)]
    state, actions = history(replace(ELASTIC, min_nodes=least), [*begun(3), *over])
    assert [one.status for one in of(EndJob, actions)] == [status if goes_on else exitcodes.NODE_LOST]
    assert state.phase is Phase.ENDED


@pytest.mark.parametrize("why", [Why.HUNG, Why.TIMED_OUT])
def test_one_that_loses_its_command_while_the_workers_of_others_are_stopped_has_not_finished(why: Why) -> None:
    state, _ = history(ELASTIC, [*begun(2), ended(SELF_ID, 50.0)])
    stopped = replace(state, phase=Phase.STOPPING, why=why)
    state, actions = job_step(stopped, NodeStopping(SELF_ID, Why.FRONT_LOST, 0, 51.0))
    assert (state.end.status, len(of(HandOver, list(actions)))) == (137, 1)


def test_before_it_has_begun_it_ends_the_job_for_all() -> None:
    cut = [*met(2), NodeStopping(SELF_ID, Why.FRONT_LOST, 15, 20.0)]
    state, actions = history(replace(ELASTIC, dispatched=True, may_leave=False), cut)
    assert (state.phase, of(HandOver, actions)) == (Phase.ENDED, [])


# --- a node that takes over


def taken_over(
    size: int, *, has_ended: bool = False, own: int = 1, at: float = 100.0, skipped: int = 0, **policy: Any
) -> State:
    """The state of node `own` of so many, which has lost node 0; its own workers are being stopped."""
    past, _ = history(ELASTIC, begun(size))
    state = starting.take_over(
        replace(ELASTIC, **policy),
        starting.history(past, 40.0),
        past.succession.electorates,
        40.0,
        at,
        25.0,
        skipped=skipped,
    )
    state = starting.without_coordinator(state, f"node 0 (a): {LOST}", (Vote(1, 0),), has_ended=has_ended)
    return after(state, Joined(member(SELF_ID, node_rank=own, votes=(Vote(1, own),)), at))


def follower(id: int, rank: int, at: float = 100.5) -> Joined:
    return Joined(member(id, node_rank=rank, votes=(Vote(1, rank),)), at)


def deciding(state: State, **fields: Any) -> State:
    return replace(state, succession=replace(state.succession, **fields))


def after(state: State, *events: Any) -> State:
    for event in events:
        state, _ = job_step(state, event)
    return state


def test_it_goes_on_once_the_others_are_there_and_have_ended() -> None:
    state = after(taken_over(3), follower(1, 2), stopping(0, 101.0))
    assert (state.phase, state.succession.gather_until) == (Phase.STOPPING, None)
    state = after(state, ended(1, 101.0), DeadlineReached(102.0), Acknowledged(1, 2, 103.0))
    assert (state.phase, state.generation.number, state.restarts.number) == (Phase.RUNNING, 2, 0)
    assert state.succession.electorates == (Electorate(2, 2),)


def test_the_first_generation_of_a_node_that_has_taken_over_has_a_greater_term_than_the_lost_one() -> None:
    lost, _ = history(ELASTIC, begun(3))
    state = after(taken_over(3), follower(1, 2), stopping(0, 101.0), ended(1, 101.0), DeadlineReached(102.0))
    state = after(state, Acknowledged(1, 2, 103.0))
    assert state.phase is Phase.RUNNING
    assert state.generation.term > lost.generation.term


def test_a_vote_that_another_coordinator_has_given_meanwhile_does_not_count() -> None:
    """Node 0 was cut off while it announced the next electorate, of term 2, to node 2 alone."""
    state = after(taken_over(3, skipped=70), follower(1, 2), stopping(0, 101.0), ended(1, 101.0))
    here = after(state, DeadlineReached(102.0))
    (_, announced) = here.succession.electorates
    assert announced.count([Vote(2, 1)]) == (0, 2)
    begun = after(here, Acknowledged(1, 72, 103.0))
    assert (begun.phase, begun.succession.electorates) == (Phase.RUNNING, (Electorate(72, 2),))


@pytest.mark.parametrize(
    ("node_rank", "votes", "proves"),
    [
        (3, (Vote(2, 3),), True),
        (None, (Vote(2, 3),), False),  # it has joined after the electorate before, and begun nothing
        (3, (Vote(1, 4), Vote(2, 3)), False),
        (3, (Vote(9, 3),), False),  # of another coordinator that has taken over
    ],
)
def test_who_has_begun_a_generation_proves_that_the_electorate_before_decides_nothing_any_more(
    node_rank: int | None, votes: tuple[Vote, ...], proves: bool
) -> None:
    known = (Electorate(1, 5, ended=(2,)), Electorate(2, 4))
    state = deciding(taken_over(5), electorates=known)
    state = after(state, Joined(member(1, node_rank=node_rank, votes=votes), 100.5))
    assert state.succession.electorates == (known[1:] if proves else known)


@pytest.mark.parametrize(
    ("votes", "proves"),
    [
        ((Vote(1, 3),), True),
        ((Vote(1, 3), Vote(2, 3)), False),
        ((Vote(1, 3), Vote(9, 0)), False),  # another coordinator may have taken its second vote from it
        ((Vote(1, 4),), False),  # it was not to take part
        ((), False),
    ],
)
def test_who_has_not_acknowledged_the_next_generation_proves_that_it_never_begins(
    votes: tuple[Vote, ...], proves: bool
) -> None:
    known = (Electorate(1, 5), Electorate(2, 4))
    told = tuple((Vote(1, rank), Vote(2, rank)) for rank in (1, 2, 3))
    state = deciding(taken_over(5), electorates=known, told=told)
    state = after(state, Joined(member(1, node_rank=3, votes=votes), 100.5))
    assert state.succession.electorates == (known[:1] if proves else known)


def test_never_does_nobody_decide() -> None:
    state = deciding(taken_over(3), electorates=(Electorate(2, 3),), told=((Vote(1, 2), Vote(2, 2)),))
    assert after(state, Joined(member(1, votes=(Vote(1, 2),)), 100.5)).succession.electorates == (Electorate(2, 3),)


def test_it_waits_for_the_others_no_longer_than_it_must() -> None:
    enough = after(taken_over(5), follower(1, 2), follower(2, 3))
    assert enough.succession.gather_until == 100.5 + succession.SETTLE
    assert taken_over(5).succession.gather_until == 125.0


def test_it_says_that_it_waits_for_the_others_if_that_takes_long() -> None:
    state, actions = job_step(after(taken_over(5), follower(1, 2)), DeadlineReached(103.0))
    assert actions == (Print("a waits up to 22 s for other nodes"),)
    assert state.deadline == 125.0
    assert after(taken_over(3), follower(1, 2)).succession.line_at is None


@pytest.mark.parametrize(
    ("size", "has_ended", "followers", "goes_on"),
    [
        (2, False, 0, False),  # node 0 may be going on alone
        (2, True, 0, True),
        (3, False, 0, False),
        (3, False, 1, True),
        (3, True, 0, False),  # the third node may be going on with as good a right
        (4, False, 1, False),  # two against two
        (4, False, 2, True),
        (5, False, 1, False),
        (5, True, 1, False),
        (5, True, 2, True),
    ],
)
def test_it_goes_on_only_with_more_nodes_than_may_be_going_on_elsewhere(
    size: int, has_ended: bool, followers: int, goes_on: bool
) -> None:
    came = [follower(id, 1 + id) for id in range(1, 1 + followers)]
    over = [stopping(0, 101.0), *(ended(id, 101.0) for id in range(1, 1 + followers))]
    state = after(taken_over(size, has_ended=has_ended), *came, *over, DeadlineReached(125.0), DeadlineReached(126.0))
    assert (state.phase is not Phase.ENDED) == goes_on
    assert goes_on or state.end.status == exitcodes.NODE_LOST


@pytest.mark.parametrize(
    ("size", "has_ended", "refused", "goes_on"),
    [
        (3, True, (0, 2), True),
        (3, True, (), False),
        (3, False, (2,), False),  # with the last coordinator as many may have gone on
        (4, True, (2, 3), False),  # two of them may have gone on
    ],
)
def test_one_that_no_longer_listens_decides_where_the_others_are_too_few_to_have_gone_on(
    size: int, has_ended: bool, refused: tuple[int, ...], goes_on: bool
) -> None:
    state = deciding(taken_over(size, has_ended=has_ended), refused=tuple(Vote(1, rank) for rank in refused))
    state = after(state, stopping(0, 101.0), DeadlineReached(125.0), DeadlineReached(126.0))
    assert (state.phase is not Phase.ENDED) is goes_on


def test_of_two_the_one_goes_on_that_is_told_of_the_other_ones_end() -> None:
    state = after(taken_over(2, dispatched=True), stopping(0, 101.0))
    assert (state.phase, state.succession.gather_until) == (Phase.STOPPING, 125.0)
    state = after(state, CoordinatorEnded(110.0), DeadlineReached(110.0))
    assert (state.phase, state.generation.number) == (Phase.RUNNING, 2)


def test_no_generation_begins_at_once_when_a_node_leaves_before_it() -> None:
    again: list[Any] = [Joined(member(3), 50.0), *(stopping(id, 51.0) for id in range(3)), DeadlineReached(51.0)]
    state, _ = history(ELASTIC, [*begun(3), *again, NodeStopping(2, Why.SIGNALLED, 15, 52.0)])
    assert (state.phase, state.deadline) == (Phase.RENDEZVOUS, 54.0)
    assert after(state, DeadlineReached(54.0)).phase is Phase.ANNOUNCING


def test_before_the_first_generation_a_coordinator_that_is_cut_off_begins_nothing_alone() -> None:
    # the other two may know that they decide, and go on
    cut = [AgentLost(id, LOST, 50.0, has_ended=False) for id in (1, 2)]
    state, actions = history(ELASTIC, [*met(3), DeadlineReached(40.0), *cut])
    assert state.end.is_cut_off
    assert of(BeginGeneration, actions) == []


def test_a_node_that_was_to_take_part_was_needed() -> None:
    state = taken_over(3, min_nodes=2, max_nodes=4, spares=1)
    state = after(state, Joined(member(1, votes=(Vote(1, 2),)), 100.5), Joined(member(2), 101.0))
    assert state.unneeded_spares == (2,)


def test_one_that_is_cut_off_from_what_was_typed_before_the_others_have_come_leaves_it_to_them() -> None:
    cut = NodeStopping(SELF_ID, Why.FRONT_LOST, 15, 101.0)
    state, actions = job_step(after(taken_over(3, dispatched=True, min_nodes=2), stopping(0, 100.5)), cut)
    assert of(HandOver, list(actions)) == [HandOver(0)]
    assert state.phase is Phase.ENDED


def test_it_waits_for_the_spare_that_is_to_take_the_place_of_the_node_that_was_lost() -> None:
    state = taken_over(2, has_ended=True, min_nodes=2, max_nodes=3, spares=1)
    state = after(state, stopping(0, 101.0), DeadlineReached(102.0))
    assert (state.phase, state.succession.gather_until) == (Phase.STOPPING, 125.0)
    state = after(state, Joined(member(1), 103.0), DeadlineReached(104.0), Acknowledged(1, 2, 105.0))
    assert (state.phase, len(state.members.taking_part)) == (Phase.RUNNING, 2)


@pytest.mark.parametrize("then", [[follower(1, 2, 103.0), ended(1, 104.0)], [DeadlineReached(105.0)]])
def test_ctrl_c_while_it_waits_for_the_others_ends_it_once_they_know(then: list[Any]) -> None:
    state = after(taken_over(3), stopping(0, 101.0), NodeStopping(SELF_ID, Why.SIGNALLED, 2, 102.0))
    assert (state.phase, state.succession.gather_until) == (Phase.STOPPING, 102.0 + succession.SETTLE)
    state = after(state, *then)
    assert (state.phase, state.end.status) == (Phase.ENDED, 130)


def test_what_was_being_stopped_for_good_is_not_started_again() -> None:
    """As after Ctrl-C, and kill -9 of node 0 while workers save: any node that comes may be the one that knows."""
    told = PastStop(Why.SIGNALLED, SIGINT, 100.2)
    state = after(taken_over(3), follower(1, 2), told, stopping(0, 101.0), ended(1, 101.0))
    assert (state.phase, state.end.status) == (Phase.ENDED, 130)
    goes_on = after(taken_over(3), follower(1, 2), stopping(0, 101.0), ended(1, 101.0), DeadlineReached(102.0))
    late = after(goes_on, told)  # of a node that comes later
    assert (late.phase, late.end.status) == (Phase.ENDED, 130)


def test_a_failure_before_the_loss_ends_the_job_as_if_nothing_was_lost() -> None:
    told = PastStop(Why.FAILED, SIGTERM, 100.2)
    state = after(taken_over(3), follower(1, 2), told, stopping(0, 101.0), ended(1, 100.9, end(2, "b", 100.9, 7)))
    assert (state.phase, state.end.status) == (Phase.ENDED, 7)
    lost_all = after(taken_over(3), follower(1, 2), told, stopping(0, 101.0), ended(1, 101.0))
    assert (lost_all.phase, lost_all.why) == (Phase.PAUSING, Why.NODE_LOST)  # it had failed on the node that was lost


@pytest.mark.parametrize("why", [Why.NODE_JOINED, Why.NODE_LOST, Why.TIMED_OUT, Why.COORDINATOR])
def test_other_reasons_to_stop_change_nothing(why: Why) -> None:
    state = after(taken_over(3), follower(1, 2))
    assert after(state, PastStop(why, SIGTERM, 100.2)) == state


def test_what_was_spent_stays_spent() -> None:
    spent = Restarts(number=2, spent=(10.0, 30.0), best_step=7)
    past = replace(history(ELASTIC, begun(3))[0], restarts=spent, limits=Limits(job_deadline=100.0))
    told = starting.history(past, 40.0)
    # on a node whose clock says 1000 when node 0's says 40
    state = starting.take_over(ELASTIC, told, past.succession.electorates, 1000.0, 1020.0, 25.0)
    assert state.restarts == Restarts(number=2, spent=(970.0, 990.0), best_step=7)
    assert state.limits.job_deadline == 1060.0


@given(
    size=st.integers(1, 12),
    gone=st.sets(st.integers(0, 11)),
    sides=st.lists(st.sampled_from("ab-"), min_size=12, max_size=12),
    known=st.tuples(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11))),
)
def test_two_coordinators_never_both_go_on(
    size: int, gone: set[int], sides: list[str], known: tuple[set[int], set[int]]
) -> None:
    """Each node that has not ended follows one of two coordinators or none; each of these knows of some that have ended."""
    nodes = range(size)

    def state(side: str, knows: set[int], *, took_over: bool) -> State:
        followers = [rank for rank in nodes if sides[rank] == side and rank not in gone]
        members = [member(0, votes=(Vote(1, rank),)) for rank in followers]
        ended = tuple(rank for rank in nodes if rank in gone & knows)
        found, _ = history(ELASTIC, ())
        for id, one in enumerate(members):
            found = replace(found, members=found.members.with_member(replace(one, id=id)))
        return deciding(found, electorates=(Electorate(1, size, ended),), took_over=took_over)

    incumbent, successor = state("a", known[0], took_over=False), state("b", known[1], took_over=True)
    assert not (incumbent.may_go_on and successor.may_go_on) or not incumbent.members
    another = deciding(incumbent, took_over=True)
    assert not (another.may_go_on and successor.may_go_on)
