"""Nodes that wait until another one is lost or leaves: `--spares`."""

from itertools import permutations
from signal import SIGKILL
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import (
    AgentLost,
    BeginGeneration,
    DeadlineReached,
    EndJob,
    Joined,
    NodeGivenUp,
    NodeStopping,
    Policy,
    Print,
    Refuse,
    Withdrawn,
)
from ddplaunch.spec.outcome import Why, WorkerError
from tests.unit.supervise.job_histories import end, ended, history, member, met, stopping

SPARE = Policy(min_nodes=2, max_nodes=3, spares=1, nodes_may_leave=True)
COMMANDED = Policy(min_nodes=2, max_nodes=3, spares=1, has_one_command=True)


def begun(actions: list[Any]) -> list[tuple[int, ...]]:
    """The nodes of each generation, by node rank."""
    return [action.order for action in actions if isinstance(action, BeginGeneration)]


def printed(actions: list[Any]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Print)]


LOST: list[Any] = [AgentLost(1, "silent for 10 s", 5.0), stopping(0, 5.5), DeadlineReached(5.6)]


def test_the_job_starts_without_waiting_for_spares_and_one_that_comes_stops_nothing() -> None:
    state, actions = history(SPARE, met(3))
    assert begun(actions) == [(0, 1)]
    assert printed(actions) == ["c is a spare: it waits until a node is lost or leaves"]
    assert [spare.host for spare in state.spares] == ["c"]


def test_only_a_spare_of_a_job_that_has_begun_was_not_needed() -> None:
    waiting, _ = history(SPARE, met(1))
    begun_with_spare, _ = history(SPARE, met(3))
    needed, _ = history(SPARE, [*met(3), *LOST])
    assert [state.unneeded_spares for state in (waiting, begun_with_spare, needed)] == [(), (2,), ()]


def test_a_spare_takes_the_place_of_a_lost_node_at_no_restart() -> None:
    state, actions = history(SPARE, [*met(3), *LOST])
    assert begun(actions) == [(0, 1), (0, 2)]
    assert "c is node 1 from now on" in printed(actions)
    assert (state.restarts.number, state.spares) == (0, ())


def test_a_spare_keeps_its_place_when_the_former_node_is_back() -> None:
    back = Joined(member(3, wanted=1), 6.0)
    _, actions = history(
        SPARE, [*met(3), *LOST, back, AgentLost(2, "gone", 9.0), stopping(0, 9.1), DeadlineReached(12.0)]
    )
    assert begun(actions) == [(0, 1), (0, 2), (0, 3)]
    assert "d is a spare: it waits until a node is lost or leaves" in printed(actions)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_node_ranks_beyond_the_job_are_those_of_spares_whoever_comes_first(order: tuple[int, ...]) -> None:
    _, actions = history(COMMANDED, [Joined(member(rank + 1, rank), at) for at, rank in enumerate(order)])
    assert begun(actions) == [(1, 2)]


def test_a_node_that_does_not_come_in_time_or_takes_no_part_is_no_reason_to_wait_for_ever() -> None:
    others: list[Any] = [Joined(member(3, 2), 0), Joined(member(2, 1), 1)]
    assert begun(history(COMMANDED, others)[1]) == []
    without_new_step, withdrawn = (
        DeadlineReached(1 + COMMANDED.last_call),
        Withdrawn("node 0 (a)", 0, "no ddplaunch", "", 2),
    )
    assert begun(history(COMMANDED, [*others, without_new_step])[1]) == [(3, 2)]
    assert begun(history(COMMANDED, [*others, withdrawn])[1]) == [(3, 2)]


@pytest.mark.parametrize("gone", [NodeGivenUp(3, 0.5), Withdrawn("node 3 (d)", 3, "no ddplaunch", "", 0.5)], ids=type)
def test_a_spare_that_does_not_come_costs_no_other_node_its_place(gone: Any) -> None:
    policy = replace(COMMANDED, max_nodes=4, spares=2)
    late = Joined(member(1, 0), 2.0)
    events: list[Any] = [Joined(member(2, 1), 0.0), gone, gone, Joined(member(3, 2), 1.0), late]
    assert begun(history(policy, events)[1]) == [(1, 2)]


def test_a_node_that_takes_no_part_each_time_it_is_started_is_one_node() -> None:
    events: list[Any] = [Joined(member(0, 0), 0.5), UNFIT, UNFIT, Joined(member(2, 2), 2.0)]
    assert begun(history(SPARE, events)[1]) == [(0, 2)]


def test_no_longer_last_call_is_announced_than_the_nodes_are_waited_for() -> None:
    others: list[Any] = [Joined(member(3, 2), 0.0), Joined(member(2, 1), 0.0), DeadlineReached(3.0)]
    for rdzv_timeout, seconds in ((600.0, 30), (5.0, 2)):
        said = printed(history(replace(COMMANDED, rdzv_timeout=rdzv_timeout), others)[1])
        assert said == [f"2 of 2 to 3 nodes joined; starting unless another joins within {seconds} s"]
    assert begun(history(replace(COMMANDED, rdzv_timeout=5.0), [*others, DeadlineReached(5.0)])[1]) == [(3, 2)]


def test_where_nodes_have_no_ranks_those_that_come_first_run() -> None:
    joined = [Joined(member(0), 0), Joined(member(2), 1)]
    assert begun(history(SPARE, joined)[1]) == [(0, 2)]


def test_a_spare_that_is_lost_or_stops_ends_nothing() -> None:
    _, lost = history(SPARE, [*met(3), AgentLost(2, "silent for 10 s", 5.0)])
    assert printed(lost)[-1] == "c, a spare, is lost: silent for 10 s"
    _, stopped = history(SPARE, [*met(3), NodeStopping(2, Why.SIGNALLED, 15, 5.0)])
    assert begun(lost) == begun(stopped) == [(0, 1)]


def test_a_signal_to_the_command_that_started_all_nodes_stops_the_job_though_a_spare_has_it_first() -> None:
    signals: list[Any] = [NodeStopping(id, Why.SIGNALLED, 2, 5.0) for id in (2, 0, 1)]
    over_ssh = replace(SPARE, has_one_command=True, nodes_may_leave=False)
    _, actions = history(over_ssh, [*met(3), *signals, stopping(0, 5.1), stopping(1, 5.2)])
    assert printed(actions) == ["c is a spare: it waits until a node is lost or leaves"]
    assert [action.status for action in actions if isinstance(action, EndJob)] == [130]


def test_a_node_that_leaves_is_replaced_by_a_spare() -> None:
    leaves: list[Any] = [NodeStopping(1, Why.SIGNALLED, 15, 5.0), ended(1, 5.1), stopping(0, 5.2), DeadlineReached(8.0)]
    assert begun(history(SPARE, [*met(3), *leaves])[1]) == [(0, 1), (0, 2)]


def test_a_job_with_no_spare_left_that_loses_a_node_ends_as_one_without_spares() -> None:
    _, actions = history(SPARE, [*met(2), *LOST])
    assert [action.status for action in actions if hasattr(action, "status")] == [122]


UNFIT = Withdrawn("node 1 (b)", 1, "b is not fit for the job", "mend it", 1.0)


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize("policy", [SPARE, replace(SPARE, has_one_command=True)], ids=["by hand", "in a step of Slurm"])
def test_a_job_with_spares_starts_without_a_node_that_takes_no_part(comes_first: bool, policy: Policy) -> None:
    events: list[Any] = [UNFIT, *[Joined(member(id, id), 2.0) for id in (0, 2)]]
    assert begun(history(policy, events if comes_first else [events[1], UNFIT, events[2]])[1]) == [(0, 2)]


@pytest.mark.parametrize("policy", [SPARE, replace(SPARE, has_one_command=True)], ids=["by hand", "in a step of Slurm"])
def test_a_job_ends_when_too_few_nodes_are_left_that_can_take_part(policy: Policy) -> None:
    _, actions = history(
        policy, [Joined(member(0, 0), 0.5), UNFIT, Withdrawn("node 2 (c)", 2, "its disk is full", "", 2.0)]
    )
    ends = [action for action in actions if isinstance(action, EndJob)]
    assert [(one.status, one.error) for one in ends] == [(121, "node 2 (c) does not take part: its disk is full")]


def killed(id: int, at: float, **how: Any) -> list[Any]:
    """A worker of node 1 is killed, or ends as `how` says, and all nodes end; then the next generation begins."""
    failure = end(1, "b", at, **(how or {"code": None, "signal": SIGKILL}))
    return [
        NodeStopping(1, Why.FAILED, 15, at),
        ended(1, at + 0.1, failure),
        stopping(0, at + 0.2),
        DeadlineReached(at + 40),
    ]


def test_a_node_whose_workers_fail_first_twice_in_a_row_is_left_out_and_a_spare_takes_its_place() -> None:
    policy = replace(SPARE, max_restarts=9)
    _, once = history(policy, [*met(3), *killed(1, 50.0)])
    assert begun(once) == [(0, 1), (0, 1)]
    _, twice = history(policy, [*met(3), *killed(1, 50.0), *killed(1, 150.0)])
    assert begun(twice) == [(0, 1), (0, 1), (0, 2)]
    refused = [action for action in twice if isinstance(action, Refuse)]
    assert [(one.id, one.unfit and one.unfit.host, one.reason) for one in refused] == [
        (1, "b", "left out, since its workers failed first twice in a row: killed by SIGKILL")
    ]


def test_a_node_whose_workers_fail_twice_because_another_one_ended_is_not_left_out() -> None:
    """The text names CUDA, a fault that may be the machine's; but what ended first was a peer."""
    text = "CUDA error: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4711"
    closed = {"code": 1, "error": WorkerError(type="RuntimeError", message=text, traceback="")}
    policy = replace(SPARE, max_restarts=9)
    assert begun(history(policy, [*met(3), *killed(1, 50.0, **closed), *killed(1, 150.0, **closed)])[1]) == [(0, 1)] * 3


def test_a_node_that_the_job_needs_is_not_left_out() -> None:
    policy = replace(SPARE, max_restarts=9)
    assert begun(history(policy, [*met(2), *killed(1, 50.0), *killed(1, 150.0)])[1]) == [(0, 1)] * 3


def test_of_several_nodes_on_a_machine_none_is_left_out() -> None:
    """Node 0 and node 1 are on b; only the host of a worker that failed is known."""
    first, *others = met(3)
    assert isinstance(first, Joined)
    assert first.member.id == 0
    on_b = replace(first, member=replace(first.member, host="b"))
    _, actions = history(replace(SPARE, max_restarts=9), [on_b, *others, *killed(1, 50.0), *killed(1, 150.0)])
    assert begun(actions) == [(0, 1)] * 3
