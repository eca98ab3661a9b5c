"""Nobody begins beside workers that may live: leases of lost nodes, coordinators that come back, node 0 on any node."""

from collections.abc import Iterable
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import (
    KILLED_WITHIN,
    AgentLost,
    BeginGeneration,
    DeadlineReached,
    Drop,
    EndJob,
    Event,
    Joined,
    LeaveJob,
    Member,
    NodeEnded,
    NodeStopping,
    Policy,
    Print,
    StopRequested,
    first_state,
    status_if_ending,
    step,
)
from ddplaunch.spec.outcome import Why
from tests.unit.supervise.job_histories import end, ended, history, member, met, stopping

LEASE = 10.0 + KILLED_WITHIN
BY_HAND = Policy(min_nodes=1, max_nodes=3, lease=LEASE, last_call=5.0, nodes_are_replaceable=True, nodes_may_leave=True)
OVER_SSH = replace(BY_HAND, nodes_are_replaceable=False, nodes_may_leave=False, has_one_command=True)


def begun(policy: Policy, *events: Event) -> list[tuple[int, ...]]:
    """The nodes of each generation, by node rank."""
    return [action.order for action in history(policy, events)[1] if isinstance(action, BeginGeneration)]


def agents(*ids: int, at: float = 0.0, ranked: bool = True, **fields: Any) -> list[Event]:
    """Agents that join a coordinator without an own one."""
    return [
        Joined(Member(id=id, host=f"n{id}", workers=2, requested_rank=id - 1 if ranked else None, **fields), at)
        for id in ids
    ]


def lost(id: int, at: float, renewed_at: float | None = None, **fields: Any) -> AgentLost:
    return AgentLost(id, "connection closed", at, renewed_at=renewed_at, **fields)


# --- the lease of a node that is lost


@pytest.mark.parametrize(
    ("loss", "until"),
    [
        (lost(2, 20.0, 17.0), 17.0 + LEASE),
        (lost(2, 20.0), 20.0 + LEASE),
    ],
    ids=["from its last renewal", "from now, if none is known"],
)
def test_a_lost_node_holds_the_next_generation_back(loss: AgentLost, until: float) -> None:
    events = [*met(), loss, stopping(0, 20.1), stopping(1, 20.2)]
    state, _ = history(BY_HAND, events)
    assert state.deadline == pytest.approx(until)
    assert begun(BY_HAND, *events, DeadlineReached(until - 0.1)) == [(0, 1, 2)]
    assert begun(BY_HAND, *events, DeadlineReached(until)) == [(0, 1, 2), (0, 1)]


def test_a_lost_node_of_which_nothing_is_left_holds_nothing_back() -> None:
    events = [*met(), lost(2, 20.0, 19.5, has_ended=True), stopping(0, 20.1), stopping(1, 20.2)]
    assert begun(BY_HAND, *events, DeadlineReached(20.3)) == [(0, 1, 2), (0, 1)]


def test_a_node_that_has_reported_its_end_holds_nothing_back() -> None:
    events = [*met(), NodeStopping(0, Why.FAILED, SIGTERM, 20.0), stopping(2, 20.1), lost(2, 20.2), stopping(1, 20.3)]
    restarted = replace(BY_HAND, max_restarts=1)
    assert begun(restarted, *events, ended(0, 20.4), DeadlineReached(20.5)) == [(0, 1, 2), (0, 1)]


def test_a_job_of_fixed_size_knows_no_lease() -> None:
    fixed = Policy(min_nodes=2, max_nodes=2, nodes_are_replaceable=True, max_restarts=1)
    events = [*met(2), lost(1, 20.0), stopping(0, 20.1), DeadlineReached(20.1), Joined(member(2), 20.2)]
    assert begun(fixed, *events) == [(0, 1), (0, 2)]


def test_nodes_that_come_meanwhile_wait_too() -> None:
    events = [
        *met(),
        lost(2, 20.0),
        stopping(0, 20.1),
        stopping(1, 20.1),
        DeadlineReached(20.2),
        Joined(member(3), 21.0),
    ]
    assert begun(BY_HAND, *events, DeadlineReached(31.0)) == [(0, 1, 2)]
    assert begun(BY_HAND, *events, DeadlineReached(20.0 + LEASE)) == [(0, 1, 2), (0, 1, 3)]


def test_a_lease_that_outlives_the_rendezvous_does_not_end_the_job() -> None:
    short = replace(BY_HAND, rdzv_timeout=5.0)
    events = [*met(), lost(2, 20.0), stopping(0, 20.1), stopping(1, 20.1), *map(DeadlineReached, range(21, 33))]
    assert begun(short, *events) == [(0, 1, 2), (0, 1)]


@pytest.mark.parametrize("policy", [BY_HAND, OVER_SSH], ids=["by hand", "a task of Slurm"])
def test_a_node_that_has_lost_its_command_is_lost_with_its_lease(policy: Policy) -> None:
    events = [*met(), NodeStopping(2, Why.FRONT_LOST, SIGTERM, 20.0), stopping(0, 20.1), stopping(1, 20.1)]
    _, actions = history(policy, events)
    assert Drop(2) in actions
    assert Print("node 2 (c) is lost: its ddplaunch has ended") in actions
    assert begun(policy, *events, DeadlineReached(31.9)) == [(0, 1, 2)]
    assert begun(policy, *events, DeadlineReached(32.0)) == [(0, 1, 2), (0, 1)]


def test_a_node_that_leaves_and_is_lost_before_its_end_holds_back_too() -> None:
    leaves = NodeStopping(2, Why.SIGNALLED, SIGTERM, 20.0)
    events = [*met(), leaves, lost(2, 21.0), stopping(0, 21.1), stopping(1, 21.1)]
    assert begun(BY_HAND, *events, DeadlineReached(32.9)) == [(0, 1, 2)]
    assert begun(BY_HAND, *events, DeadlineReached(33.0)) == [(0, 1, 2), (0, 1)]


def test_a_job_that_gets_no_other_node_ends_at_once_when_too_few_wait_for_a_lease() -> None:
    policy = replace(OVER_SSH, min_nodes=2)
    events = [*agents(1, 2, 3), lost(3, 20.0), stopping(1, 20.1), stopping(2, 20.1), lost(2, 22.0)]
    state, actions = history(policy, events)
    assert (state.end.status, state.generation.lost) == (122, ("node 1 (n2): connection closed",))
    assert isinstance(actions[-1], EndJob)


# --- a coordinator that begins, perhaps after another one


def test_with_fewer_than_all_it_waits_for_the_leases_of_another_coordinator_and_the_last_call() -> None:
    assert begun(BY_HAND, *met(2), DeadlineReached(5.2), DeadlineReached(11.9)) == []
    assert begun(BY_HAND, *met(2), DeadlineReached(5.2), DeadlineReached(12.0)) == [(0, 1)]
    patient = replace(BY_HAND, last_call=30.0)
    assert begun(patient, *met(2), DeadlineReached(29.0)) == []
    assert begun(patient, *met(2), DeadlineReached(30.1)) == [(0, 1)]


def test_with_all_it_begins_at_once() -> None:
    assert begun(BY_HAND, *met(3)) == [(0, 1, 2)]


def test_with_all_that_run_but_a_spare_it_waits_since_the_spare_may_have_a_place_that_another_node_holds() -> None:
    with_spare = replace(BY_HAND, spares=1)
    assert begun(with_spare, *met(2), DeadlineReached(11.9)) == []
    assert begun(with_spare, *met(2), DeadlineReached(12.0)) == [(0, 1)]
    assert begun(with_spare, *met(3)) == [(0, 1)]
    line = "2 of 1 to 3 nodes joined; starting in 9 s: nodes that are not here may have workers until then"
    assert history(with_spare, [*met(2), DeadlineReached(3.1)])[1] == [Print(line)]
    assert history(BY_HAND, [*met(2), DeadlineReached(3.1)])[1] == [Print(line)], "its last call is over before"


def test_where_a_command_has_started_all_nodes_no_coordinator_came_before() -> None:
    assert begun(OVER_SSH, *agents(1, 2), DeadlineReached(5.0)) == [(1, 2)]
    assert begun(replace(OVER_SSH, spares=1), *agents(1, 2)) == [(1, 2)]


def back(*generations: int) -> list[Event]:
    """Node 0 is back, and other nodes which have begun these generations come to it."""
    others = [member(id, last_generation=last, last_term=last) for id, last in enumerate(generations, 1)]
    return [Joined(one, one.id / 10) for one in (member(0), *others)]


@pytest.mark.parametrize(
    ("generations", "at_once"), [((4, 4), True), ((4, -1), False), ((4, 3), False), ((-1, -1), True)]
)
def test_it_begins_at_once_only_if_all_have_followed_the_same_one(generations: tuple[int, ...], at_once: bool) -> None:
    """A node in whose place another one has come may still be at work."""
    _, actions = history(BY_HAND, back(*generations))
    assert any(isinstance(action, BeginGeneration) for action in actions) is at_once
    assert begun(BY_HAND, *back(*generations), DeadlineReached(12.0)) == [(0, 1, 2)]


def test_generations_of_one_number_under_two_coordinators_are_not_the_same() -> None:
    """The first is long over, and in the other one a third node may be at work."""
    others = [member(id, last_generation=4, last_term=term) for id, term in ((1, 104), (2, 204))]
    events = [Joined(one, one.id / 10) for one in (member(0), *others)]
    assert not any(isinstance(action, BeginGeneration) for action in history(BY_HAND, events)[1])


def test_a_node_that_has_only_waited_for_another_coordinator_does_not_make_it_all() -> None:
    """It was one too many there, or a spare, and another node may be at work."""
    waited = [Joined(member(0), 0.0), *(Joined(member(id, was_left=True), 0.1) for id in (1, 2))]
    assert begun(BY_HAND, *waited) == []
    assert begun(BY_HAND, *waited, DeadlineReached(12.0)) == [(0, 1, 2)]


def test_it_begins_with_the_generation_after_the_last_one_of_any_node() -> None:
    _, actions = history(BY_HAND, [*back(4, 7), DeadlineReached(12.0)])
    assert [action.generation for action in actions if isinstance(action, BeginGeneration)] == [8]
    late = Joined(member(3, last_generation=9), 20.0)
    events = [*back(4)[:2], DeadlineReached(5.2), DeadlineReached(12.0), late, stopping(0, 20.1), stopping(1, 20.1)]
    _, actions = history(BY_HAND, [*events, DeadlineReached(20.2)])
    assert [action.generation for action in actions if isinstance(action, BeginGeneration)] == [5, 10]


def test_others_wait_for_a_node_0_that_has_lost_its_command_once_its_workers_have_ended() -> None:
    """Else they might begin beside these with another node 0."""
    events = [*met(), NodeStopping(0, Why.FRONT_LOST, SIGTERM, 20.0), stopping(1, 20.1), stopping(2, 20.1)]
    assert not any(isinstance(action, LeaveJob) for action in history(BY_HAND, events)[1])
    assert LeaveJob(0) in history(BY_HAND, [*events, stopping(0, 30.0)])[1]


def test_a_stop_of_the_job_ends_it_and_nobody_waits_for_node_0() -> None:
    events = [*met(), NodeStopping(0, Why.SIGNALLED, SIGINT, 20.0), lost(2, 20.5), *(stopping(id, 21) for id in (0, 1))]
    state, actions = history(BY_HAND, events)
    assert state.end.status == 130
    assert not any(isinstance(action, LeaveJob) for action in actions)


@pytest.mark.parametrize(
    ("event", "restarts", "said"),
    [
        (NodeStopping(0, Why.SIGNALLED, SIGINT, 20.0), 0, [130]),
        (NodeStopping(1, Why.SIGNALLED, SIGINT, 20.0), 3, [130]),
        (StopRequested(Why.SIGNALLED, SIGTERM, 20.0), 3, [143]),
        (DeadlineReached(100.0), 3, [124]),
        (NodeStopping(1, Why.FAILED, SIGTERM, 20.0), 0, [122]),
        (NodeStopping(1, Why.FAILED, SIGTERM, 20.0), 1, []),
        (NodeStopping(1, Why.SIGNALLED, SIGTERM, 20.0), 0, []),
        (lost(1, 20.0), 0, []),
    ],
    ids=[
        "Ctrl-C",
        "elsewhere",
        "stop",
        "--timeout",
        "a failure",
        "a failure, and a restart left",
        "one leaves",
        "a loss",
    ],
)
def test_nodes_hear_at_once_that_a_job_is_stopped_for_good(event: Event, restarts: int, said: list[int]) -> None:
    """Else they would wait for a node 0 that is lost meanwhile."""
    policy = replace(BY_HAND, max_restarts=restarts, timeout=100.0)
    assert endings(policy, [*met(), event]) == said


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (NodeStopping(1, Why.FAILED, SIGTERM, 20.0), [122]),
        (Joined(member(3), 20.0), [130]),
        (NodeStopping(1, Why.SIGNALLED, SIGTERM, 20.0), [130]),
    ],
    ids=["before a restart", "as another node joins", "as one leaves"],
)
def test_they_hear_it_too_where_the_workers_were_being_stopped_already(first: Event, said: list[int]) -> None:
    policy = replace(BY_HAND, max_nodes=4, max_restarts=1)
    begins = [*met(3), DeadlineReached(5.2), DeadlineReached(12.0)]
    assert endings(policy, [*begins, first, NodeStopping(0, Why.SIGNALLED, SIGINT, 20.1)]) == said


def endings(policy: Policy, events: Iterable[Event]) -> list[int]:
    """What the nodes hear, in turn, of the status with which the job is to end."""
    state, heard = first_state(policy, 0.0, 1), []
    for event in events:
        after, _ = step(state, event)
        heard.append(status_if_ending(state, after, getattr(event, "at", 0.0)))
        state = after
    return [status for status in heard if status is not None]


# --- a coordinator without an own agent


@pytest.mark.parametrize("ranked", [True, False], ids=["with ranks of their own", "without"])
def test_another_node_becomes_node_0_when_that_is_lost(ranked: bool) -> None:
    loss = lost(1, 20.0, has_ended=True)
    events = [*agents(1, 2, 3, ranked=ranked), loss, stopping(2, 20.1), stopping(3, 20.1), DeadlineReached(22.0)]
    # a node keeps the rank of its own
    assert begun(OVER_SSH, *events) == [(1, 2, 3), (3, 2) if ranked else (2, 3)]


def test_a_spare_steps_in_for_node_0() -> None:
    policy = replace(OVER_SSH, min_nodes=2, spares=1)
    events = [*agents(1, 2, 3), lost(1, 20.0, has_ended=True), stopping(2, 20.1), DeadlineReached(22.0)]
    state, actions = history(policy, events)
    assert [action.order for action in actions if isinstance(action, BeginGeneration)] == [(1, 2), (3, 2)]
    assert Print("n3 is node 0 from now on") in actions
    assert state.restarts.number == 0


def test_it_waits_for_node_0_by_its_name_and_offers_its_rank() -> None:
    policy = replace(OVER_SSH, host_names=("n1", "n2", "n3"), min_nodes=3)
    _, actions = history(policy, [*agents(2, 3), DeadlineReached(3.0)])
    assert actions == [Print("2 of 3 nodes joined (n2, n3) after 3 s of 10 min; waiting for node 0 (n1)")]
    _, actions = history(policy, [DeadlineReached(3.0)])
    assert actions == [
        Print("0 of 3 nodes joined after 3 s of 10 min; waiting for node 0 (n1), node 1 (n2), node 2 (n3)")
    ]


def test_the_loss_of_all_nodes_ends_the_job() -> None:
    state, _ = history(OVER_SSH, [*agents(1, 2), DeadlineReached(5.0), lost(1, 20.0), lost(2, 20.0)])
    assert state.end.status == 122


def test_a_job_of_which_some_nodes_had_no_workers_yet_has_not_finished() -> None:
    """Node 3 joins as the workers of the others begin, and the one that has begun finishes at once."""
    policy = replace(BY_HAND, max_nodes=4)
    begins = [*met(3), DeadlineReached(5.2), DeadlineReached(12.0), Joined(member(3), 12.1)]
    events = [
        *begins,
        NodeEnded(1, (), None, 12.2),
        NodeEnded(2, (), None, 12.2),
        ended(0, 14.0),
        DeadlineReached(14.1),
    ]
    assert begun(policy, *events) == [(0, 1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize("others_ended", [False, True])
def test_a_node_whose_workers_were_ended_without_a_word_before_has_not_finished(others_ended: bool) -> None:
    """Its lease was over, and what it says of that is still heard."""
    others = [ended(0, 19.0), ended(1, 19.0)]
    rest = [] if others_ended else [stopping(0, 20.1), stopping(1, 20.1)]
    for exits in ([], [end(2, "c", 20.0, None, signal=9, stopped_with=9)], [end(2, "c", 20.0, 1)]):
        over: list[Event] = [*(others if others_ended else []), NodeEnded(2, tuple(exits), None, 20.0), *rest]
        state, actions = history(BY_HAND, [*met(), *over, DeadlineReached(20.2)])
        assert state.end.status is None
        said = "node 2 (c) is lost: its workers were ended there, as when it is not heard for too long"
        assert Print(said) in actions
        assert isinstance(actions[-1], BeginGeneration)


def test_its_term_is_greater_than_that_of_any_node_though_its_own_clock_is_behind() -> None:
    state, _ = history(BY_HAND, [*back(104, 107), DeadlineReached(12.0)], first_term=50)
    assert state.generation.term == 108
    state, _ = history(BY_HAND, [*back(4, 7), DeadlineReached(12.0)], first_term=50)
    assert state.generation.term == 50


def test_a_job_has_not_finished_while_it_is_unknown_how_workers_of_a_lost_node_that_left_have_ended() -> None:
    leaves = [*met(), NodeStopping(2, Why.SIGNALLED, SIGTERM, 20.0), lost(2, 20.1, has_ended=True)]
    done = [ended(0, 20.2), ended(1, 20.2)]
    assert begun(BY_HAND, *leaves, *done, DeadlineReached(22.0)) == [(0, 1, 2), (0, 1)]
