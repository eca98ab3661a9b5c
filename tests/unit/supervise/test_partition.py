"""Who goes on when nodes lose each other, though the coordinator hears all of them."""

from collections.abc import Sequence
from signal import SIGTERM
from typing import Any

import pytest

from ddplaunch.launcher.decide.job import (
    AgentLost,
    BeginGeneration,
    DeadlineReached,
    EndJob,
    Event,
    FirstNodeUnheard,
    FirstNodeUnreached,
    Joined,
    LeaveBehind,
    NodeStopping,
    Phase,
    Policy,
    Print,
    State,
    StopNodes,
)
from ddplaunch.spec.outcome import Why, WorkerError
from ddplaunch.system import exitcodes
from tests.unit.supervise.job_histories import end, ended, history, member, silent, stopping

SILENT = "silent for 10 s"
ELASTIC = Policy(min_nodes=1, max_nodes=5, has_one_command=True, lease=12.0, last_call=30.0)


def met(number: int) -> list[Event]:
    """So many nodes have joined, none of which coordinates: node 0 is the member with the id 1."""
    return [
        *(Joined(member(id), 1.0) for id in range(1, number + 1)),
        DeadlineReached(31.0),
    ]


def played(policy: Policy, number: int, *events: Event) -> tuple[State, list[Any]]:
    state, done = history(policy, [*met(number), *events])
    begun = next(at for at, action in enumerate(done) if isinstance(action, BeginGeneration))
    return state, done[begun + 1 :]


def printed(done: Sequence[Any]) -> list[str]:
    return [action.text for action in done if isinstance(action, Print)]


def test_the_larger_part_goes_on_and_the_smaller_one_ends_once_its_workers_have() -> None:
    state, done = played(ELASTIC, 3, FirstNodeUnheard(3, SILENT, 50.0))
    assert state.phase is Phase.RUNNING
    assert done == []
    assert state.deadline == 52.0  # others may report the same

    line = "node 2 (d) does not hear node 0 (b): silent for 10 s. The job goes on without it"
    state, done = played(ELASTIC, 3, FirstNodeUnheard(3, SILENT, 50.0), DeadlineReached(52.0))
    assert printed(done) == [line]
    assert silent(done) == [StopNodes((1, 2, 3), 15)]

    rest: list[Event] = [stopping(id, 53.0) for id in (3, 1, 2)]
    state, done = played(
        ELASTIC, 3, FirstNodeUnheard(3, SILENT, 50.0), DeadlineReached(52.0), *rest, DeadlineReached(60.0)
    )
    assert LeaveBehind(3, line) in done
    assert done.index(LeaveBehind(3, line)) < done.index(BeginGeneration(1, (1, 2), 0))
    assert sorted(state.members) == [1, 2]


def test_no_lease_of_a_node_that_is_heard_is_waited_for() -> None:
    rest: list[Event] = [stopping(id, 53.0) for id in (3, 1, 2)]
    state, _ = played(ELASTIC, 3, FirstNodeUnheard(3, SILENT, 50.0), DeadlineReached(52.0), *rest)
    assert state.phase is Phase.PAUSING
    assert state.phase_deadline is not None
    assert state.phase_deadline < 55.0


def test_a_node_0_that_the_most_do_not_hear_is_let_go() -> None:
    cut: list[Event] = [FirstNodeUnheard(2, SILENT, 50.0), FirstNodeUnheard(3, SILENT, 50.5), DeadlineReached(52.0)]
    rest: list[Event] = [stopping(id, 53.0) for id in (1, 2, 3)]
    _state, done = played(ELASTIC, 3, *cut, *rest, DeadlineReached(60.0))
    line = "node 1 (c) and node 2 (d) do not hear node 0 (b): silent for 10 s. The job goes on without node 0 (b)"
    assert printed(done)[0] == line
    assert LeaveBehind(1, line) in done
    assert BeginGeneration(1, (2, 3), 0) in done


def test_a_tie_keeps_node_0() -> None:
    state, done = played(
        ELASTIC, 2, FirstNodeUnheard(2, SILENT, 50.0), DeadlineReached(52.0), stopping(2, 53.0), stopping(1, 53.0)
    )
    assert sorted(state.members) == [1]
    assert [action.id for action in done if isinstance(action, LeaveBehind)] == [2]


def test_the_smaller_part_is_kept_where_only_that_is_impossible_otherwise() -> None:
    """No part has MIN nodes: the job ends, and says which nodes do not hear which."""
    two_of_three = Policy(min_nodes=3, max_nodes=4, has_one_command=True, lease=12.0)
    rest: list[Event] = [stopping(id, 53.0) for id in (3, 1, 2)]
    state, done = played(two_of_three, 3, FirstNodeUnheard(3, SILENT, 50.0), DeadlineReached(52.0), *rest)
    assert printed(done) == ["node 2 (d) does not hear node 0 (b): silent for 10 s"]
    assert not [action for action in done if isinstance(action, LeaveBehind)]
    assert done[-1] == EndJob(exitcodes.NODE_LOST)
    assert state.generation.lost == ("node 2 (d): it does not hear node 0 (b): silent for 10 s",)


def test_a_first_node_that_is_silent_may_be_lost_itself_which_is_waited_for() -> None:
    unheard: list[Event] = [FirstNodeUnheard(2, "connection reset", 50.0), DeadlineReached(52.0, is_first_silent=True)]
    state, done = played(ELASTIC, 2, *unheard)
    assert (done, state.deadline) == ([], 54.0)
    lost: list[Event] = [*unheard, AgentLost(1, "connection reset", 53.0), stopping(2, 53.5), DeadlineReached(70.0)]
    state, done = played(ELASTIC, 2, *lost)
    assert sorted(state.members) == [2]
    assert BeginGeneration(1, (2,), 0) in done


@pytest.mark.parametrize("unheard_at", [49.9, 50.1])
def test_a_failure_that_follows_as_the_nodes_part_costs_no_restart(unheard_at: float) -> None:
    """Without a restart, too, the job goes on with those that reach each other."""
    closed = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer"
    gloo = WorkerError(type="RuntimeError", message=closed, traceback="")
    fails, unheard = NodeStopping(2, Why.FAILED, SIGTERM, 50.0), FirstNodeUnheard(2, "connection closed", unheard_at)
    ends: list[Event] = [ended(2, 51.0, end(2, "c", 50.0, 1, error=gloo)), stopping(1, 51.0), stopping(3, 51.0)]
    events: list[Event] = [unheard, fails] if unheard_at < 50.0 else [fails, unheard]
    state, done = played(ELASTIC, 3, *events, *ends, DeadlineReached(60.0))
    assert (state.phase, BeginGeneration(1, (1, 2, 3), 0) in done) == (Phase.RUNNING, True)
    state, done = played(ELASTIC, 3, fails, *ends, DeadlineReached(60.0))
    assert done[-1] == EndJob(1)


def test_a_job_of_fixed_size_ends() -> None:
    fixed = Policy(min_nodes=2, max_nodes=2, has_one_command=True, max_restarts=3)
    rest: list[Event] = [stopping(2, 53.0), stopping(1, 53.0)]
    state, done = played(fixed, 2, FirstNodeUnheard(2, "connection reset", 50.0), DeadlineReached(52.0), *rest)
    assert done[-1] == EndJob(exitcodes.NODE_LOST)
    assert state.why is Why.NODE_LOST


def test_a_spare_steps_in_for_the_node_that_is_let_go() -> None:
    spare = Policy(min_nodes=2, max_nodes=3, spares=1, has_one_command=True, lease=12.0)
    late = [Joined(member(3), 32.0)]
    cut: list[Event] = [FirstNodeUnheard(2, SILENT, 50.0), DeadlineReached(52.0), stopping(2, 53.0), stopping(1, 53.0)]
    _state, done = played(spare, 2, *late, *cut, DeadlineReached(60.0))
    assert BeginGeneration(1, (1, 3), 0) in done


def test_a_first_node_that_is_lost_meanwhile_is_just_lost() -> None:
    lost = AgentLost(1, "connection closed", 51.0, has_ended=True)
    state, done = played(ELASTIC, 3, FirstNodeUnheard(2, "connection closed", 50.9), lost, DeadlineReached(52.9))
    assert printed(done) == ["node 0 (b) is lost: connection closed"]
    assert not [one for one in state.members.values() if one.why_left_behind]


def test_nodes_that_have_finished_part_from_nobody() -> None:
    gone: list[Event] = [ended(1, 49.0), FirstNodeUnheard(2, "connection closed", 50.0), DeadlineReached(52.0)]
    state, done = played(ELASTIC, 2, *gone)
    assert state.phase is Phase.RUNNING
    assert done == []
    finished: list[Event] = [FirstNodeUnheard(2, "connection closed", 50.0), ended(2, 51.0), DeadlineReached(52.0)]
    state, done = played(ELASTIC, 2, *finished)
    assert (state.phase, done) == (Phase.RUNNING, [])


def test_node_0_cannot_say_that_it_does_not_hear_itself() -> None:
    state, done = played(ELASTIC, 2, FirstNodeUnheard(1, SILENT, 50.0), DeadlineReached(52.0))
    assert (state.partition.not_hearing, done) == ((), [])


def test_who_does_not_reach_the_first_node_is_let_go_before_any_worker_starts() -> None:
    why = "10.0.0.1:4711: no answer in 2 s"
    _state, done = played(ELASTIC, 3, FirstNodeUnreached(((3, why),), 32.0), DeadlineReached(32.0))
    line = f"node 2 (d) does not reach node 0 (b): {why}. The job goes on without it"
    assert done == [
        Print(line),
        LeaveBehind(3, line),
        BeginGeneration(0, (1, 2), 0),
    ]  # the same: no agent knows of the first


def test_a_job_of_fixed_size_ends_whose_nodes_do_not_reach_each_other() -> None:
    fixed = Policy(min_nodes=2, max_nodes=2, has_one_command=True)
    state, done = played(fixed, 2, FirstNodeUnreached(((2, "connection refused"),), 32.0))
    assert done == [EndJob(exitcodes.NODE_LOST)]
    assert state.generation.lost == ("node 1 (c): it does not reach node 0 (b): connection refused",)
    assert state.end.between_generations


def test_the_next_generation_forgets_who_did_not_hear_whom() -> None:
    events: list[Event] = [FirstNodeUnheard(3, SILENT, 50.0), AgentLost(2, "reset", 51.0, has_ended=True)]
    rest: list[Event] = [stopping(1, 52.0), stopping(3, 52.0), DeadlineReached(70.0), DeadlineReached(80.0)]
    state, _ = played(ELASTIC, 3, *events, *rest)
    assert state.phase is Phase.RUNNING
    assert sorted(state.members) == [1, 3]
    assert state.partition.not_hearing == ()
