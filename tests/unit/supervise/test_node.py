"""Histories of events and what must be done about them; no process, no clock."""

from __future__ import annotations

from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record import replace
from ddplaunch.supervise import node
from ddplaunch.supervise.node import (
    Announce,
    Begun,
    DeadlineReached,
    Dismissed,
    Exit,
    Forward,
    FrontLost,
    Hurry,
    Kill,
    Phase,
    Policy,
    Report,
    Resume,
    Retry,
    Say,
    SignalReceived,
    Start,
    StartFailed,
    State,
    Stop,
    Suspend,
    Sweep,
    Swept,
    TellNotice,
    ToldToKill,
    ToldToStop,
    Why,
    WorkerExited,
    WorkerRaised,
    WorkerStarted,
)
from ddplaunch.supervise.outcome import WorkerError, WorkerExit

ALL = frozenset(range(3))
POLICY = Policy(ranks=ALL, stop_signals=frozenset({SIGINT, SIGTERM, SIGHUP, SIGQUIT}), grace_period=10.0)
LOST = WorkerError(
    type="RuntimeError", message="[x/gloo/transport/tcp/pair.cc:1] Connection closed by peer", traceback=""
)
OWN = WorkerError(type="ValueError", message="boom", traceback="", at=0.9)


def ended(
    rank: int, at: float = 1.0, *, code: int | None = 0, signal: int | None = None, **more: object
) -> WorkerExited:
    exit = WorkerExit(
        rank=rank,
        local_rank=rank,
        host="here",
        pid=100 + rank,
        device="cpu",
        code=code,
        signal=signal,
        at=at,
        seconds=at,
    )
    return WorkerExited(replace(exit, **more), at)


def after(*events: node.Event, policy: Policy = POLICY) -> tuple[State, list[node.Action]]:
    """The state after these events, and what the last one asked for."""
    state, actions = node.begin(policy, 0.0)
    for event in events:
        state, actions = node.step(state, event)
    return state, list(actions)


STARTED = tuple(WorkerStarted(rank, 0.1) for rank in ALL)
NOTHING_LEFT = Swept((), 5.0)
LEFT = Swept(("pid 7 (sleep)",), 5.0)


def test_a_job_begins_by_starting_every_worker():
    state, actions = after()
    assert actions == [Start(0)]
    assert state.pending == ALL


def test_workers_that_end_with_0_are_waited_for_then_swept_after_then_the_status_is_0():
    _, actions = after(*STARTED, ended(1), ended(0))
    assert actions == []
    state, actions = after(*STARTED, ended(1), ended(0), ended(2))
    assert actions == [Sweep(SIGTERM)]
    assert state.deadline == 1.0 + node.SWEEP_GRACE
    state, actions = after(*STARTED, ended(1), ended(0), ended(2), NOTHING_LEFT)
    assert actions == [Exit(0)]
    assert state.deadline is None


def test_first_failure_stops_the_others_and_gives_the_status():
    state, actions = after(*STARTED, ended(1, code=3))
    assert actions == [Stop(SIGTERM, ALL)]
    assert state.deadline == 11.0
    stopped = {"stopped_with": SIGTERM, "stopped_at": 1.0}
    rest = (ended(0, 1.1, code=None, signal=SIGTERM, **stopped), ended(2, 1.2, code=9, **stopped))
    assert after(*STARTED, ended(1, code=3), *rest)[1] == [Sweep(SIGTERM)]
    assert after(*STARTED, ended(1, code=3), *rest, NOTHING_LEFT)[1] == [Exit(3)]


def test_a_signal_that_ends_a_worker_gives_128_plus_n():
    history = (*STARTED, ended(1, code=None, signal=11), ended(0, 2.0), ended(2, 2.0), NOTHING_LEFT)
    assert after(*history)[1] == [Exit(139)]


def test_workers_that_ignore_the_stop_are_killed_at_the_deadline_and_not_before():
    history = (*STARTED, ended(1, code=3))
    assert after(*history, DeadlineReached(10.9))[1] == []
    state, actions = after(*history, DeadlineReached(11.0))
    assert actions == [Kill(ALL)]
    assert state.phase is Phase.KILLING


@pytest.mark.parametrize(("signum", "status"), [(SIGINT, 130), (SIGTERM, 143), (SIGHUP, 129), (SIGQUIT, 131)], ids=str)
def test_a_stop_signal_is_passed_on_as_it_is_and_gives_the_status(signum, status):
    state, actions = after(*STARTED, SignalReceived(signum, 1.0))
    assert actions == [Stop(signum, ALL)]
    assert state.deadline == 11.0
    ends = [ended(rank, 1.5, code=0, stopped_with=signum, stopped_at=1.0) for rank in ALL]
    assert after(*STARTED, SignalReceived(signum, 1.0), *ends)[1] == [Sweep(signum)]
    assert after(*STARTED, SignalReceived(signum, 1.0), *ends, NOTHING_LEFT)[1] == [Exit(status)]


def test_the_second_stop_signal_kills_at_once():
    assert after(*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGTERM, 1.1))[1] == [Kill(ALL)]


def test_a_copy_of_a_signal_sent_to_the_agent_itself_does_not_count_as_the_second():
    assert after(*STARTED, SignalReceived(SIGTERM, 1.0), SignalReceived(SIGTERM, 1.0, escalates=False))[1] == []


def test_a_stop_signal_while_a_failure_is_being_torn_down_kills_and_the_failure_keeps_the_status():
    history = (*STARTED, ended(1, code=3), SignalReceived(SIGINT, 1.1))
    assert after(*history)[1] == [Kill(ALL)]
    rest = [ended(rank, 1.2, code=None, signal=9, stopped_with=SIGKILL, stopped_at=1.1) for rank in (0, 2)]
    assert after(*history, *rest)[1] == [Sweep(SIGKILL)]
    assert after(*history, *rest, NOTHING_LEFT)[1] == [Exit(3)]


def test_signals_that_do_not_stop_are_forwarded_to_the_living_and_the_job_goes_on():
    state, actions = after(*STARTED, ended(0), SignalReceived(SIGUSR1, 1.0))
    assert actions == [Forward(SIGUSR1, frozenset({1, 2}))]
    assert state.phase is Phase.RUNNING


def test_signals_before_any_worker_runs():
    assert after(SignalReceived(SIGUSR1, 0.05))[1] == []
    state, actions = after(SignalReceived(SIGTERM, 0.05))
    assert actions == [Stop(SIGTERM, ALL), Sweep(SIGTERM)]
    assert not state.pending
    assert after(SignalReceived(SIGTERM, 0.05), NOTHING_LEFT)[1] == [Exit(143)]


def test_a_signal_while_workers_are_being_started_cancels_the_rest():
    state, actions = after(STARTED[0], SignalReceived(SIGTERM, 0.15))
    assert actions == [Stop(SIGTERM, ALL)]
    assert not state.pending
    assert state.alive == {0}


def test_a_worker_that_cannot_be_started_stops_those_that_were():
    history = (STARTED[0], StartFailed(1, "fork: Resource temporarily unavailable", 126, 0.2))
    state, actions = after(*history)
    assert actions == [Stop(SIGTERM, ALL)]
    assert not state.pending
    assert after(*history, ended(0, 0.3, code=None, signal=SIGTERM), NOTHING_LEFT)[1] == [Exit(126)]


def test_a_start_failure_is_not_tried_again():
    policy = replace(POLICY, max_restarts=3)
    assert after(StartFailed(0, "no such file", 127, 0.2), NOTHING_LEFT, policy=policy)[1] == [Exit(127)]


def test_when_the_front_is_gone_the_workers_are_stopped():
    assert after(*STARTED, FrontLost(1.0))[1] == [Stop(SIGTERM, ALL)]
    assert after(*STARTED, ended(1, code=3), FrontLost(1.1))[1] == []


# --- the first failure


def test_a_failure_that_only_follows_another_waits_for_its_cause():
    history = (*STARTED, ended(0, 1.0, code=1, error=LOST))
    state, actions = after(*history)
    assert actions == []
    assert state.phase is Phase.SETTLING
    assert state.deadline == 1.0 + node.SETTLE
    history = (*history, ended(1, 1.05, code=3))
    state, actions = after(*history)
    assert actions == [Stop(SIGTERM, ALL)]
    assert after(*history, ended(2, 1.1, code=None, signal=15), NOTHING_LEFT)[1] == [Exit(3)]


def test_further_followers_do_not_prolong_the_wait():
    state, _ = after(*STARTED, ended(0, 1.0, code=1, error=LOST), ended(1, 1.3, code=1, error=LOST))
    assert state.deadline == 1.0 + node.SETTLE
    history = (*STARTED, ended(0, 1.0, code=1, error=LOST), DeadlineReached(1.0 + node.SETTLE))
    assert after(*history)[1] == [Stop(SIGTERM, ALL)]


def test_a_culprit_that_has_raised_but_not_ended_is_not_waited_for():
    history = (*STARTED, WorkerRaised(1, OWN, 1.0), ended(0, 1.0, code=1, error=LOST))
    assert after(*history)[1] == [Stop(SIGTERM, ALL)]
    stopped = {"code": None, "signal": 15, "stopped_with": 15, "stopped_at": 1.0}
    history = (*history, ended(1, 1.2, error=OWN, **stopped), ended(2, 1.2, **stopped), NOTHING_LEFT)
    state, actions = after(*history)
    assert state.failure is not None
    assert state.failure.rank == 1
    assert actions == [Exit(1)]


def test_of_two_that_die_a_millisecond_apart_the_earlier_is_the_first():
    history = (*STARTED, ended(2, 1.000, code=17), ended(0, 1.001, code=1))
    state, _ = after(*history)
    assert state.failure is not None
    assert state.failure.rank == 2


# --- what workers left behind


def test_what_workers_left_behind_is_stopped_then_killed_then_named():
    clean = (*STARTED, ended(0), ended(1), ended(2), LEFT)
    _, actions = after(*clean)
    assert actions == []
    history = (*clean, DeadlineReached(2.0))
    assert after(*history)[1] == [Sweep(SIGKILL)]
    assert after(*history, NOTHING_LEFT)[1] == [Exit(0)]
    history = (*history, LEFT, DeadlineReached(2.0 + node.TIDY_PATIENCE))
    assert after(*history)[1] == [Sweep(SIGKILL, sparing=False)]
    end = after(*history, LEFT, DeadlineReached(2.0 + node.KILL_PATIENCE))[1]
    assert end == [Say("could not be ended: pid 7 (sleep)"), Exit(0)]


def test_after_a_stop_what_is_left_shares_the_one_grace_period():
    stopped = {"code": None, "signal": 15, "stopped_with": 15, "stopped_at": 1.0}
    state, _ = after(*STARTED, SignalReceived(SIGTERM, 1.0), *(ended(rank, 4.0, **stopped) for rank in ALL), LEFT)
    assert state.deadline == 11.0


def test_a_stop_signal_while_sweeping_kills_what_is_left():
    history = (*STARTED, ended(0), ended(1), ended(2), LEFT, SignalReceived(SIGINT, 1.5))
    assert after(*history)[1] == [Sweep(SIGKILL, sparing=False)]


def test_a_worker_that_survives_sigkill_does_not_hold_the_command_for_ever():
    history = (*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGINT, 1.1), DeadlineReached(6.1))
    assert after(*history)[1] == [Sweep(SIGKILL, sparing=False)]
    stuck = Swept(("pid 101 (python) in uninterruptible sleep",), 6.1)
    say, leave = after(*history, stuck, DeadlineReached(6.1))[1]
    assert isinstance(say, Say)
    assert "uninterruptible sleep" in say.text
    assert leave == Exit(130)


# --- restarts


RETRY = replace(POLICY, max_restarts=1)
FAILED_ONCE = (*STARTED, ended(1, code=3), ended(0, 1.1), ended(2, 1.1), NOTHING_LEFT)


def test_a_failure_with_restarts_left_starts_a_new_generation_once_all_is_gone():
    state, actions = after(*FAILED_ONCE, policy=RETRY)
    assert actions == [Retry(0.0)]
    assert state.deadline == 5.0
    state, actions = after(*FAILED_ONCE, DeadlineReached(5.0), policy=RETRY)
    assert actions == [Start(1)]
    assert (state.generation, state.pending, state.exits) == (1, ALL, ())


def test_the_last_generation_gives_the_status():
    again = (DeadlineReached(5.0), *STARTED, ended(0, 6.0, code=7), ended(1, 6.1), ended(2, 6.1), Swept((), 6.2))
    assert after(*FAILED_ONCE, *again, policy=RETRY)[1] == [Exit(7)]


def test_generations_that_die_at_once_wait_longer_and_longer():
    policy = replace(POLICY, max_restarts=9)
    history: tuple[node.Event, ...] = ()
    waits = []
    for second in (10.0, 20.0, 30.0, 40.0):
        failed = (*STARTED, ended(0, second, code=1), ended(1, second), ended(2, second), Swept((), second))
        state, actions = after(*history, *failed, policy=policy)
        waits += [action.wait for action in actions if isinstance(action, Retry)]
        assert state.phase_deadline is not None
        history = (*history, *failed, DeadlineReached(second + 8.0))
    assert waits == [0.0, 0.0, 1.0, 2.0]


def test_a_stop_signal_while_waiting_for_the_next_generation_ends_the_job():
    history = (*FAILED_ONCE, SignalReceived(SIGTERM, 5.0))
    assert after(*history, policy=RETRY)[1] == [Stop(SIGTERM, ALL), Sweep(SIGTERM)]
    assert after(*history, NOTHING_LEFT, policy=RETRY)[1] == [Exit(143)]


def test_a_stop_signal_during_the_stop_after_a_failure_means_no_restart():
    policy = replace(POLICY, max_restarts=9)
    history = (*STARTED, ended(1, code=3), SignalReceived(SIGINT, 1.1))
    assert after(*history, policy=policy)[1] == [Kill(ALL)]
    rest = [ended(rank, 1.2, code=None, signal=9, stopped_with=SIGKILL, stopped_at=1.1) for rank in (0, 2)]
    assert after(*history, *rest, NOTHING_LEFT, policy=policy)[1] == [Exit(3)]


def test_a_stop_signal_while_what_is_left_is_swept_means_no_restart():
    policy = replace(POLICY, max_restarts=9)
    history = (*FAILED_ONCE[:-1], LEFT, SignalReceived(SIGINT, 1.1))
    assert after(*history, policy=policy)[1] == [Sweep(SIGKILL, sparing=False)]
    assert after(*history, NOTHING_LEFT, policy=policy)[1] == [Exit(3)]


# --- deadlines of the job


def test_the_timeout_of_the_job_stops_it_with_124():
    policy = replace(POLICY, timeout=60.0)
    state, _ = after(*STARTED, policy=policy)
    assert state.deadline == 60.0
    history = (*STARTED, DeadlineReached(60.0))
    assert after(*history, policy=policy)[1] == [Stop(SIGTERM, ALL)]
    ends = [ended(rank, 60.5, code=None, signal=15, stopped_with=15, stopped_at=60.0) for rank in ALL]
    assert after(*history, *ends, NOTHING_LEFT, policy=policy)[1] == [Exit(124)]


def test_one_that_ended_long_before_the_others_is_named_once():
    state, _ = after(*STARTED, ended(1, 1.0))
    assert state.deadline == 1.0 + node.LINGER
    state, actions = after(*STARTED, ended(1, 1.0), DeadlineReached(61.0))
    assert isinstance(actions[0], Say)
    assert "rank 1 ended with status 0" in actions[0].text
    assert state.deadline in (None, float("inf"))


def test_all_clocks_stand_still_while_the_job_is_suspended():
    policy = replace(POLICY, timeout=60.0)
    suspended = (*STARTED, SignalReceived(SIGTSTP, 10.0))
    state, actions = after(*suspended, policy=policy)
    assert actions == [Suspend()]
    assert state.deadline is None
    state, actions = after(*suspended, SignalReceived(SIGCONT, 110.0), policy=policy)
    assert actions == [Resume()]
    assert state.deadline == 160.0


@pytest.mark.parametrize("event", [SignalReceived(SIGTERM, 50.0), FrontLost(50.0)], ids=["SIGTERM", "front lost"])
def test_the_grace_period_runs_when_a_suspended_job_is_ended(event):
    suspended = (*STARTED, SignalReceived(SIGTSTP, 10.0), event)
    assert after(*suspended)[0].deadline == 60.0
    assert after(*suspended, SignalReceived(SIGCONT, 51.0))[0].deadline == 60.0


def test_the_front_of_a_job_that_is_suspended_while_it_stops_is_lost():
    history = (*STARTED, SignalReceived(SIGINT, 1.0), SignalReceived(SIGTSTP, 2.0), FrontLost(52.0))
    state, actions = after(*history)
    assert actions == [Resume()]
    assert state.deadline == 61.0


def calm(signum: int, at: float) -> SignalReceived:
    """One that is nobody's hurry."""
    return SignalReceived(signum, at, escalates=False)


@pytest.mark.parametrize("signum", [SIGHUP, SIGTERM], ids=lambda signum: signum.name)
def test_signals_without_hurry_leave_the_grace_period_however_many_come_and_one_with_it_kills(signum):
    """Of a closed terminal the kernel and the shell tell; Slurm sends SIGTERM before and after the grace time of its own."""
    history = (*STARTED, calm(signum, 1.0), calm(signum, 4.0), calm(SIGTERM, 7.0))
    state, actions = after(*history)
    assert actions == []
    assert (state.phase, state.deadline) == (Phase.STOPPING, 11.0)
    assert after(*history, SignalReceived(SIGINT, 8.0))[1] == [Kill(ALL)]
    ends = [ended(rank, 9.0, stopped_with=signum, stopped_at=1.0) for rank in ALL]
    assert after(*history, *ends, LEFT, calm(SIGTERM, 9.5))[1] == []
    assert after(*history, *ends, NOTHING_LEFT)[1] == [Exit(128 + signum)]


def test_a_signal_without_hurry_after_a_failure_kills_nobody_and_means_no_restart():
    policy = replace(POLICY, max_restarts=9)
    history = (*STARTED, ended(1, code=3), calm(SIGTERM, 1.1))
    assert after(*history, policy=policy)[1] == []
    rest = [ended(rank, 1.2, stopped_with=SIGTERM, stopped_at=1.0) for rank in (0, 2)]
    assert after(*history, *rest, NOTHING_LEFT, policy=policy)[1] == [Exit(3)]


def test_sigcont_to_a_job_that_is_not_suspended_is_forwarded():
    assert after(*STARTED, SignalReceived(SIGCONT, 1.0))[1] == [Forward(SIGCONT, ALL)]


# --- a worker in the debugger


DEBUG = replace(POLICY, debug_rank=1, timeout=60.0)


def test_ctrl_c_goes_to_the_debugger_alone_and_no_deadline_runs():
    for event in (SignalReceived(SIGINT, 1.0), calm(SIGINT, 1.01)):
        state, actions = after(*STARTED, event, policy=DEBUG)
        assert actions == [Forward(SIGINT, frozenset({1}))]
        assert state.deadline is None


def test_the_failure_of_another_leaves_the_debugger_alone():
    history = (*STARTED, ended(0, code=3))
    state, actions = after(*history, policy=DEBUG)
    assert actions[0] == Stop(SIGTERM, frozenset({0, 2}))
    state, actions = after(*history, DeadlineReached(11.0), policy=DEBUG)
    assert actions == [Kill(frozenset({0, 2}))]
    assert state.deadline is None
    ends = (ended(2, 11.1, code=None, signal=9, stopped_with=9, stopped_at=11.0), ended(1, 99.0))
    assert after(*history, DeadlineReached(11.0), *ends, NOTHING_LEFT, policy=DEBUG)[1] == [Exit(3)]


def test_once_the_debugged_worker_has_ended_ctrl_c_stops_the_job():
    assert after(*STARTED, ended(1), SignalReceived(SIGINT, 2.0), policy=DEBUG)[1] == [Stop(SIGINT, ALL)]


def test_nobody_at_the_debugger_is_told_of_workers_that_ended_long_ago():
    state, _ = after(*STARTED, ended(0, 1.0), policy=DEBUG)
    assert state.deadline is None


@pytest.mark.parametrize("event", [SignalReceived(SIGTERM, 1.0), FrontLost(1.0)], ids=["SIGTERM", "front lost"])
def test_whoever_ends_the_job_ends_the_debugged_worker_too(event):
    assert after(*STARTED, event, DeadlineReached(11.0), policy=DEBUG)[1] == [Kill(ALL)]


# --- with other nodes


OTHERS = replace(POLICY, coordinated=True, max_restarts=3)  # which only the coordinator counts
FIRST = (Begun(0, ALL, 0.05), *STARTED)
SECOND = frozenset({4, 5})
ENDS = tuple(ended(rank, 2.0 + rank, code=None, signal=15, stopped_with=15, stopped_at=1.0) for rank in sorted(ALL))


def elsewhere(*events: node.Event, policy: Policy = OTHERS) -> tuple[State, list[node.Action]]:
    """As `after`, on a node that is not the first."""
    return after(*events, policy=replace(policy, ranks=SECOND))


def test_with_other_nodes_nothing_starts_before_the_coordinators_word():
    state, actions = after(policy=OTHERS)
    assert (state.phase, actions) == (Phase.WAITING, [])
    state, actions = after(Begun(4, SECOND, 1.0), policy=OTHERS)
    assert actions == [Start(4)]
    assert (state.generation, state.pending, state.policy.ranks) == (4, SECOND, SECOND)


def test_a_failure_is_announced_as_soon_as_the_others_here_are_stopped_and_reported_when_all_are_gone():
    history = (*FIRST, ended(1, code=3))
    assert after(*history, policy=OTHERS)[1] == [Stop(SIGTERM, ALL), Announce(Why.FAILED, SIGTERM)]
    history = (*history, ENDS[0], ENDS[2])
    assert after(*history, policy=OTHERS)[1] == [Sweep(SIGTERM)]
    state, actions = after(*history, NOTHING_LEFT, policy=OTHERS)
    assert actions == [Report()]
    assert (state.phase, state.deadline) == (Phase.WAITING, None)


def test_what_follows_from_a_failure_only_the_coordinator_says():
    failed = (*FIRST, ended(1, code=3), ENDS[0], ENDS[2], NOTHING_LEFT)
    state, actions = after(*failed, Begun(1, ALL, 9.0), policy=OTHERS)
    assert actions == [Start(1)]
    assert (state.exits, state.raised, state.why) == ((), (), None)
    state, actions = after(*failed, Dismissed(7, 9.0), policy=OTHERS)
    assert actions == [Exit(7)]
    assert state.phase is Phase.ENDED


def test_workers_that_finish_are_reported_and_the_end_of_the_others_is_waited_for():
    history = (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT)
    state, actions = after(*history, policy=OTHERS)
    assert actions == [Report()]
    assert (state.phase, state.why) == (Phase.WAITING, Why.FINISHED)
    assert after(*history, Dismissed(0, 60.0), policy=OTHERS)[1] == [Exit(0)]
    assert after(*history, ToldToStop(SIGTERM, 60.0), policy=OTHERS)[1] == []


def test_a_stop_that_comes_from_another_node_is_not_announced():
    history = (*FIRST, ToldToStop(SIGINT, 1.0))
    state, actions = after(*history, policy=OTHERS)
    assert actions == [Stop(SIGINT, ALL)]
    assert state.deadline == 11.0
    assert after(*history, *ENDS, NOTHING_LEFT, policy=OTHERS)[1] == [Report()]


def test_a_stop_from_another_node_while_this_one_stops_already_changes_nothing():
    state, actions = after(*FIRST, ended(1, code=3), ToldToStop(SIGINT, 1.5), policy=OTHERS)
    assert actions == []
    assert (state.why, state.deadline) == (Why.FAILED, 11.0)


def test_workers_that_ignore_a_stop_from_another_node_are_killed_at_the_deadline():
    assert after(*FIRST, ToldToStop(SIGTERM, 1.0), DeadlineReached(11.0), policy=OTHERS)[1] == [Kill(ALL)]


def test_a_stop_signal_here_is_announced():
    state, actions = after(*FIRST, SignalReceived(SIGINT, 1.0), policy=OTHERS)
    assert actions == [Stop(SIGINT, ALL), Announce(Why.SIGNALLED, SIGINT)]
    assert state.phase is Phase.STOPPING


def test_the_second_stop_signal_here_kills_here_and_everywhere():
    history = (*FIRST, SignalReceived(SIGINT, 1.0), SignalReceived(SIGINT, 1.1))
    assert after(*history, policy=OTHERS)[1] == [Kill(ALL), Hurry()]


def test_the_same_signal_from_another_node_and_here_is_one():
    """A scheduler sends it to all nodes; the second one here kills."""
    told = (*FIRST, ToldToStop(SIGTERM, 1.0), SignalReceived(SIGTERM, 1.001))
    state, actions = after(*told, policy=OTHERS)
    assert actions == [Announce(Why.SIGNALLED, SIGTERM)]
    assert state.deadline == 11.0
    assert after(*told, SignalReceived(SIGTERM, 1.5), policy=OTHERS)[1] == [Kill(ALL), Hurry()]


def test_a_signal_without_hurry_while_this_node_stops_for_another_reason_is_announced_once():
    """So the coordinator begins nothing after the stop; nobody is killed, here or elsewhere."""
    failed = (*FIRST, ended(1, code=3), calm(SIGTERM, 1.1))
    assert after(*failed, policy=OTHERS)[1] == [Announce(Why.SIGNALLED, SIGTERM)]
    assert after(*failed, calm(SIGTERM, 4.0), policy=OTHERS)[1] == []
    told = (*FIRST, ToldToStop(SIGTERM, 1.0), calm(SIGTERM, 1.1))
    assert after(*told, policy=OTHERS)[1] == [Announce(Why.SIGNALLED, SIGTERM)]
    assert after(*told, calm(SIGTERM, 4.0), policy=OTHERS)[1] == []
    own = (*FIRST, calm(SIGTERM, 1.0), calm(SIGTERM, 4.0))
    assert after(*own, policy=OTHERS)[1] == []


def test_somebody_at_another_node_who_does_not_want_to_wait_is_obeyed():
    assert after(*FIRST, ToldToStop(SIGINT, 1.0), ToldToKill(1.1), policy=OTHERS)[1] == [Kill(ALL)]
    sweeping = (*FIRST, ToldToStop(SIGINT, 1.0), *ENDS, LEFT)
    assert after(*sweeping, ToldToKill(5.1), policy=OTHERS)[1] == [Sweep(SIGKILL, sparing=False)]


def test_a_kill_that_overtakes_the_stop_ends_nothing():
    """Which cannot be, since the coordinator says one after the other; a job that runs is not killed without a stop."""
    assert after(*FIRST, ToldToKill(1.0), policy=OTHERS)[1] == []


def test_a_dismissed_node_stops_its_workers_and_ends_with_the_status_it_was_given():
    """The coordinator is lost, or this node has no part in the job any more."""
    history = (*FIRST, Dismissed(122, 1.0))
    assert after(*history, policy=OTHERS)[1] == [Stop(SIGTERM, ALL)]
    assert after(*history, *ENDS, policy=OTHERS)[1] == [Sweep(SIGTERM)]
    assert after(*history, *ENDS, NOTHING_LEFT, policy=OTHERS)[1] == [Exit(122)]


@pytest.mark.parametrize(
    "event", [ToldToStop(SIGTERM, 1.0), SignalReceived(SIGINT, 1.0), ended(1, code=3), FrontLost(1.0)], ids=repr
)
def test_a_node_that_is_dismissed_while_it_stops_ends_when_its_workers_have(event):
    history = (*FIRST, event, Dismissed(122, 1.1))
    assert after(*history, policy=OTHERS)[1] == []
    gone = [end for end in ENDS if end.exit.rank in after(*history, policy=OTHERS)[0].alive]
    assert after(*history, *gone, NOTHING_LEFT, policy=OTHERS)[1] == [Exit(122)]


def test_a_lost_front_is_announced():
    assert after(*FIRST, FrontLost(1.0), policy=OTHERS)[1] == [Stop(SIGTERM, ALL), Announce(Why.FRONT_LOST, SIGTERM)]
    assert after(FrontLost(1.0), policy=OTHERS)[1] == [Announce(Why.FRONT_LOST, SIGTERM)]


def test_a_worker_that_cannot_be_started_is_announced_and_reported():
    history = (Begun(0, ALL, 0.05), STARTED[0], StartFailed(1, "no such file", 127, 0.2))
    state, actions = after(*history, policy=OTHERS)
    assert actions == [Stop(SIGTERM, ALL), Announce(Why.FAILED, SIGTERM)]
    state, actions = after(*history, ENDS[0], NOTHING_LEFT, policy=OTHERS)
    assert actions == [Report()]
    assert state.start_failure is not None


def test_what_may_only_follow_a_failure_elsewhere_is_waited_for_even_when_all_are_gone_here():
    lost = [ended(rank, 1.0, code=1, error=LOST) for rank in sorted(ALL)]
    state, actions = after(*FIRST, *lost, policy=OTHERS)
    assert actions == []
    assert (state.phase, state.deadline) == (Phase.SETTLING, 1.0 + node.SETTLE)
    told = (*FIRST, *lost, ToldToStop(SIGTERM, 1.2))
    assert after(*told, policy=OTHERS)[1] == [Stop(SIGTERM, ALL), Sweep(SIGTERM)]
    assert after(*told, NOTHING_LEFT, policy=OTHERS)[1] == [Report()]
    alone = (*FIRST, *lost, DeadlineReached(1.0 + node.SETTLE))
    assert after(*alone, policy=OTHERS)[1] == [Stop(SIGTERM, ALL), Announce(Why.FAILED, SIGTERM), Sweep(SIGTERM)]


# --- while the coordinator is waited for


@pytest.mark.parametrize("before", [FIRST, (), (*FIRST, ToldToStop(SIGTERM, 0.9))], ids=["running", "idle", "told"])
def test_a_signal_that_is_sent_twice_at_once_is_one(before):
    once = (*before, SignalReceived(SIGTERM, 1.0))
    assert elsewhere(*once, calm(SIGTERM, 1.01)) == (elsewhere(*once)[0], [])


@pytest.mark.parametrize("before", [(), (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT)], ids=["first", "later"])
def test_a_stop_signal_while_nothing_runs_is_announced_and_the_answer_is_waited_for(before):
    history = (*before, SignalReceived(SIGINT, 9.0))
    state, actions = elsewhere(*history)
    assert actions == [Announce(Why.SIGNALLED, SIGINT)]
    assert state.phase is Phase.WAITING
    assert elsewhere(*history, Dismissed(130, 9.1))[1] == [Exit(130)]


@pytest.mark.parametrize(
    "signal", [SignalReceived(SIGINT, 1.5), SignalReceived(SIGHUP, 1.5, escalates=False)], ids=repr
)
def test_the_first_stop_signal_in_the_sweep_after_workers_that_finished_stops_those_of_other_nodes(signal):
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, signal)
    state, actions = after(*history, policy=OTHERS)
    assert actions == [Announce(Why.SIGNALLED, signal.signum)]
    assert state.deadline == 1.0 + node.SWEEP_GRACE
    assert after(*history, SignalReceived(SIGINT, 1.6), policy=OTHERS)[1] == [Sweep(SIGKILL, sparing=False), Hurry()]
    assert after(*history, calm(SIGHUP, 1.6), policy=OTHERS)[1] == []
    assert after(*history, NOTHING_LEFT, policy=OTHERS)[1] == [Report()]
    assert after(*history, NOTHING_LEFT, SignalReceived(SIGINT, 5.1), policy=OTHERS)[1] == [Hurry()]
    assert after(*history, NOTHING_LEFT, Dismissed(130, 5.1), policy=OTHERS)[1] == [Exit(130)]


def test_the_front_that_is_lost_in_the_sweep_after_workers_that_finished_is_announced():
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, FrontLost(1.5))
    assert after(*history, policy=OTHERS)[1] == [Announce(Why.FRONT_LOST, SIGTERM)]
    assert after(*history, NOTHING_LEFT, policy=OTHERS)[1] == [Report()]


def test_a_stop_signal_in_the_sweep_of_a_node_that_was_dismissed_kills_what_is_left():
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, Dismissed(122, 1.4), SignalReceived(SIGINT, 1.5))
    assert Sweep(SIGKILL, sparing=False) in after(*history, policy=OTHERS)[1]


def test_the_second_stop_signal_while_nothing_runs_waits_for_no_answer():
    waiting = (SignalReceived(SIGINT, 9.0), SignalReceived(SIGTERM, 9.5))
    assert elsewhere(*waiting)[1] == [Hurry(), Exit(130)]


def test_the_second_stop_signal_where_the_coordinator_is_kills_the_workers_of_the_others():
    finished = (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT, SignalReceived(SIGINT, 9.0))
    state, actions = after(*finished, SignalReceived(SIGINT, 9.5), policy=OTHERS)
    assert actions == [Hurry()]
    assert state.phase is Phase.WAITING


def test_a_copy_of_the_signal_while_nothing_runs_is_no_second_one():
    copy = SignalReceived(SIGINT, 9.0, escalates=False)
    assert elsewhere(SignalReceived(SIGINT, 9.0), copy)[1] == []
    assert elsewhere(SignalReceived(SIGINT, 9.0), copy)[0].phase is Phase.WAITING


@pytest.mark.parametrize(
    "event", [SignalReceived(SIGINT, 9.0), FrontLost(9.0), DeadlineReached(60.0)], ids=["signal", "front", "timeout"]
)
def test_a_start_that_crosses_the_announcement_of_an_end_starts_nothing(event):
    """The coordinator, which takes this node for stopped, waits for its report."""
    policy = replace(OTHERS, timeout=60.0)
    state, actions = after(event, Begun(0, ALL, 61.0), policy=policy)
    assert actions == [Report()]
    assert (state.phase, state.generation) == (Phase.WAITING, 0)
    assert after(event, Begun(0, ALL, 61.0), Dismissed(130, 61.1), policy=policy)[1] == [Exit(130)]


def test_signals_that_do_not_stop_reach_nobody_while_nothing_runs():
    assert after(SignalReceived(SIGUSR1, 1.0), policy=OTHERS)[1] == []


def test_node_0_watches_the_time_of_the_job_from_its_first_start_on():
    policy = replace(OTHERS, timeout=60.0)
    assert after(policy=policy)[0].deadline == 60.0
    assert after(DeadlineReached(60.0), policy=policy)[1] == [Announce(Why.TIMED_OUT, SIGTERM)]
    running = (*FIRST, DeadlineReached(60.0))
    assert after(*running, policy=policy)[1] == [Stop(SIGTERM, ALL), Announce(Why.TIMED_OUT, SIGTERM)]
    again = (*FIRST, ended(1, code=3), ENDS[0], ENDS[2], NOTHING_LEFT, Begun(1, ALL, 9.0))
    assert after(*again, policy=policy)[0].deadline == 60.0


def test_a_node_that_turns_out_not_to_be_the_first_leaves_the_time_to_that():
    assert after(Begun(0, SECOND, 1.0), policy=replace(OTHERS, timeout=60.0))[0].deadline is None


def test_workers_here_that_ended_long_before_the_others_here_are_named():
    _, actions = after(*FIRST, ended(1, 1.0), DeadlineReached(61.0), policy=OTHERS)
    assert isinstance(actions[0], Say)


# --- any history


@st.composite
def histories(draw: st.DrawFn) -> list[node.Event]:
    at = 0.0
    events: list[node.Event] = []
    for kind in draw(st.lists(st.sampled_from("wxrsfdlnz"), max_size=30)):
        at += draw(st.floats(0.001, 20.0))
        rank = draw(st.sampled_from(sorted(ALL)))
        match kind:
            case "w":
                events.append(WorkerStarted(rank, at))
            case "x":
                code = draw(st.sampled_from([0, 1, 3]))
                events.append(ended(rank, at, code=code, error=draw(st.sampled_from([None, LOST])) if code else None))
            case "r":
                events.append(WorkerRaised(rank, replace(OWN, at=at), at))
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
                events.append(StartFailed(rank, "why", 126, at))
    return events


@given(histories(), st.integers(0, 2))
def test_whatever_happens_the_job_ends_once_signals_and_deadlines_have_come(events, restarts):
    """After any history that the agent can tell, two stop signals and the deadlines lead to one Exit."""
    policy = replace(POLICY, max_restarts=restarts)
    state, _ = node.begin(policy, 0.0)
    exits = 0
    at = 1000.0

    def take(event: node.Event) -> None:
        nonlocal state, exits
        actions: tuple[node.Action, ...]
        match event:  # what cannot happen is left out
            case WorkerStarted(rank, _) if rank not in state.pending:
                return
            case WorkerExited(exit, _) if exit.rank not in state.alive:
                return
            case StartFailed(rank, _, _, _) if rank not in state.pending:
                return
        if state.phase is Phase.ENDED:
            return
        state, actions = node.step(state, event)
        exits += sum(isinstance(action, Exit) for action in actions)
        if exits:
            assert state.status is not None
        for action in actions:
            if isinstance(action, (Stop, Kill, Forward)):
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


# --- a notice of the end

NOTICES = replace(POLICY, notices=frozenset({SIGUSR1, SIGTERM}), max_restarts=3)
TOLD = (*STARTED, SignalReceived(SIGUSR1, 1.0))
GONE = tuple(ended(rank, 2.0) for rank in ALL)
BY_TERM: dict[str, Any] = {"code": None, "signal": SIGTERM, "stopped_with": SIGTERM, "stopped_at": 1.5}


@pytest.mark.parametrize(
    ("history", "status", "requeue"),
    [
        ((*TOLD, *GONE), 138, SIGUSR1),
        ((*STARTED, *GONE), 0, 0),
        ((*TOLD, *(ended(rank, 2.0, code=None, signal=SIGUSR1) for rank in ALL)), 138, SIGUSR1),
        ((*TOLD, ended(0), ended(1, code=1, error=LOST), ended(2, **BY_TERM)), 138, SIGUSR1),
        ((*STARTED, SignalReceived(SIGTERM, 1.0), *(ended(rank, **BY_TERM) for rank in ALL)), 143, SIGTERM),
        ((*TOLD, SignalReceived(SIGTERM, 1.5), *(ended(rank, **BY_TERM) for rank in ALL)), 138, SIGUSR1),
        ((*TOLD, SignalReceived(SIGINT, 1.5), *(ended(rank, 2.0) for rank in ALL)), 130, 0),
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
    state, actions = after(*history, NOTHING_LEFT, policy=NOTICES)
    assert (actions, state.requeue) == ([Exit(status)], requeue)


def test_a_worker_that_fails_after_a_notice_is_a_failure_like_any_other():
    history = (*TOLD, ended(1, code=3, error=OWN), ended(0, **BY_TERM), ended(2, **BY_TERM), NOTHING_LEFT)
    assert isinstance(after(*history, policy=NOTICES)[1][0], Retry)
    state, actions = after(*history, policy=replace(NOTICES, max_restarts=0))
    assert (actions, state.requeue) == ([Exit(3)], 0)
    state, _ = after(*history, DeadlineReached(100.0), policy=NOTICES)
    assert (state.generation, state.notice) == (1, 0)


def test_what_a_notice_does_to_the_workers_is_what_it_did_before():
    plain = replace(POLICY, max_restarts=3)
    for signum in (SIGUSR1, SIGTERM, SIGINT):
        history = (*STARTED, SignalReceived(signum, 1.0))
        assert after(*history, policy=NOTICES)[1] == after(*history, policy=plain)[1]


def test_of_several_nodes_the_coordinator_is_told_of_a_notice_and_decides():
    policy = replace(NOTICES, coordinated=True)
    begun = (Begun(0, ALL, 0.0), *STARTED)
    assert after(*begun, SignalReceived(SIGUSR1, 1.0), policy=policy)[1] == [TellNotice(SIGUSR1), Forward(SIGUSR1, ALL)]
    assert after(*begun, *(SignalReceived(SIGUSR1, at) for at in (1.0, 2.0)), policy=policy)[1] == [
        Forward(SIGUSR1, ALL)
    ]
    _, actions = after(*begun, SignalReceived(SIGTERM, 1.0), policy=policy)
    assert actions == [TellNotice(SIGTERM), Stop(SIGTERM, ALL), Announce(Why.SIGNALLED, SIGTERM)]
    history = (*begun, SignalReceived(SIGUSR1, 1.0), *GONE, NOTHING_LEFT, Dismissed(138, 3.0))
    state, actions = after(*history, policy=policy)
    assert (actions, state.requeue) == ([Exit(138)], 0)
