"""Histories of a node whose coordinator is elsewhere, and what must be done about them; no process, no clock."""

from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGTSTP, SIGUSR1

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import *
from ddplaunch.launcher.decide.node.state import End
from ddplaunch.spec.outcome import StartFailure, Why
from tests.unit.supervise.histories import ALL, LEFT, LOST, NOTHING_LEFT, POLICY, STARTED, calm, ended
from tests.unit.supervise.phases import node_step


def after(*events: node.Event, policy: Policy = POLICY) -> tuple[State, list[node.Action]]:
    """The state after these events, and what the last one asked for."""
    state: State = node.State(policy=policy)
    actions: tuple[node.Action, ...] = ()
    for event in events:
        state, actions = node_step(state, event)
    return state, list(actions)


# --- with other nodes


FIRST = (GenerationBegun(0, ALL, 0.05), *STARTED)
SECOND = frozenset({4, 5})
ENDS = tuple(ended(rank, 2.0 + rank, code=None, signal=15, stopped_with=15, stopped_at=1.0) for rank in sorted(ALL))


def elsewhere(*events: node.Event, policy: Policy = POLICY) -> tuple[State, list[node.Action]]:
    """As `after`, on a node that is not the first."""
    return after(*events, policy=replace(policy, ranks=SECOND))


def test_with_other_nodes_nothing_starts_before_the_coordinators_word():
    state, actions = after()
    assert (state.phase, actions) == (Phase.WAITING, [])
    state, actions = after(GenerationBegun(4, SECOND, 1.0))
    assert actions == [StartWorkers(4)]
    assert (state.generation, state.pending, state.policy.ranks) == (4, SECOND, SECOND)


def test_a_failure_is_announced_as_soon_as_the_others_here_are_stopped_and_reported_when_all_are_gone():
    history = (*FIRST, ended(1, code=3))
    assert after(*history)[1] == [StopWorkers(SIGTERM, ALL), ReportStopping(Why.FAILED, SIGTERM)]
    history = (*history, ENDS[0], ENDS[2])
    assert after(*history)[1] == [Sweep(SIGTERM)]
    state, actions = after(*history, NOTHING_LEFT)
    assert actions == [ReportEnded()]
    assert (state.phase, state.deadline) == (Phase.WAITING, None)


def test_a_node_that_waits_for_the_coordinator_does_not_wake_for_an_exception_of_the_generation_before():
    failed = (*FIRST, ErrorRecorded(0.9), ended(1, code=3), ENDS[0], ENDS[2], NOTHING_LEFT)
    state, _ = after(*failed)
    assert (state.phase, state.deadline) == (Phase.WAITING, None)


def test_what_follows_from_a_failure_only_the_coordinator_says():
    failed = (*FIRST, ended(1, code=3), ENDS[0], ENDS[2], NOTHING_LEFT)
    state, actions = after(*failed, GenerationBegun(1, ALL, 9.0))
    assert actions == [StartWorkers(1)]
    assert (state.exits, state.raised.errors, state.why) == ((), (), None)
    state, actions = after(*failed, JobEnded(7, 9.0))
    assert actions == [Exit(7)]
    assert state.phase is Phase.ENDED


OUTLIVES = {"end": End(abandoned=True)}  # the end of a generation


@pytest.mark.parametrize("field", [name for name in State.__annotations__ if name != "policy"])
def test_a_generation_begins_with_nothing_of_the_last_but_what_is_not_of_one_alone(field):
    of_the_last = OUTLIVES.get(field, object())
    state, _ = node.step(replace(node.State(policy=POLICY), **{field: of_the_last}), GenerationBegun(4, SECOND, 1.0))
    assert (getattr(state, field) is of_the_last) is (field in OUTLIVES)
    assert state.policy == replace(POLICY, ranks=SECOND)


def test_workers_that_finish_are_reported_and_the_end_of_the_others_is_waited_for():
    history = (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT)
    state, actions = after(*history)
    assert actions == [ReportEnded()]
    assert (state.phase, state.why) == (Phase.WAITING, Why.FINISHED)
    assert after(*history, JobEnded(0, 60.0))[1] == [Exit(0)]
    assert after(*history, StopOrdered(SIGTERM, 60.0))[1] == []


def test_a_stop_that_comes_from_another_node_is_not_announced():
    history = (*FIRST, StopOrdered(SIGINT, 1.0))
    state, actions = after(*history)
    assert actions == [StopWorkers(SIGINT, ALL)]
    assert state.deadline == 11.0
    assert after(*history, *ENDS, NOTHING_LEFT)[1] == [ReportEnded()]


def test_a_stop_from_another_node_while_this_one_stops_already_changes_nothing():
    state, actions = after(*FIRST, ended(1, code=3), StopOrdered(SIGINT, 1.5))
    assert actions == []
    assert (state.why, state.deadline) == (Why.FAILED, 11.0)


def test_workers_that_ignore_a_stop_from_another_node_are_killed_at_the_deadline():
    assert after(*FIRST, StopOrdered(SIGTERM, 1.0), DeadlineReached(11.0))[1] == [KillWorkers(ALL)]


def test_a_stop_signal_here_is_announced():
    state, actions = after(*FIRST, SignalReceived(SIGINT, 1.0))
    assert actions == [StopWorkers(SIGINT, ALL), ReportStopping(Why.SIGNALLED, SIGINT)]
    assert state.phase is Phase.STOPPING


def test_the_second_stop_signal_here_kills_here_and_everywhere():
    history = (*FIRST, SignalReceived(SIGINT, 1.0), SignalReceived(SIGINT, 1.1))
    assert after(*history)[1] == [KillWorkers(ALL), Escalate(SIGINT)]


def test_the_same_signal_from_another_node_and_here_is_one():
    """A scheduler sends it to all nodes; the second one here kills."""
    told = (*FIRST, StopOrdered(SIGTERM, 1.0), SignalReceived(SIGTERM, 1.001))
    state, actions = after(*told)
    assert actions == [ReportStopping(Why.SIGNALLED, SIGTERM)]
    assert state.deadline == 11.0
    assert after(*told, SignalReceived(SIGTERM, 1.5))[1] == [KillWorkers(ALL), Escalate(SIGTERM)]


def test_a_signal_without_hurry_while_this_node_stops_for_another_reason_is_announced_once():
    """So the coordinator begins nothing after the stop; nobody is killed, here or elsewhere."""
    failed = (*FIRST, ended(1, code=3), calm(SIGTERM, 1.1))
    assert after(*failed)[1] == [ReportStopping(Why.SIGNALLED, SIGTERM)]
    assert after(*failed, calm(SIGTERM, 4.0))[1] == []
    told = (*FIRST, StopOrdered(SIGTERM, 1.0), calm(SIGTERM, 1.1))
    assert after(*told)[1] == [ReportStopping(Why.SIGNALLED, SIGTERM)]
    assert after(*told, calm(SIGTERM, 4.0))[1] == []
    own = (*FIRST, calm(SIGTERM, 1.0), calm(SIGTERM, 4.0))
    assert after(*own)[1] == []


def test_somebody_at_another_node_who_does_not_want_to_wait_is_obeyed():
    assert after(*FIRST, StopOrdered(SIGINT, 1.0), KillOrdered(1.1))[1] == [KillWorkers(ALL)]
    sweeping = (*FIRST, StopOrdered(SIGINT, 1.0), *ENDS, LEFT)
    assert after(*sweeping, KillOrdered(5.1))[1] == [Sweep(SIGKILL, sparing=False)]


def test_a_kill_that_overtakes_the_stop_ends_nothing():
    """Which cannot be, since the coordinator says one after the other; a job that runs is not killed without a stop."""
    assert after(*FIRST, KillOrdered(1.0))[1] == []


def test_a_dismissed_node_stops_its_workers_and_ends_with_the_status_it_was_given():
    """The coordinator is lost, or this node has no part in the job any more."""
    history = (*FIRST, JobEnded(122, 1.0))
    assert after(*history)[1] == [StopWorkers(SIGTERM, ALL)]
    assert after(*history, *ENDS)[1] == [Sweep(SIGTERM)]
    assert after(*history, *ENDS, NOTHING_LEFT)[1] == [Exit(122)]


@pytest.mark.parametrize(
    "event", [StopOrdered(SIGTERM, 1.0), SignalReceived(SIGINT, 1.0), ended(1, code=3), FrontLost(1.0)], ids=repr
)
def test_a_node_that_is_dismissed_while_it_stops_ends_when_its_workers_have(event):
    history = (*FIRST, event, JobEnded(122, 1.1))
    assert after(*history)[1] == []
    gone = [end for end in ENDS if end.exit.rank in after(*history)[0].alive]
    assert after(*history, *gone, NOTHING_LEFT)[1] == [Exit(122)]


def test_a_lost_front_is_announced():
    assert after(*FIRST, FrontLost(1.0))[1] == [StopWorkers(SIGTERM, ALL), ReportStopping(Why.FRONT_LOST, SIGTERM)]
    assert after(FrontLost(1.0))[1] == [ReportStopping(Why.FRONT_LOST, SIGTERM)]


def test_a_worker_that_cannot_be_started_is_announced_and_reported():
    history = (
        GenerationBegun(0, ALL, 0.05),
        STARTED[0],
        StartFailed(StartFailure(1, "here", "no such file", 127), 0.2),
    )
    state, actions = after(*history)
    assert actions == [StopWorkers(SIGTERM, ALL), ReportStopping(Why.FAILED, SIGTERM)]
    state, actions = after(*history, ENDS[0], NOTHING_LEFT)
    assert actions == [ReportEnded()]
    assert state.start_failure is not None


def test_what_may_only_follow_a_failure_elsewhere_is_waited_for_even_when_all_are_gone_here():
    lost = [ended(rank, 1.0, code=1, error=LOST) for rank in sorted(ALL)]
    state, actions = after(*FIRST, *lost)
    assert actions == []
    assert (state.phase, state.deadline) == (Phase.SETTLING, 1.0 + node.CAUSE_TIMEOUT)
    told = (*FIRST, *lost, StopOrdered(SIGTERM, 1.2))
    assert after(*told)[1] == [StopWorkers(SIGTERM, ALL), Sweep(SIGTERM)]
    assert after(*told, NOTHING_LEFT)[1] == [ReportEnded()]
    alone = (*FIRST, *lost, DeadlineReached(1.0 + node.CAUSE_TIMEOUT))
    assert after(*alone)[1] == [StopWorkers(SIGTERM, ALL), ReportStopping(Why.FAILED, SIGTERM), Sweep(SIGTERM)]


# --- while the coordinator is waited for


@pytest.mark.parametrize("before", [FIRST, (), (*FIRST, StopOrdered(SIGTERM, 0.9))], ids=["running", "idle", "told"])
def test_a_signal_that_is_sent_twice_at_once_is_one(before):
    once = (*before, SignalReceived(SIGTERM, 1.0))
    assert elsewhere(*once, calm(SIGTERM, 1.01)) == (elsewhere(*once)[0], [])


@pytest.mark.parametrize("before", [(), (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT)], ids=["first", "later"])
def test_a_stop_signal_while_nothing_runs_is_announced_and_the_answer_is_waited_for(before):
    history = (*before, SignalReceived(SIGINT, 9.0))
    state, actions = elsewhere(*history)
    assert actions == [ReportStopping(Why.SIGNALLED, SIGINT)]
    assert state.phase is Phase.WAITING
    assert elsewhere(*history, JobEnded(130, 9.1))[1] == [Exit(130)]


@pytest.mark.parametrize(
    "signal", [SignalReceived(SIGINT, 1.5), SignalReceived(SIGHUP, 1.5, is_request=False)], ids=repr
)
def test_the_first_stop_signal_in_the_sweep_after_workers_that_finished_stops_those_of_other_nodes(signal):
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, signal)
    state, actions = after(*history)
    assert actions == [ReportStopping(Why.SIGNALLED, signal.signum)]
    assert state.deadline == 1.0 + node.SWEEP_GRACE
    assert after(*history, SignalReceived(SIGINT, 1.6))[1] == [Sweep(SIGKILL, sparing=False), Escalate(SIGINT)]
    assert after(*history, calm(SIGHUP, 1.6))[1] == []
    assert after(*history, NOTHING_LEFT)[1] == [ReportEnded()]
    assert after(*history, NOTHING_LEFT, SignalReceived(SIGINT, 5.1, coordinator_is_here=True))[1] == [Escalate(SIGINT)]
    assert after(*history, NOTHING_LEFT, JobEnded(130, 5.1))[1] == [Exit(130)]


def test_the_front_that_is_lost_in_the_sweep_after_workers_that_finished_is_announced():
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, FrontLost(1.5))
    assert after(*history)[1] == [ReportStopping(Why.FRONT_LOST, SIGTERM)]
    assert after(*history, NOTHING_LEFT)[1] == [ReportEnded()]


def test_a_stop_signal_in_the_sweep_of_a_node_that_was_dismissed_kills_what_is_left():
    history = (*FIRST, ended(0), ended(1), ended(2), LEFT, JobEnded(122, 1.4), SignalReceived(SIGINT, 1.5))
    assert Sweep(SIGKILL, sparing=False) in after(*history)[1]


def test_the_second_stop_signal_while_nothing_runs_waits_for_no_answer():
    waiting = (SignalReceived(SIGINT, 9.0), SignalReceived(SIGTERM, 9.5))
    assert elsewhere(*waiting)[1] == [Escalate(SIGTERM), Exit(130)]


def test_the_second_stop_signal_where_the_coordinator_is_kills_the_workers_of_the_others():
    finished = (*FIRST, ended(0), ended(1), ended(2), NOTHING_LEFT, SignalReceived(SIGINT, 9.0))
    state, actions = after(*finished, SignalReceived(SIGINT, 9.5, coordinator_is_here=True))
    assert actions == [Escalate(SIGINT)]
    assert state.phase is Phase.WAITING


def test_a_copy_of_the_signal_while_nothing_runs_is_no_second_one():
    copy = SignalReceived(SIGINT, 9.0, is_request=False)
    assert elsewhere(SignalReceived(SIGINT, 9.0), copy)[1] == []
    assert elsewhere(SignalReceived(SIGINT, 9.0), copy)[0].phase is Phase.WAITING


@pytest.mark.parametrize("event", [SignalReceived(SIGINT, 9.0), FrontLost(9.0)], ids=["signal", "front"])
def test_a_start_that_crosses_the_report_of_a_stop_starts_nothing(event):
    """The coordinator, which takes this node for stopped, waits for its report."""
    state, actions = after(event, GenerationBegun(0, ALL, 61.0))
    assert actions == [ReportEnded()]
    assert (state.phase, state.generation) == (Phase.WAITING, 0)
    assert after(event, GenerationBegun(0, ALL, 61.0), JobEnded(130, 61.1))[1] == [Exit(130)]


def test_a_coordinator_that_has_not_had_the_report_of_a_signal_starts_nothing_here():
    stopped = (*FIRST, StopOrdered(SIGTERM, 1.0), SignalReceived(SIGTERM, 1.1), *ENDS, NOTHING_LEFT)
    state, actions = after(*stopped, GenerationBegun(1, ALL, 9.0))
    assert actions == [ReportEnded()]
    assert (state.generation, state.exits, state.start_failure) == (1, (), None), "nothing of the last one"


def test_signals_that_do_not_stop_reach_nobody_while_nothing_runs():
    assert after(SignalReceived(SIGUSR1, 1.0))[1] == []


def test_workers_here_that_ended_long_before_the_others_here_are_named():
    _, actions = after(*FIRST, ended(1, 1.0), DeadlineReached(61.0))
    assert isinstance(actions[0], Print)


def test_of_several_nodes_the_coordinator_is_told_of_a_notice_and_decides():
    policy = replace(POLICY, notices=frozenset({SIGUSR1, SIGTERM}))
    begun = (GenerationBegun(0, ALL, 0.0), *STARTED)
    assert after(*begun, SignalReceived(SIGUSR1, 1.0), policy=policy)[1] == [
        ReportNotice(SIGUSR1),
        ForwardSignal(SIGUSR1, ALL),
    ]
    assert after(*begun, *(SignalReceived(SIGUSR1, at) for at in (1.0, 2.0)), policy=policy)[1] == [
        ForwardSignal(SIGUSR1, ALL)
    ]
    _, actions = after(*begun, SignalReceived(SIGTERM, 1.0), policy=policy)
    assert actions == [ReportNotice(SIGTERM), StopWorkers(SIGTERM, ALL), ReportStopping(Why.SIGNALLED, SIGTERM)]
    history = (
        *begun,
        SignalReceived(SIGUSR1, 1.0),
        *(ended(rank, 2.0) for rank in ALL),
        NOTHING_LEFT,
        JobEnded(138, 3.0),
    )
    assert after(*history, policy=policy)[1] == [Exit(138)]


def test_a_store_that_is_wanted_here_is_requested_and_hosted_once_a_generation_while_workers_live():
    order = node.StoreOrdered(1.5)
    assert elsewhere(GenerationBegun(0, SECOND, 1.0), node.StoreWanted(1.5))[1] == [node.RequestStore()]
    assert after(*FIRST, order)[1] == [node.HostStore()]
    assert after(*FIRST, order, order)[1] == []
    assert after(order)[1] == []
    again = (ended(1, code=3), *ENDS, NOTHING_LEFT, GenerationBegun(1, ALL, 9.0), *STARTED)
    assert after(*FIRST, order, *again, order)[1] == [node.HostStore()]


EXPLAINING = replace(POLICY, stacks_timeout=2.0)
TAKING = (*FIRST, ended(1, code=3))


def test_where_the_others_are_is_found_out_before_they_are_stopped():
    state, actions = after(*TAKING, policy=EXPLAINING)
    assert actions == [CaptureStacks(2.0, if_in_group=True), ReportStopping(Why.FAILED, SIGTERM)]
    assert (state.phase, state.deadline) == (Phase.STOPPING, 3.0)
    state, actions = after(*TAKING, StacksCaptured(1.1), policy=EXPLAINING)
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert state.phase_deadline == 11.1  # the grace period begins with the stop
    assert after(*TAKING, StacksCaptured(1.1), StacksCaptured(1.2), policy=EXPLAINING)[1] == []


def test_those_that_do_not_say_where_they_are_are_stopped_all_the_same():
    assert after(*TAKING, DeadlineReached(3.0), policy=EXPLAINING)[1] == [StopWorkers(SIGTERM, ALL)]
    late = (*TAKING, DeadlineReached(3.0), StacksCaptured(3.1))
    assert after(*late, policy=EXPLAINING)[1] == []


def test_the_users_second_stop_does_not_wait_for_that():
    impatient = (*TAKING, SignalReceived(SIGINT, 1.1))
    assert after(*impatient, policy=EXPLAINING)[1][0] == KillWorkers(ALL)
    assert after(*impatient, StacksCaptured(1.2), policy=EXPLAINING)[1] == []


def test_the_first_ctrl_c_of_a_job_that_was_silent_for_long_asks_where_the_workers_are():
    silent = SignalReceived(SIGINT, 50.0, silent_for=40.0)
    _, actions = after(*FIRST, silent, policy=EXPLAINING)
    assert actions == [CaptureStacks(2.0), ReportStopping(Why.SIGNALLED, SIGINT)]
    assert after(*FIRST, silent, StacksCaptured(50.1), policy=EXPLAINING)[1] == [StopWorkers(SIGINT, ALL)]
    assert after(*FIRST, silent, SignalReceived(SIGINT, 50.1), policy=EXPLAINING)[1][0] == KillWorkers(ALL)


def test_a_stop_signal_of_a_scheduler_asks_nobody():
    signal = SignalReceived(SIGTERM, 50.0, silent_for=40.0)
    assert after(*FIRST, signal, policy=EXPLAINING)[1][0] == StopWorkers(SIGTERM, ALL)


def test_ctrl_c_while_something_is_printed_asks_briefly_and_tells_nobody():
    brief = CaptureStacks(1.0, silently=True)
    assert after(*FIRST, SignalReceived(SIGINT, 50.0, silent_for=2.0), policy=EXPLAINING)[1][0] == brief
    began = (GenerationBegun(0, SECOND, 0.1), *(node.WorkerStarted(rank, 0.2) for rank in sorted(SECOND)))
    assert elsewhere(*began, StopOrdered(SIGINT, 50.0), policy=EXPLAINING)[1] == [brief]


def test_ctrl_c_on_another_node_is_no_other():
    began = (GenerationBegun(0, SECOND, 0.1), *(node.WorkerStarted(rank, 0.2) for rank in sorted(SECOND)))
    assert elsewhere(*began, StopOrdered(SIGINT, 50.0, silent_for=40.0), policy=EXPLAINING)[1] == [
        CaptureStacks(2.0, if_in_group=True)
    ]


def test_where_nobody_lives_nobody_is_asked():
    history = (*FIRST, ended(0, code=3, error=LOST), ended(2, code=3, error=LOST), ended(1, code=3))
    assert CaptureStacks(2.0, if_in_group=True) not in after(*history, policy=EXPLAINING)[1]


def test_those_that_were_suspended_meanwhile_are_stopped_when_the_job_goes_on():
    suspended = (*TAKING, SignalReceived(SIGTSTP, 1.1), StacksCaptured(1.2))
    state, actions = after(*suspended, policy=EXPLAINING)
    assert (actions, state.deadline) == ([], None)
    state, actions = after(*suspended, SignalReceived(SIGCONT, 50.0), policy=EXPLAINING)
    assert (actions, state.deadline) == ([Resume()], 50.0)
    assert after(*suspended, SignalReceived(SIGCONT, 50.0), DeadlineReached(50.0), policy=EXPLAINING)[1] == [
        StopWorkers(SIGTERM, ALL)
    ]


def test_what_ends_by_itself_meanwhile_is_swept():
    history = (*TAKING, ended(0, 1.1, code=1, error=LOST), ended(2, 1.1, code=1, error=LOST))
    state, actions = after(*history, policy=EXPLAINING)
    assert actions == [Sweep(SIGTERM)]
    assert after(*history, StacksCaptured(1.2), policy=EXPLAINING) == (state, [])


# --- the lease of this node is over


SAID = Print("the workers of this node are killed: other nodes may go on without it")
SETTLING = (*FIRST, ended(1, code=1, error=LOST))
STOPPING = (*FIRST, StopOrdered(SIGTERM, 1.0))


@pytest.mark.parametrize(
    ("before", "resumes"),
    [
        (FIRST, []),
        (FIRST[:2], []),
        (SETTLING, []),
        (STOPPING, []),
        ((*FIRST, calm(SIGTSTP, 0.5)), [Resume()]),
    ],
    ids=["running", "starting", "settling", "stopping", "suspended"],
)
def test_when_its_lease_is_over_the_workers_are_killed_whatever_was_waited_for(before, resumes):
    state, actions = after(*before, LeaseOver(2.0))
    assert actions == [KillWorkers(ALL), *resumes, SAID]
    assert (state.phase, state.pending) == (Phase.KILLING, frozenset())
    lives = sorted(state.alive)
    for rank in lives:
        state, actions = node_step(state, ended(rank, 2.1, code=None, signal=9))
    assert list(actions) == [Sweep(SIGKILL)]
    assert node_step(state, NOTHING_LEFT)[1] == (ReportEnded(),)


def test_processes_that_workers_left_behind_are_killed_then_too():
    sweeping = (*STOPPING, *ENDS)
    assert after(*sweeping, LeaseOver(6.0))[1] == [Sweep(SIGKILL, sparing=False)]


@pytest.mark.parametrize(
    "before", [(), (*FIRST, StopOrdered(SIGTERM, 1.0), *ENDS, NOTHING_LEFT)], ids=["first", "later"]
)
def test_without_workers_nothing_follows_from_the_end_of_a_lease(before):
    state, actions = after(*before, LeaseOver(9.0))
    assert (state.phase, actions) == (Phase.WAITING, [])


def test_a_second_word_that_the_lease_is_over_kills_nobody_again():
    assert after(*FIRST, LeaseOver(2.0), LeaseOver(3.0))[1] == []
