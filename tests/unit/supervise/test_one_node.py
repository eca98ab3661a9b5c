"""Histories of a job of one node, and what must be done about them; no process, no clock."""

from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.job import ReportFailure
from ddplaunch.launcher.decide.node import *
from ddplaunch.spec.outcome import StartFailure, Why
from tests.unit.supervise.histories import (
    ALL,
    LEFT,
    LOST,
    NOTHING_LEFT,
    OWN_ERROR,
    POLICY,
    STARTED,
    OneNode,
    calm,
    ended,
    one_node,
)


def test_a_job_begins_by_starting_every_worker():
    state, actions = one_node()
    assert actions == [StartWorkers(0)]
    assert state.pending == ALL


def test_workers_that_end_with_0_are_waited_for_then_swept_after_then_the_status_is_0():
    _, actions = one_node(*STARTED, ended(1), ended(0))
    assert actions == []
    state, actions = one_node(*STARTED, ended(1), ended(0), ended(2))
    assert actions == [Sweep(SIGTERM)]
    assert state.deadline == 1.0 + node.SWEEP_GRACE
    state, actions = one_node(*STARTED, ended(1), ended(0), ended(2), NOTHING_LEFT)
    assert actions == [Exit(0)]
    assert state.deadline is None


def test_first_failure_stops_the_others_and_gives_the_status():
    state, actions = one_node(*STARTED, ended(1, code=3))
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert state.deadline == 11.0
    stopped = {"stopped_with": SIGTERM, "stopped_at": 1.0}
    rest = (ended(0, 1.1, code=None, signal=SIGTERM, **stopped), ended(2, 1.2, code=9, **stopped))
    assert one_node(*STARTED, ended(1, code=3), *rest)[1] == [Sweep(SIGTERM)]
    assert one_node(*STARTED, ended(1, code=3), *rest, NOTHING_LEFT)[1] == [Exit(3)]


def test_a_signal_that_ends_a_worker_gives_128_plus_n():
    history = (*STARTED, ended(1, code=None, signal=11), ended(0, 2.0), ended(2, 2.0), NOTHING_LEFT)
    assert one_node(*history)[1] == [Exit(139)]


def test_workers_that_ignore_the_stop_are_killed_at_the_deadline_and_not_before():
    history = (*STARTED, ended(1, code=3))
    assert one_node(*history, DeadlineReached(10.9))[1] == []
    state, actions = one_node(*history, DeadlineReached(11.0))
    assert actions == [KillWorkers(ALL)]
    assert state.phase is Phase.KILLING


@pytest.mark.parametrize(("signum", "status"), [(SIGINT, 130), (SIGTERM, 143), (SIGHUP, 129), (SIGQUIT, 131)], ids=str)
def test_a_stop_signal_is_passed_on_as_it_is_and_gives_the_status(signum, status):
    state, actions = one_node(*STARTED, SignalReceived(signum, 1.0))
    assert actions == [StopWorkers(signum, ALL)]
    assert state.deadline == 11.0
    ends = [ended(rank, 1.5, code=0, stopped_with=signum, stopped_at=1.0) for rank in ALL]
    assert one_node(*STARTED, SignalReceived(signum, 1.0), *ends)[1] == [Sweep(signum)]
    assert one_node(*STARTED, SignalReceived(signum, 1.0), *ends, NOTHING_LEFT)[1] == [Exit(status)]


def test_the_second_stop_signal_kills_at_once():
    assert one_node(*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGTERM, 1.1))[1] == [KillWorkers(ALL)]


def test_a_copy_of_a_signal_sent_to_the_agent_itself_does_not_count_as_the_second():
    assert one_node(*STARTED, SignalReceived(SIGTERM, 1.0), SignalReceived(SIGTERM, 1.0, is_request=False))[1] == []


def test_a_stop_signal_while_a_failure_is_being_torn_down_kills_and_the_failure_keeps_the_status():
    history = (*STARTED, ended(1, code=3), SignalReceived(SIGINT, 1.1))
    assert one_node(*history)[1] == [KillWorkers(ALL)]
    rest = [ended(rank, 1.2, code=None, signal=9, stopped_with=SIGKILL, stopped_at=1.1) for rank in (0, 2)]
    assert one_node(*history, *rest)[1] == [Sweep(SIGKILL)]
    assert one_node(*history, *rest, NOTHING_LEFT)[1] == [Exit(3)]


def test_signals_that_do_not_stop_are_forwarded_to_the_living_and_the_job_goes_on():
    state, actions = one_node(*STARTED, ended(0), SignalReceived(SIGUSR1, 1.0))
    assert actions == [ForwardSignal(SIGUSR1, frozenset({1, 2}))]
    assert state.phase is Phase.RUNNING


def test_signals_before_any_worker_runs():
    assert one_node(SignalReceived(SIGUSR1, 0.05))[1] == []
    state, actions = one_node(SignalReceived(SIGTERM, 0.05))
    assert actions == [StopWorkers(SIGTERM, ALL), Sweep(SIGTERM)]
    assert not state.pending
    assert one_node(SignalReceived(SIGTERM, 0.05), NOTHING_LEFT)[1] == [Exit(143)]


def test_a_signal_while_workers_are_being_started_cancels_the_rest():
    state, actions = one_node(STARTED[0], SignalReceived(SIGTERM, 0.15))
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert not state.pending
    assert state.alive == {0}


def test_a_worker_that_cannot_be_started_stops_those_that_were():
    history = (STARTED[0], StartFailed(StartFailure(1, "here", "fork: Resource temporarily unavailable", 126), 0.2))
    state, actions = one_node(*history)
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert not state.pending
    assert one_node(*history, ended(0, 0.3, code=None, signal=SIGTERM), NOTHING_LEFT)[1] == [Exit(126)]


def test_a_start_failure_is_not_tried_again():
    failed = StartFailed(StartFailure(0, "here", "no such file", 127), 0.2)
    assert one_node(failed, NOTHING_LEFT, max_restarts=3)[1] == [Exit(127)]


def test_when_the_front_is_gone_the_workers_are_stopped():
    assert one_node(*STARTED, FrontLost(1.0))[1] == [StopWorkers(SIGTERM, ALL)]
    assert one_node(*STARTED, ended(1, code=3), FrontLost(1.1))[1] == []


# --- the first failure


def test_a_failure_that_only_follows_another_waits_for_its_cause():
    history = (*STARTED, ended(0, 1.0, code=1, error=LOST))
    state, actions = one_node(*history)
    assert actions == []
    assert state.phase is Phase.SETTLING
    assert state.deadline == 1.0 + node.CAUSE_TIMEOUT
    history = (*history, ended(1, 1.05, code=3))
    state, actions = one_node(*history)
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert one_node(*history, ended(2, 1.1, code=None, signal=15), NOTHING_LEFT)[1] == [Exit(3)]


def test_further_followers_do_not_prolong_the_wait():
    state, _ = one_node(*STARTED, ended(0, 1.0, code=1, error=LOST), ended(1, 1.3, code=1, error=LOST))
    assert state.deadline == 1.0 + node.CAUSE_TIMEOUT
    history = (*STARTED, ended(0, 1.0, code=1, error=LOST), DeadlineReached(1.0 + node.CAUSE_TIMEOUT))
    assert one_node(*history)[1] == [StopWorkers(SIGTERM, ALL)]


def test_a_culprit_that_has_raised_but_not_ended_is_not_waited_for():
    history = (*STARTED, WorkerRaised(1, OWN_ERROR, 1.0), ended(0, 1.0, code=1, error=LOST))
    assert one_node(*history)[1] == [StopWorkers(SIGTERM, ALL)]
    stopped = {"code": None, "signal": 15, "stopped_with": 15, "stopped_at": 1.0}
    history = (*history, ended(1, 1.2, error=OWN_ERROR, **stopped), ended(2, 1.2, **stopped), NOTHING_LEFT)
    state, actions = one_node(*history)
    assert state.failure is not None
    assert state.failure.rank == 1
    assert actions == [Exit(1)]


LINGERS = (*STARTED, ErrorRecorded(1.0), DeadlineReached(1.0 + node.END_TIMEOUT))


def test_a_worker_that_has_raised_and_does_not_end_is_the_failure():
    state, actions = one_node(*STARTED, ErrorRecorded(1.0), ErrorRecorded(2.0))
    assert (actions, state.deadline) == ([], 1.0 + node.END_TIMEOUT)
    assert one_node(*LINGERS)[1] == [FindRaised()]
    error = replace(OWN_ERROR, at=1.0)
    history = (*LINGERS, WorkerRaised(1, error, 6.0, lingers=True))
    word, *actions = one_node(*history)[1]
    assert isinstance(word, Print)
    assert word.text.startswith(f"rank 1 has raised {error.type} and does not end")
    assert actions == [StopWorkers(SIGTERM, ALL)]
    stopped = {"code": None, "signal": 15, "stopped_with": 15, "stopped_at": 6.0}
    ends = (ended(0, 6.1, **stopped), ended(1, 6.1, error=error, **stopped), ended(2, 6.1, **stopped), NOTHING_LEFT)
    state, actions = one_node(*history, *ends)
    assert actions == [Exit(1)]
    assert state.failure is not None
    assert state.failure.rank == 1


@pytest.mark.parametrize("others", [(), (ended(0, 1.5),)], ids=["all run", "one has finished"])
def test_a_worker_that_ends_soon_after_it_raised_is_not_looked_for(others):
    state, actions = one_node(*STARTED, ErrorRecorded(1.0), *others, ended(1, 2.0, code=1, error=OWN_ERROR))
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert state.deadline == 12.0


def test_an_exception_that_the_program_may_handle_is_no_failure():
    """torch's @record writes it down when it leaves the decorated function, and does not say when."""
    assert one_node(*LINGERS, WorkerRaised(1, replace(OWN_ERROR, at=None), 6.0, lingers=True))[1] == []


def test_who_is_debugged_may_stay_as_long_as_the_user_likes():
    debugged = replace(POLICY, debug_rank=1)
    history = (*LINGERS, WorkerRaised(1, replace(OWN_ERROR, at=1.0), 6.0, lingers=True))
    assert one_node(*history, policy=debugged)[1] == []


def test_a_suspended_job_gives_who_has_raised_its_time_later():
    suspended = (*STARTED, ErrorRecorded(1.0), SignalReceived(SIGTSTP, 2.0), SignalReceived(SIGCONT, 50.0))
    assert one_node(*suspended)[0].deadline == 49.0 + node.END_TIMEOUT


def test_of_two_that_die_a_millisecond_apart_the_earlier_is_the_first():
    history = (*STARTED, ended(2, 1.000, code=17), ended(0, 1.001, code=1))
    state, _ = one_node(*history)
    assert state.failure is not None
    assert state.failure.rank == 2


# --- what workers left behind


def test_what_workers_left_behind_is_stopped_then_killed_then_named():
    clean = (*STARTED, ended(0), ended(1), ended(2), LEFT)
    _, actions = one_node(*clean)
    assert actions == []
    history = (*clean, DeadlineReached(2.0))
    assert one_node(*history)[1] == [Sweep(SIGKILL)]
    assert one_node(*history, NOTHING_LEFT)[1] == [Exit(0)]
    history = (*history, LEFT, DeadlineReached(2.0 + node.TIDY_TIMEOUT))
    assert one_node(*history)[1] == [Sweep(SIGKILL, sparing=False)]
    end = one_node(*history, LEFT, DeadlineReached(2.0 + node.KILL_TIMEOUT))[1]
    assert end == [Print("could not be ended: pid 7 (sleep)"), Exit(0)]


def test_who_still_runs_is_named_while_a_long_stop_goes_on():
    patient = replace(POLICY, grace_period=30.0)
    stopped = (*STARTED, SignalReceived(SIGINT, 1.0), ended(1, 2.0))
    state, actions = one_node(*stopped, DeadlineReached(6.0), policy=patient)
    assert (state.phase, actions, state.deadline) == (Phase.STOPPING, [NameRunning(frozenset({0, 2}), 25.0)], 11.0)
    state, actions = one_node(*stopped, DeadlineReached(31.0), policy=patient)
    assert (state.phase, actions) == (Phase.KILLING, [KillWorkers(ALL)])


def test_after_a_stop_what_is_left_shares_the_one_grace_period():
    stopped = {"code": None, "signal": 15, "stopped_with": 15, "stopped_at": 1.0}
    state, _ = one_node(*STARTED, SignalReceived(SIGTERM, 1.0), *(ended(rank, 4.0, **stopped) for rank in ALL), LEFT)
    assert state.deadline == 11.0


def test_a_stop_signal_while_sweeping_kills_what_is_left():
    history = (*STARTED, ended(0), ended(1), ended(2), LEFT, SignalReceived(SIGINT, 1.5))
    assert one_node(*history)[1] == [Sweep(SIGKILL, sparing=False)]


def test_a_worker_that_survives_sigkill_does_not_hold_the_command_for_ever():
    history = (*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGINT, 1.1), DeadlineReached(6.1))
    assert one_node(*history)[1] == [Sweep(SIGKILL, sparing=False)]
    stuck = Swept(("pid 101 (python) in uninterruptible sleep",), 6.1)
    say, leave = one_node(*history, stuck, DeadlineReached(6.1))[1]
    assert isinstance(say, Print)
    assert "uninterruptible sleep" in say.text
    assert leave == Exit(130)


# --- restarts


RETRY: dict[str, Any] = {"max_restarts": 1}
FAILED_ONCE = (*STARTED, ended(1, code=3), ended(0, 1.1), ended(2, 1.1), NOTHING_LEFT)


def test_a_failure_with_restarts_left_starts_a_new_generation_once_all_is_gone():
    state, actions = one_node(*FAILED_ONCE, **RETRY)
    assert actions == [ReportFailure(0.0)]
    assert state.deadline == 5.0
    state, actions = one_node(*FAILED_ONCE, DeadlineReached(5.0), **RETRY)
    assert actions == [StartWorkers(1)]
    assert (state.generation, state.pending, state.exits) == (1, ALL, ())


def test_the_last_generation_gives_the_status():
    again = (DeadlineReached(5.0), *STARTED, ended(0, 6.0, code=7), ended(1, 6.1), ended(2, 6.1), Swept((), 6.2))
    assert one_node(*FAILED_ONCE, *again, **RETRY)[1] == [Exit(7)]


def test_generations_that_die_at_once_wait_longer_and_longer():
    history: tuple[node.Event, ...] = ()
    waits = []
    for second in (10.0, 20.0, 30.0, 40.0):
        failed = (*STARTED, ended(0, second, code=1), ended(1, second), ended(2, second), Swept((), second))
        state, actions = one_node(*history, *failed, max_restarts=9)
        waits += [action.wait for action in actions if isinstance(action, ReportFailure)]
        assert state.job.phase_deadline is not None
        history = (*history, *failed, DeadlineReached(second + 8.0))
    assert waits == [0.0, 0.0, 1.0, 2.0]


def test_a_stop_signal_while_waiting_for_the_next_generation_ends_the_job():
    history = (*FAILED_ONCE, SignalReceived(SIGTERM, 5.0))
    assert one_node(*history, **RETRY)[1] == [Exit(143)]


def test_a_stop_signal_during_the_stop_after_a_failure_means_no_restart():
    history = (*STARTED, ended(1, code=3), SignalReceived(SIGINT, 1.1))
    assert one_node(*history, max_restarts=9)[1] == [KillWorkers(ALL)]
    rest = [ended(rank, 1.2, code=None, signal=9, stopped_with=SIGKILL, stopped_at=1.1) for rank in (0, 2)]
    assert one_node(*history, *rest, NOTHING_LEFT, max_restarts=9)[1] == [Exit(3)]


def test_a_program_that_asks_first_during_the_stop_after_a_failure_kills_nobody_and_its_second_request_does():
    asks = SignalReceived(SIGTERM, 1.1, is_first_by_program=True)
    history = (*STARTED, ended(1, code=3), asks)
    assert one_node(*history, max_restarts=9)[1] == []
    assert one_node(*history, SignalReceived(SIGTERM, 9.1), max_restarts=9)[1] == [KillWorkers(ALL)]
    rest = [ended(rank, 1.2, code=0, stopped_with=SIGTERM, stopped_at=1.1) for rank in (0, 2)]
    assert one_node(*history, *rest, NOTHING_LEFT, max_restarts=9)[1] == [Exit(3)]


def test_a_stop_signal_while_what_is_left_is_swept_means_no_restart():
    history = (*FAILED_ONCE[:-1], LEFT, SignalReceived(SIGINT, 1.1))
    assert one_node(*history, max_restarts=9)[1] == [Sweep(SIGKILL, sparing=False)]
    assert one_node(*history, NOTHING_LEFT, max_restarts=9)[1] == [Exit(3)]


# --- deadlines of the job


def test_the_timeout_of_the_job_stops_it_with_124():
    state, _ = one_node(*STARTED, timeout=60.0)
    assert state.deadline == 60.0
    history = (*STARTED, DeadlineReached(60.0))
    assert one_node(*history, timeout=60.0)[1] == [StopWorkers(SIGTERM, ALL)]
    ends = [ended(rank, 60.5, code=None, signal=15, stopped_with=15, stopped_at=60.0) for rank in ALL]
    assert one_node(*history, *ends, NOTHING_LEFT, timeout=60.0)[1] == [Exit(124)]


def test_one_that_ended_long_before_the_others_is_named_once():
    state, _ = one_node(*STARTED, ended(1, 1.0))
    assert state.deadline == 1.0 + node.EARLY_EXIT_WARNING
    state, actions = one_node(*STARTED, ended(1, 1.0), DeadlineReached(61.0))
    assert isinstance(actions[0], Print)
    assert "rank 1 ended with status 0" in actions[0].text
    assert state.deadline in (None, float("inf"))


def test_all_clocks_stand_still_while_the_job_is_suspended():
    suspended = (*STARTED, SignalReceived(SIGTSTP, 10.0))
    state, actions = one_node(*suspended, timeout=60.0)
    assert actions == [Suspend()]
    assert state.deadline is None
    state, actions = one_node(*suspended, SignalReceived(SIGCONT, 110.0), timeout=60.0)
    assert actions == [Resume()]
    assert state.deadline == 160.0
    stopping = (SignalReceived(SIGINT, 1.0), SignalReceived(SIGTSTP, 2.0), SignalReceived(SIGCONT, 102.0))
    assert one_node(*STARTED, *stopping)[0].deadline == 111.0, "9 s of the grace period were left"


@pytest.mark.parametrize("event", [SignalReceived(SIGTERM, 50.0), FrontLost(50.0)], ids=["SIGTERM", "front lost"])
def test_the_grace_period_runs_when_a_suspended_job_is_ended(event):
    suspended = (*STARTED, SignalReceived(SIGTSTP, 10.0), event)
    assert one_node(*suspended)[0].deadline == 60.0
    assert one_node(*suspended, SignalReceived(SIGCONT, 51.0))[0].deadline == 60.0


def test_the_front_of_a_job_that_is_suspended_while_it_stops_is_lost():
    history = (*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGTSTP, 2.0), FrontLost(52.0))
    state, actions = one_node(*history)
    assert actions == [Resume()]
    assert state.deadline == 61.0


@pytest.mark.parametrize("signum", [SIGHUP, SIGTERM], ids=lambda signum: signum.name)
def test_signals_without_hurry_leave_the_grace_period_however_many_come_and_one_with_it_kills(signum):
    """Of a closed terminal the kernel and the shell tell; Slurm sends SIGTERM before and after the grace time of its own."""
    history = (*STARTED, calm(signum, 1.0), calm(signum, 4.0), calm(SIGTERM, 7.0))
    state, actions = one_node(*history)
    assert actions == []
    assert (state.phase, state.deadline) == (Phase.STOPPING, 11.0)
    assert one_node(*history, SignalReceived(SIGINT, 8.0))[1] == [KillWorkers(ALL)]
    ends = [ended(rank, 9.0, stopped_with=signum, stopped_at=1.0) for rank in ALL]
    assert one_node(*history, *ends, LEFT, calm(SIGTERM, 9.5))[1] == []
    assert one_node(*history, *ends, NOTHING_LEFT)[1] == [Exit(128 + signum)]


def test_a_signal_without_hurry_after_a_failure_kills_nobody_and_means_no_restart():
    history = (*STARTED, ended(1, code=3), calm(SIGTERM, 1.1))
    assert one_node(*history, max_restarts=9)[1] == []
    rest = [ended(rank, 1.2, stopped_with=SIGTERM, stopped_at=1.0) for rank in (0, 2)]
    assert one_node(*history, *rest, NOTHING_LEFT, max_restarts=9)[1] == [Exit(3)]


def test_sigcont_to_a_job_that_is_not_suspended_is_forwarded():
    assert one_node(*STARTED, SignalReceived(SIGCONT, 1.0))[1] == [ForwardSignal(SIGCONT, ALL)]


def test_a_worker_that_dies_while_the_job_is_suspended_wakes_it_and_a_restart_follows():
    suspended = (*STARTED, SignalReceived(SIGTSTP, 1.0), ended(1, 50.0, code=None, signal=SIGKILL))
    assert one_node(*suspended, **RETRY)[1] == [StopWorkers(SIGTERM, ALL), Resume()]
    gone = (*suspended, ended(0, 50.1), ended(2, 50.1), Swept((), 50.2))
    state, actions = one_node(*gone, **RETRY)
    assert actions == [ReportFailure(0.0)]
    assert state.deadline == 50.2
    assert one_node(*gone, DeadlineReached(50.2), **RETRY)[1] == [StartWorkers(1)]


FINISHED = (*STARTED, ended(0), ended(1), ended(2), LEFT)


@pytest.mark.parametrize("signum", [SIGTERM, SIGINT, SIGHUP])
@pytest.mark.parametrize("is_request", [True, False])
@pytest.mark.parametrize("notices", [frozenset(), frozenset({SIGTERM, SIGHUP})], ids=["", "notices"])
def test_a_job_that_has_finished_stays_finished_whatever_signal_comes_while_it_sweeps(signum, is_request, notices):
    given: dict[str, Any] = {"policy": replace(POLICY, notices=notices), "notices": notices}
    signalled = (*FINISHED, SignalReceived(signum, 1.5, is_request=is_request))
    assert one_node(*signalled, **given)[1] == ([Sweep(SIGKILL, sparing=False)] if is_request else [])
    state, actions = one_node(*signalled, NOTHING_LEFT, **given)
    assert (actions, state.job.why, state.job.end.requeue) == ([Exit(0)], Why.FINISHED, 0)


def test_the_front_of_a_job_that_has_finished_may_be_lost():
    assert one_node(*FINISHED, FrontLost(1.5), NOTHING_LEFT)[1] == [Exit(0)]


def test_the_first_stop_signal_after_the_timeout_kills():
    up = (*STARTED, DeadlineReached(60.0))
    assert one_node(*up, SignalReceived(SIGINT, 60.5), timeout=60.0)[1] == [KillWorkers(ALL)]


def test_no_generation_begins_when_the_front_is_lost_during_the_stop_after_a_failure():
    lost = (*STARTED, ended(1, code=3), FrontLost(1.1))
    assert one_node(*lost, **RETRY)[1] == []
    gone = (*lost, ended(0, 1.2), ended(2, 1.2), NOTHING_LEFT)
    assert one_node(*gone, **RETRY)[1] == [ReportFailure(0.0), Exit(137)]
    assert one_node(*gone)[1] == [Exit(3)]


# --- a worker in the debugger


DEBUG = replace(POLICY, debug_rank=1)


def test_ctrl_c_goes_to_the_debugger_alone_and_no_deadline_runs():
    for event in (SignalReceived(SIGINT, 1.0), calm(SIGINT, 1.01)):
        state, actions = one_node(*STARTED, event, policy=DEBUG)
        assert actions == [ForwardSignal(SIGINT, frozenset({1}))]
        assert state.deadline is None


def test_ctrl_c_that_ends_the_debugged_worker_stops_the_job():
    by_it: dict[str, Any] = {"code": None, "signal": SIGINT}
    history = (*STARTED, SignalReceived(SIGINT, 1.0), ended(1, 2.0, **by_it))
    assert one_node(*history, policy=DEBUG)[1] == [StopWorkers(SIGINT, ALL)]
    stopped: dict[str, Any] = {**by_it, "stopped_with": SIGINT, "stopped_at": 2.0}
    gone = (ended(0, 2.1, **stopped), ended(2, 2.1, **stopped), NOTHING_LEFT)
    assert one_node(*history, *gone, policy=DEBUG)[1] == [Exit(130)]
    assert one_node(*STARTED, ended(1, 2.0, **by_it), policy=DEBUG)[1] == [StopWorkers(SIGTERM, ALL)]


def test_the_timeout_waits_for_the_debugger():
    timed: dict[str, Any] = {"policy": DEBUG, "timeout": 60.0}
    assert one_node(*STARTED, DeadlineReached(60.0), **timed)[1] == []
    assert one_node(*STARTED, **timed)[0].deadline is None
    left = (*STARTED, ended(1, 70.0))
    assert one_node(*left, **timed)[0].deadline == 60.0
    assert one_node(*left, DeadlineReached(70.1), **timed)[1] == [StopWorkers(SIGTERM, ALL)]


def test_the_failure_of_another_leaves_the_debugger_alone():
    history = (*STARTED, ended(0, code=3))
    state, actions = one_node(*history, policy=DEBUG)
    assert actions[0] == StopWorkers(SIGTERM, frozenset({0, 2}))
    state, actions = one_node(*history, DeadlineReached(11.0), policy=DEBUG)
    assert actions == [KillWorkers(frozenset({0, 2}))]
    assert state.deadline is None
    ends = (ended(2, 11.1, code=None, signal=9, stopped_with=9, stopped_at=11.0), ended(1, 99.0))
    assert one_node(*history, DeadlineReached(11.0), *ends, NOTHING_LEFT, policy=DEBUG)[1] == [Exit(3)]


def test_once_the_debugged_worker_has_ended_ctrl_c_stops_the_job():
    assert one_node(*STARTED, ended(1), SignalReceived(SIGINT, 2.0), policy=DEBUG)[1] == [StopWorkers(SIGINT, ALL)]


def test_nobody_at_the_debugger_is_told_of_workers_that_ended_long_ago():
    state, _ = one_node(*STARTED, ended(0, 1.0), policy=DEBUG)
    assert state.deadline is None


@pytest.mark.parametrize("event", [SignalReceived(SIGTERM, 1.0), FrontLost(1.0)], ids=["SIGTERM", "front lost"])
def test_whoever_ends_the_job_ends_the_debugged_worker_too(event):
    assert one_node(*STARTED, event, DeadlineReached(11.0), policy=DEBUG)[1] == [KillWorkers(ALL)]


# --- any history


@st.composite
def histories(draw: st.DrawFn) -> list[node.Event]:
    at = 0.0
    events: list[node.Event] = []
    for kind in draw(st.lists(st.sampled_from("wxrevsfdlnz"), max_size=30)):
        at += draw(st.floats(0.001, 20.0))
        rank = draw(st.sampled_from(sorted(ALL)))
        match kind:
            case "w":
                events.append(WorkerStarted(rank, at))
            case "x":
                code = draw(st.sampled_from([0, 1, 3]))
                events.append(ended(rank, at, code=code, error=draw(st.sampled_from([None, LOST])) if code else None))
            case "r":
                events.append(WorkerRaised(rank, replace(OWN_ERROR, at=at), at, lingers=draw(st.booleans())))
            case "e":
                events.append(ErrorRecorded(at))
            case "v":
                events.append(ExceptionFinal(rank, at))
            case "s":
                signum = draw(st.sampled_from([SIGINT, SIGTERM, SIGUSR1, SIGTSTP, SIGCONT]))
                events.append(SignalReceived(signum, at))
            case "f":
                events.append(FrontLost(at))
            case "d":
                events.append(DeadlineReached(at))
            case "l":
                events.append(Swept(("pid 7 (sleep)",), at))
            case "n":
                events.append(Swept((), at))
            case "z":
                events.append(StartFailed(StartFailure(rank, "here", "why", 126), at))
    return events


def can_happen(state: OneNode, event: node.Event) -> bool:
    match event:
        case WorkerStarted(rank) | StartFailed(StartFailure(rank)):
            return rank in state.pending
        case WorkerExited(exit):
            return exit.rank in state.alive
    return state.phase is not Phase.ENDED


@given(histories(), st.integers(0, 2))
def test_whatever_happens_the_job_ends_once_signals_and_deadlines_have_come(events, restarts):
    """After any history that the agent can feed, two stop signals and the deadlines lead to one Exit."""
    state = OneNode(max_restarts=restarts)
    exits = 0
    at = 1000.0

    def take(event: node.Event) -> None:
        nonlocal exits
        if not can_happen(state, event):
            return
        actions = state.take(event)
        exits += sum(isinstance(action, Exit) for action in actions)
        if exits:
            assert state.end.status is not None
        for action in actions:
            if isinstance(action, (StopWorkers, KillWorkers, ForwardSignal)):
                assert action.ranks <= ALL

    for event in events:
        take(event)
    if state.suspended_at is not None:
        take(SignalReceived(SIGCONT, at))
    take(SignalReceived(SIGTERM, at))
    take(SignalReceived(SIGTERM, at + 1))
    for rank in sorted(state.alive):
        take(ended(rank, at + 2, code=None, signal=9))
    for _ in range(4):
        take(Swept((), at + 3))
        take(SignalReceived(SIGTERM, at + 3))
    assert state.phase is Phase.ENDED
    assert exits == 1


@given(histories(), st.integers(0, 2))
def test_a_job_of_one_node_and_the_only_node_of_an_elastic_job_do_and_end_alike(events, restarts):
    alone, elastic = OneNode(max_restarts=restarts), OneNode(max_restarts=restarts, max_nodes=3)
    for event in events:
        if can_happen(alone, event):
            assert alone.take(event) == elastic.take(event)
    assert (alone.node.end, alone.job.why, alone.job.end) == (elastic.node.end, elastic.job.why, elastic.job.end)


# --- a notice of the end

NOTICES = replace(POLICY, notices=frozenset({SIGUSR1, SIGTERM}))
ASKED: dict[str, Any] = {"policy": NOTICES, "notices": NOTICES.notices, "max_restarts": 3}
NOTICED = (*STARTED, SignalReceived(SIGUSR1, 1.0))
GONE = tuple(ended(rank, 2.0) for rank in ALL)
BY_TERM: dict[str, Any] = {"code": None, "signal": SIGTERM, "stopped_with": SIGTERM, "stopped_at": 1.5}


@pytest.mark.parametrize(
    ("history", "status", "requeue"),
    [
        ((*NOTICED, *GONE), 138, SIGUSR1),
        ((*STARTED, *GONE), 0, 0),
        ((*NOTICED, *(ended(rank, 2.0, code=None, signal=SIGUSR1) for rank in ALL)), 138, SIGUSR1),
        ((*NOTICED, ended(0), ended(1, code=1, error=LOST), ended(2, **BY_TERM)), 138, SIGUSR1),
        ((*STARTED, SignalReceived(SIGTERM, 1.0), *(ended(rank, **BY_TERM) for rank in ALL)), 143, SIGTERM),
        ((*NOTICED, SignalReceived(SIGTERM, 1.5), *(ended(rank, **BY_TERM) for rank in ALL)), 138, SIGUSR1),
        ((*NOTICED, SignalReceived(SIGINT, 1.5), *(ended(rank, 2.0) for rank in ALL)), 130, 0),
        ((*STARTED, SignalReceived(SIGTERM, 1.0), SignalReceived(SIGINT, 1.5), *GONE), 143, 0),
        (
            (*STARTED, ended(0, code=None, signal=SIGTERM), SignalReceived(SIGTERM, 1.1), ended(1), ended(2)),
            143,
            SIGTERM,
        ),
        ((*STARTED, *GONE, SignalReceived(SIGUSR1, 3.0)), 0, 0),
    ],
    ids=[
        "all left with 0",
        "there was none",
        "it ended all of them",
        "one lost contact, and the rest were stopped",
        "it stopped them",
        "the time was up before all had left",
        "Ctrl-C came after it",
        "Ctrl-C came after one that stops",
        "Slurm signalled a worker first",
        "it came when all had finished",
    ],
)
def test_a_job_goes_back_if_all_left_after_a_notice(history, status, requeue):
    state, actions = one_node(*history, NOTHING_LEFT, **ASKED)
    assert (actions, state.job.end.requeue) == ([Exit(status)], requeue)


def test_a_worker_that_fails_after_a_notice_is_a_failure_like_any_other():
    history = (*NOTICED, ended(1, code=3, error=OWN_ERROR), ended(0, **BY_TERM), ended(2, **BY_TERM), NOTHING_LEFT)
    assert isinstance(one_node(*history, **ASKED)[1][0], ReportFailure)
    state, actions = one_node(*history, **{**ASKED, "max_restarts": 0})
    assert (actions, state.job.end.requeue) == ([Exit(3)], 0)
    state, _ = one_node(*history, DeadlineReached(100.0), **ASKED)
    assert (state.generation, state.notice, state.job.generation.notice) == (1, 0, 0)


def test_what_a_notice_does_to_the_workers_is_what_it_did_before():
    for signum in (SIGUSR1, SIGTERM, SIGINT):
        history = (*STARTED, SignalReceived(signum, 1.0))
        assert one_node(*history, **ASKED)[1] == one_node(*history)[1]
