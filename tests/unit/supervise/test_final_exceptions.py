"""A worker has failed, and its interpreter still ends: the others are stopped meanwhile, and the worker keeps its own end."""

from signal import SIGCONT, SIGINT, SIGTERM, SIGTSTP
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import *
from ddplaunch.spec.outcome import Frame, Why, WorkerError
from tests.unit.supervise.histories import ALL, LOST, NOTHING_LEFT, OWN_ERROR, POLICY, STARTED, ended, one_node
from tests.unit.supervise.phases import node_step

STOPPED: dict[str, Any] = {"code": None, "signal": SIGTERM, "stopped_with": SIGTERM, "stopped_at": 1.1}
ENDED = ended(0, 1.2, **STOPPED), ended(2, 1.2, **STOPPED)
OTHERS = frozenset({0, 2})


def final(rank: int, at: float = 1.0, error: WorkerError = OWN_ERROR) -> tuple[node.Event, ...]:
    """What the agent feeds when the exception of a worker is final."""
    return ErrorRecorded(at), WorkerRaised(rank, replace(error, at=at), at), ExceptionFinal(rank, at)


DUE = DeadlineReached(1.0 + node.LIKEWISE_TIMEOUT)
FINAL = (*STARTED, *final(1), DUE)


def test_the_others_are_stopped_while_the_interpreter_of_the_first_one_ends():
    assert one_node(*STARTED, *final(1))[1] == []
    assert one_node(*STARTED, *final(1))[0].deadline == DUE.at
    assert one_node(*FINAL)[1] == [StopWorkers(SIGTERM, OTHERS)]
    state, actions = one_node(*FINAL, *ENDED, ended(1, 1.6, code=1, error=OWN_ERROR), NOTHING_LEFT)
    assert actions == [Exit(1)]
    assert state.failure is not None
    assert (state.failure.rank, state.failure.code, state.failure.stopped_with) == (1, 1, None)


def test_a_worker_that_ends_sooner_is_a_failure_as_any_other():
    ends = ended(1, 1.05, code=1, error=OWN_ERROR)
    assert one_node(*STARTED, *final(1), ends)[1] == [StopWorkers(SIGTERM, ALL)]
    assert one_node(*STARTED, ends, ExceptionFinal(1, 1.06))[1] == []


def test_a_crash_of_the_interpreter_as_it_ends_is_the_status():
    assert one_node(*FINAL, *ENDED, ended(1, 1.6, code=None, signal=11), NOTHING_LEFT)[1] == [Exit(139)]


@pytest.mark.parametrize("at", [1.05, 1.6], ids=["before the stop", "in the stop"])
def test_an_interpreter_that_ends_with_0_after_all_is_the_failure_for_which_others_were_stopped(at):
    ends = (
        [ended(1, at, code=0, error=OWN_ERROR), DUE, *ENDED]
        if at < DUE.at
        else [DUE, *ENDED, ended(1, at, code=0, error=OWN_ERROR)]
    )
    state, actions = one_node(*STARTED, *final(1), *ends, NOTHING_LEFT)
    assert actions[-1] == Exit(1)
    assert state.failure is not None
    assert state.failure.rank == 1


def test_those_that_fail_likewise_meanwhile_keep_their_own_ends():
    assert one_node(*STARTED, *final(1), *final(2, 1.05), DUE)[1] == [StopWorkers(SIGTERM, frozenset({0}))]
    assert one_node(*STARTED, *final(1), *final(2, 1.05), *final(0, 1.06), DUE)[1] == []
    ends = [ended(rank, 1.5, code=1, error=OWN_ERROR) for rank in (1, 2)]
    state, actions = one_node(*STARTED, *final(1), *final(2, 1.05), DUE, ENDED[0], *ends, NOTHING_LEFT)
    assert actions == [Exit(1)]
    assert [end.stopped_with for end in state.exits] == [SIGTERM, None, None]


def test_the_last_worker_that_runs_is_waited_for():
    """Nobody is left whom a stop would reach sooner."""
    assert one_node(*STARTED, ended(0), ended(2), *final(1), DUE)[1] == []
    state, _ = one_node(*STARTED, ended(0), ended(2), *final(1))
    assert state.phase is Phase.RUNNING


def test_who_has_lost_contact_stops_nobody_and_the_cause_does():
    lost = (*STARTED, *final(2, error=LOST))
    state, actions = one_node(*lost, DUE)
    assert (state.phase, actions) == (Phase.RUNNING, [])
    cause = (*lost, *final(1, 1.5), DeadlineReached(1.5 + node.LIKEWISE_TIMEOUT))
    assert one_node(*cause)[1] == [StopWorkers(SIGTERM, OTHERS)]
    settling = (*STARTED, ended(2, 1.0, code=1, error=LOST), *final(1, 1.5))
    assert one_node(*settling)[0].deadline == 1.5 + node.LIKEWISE_TIMEOUT
    assert one_node(*settling, DeadlineReached(1.6))[1] == [StopWorkers(SIGTERM, OTHERS)]


def test_the_wait_for_the_cause_is_not_prolonged():
    late = (*STARTED, ended(2, 1.0, code=1, error=LOST), *final(1, 3.99))
    assert one_node(*late)[0].deadline == 1.0 + node.CAUSE_TIMEOUT


def test_whether_all_fail_at_the_same_import_is_seen_at_their_ends():
    frames = (Frame(file="train.py", line=1, function="<module>", source="import flash_attn"),)
    missing = replace(OWN_ERROR, type="ModuleNotFoundError", message="No module named 'flash_attn'", frames=frames)
    state, actions = one_node(*STARTED, *final(1, error=missing), DUE)
    assert (state.phase, actions) == (Phase.RUNNING, [])


def test_an_exception_of_which_nothing_is_known_is_judged_at_the_end_of_the_worker():
    assert one_node(*STARTED, ExceptionFinal(1, 1.0), DUE)[1] == []
    by_record = (ErrorRecorded(1.0), WorkerRaised(1, replace(OWN_ERROR, at=None), 1.0), ExceptionFinal(1, 1.0))
    assert one_node(*STARTED, *by_record, DUE)[1] == []


def test_the_news_that_comes_twice_is_the_first_one():
    assert one_node(*STARTED, *final(1), ExceptionFinal(1, 1.05), DUE)[1] == [StopWorkers(SIGTERM, OTHERS)]


# --- an interpreter that does not end


def test_an_interpreter_that_hangs_is_stopped_after_its_time_and_killed_after_the_grace_period():
    policy = replace(POLICY, grace_period=20.0)
    hangs = (*FINAL, *ENDED, DeadlineReached(1.0 + node.END_TIMEOUT))
    assert one_node(*FINAL, *ENDED, policy=policy)[0].node.phase_deadline == DUE.at + 20.0
    state, actions = one_node(*hangs, policy=policy)
    assert actions == [
        Print("rank 1 has raised ValueError and does not end: its interpreter hangs"),
        StopWorkers(SIGTERM, frozenset({1})),
    ]
    assert state.node.phase_deadline == 31.0
    assert one_node(*hangs, DeadlineReached(31.0), policy=policy)[1] == [KillWorkers(ALL)]
    of_it = {"signal": SIGTERM, "stopped_with": SIGTERM, "stopped_at": 11.0, "error": replace(OWN_ERROR, at=1.0)}
    state, actions = one_node(*hangs, ended(1, 11.1, code=None, **of_it), NOTHING_LEFT, policy=policy)
    assert actions == [Exit(1)]
    assert state.failure is not None
    assert state.failure.rank == 1


def test_it_has_its_time_also_where_the_grace_period_of_the_others_is_over():
    """No interpreter with torch ends within a --grace-period of 0, which is for those that are asked to end."""
    policy = replace(POLICY, grace_period=0.0)
    over = (*FINAL, DUE)
    assert one_node(*over, policy=policy)[1] == [KillWorkers(OTHERS)]
    again = DUE.at + node.KILL_TIMEOUT
    assert one_node(*over, DeadlineReached(again), policy=policy)[1] == [KillWorkers(OTHERS)]
    assert one_node(*over, *ENDED, ended(1, 1.6, code=1, error=OWN_ERROR), NOTHING_LEFT, policy=policy)[1] == [Exit(1)]
    *_, stops = one_node(*over, DeadlineReached(1.0 + node.END_TIMEOUT), policy=policy)[1]
    assert stops == StopWorkers(SIGTERM, frozenset({1}))
    # one that SIGKILL does not end holds nobody up once it has ended
    state, actions = one_node(*over, ended(1, 1.6, code=1), DeadlineReached(again), policy=policy)
    assert (state.phase, actions) == (Phase.KILLING, [KillWorkers(ALL)])


def test_it_has_its_time_from_when_its_exception_was_final_whoever_raised_before():
    history = (*STARTED, ErrorRecorded(0.1), *final(1, 10.0), DeadlineReached(10.0 + node.LIKEWISE_TIMEOUT))
    assert one_node(*history)[1] == [StopWorkers(SIGTERM, OTHERS)]
    assert one_node(*history, DeadlineReached(10.2))[1] == []


def test_who_raises_when_asked_to_end_is_not_said_to_hang():
    policy = replace(POLICY, grace_period=20.0)
    saved = (*FINAL, ended(1, 1.6, code=1, error=OWN_ERROR), *final(2, 10.9), DeadlineReached(1.0 + node.END_TIMEOUT))
    assert one_node(*saved, policy=policy)[1] == [NameRunning(OTHERS, 20.1 - 10.0)]


def test_an_interpreter_that_hangs_is_stopped_too_where_it_was_the_last():
    history = (*STARTED, ended(0), ended(2), *final(1), DeadlineReached(1.0 + node.END_TIMEOUT))
    assert one_node(*history)[1] == [FindRaised()]
    assert one_node(*history, WorkerRaised(1, replace(OWN_ERROR, at=1.0), 11.0, lingers=True))[1] == [
        Print("rank 1 has raised ValueError and does not end: its interpreter hangs"),
        StopWorkers(SIGTERM, ALL),
    ]


def test_only_workers_that_were_asked_to_end_are_named_as_those_that_still_run():
    policy = replace(POLICY, grace_period=30.0)
    names = one_node(*FINAL, DeadlineReached(DUE.at + 5.0), policy=policy)[1]
    assert names == [NameRunning(OTHERS, 25.0)]
    assert one_node(*FINAL, *ENDED, DeadlineReached(DUE.at + 5.0), policy=policy)[1] == []


def test_its_time_does_not_count_while_the_job_is_suspended():
    suspended = (*FINAL, SignalReceived(SIGTSTP, 2.0), SignalReceived(SIGCONT, 50.0))
    assert (
        one_node(*suspended, policy=replace(POLICY, grace_period=60.0))[0].raised.should_exit_by
        == 49.0 + node.END_TIMEOUT
    )


# --- other reasons to stop, at the same time


def test_a_user_who_stops_the_job_meanwhile_stops_all():
    assert one_node(*STARTED, *final(1), SignalReceived(SIGINT, 1.05))[1] == [StopWorkers(SIGINT, ALL)]


def test_a_second_signal_kills_all_of_them():
    stopped = (*FINAL, SignalReceived(SIGINT, 1.2, is_first_by_program=True))
    assert one_node(*stopped)[1] == []
    assert one_node(*stopped, SignalReceived(SIGINT, 1.3))[1] == [KillWorkers(ALL)]


def test_the_other_nodes_are_told_as_soon_as_the_others_here():
    first = (GenerationBegun(0, ALL, 0.05), *STARTED)
    state = node.State(policy=POLICY)
    for event in (*first, *final(1)):
        state, _ = node_step(state, event)
    assert node_step(state, DUE)[1] == (StopWorkers(SIGTERM, OTHERS), ReportStopping(Why.FAILED, SIGTERM))
    alone, _ = node_step(replace(state, alive=frozenset({1})), ExceptionFinal(1, 1.0))
    assert alone.phase is Phase.SETTLING  # no other worker is here, but there are other nodes
    lease, kills = node_step(node_step(state, DUE)[0], LeaseOver(1.2))
    assert (lease.phase, kills[0]) == (Phase.KILLING, KillWorkers(ALL))


@pytest.mark.parametrize(("why", "ranks"), [(Why.FAILED, OTHERS), (Why.SIGNALLED, ALL), (Why.NODE_LOST, ALL)])
def test_where_workers_of_all_nodes_fail_likewise_each_keeps_its_own_end(why, ranks):
    state = node.State(policy=POLICY)
    for event in (GenerationBegun(0, ALL, 0.05), *STARTED, *final(1)):
        state, _ = node_step(state, event)
    state, actions = node_step(state, StopOrdered(SIGTERM, 1.05, why))
    assert actions == (StopWorkers(SIGTERM, ranks),)
    for end in ENDED:
        state, _ = node_step(state, end)
    actions = node_step(state, DeadlineReached(1.0 + node.END_TIMEOUT))[1]
    assert (StopWorkers(SIGTERM, frozenset({1})) in actions) is (ranks == OTHERS)


def test_its_stack_is_not_asked_for_since_the_signal_would_kill_an_interpreter_that_has_lost_its_handlers():
    policy = replace(POLICY, stacks_timeout=2.0)
    assert one_node(*FINAL, policy=policy)[1] == [CaptureStacks(2.0, if_in_group=True, but=frozenset({1}))]
    captured = (*FINAL, StacksCaptured(1.2, frozenset({0, 2}), frozenset({0, 2})))
    assert one_node(*captured, policy=policy)[1] == [StopWorkers(SIGTERM, OTHERS)]


def test_a_debugger_that_has_the_terminal_keeps_its_worker():
    assert one_node(*STARTED, *final(1), DUE, policy=replace(POLICY, debug_rank=0))[1] == [
        StopWorkers(SIGTERM, frozenset({2})),
        Print("rank 1 failed (ValueError); rank 0 stays in the debugger"),
    ]


def test_the_debugged_worker_itself_stays_in_no_debugger_once_its_exception_is_final():
    history = (*STARTED, *final(1), DUE)
    assert one_node(*history, policy=replace(POLICY, debug_rank=1))[1] == [StopWorkers(SIGTERM, OTHERS)]


def test_a_restart_waits_for_its_end():
    state, actions = one_node(*FINAL, *ENDED, max_restarts=1)
    assert (state.phase, actions) == (Phase.STOPPING, [])
    assert one_node(*FINAL, *ENDED, ended(1, 1.6, code=1), max_restarts=1)[1] == [Sweep(SIGTERM)]
