"""Histories of jobs whose workers do not move, and what follows; times in seconds, a look each second, a hang after four."""

from collections.abc import Iterator
from signal import SIGCONT, SIGINT, SIGTERM, SIGTSTP

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import (
    EndJob,
    JobResumed,
    JobSuspended,
    LimitsPaused,
    Member,
    NodeIdle,
    PrintIdle,
    PrintProgress,
    ReportFailure,
    StopNodes,
)
from ddplaunch.launcher.decide.job.members import Members
from ddplaunch.launcher.decide.job.restarts import Generation
from ddplaunch.launcher.decide.node import *
from ddplaunch.spec.outcome import Why
from tests.unit.supervise.histories import ALL, NOTHING_LEFT, POLICY, STARTED, ended, one_node
from tests.unit.supervise.job_histories import THREE, history, met, stopping
from tests.unit.supervise.job_histories import ended as node_ended
from tests.unit.supervise.phases import job_step, node_step

LOOKING = replace(POLICY, progress_interval=1.0, stacks_timeout=2.0)
HUNG = {"policy": LOOKING, "hang_timeout": 4.0}
PATIENT = replace(LOOKING, grace_period=30.0)


def look(at: float, *, progressed: bool = False) -> tuple[node.Event, node.Event]:
    return DeadlineReached(at), ProgressChecked(progressed, at)


def looks(*seconds: float) -> tuple[node.Event, ...]:
    return tuple(event for at in seconds for event in look(at))


FIRST = (*STARTED, ProgressChecked(True, 1.0))  # what there was before the first look counts as movement


def of_several(*events: node.Event, policy: Policy = PATIENT) -> tuple[node.State, list[node.Action]]:
    state, asked = node.State(policy=policy), list[node.Action]()
    for event in events:
        state, actions = node_step(state, event)
        asked = list(actions)
    return state, asked


# --- a job of one node


def test_the_first_look_is_when_all_workers_have_started_and_the_next_when_it_is_due():
    assert CheckProgress() not in one_node(*STARTED[:-1], **HUNG)[1]
    assert one_node(*STARTED, **HUNG)[1] == [CheckProgress()]
    assert one_node(*STARTED, **HUNG)[0].node.deadline is None  # the answer comes by itself
    state, _ = one_node(*FIRST, **HUNG)
    assert state.node.deadline == 2.0
    assert one_node(*FIRST, DeadlineReached(2.0), **HUNG)[1] == [CheckProgress()]


def test_without_the_option_nobody_looks_and_nothing_wakes():
    state, actions = one_node(*STARTED)
    assert (actions, state.deadline) == ([], None)


def test_workers_that_do_not_move_are_asked_where_they_are_and_stopped_with_123():
    assert one_node(*FIRST, *looks(2, 3, 4), **HUNG)[0].node.phase is Phase.RUNNING
    state, actions = one_node(*FIRST, *looks(2, 3, 4, 5), **HUNG)
    assert actions == [CaptureStacks(2.0, asks_nccl=True)]
    assert state.job.why is Why.HUNG
    state, actions = one_node(*FIRST, *looks(2, 3, 4, 5), StacksCaptured(5.5), **HUNG)
    assert actions == [StopWorkers(SIGTERM, ALL)]
    ends = [ended(rank, 6.0, code=None, signal=15, stopped_with=15, stopped_at=5.5) for rank in sorted(ALL)]
    state, actions = one_node(*FIRST, *looks(2, 3, 4, 5), StacksCaptured(5.5), *ends, NOTHING_LEFT, **HUNG)
    assert state.node.end.status == 123


WAIT = frozenset({0, 2})
STUCK = (*FIRST, *looks(2, 3, 4, 5), StacksCaptured(5.5, WAIT))
LONG = {**HUNG, "policy": PATIENT}


def test_those_whose_place_is_known_when_a_job_hangs_are_looked_at_again_after_five_seconds():
    state, _ = one_node(*STUCK, **LONG)
    assert (state.node.deadline, state.node.phase_deadline) == (10.5, 35.5)
    assert one_node(*STUCK, DeadlineReached(10.5), **LONG)[1] == [FindStuck(WAIT)]
    assert one_node(*STUCK, ended(2, 6.0, code=1), DeadlineReached(10.5), **LONG)[1] == [FindStuck(frozenset({0}))]
    gone = (ended(0, 6.0, code=1), ended(2, 6.0, code=1))
    over = (DeadlineReached(10.5), DeadlineReached(10.5))
    assert one_node(*STUCK, *gone, *over, **LONG)[1] == [NameRunning(frozenset({1}), 25.0)]


def test_those_that_have_not_moved_then_are_killed_and_the_others_keep_their_time():
    looked = (*STUCK, DeadlineReached(10.5))
    state, actions = one_node(*looked, StuckFound(frozenset({0}), 10.6), **LONG)
    assert actions == [NameStuck(frozenset({0}), 5.0), KillWorkers(frozenset({0}))]
    assert (state.node.phase, state.node.phase_deadline) == (Phase.STOPPING, 35.5)
    assert one_node(*looked, StuckFound(frozenset(), 10.6), **LONG)[1] == []
    assert one_node(*looked, ended(0, 10.6, code=1), StuckFound(frozenset({0}), 10.6), **LONG)[1] == []


def test_a_job_that_does_not_hang_and_one_with_a_short_grace_period_kill_nobody_early():
    assert (
        one_node(*STUCK, **{**HUNG, "policy": replace(LOOKING, grace_period=5.0)})[0].node.teardown.stuck_deadline
        is None
    )
    moving = (*FIRST, *looks(2, 3), *look(4, progressed=True), SignalReceived(SIGINT, 5.0), StacksCaptured(5.5, WAIT))
    assert one_node(*moving, **LONG)[0].node.teardown.stuck_deadline is None


INTERRUPTED = (*STARTED, SignalReceived(SIGINT, 5.0), StacksCaptured(5.1, ALL, WAIT))


def test_after_ctrl_c_those_that_waited_for_others_are_looked_at_again_once_one_has_ended():
    assert one_node(*INTERRUPTED, **LONG)[0].node.deadline == 10.1
    again = (*INTERRUPTED, DeadlineReached(10.1))
    state, actions = one_node(*again, **LONG)
    assert (actions, state.node.teardown.stuck_deadline) == ([], 15.1)  # the rank that they wait for may be saving
    assert one_node(*again, DeadlineReached(10.1), **LONG)[1] == [NameRunning(ALL, 25.0)]
    assert one_node(*again, ended(1, 11.0), DeadlineReached(15.1), **LONG)[1] == [FindStuck(WAIT)]
    assert one_node(*INTERRUPTED, ended(1, 6.0), DeadlineReached(10.1), **LONG)[1] == [FindStuck(WAIT)]


def test_so_are_they_once_all_workers_of_another_node_have_ended():
    told = (*STARTED, node.StopOrdered(SIGINT, 5.0), StacksCaptured(5.1, ALL, WAIT))
    ended_elsewhere = node.StopOrdered(SIGINT, 6.0, another_node_ended=True)
    policy = replace(POLICY, stacks_timeout=2.0, grace_period=30.0)
    assert one_node(*told, DeadlineReached(10.1), policy=policy)[0].node.teardown.stuck_deadline == 15.1
    assert one_node(*told, ended_elsewhere, DeadlineReached(10.1), policy=policy)[1] == [FindStuck(WAIT)]


def test_after_another_signal_of_the_user_they_keep_their_time():
    terminated = (*STARTED, SignalReceived(SIGTERM, 5.0), StacksCaptured(5.1, ALL, WAIT))
    assert one_node(*terminated, **LONG)[0].node.teardown.stuck_deadline is None


def test_what_is_found_of_a_stop_that_is_suspended_kills_nobody_and_the_time_to_look_moves():
    suspended = (*STUCK, SignalReceived(SIGTSTP, 7.5))
    assert one_node(*suspended, StuckFound(frozenset({0}), 8.0), **LONG)[1] == []
    resumed = (*suspended, SignalReceived(SIGCONT, 107.5))
    assert one_node(*resumed, **LONG)[0].node.teardown.stuck_deadline == 110.5


def test_nccl_is_not_asked_why_a_job_ends_that_does_not_hang():
    state = node.State(policy=LOOKING)
    for event in (node.GenerationBegun(0, ALL, 0.0), *FIRST, *looks(2), *look(3, progressed=True), *looks(4)):
        state, _ = node_step(state, event)
    assert CaptureStacks(2.0) in node_step(state, node.StopOrdered(SIGTERM, 5.0))[1]


def test_a_hang_is_a_failure_after_which_all_start_again():
    ends = [ended(rank, 26.0, code=None, signal=15, stopped_with=15, stopped_at=25.5) for rank in sorted(ALL)]
    hung = (*STARTED, ProgressChecked(True, 21.0), *looks(22, 23, 24, 25), StacksCaptured(25.5), *ends, NOTHING_LEFT)
    state, actions = one_node(*hung, max_restarts=1, **HUNG)
    assert (actions, state.job.restarts.number) == ([ReportFailure(0.0)], 1)
    assert one_node(*hung, DeadlineReached(26.0), max_restarts=1, **HUNG)[1] == [StartWorkers(1)]
    state, actions = one_node(*hung, DeadlineReached(26.0), *STARTED, max_restarts=1, **HUNG)
    assert actions == [CheckProgress()]
    assert state.job.idleness.idle_spans == {}


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(
            look(4.0, progressed=True), id="one of them has moved, as rank 0 that evaluates while the others wait"
        ),
        pytest.param((ended(1, 3.5), ended(0, 4.0), *looks(4.0)), id="one of them has ended"),
    ],
)
def test_any_movement_begins_the_time_anew(between):
    quiet = (*FIRST, *looks(2, 3), *between, *looks(5, 6, 7))
    assert one_node(*quiet, **HUNG)[0].node.phase is Phase.RUNNING
    assert one_node(*quiet, *looks(8), **HUNG)[0].node.phase is Phase.STOPPING


def test_a_suspended_job_does_not_hang():
    """Nor does the time before count for less or more than it was."""
    suspended = (*FIRST, *looks(2, 3), SignalReceived(SIGTSTP, 3.5))
    assert one_node(*suspended, **HUNG)[0].node.deadline is None
    resumed = (*suspended, SignalReceived(SIGCONT, 103.5))
    state, _ = one_node(*resumed, **HUNG)
    assert (state.node.deadline, state.node.progress.idle_since) == (104.0, 101.0)
    assert one_node(*resumed, *looks(104), **HUNG)[0].node.phase is Phase.RUNNING
    assert one_node(*resumed, *looks(104, 105), **HUNG)[0].node.phase is Phase.STOPPING


def test_what_was_seen_of_a_job_that_was_suspended_meanwhile_does_not_count():
    asked = (*FIRST, *looks(2), DeadlineReached(3.0), SignalReceived(SIGTSTP, 3.1), ProgressChecked(False, 3.2))
    state, actions = one_node(*asked, **HUNG)
    assert actions == []
    assert state.node.progress.idle_since == 3.2


def test_a_look_that_comes_late_counts_no_more_than_one_that_comes_in_time():
    late = (*FIRST, *looks(2, 9))  # the machine was slow, or everything was paused for less than the clock notices
    assert one_node(*late, **HUNG)[0].node.progress.idle_since == 7.0
    assert one_node(*late, *looks(10), **HUNG)[0].node.phase is Phase.RUNNING


def test_while_a_worker_is_debugged_nobody_looks_and_its_end_begins_the_time_anew():
    debugging = {"policy": replace(LOOKING, debug_rank=1), "hang_timeout": 4.0}
    state, _ = one_node(*FIRST, **debugging)
    assert state.node.deadline is None
    assert one_node(*FIRST, ended(1, 900.0), DeadlineReached(900.0), **debugging)[1] == [CheckProgress()]
    state, _ = one_node(*FIRST, ended(1, 900.0), *looks(900.5, 901.5), **debugging)
    assert state.node.phase is Phase.RUNNING


def test_a_look_that_is_answered_while_the_workers_are_stopped_changes_nothing():
    stopping_ = (*FIRST, DeadlineReached(2.0), SignalReceived(SIGINT, 2.1))
    state, _ = one_node(*stopping_, **HUNG)
    assert one_node(*stopping_, ProgressChecked(False, 9.0), **HUNG)[0].node == state.node


def test_ctrl_c_while_a_job_that_hangs_is_stopped_means_no_restart():
    state, _ = one_node(*FIRST, *looks(2, 3, 4, 5), SignalReceived(SIGINT, 5.1), max_restarts=3, **HUNG)
    assert state.job.end.no_restart


# --- several nodes

POLICY_OF_THREE = replace(THREE, hang_timeout=10.0)
STILL = [NodeIdle(0, 5.0, 20.0), NodeIdle(1, 8.0, 20.0), NodeIdle(2, 9.0, 20.0)]


def test_a_node_reports_each_look_that_has_found_no_movement_and_the_first_that_has():
    state = node.State(policy=LOOKING)
    said = []
    events = (node.GenerationBegun(0, ALL, 0.0), *FIRST, *looks(2, 3), *look(4, progressed=True), *looks(5))
    for event in events:
        state, actions = node_step(state, event)
        said += [(event.at, action.seconds) for action in actions if isinstance(action, ReportIdle)]
    assert said == [(2, 1.0), (3, 2.0), (4, 0.0), (5, 1.0)]


def test_only_the_time_in_which_all_nodes_were_still_counts():
    assert history(POLICY_OF_THREE, [*met(), *STILL])[1][-1] == StopNodes((0, 1, 2), SIGTERM, job_stands_still=True)
    late = [*STILL[:2], NodeIdle(2, 11.0, 20.0)]
    assert history(POLICY_OF_THREE, [*met(), *late])[0].why is None
    # what was seen there last is too old to be joined with the rest
    old = [NodeIdle(2, 9.0, 18.0), *STILL[:2]]
    assert history(POLICY_OF_THREE, [*met(), *old])[0].why is None
    assert history(POLICY_OF_THREE, [*met(), *STILL[:2]])[0].why is None


def test_nodes_that_have_finished_are_waited_for_too():
    actions = history(POLICY_OF_THREE, [*met(), node_ended(1, 6.0), STILL[0], STILL[2]])[1]
    assert actions[-1] == StopNodes((0, 2), SIGTERM, job_stands_still=True)


def test_the_status_of_a_job_that_hung_is_123_on_all_nodes():
    ends = [stopping(id, 21.0) for id in range(3)]
    assert history(POLICY_OF_THREE, [*met(), *STILL, *ends])[1][-1] == EndJob(123)


def test_what_ends_by_itself_just_then_has_not_hung():
    ends = [node_ended(id, 21.0) for id in range(3)]
    assert history(POLICY_OF_THREE, [*met(), *STILL, *ends])[1][-1] == EndJob(0)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([JobSuspended(4.0)], id="suspended"),
        pytest.param([LimitsPaused(0, True)], id="debugged"),
        pytest.param([JobSuspended(4.0), *STILL[:2], JobResumed(19.0)], id="suspended on the first node alone"),
    ],
)
def test_of_a_job_that_is_suspended_or_debugged_nothing_counts(before: list[job.Event]):
    last = STILL if before[-1] != JobResumed(19.0) else STILL[2:]
    assert history(POLICY_OF_THREE, [*met(), *before, *last])[0].why is None


def test_what_was_seen_of_one_generation_does_not_count_in_the_next():
    policy = replace(POLICY_OF_THREE, max_restarts=1)
    hung = [*met(), *STILL, *(stopping(id, 21.0) for id in range(3))]
    state, _ = history(policy, [*hung, job.DeadlineReached(21.0)])
    assert (state.generation.number, state.idleness.idle_spans) == (1, {})


# --- without --hang-timeout

AT_REST = {"policy": replace(POLICY, lax_progress_interval=20.0)}


def rested(*seconds: float, progressed: bool = False) -> tuple[node.Event, ...]:
    return tuple(event for at in seconds for event in (DeadlineReached(at), ProgressChecked(progressed, at)))


def still_for(seconds: float, until: float = 500.0) -> list[job.Event]:
    return [NodeIdle(id, until - seconds, until) for id in range(3)]


def test_without_the_option_it_is_looked_now_and_then_with_no_deadline_and_nobody_is_asked_by_a_signal():
    state, actions = one_node(*STARTED, **AT_REST)
    assert (actions, state.deadline, state.node.lax_deadline) == ([], None, pytest.approx(20.1))
    assert one_node(*STARTED, DeadlineReached(20.0), **AT_REST)[1] == []
    assert one_node(*STARTED, DeadlineReached(21.0), **AT_REST)[1] == [CheckProgress(asks=False)]
    state, _ = one_node(*STARTED, *rested(21.0, progressed=True), **AT_REST)
    assert (state.deadline, state.node.lax_deadline) == (None, 41.0)
    assert one_node(*STARTED, SignalReceived(SIGTSTP, 10.0), **AT_REST)[0].node.lax_deadline is None


def test_a_job_in_which_nothing_moves_for_a_minute_is_named_once_until_something_moves_which_is_said():
    quiet = (*STARTED, *rested(21.0, progressed=True), *rested(41.0, 61.0))
    assert one_node(*quiet, **AT_REST)[1] == []
    assert one_node(*quiet, *rested(81.0), **AT_REST)[1] == [PrintIdle(60.0)]
    assert one_node(*quiet, *rested(81.0, 101.0), **AT_REST)[1] == []
    again = (*quiet, *rested(81.0), *rested(101.0, progressed=True), *rested(121.0, 141.0, 161.0))
    moving = (*quiet, *rested(81.0), *rested(101.0, progressed=True))
    assert one_node(*moving, **AT_REST)[1] == [PrintProgress(20.0)]
    assert one_node(*moving, *rested(121.0, progressed=True), **AT_REST)[1] == []
    state, actions = one_node(*again, **AT_REST)
    assert actions == [PrintIdle(60.0)]
    assert state.node.phase is Phase.RUNNING


def test_a_look_after_a_pause_counts_no_more_than_one_in_time():
    paused = (*STARTED, *rested(21.0, progressed=True), *rested(30_000.0, 30_020.0))
    assert one_node(*paused, **AT_REST)[1] == []


def test_a_node_that_moves_is_enough():
    assert history(THREE, [*met(), *still_for(65.0)])[1][-1] == PrintIdle(65.0)
    assert PrintIdle(65.0) not in history(THREE, [*met(), *still_for(65.0)[:2]])[1]
    assert not any(isinstance(one, PrintProgress) for one in history(THREE, [*met(), *still_for(65.0)])[1])
    assert history(THREE, [*met(), *still_for(65.0)])[0].why is None
    twice = [*met(), *still_for(65.0), *still_for(166.0, until=601.0)]
    assert [action for action in history(THREE, twice)[1] if isinstance(action, PrintIdle)] == [PrintIdle(65.0)]


@pytest.mark.parametrize("before", [JobSuspended(4.0), LimitsPaused(0, True)], ids=["suspended", "debugged"])
def test_a_job_that_is_suspended_or_debugged_is_not_named(before: job.Event):
    assert PrintIdle(65.0) not in history(THREE, [*met(), before, *still_for(65.0)])[1]


def test_a_worker_that_is_started_late_is_waited_for():
    assert one_node(*STARTED[:-1], WorkerStarted(2, 30.0), **HUNG)[1] == [CheckProgress()]


class CountedMembers(Members):
    """These, and how often all of them were looked at."""

    scans = 0

    def __iter__(self) -> Iterator[int]:
        self.scans += 1
        return super().__iter__()


@pytest.mark.parametrize("stride", [1, 7, 299], ids=["by their numbers", "mixed", "the last first"])
def test_of_many_nodes_all_are_looked_at_a_few_times_and_not_at_each_report(stride: int):
    nodes, period = 300, 21.0
    members = [Member(id=id, host=f"n{id}", workers=8, requested_rank=id, node_rank=id) for id in range(nodes)]
    counted = CountedMembers.of(members)
    assert isinstance(counted, CountedMembers)
    policy = replace(THREE, min_nodes=nodes, max_nodes=nodes)
    state = job.State(policy=policy, phase=job.Phase.RUNNING, members=counted, generation=Generation(number=0))
    began, said = [0.0] * nodes, []
    for turn in range(1, 13):
        for turn_of_node in range(nodes):  # each looks at a time of its own
            id, at = turn_of_node * stride % nodes, (turn + turn_of_node / nodes) * period
            if turn == 7 and id == 3:
                began[id] = at - 20.0
            state, then = job_step(state, NodeIdle(id, began[id], at))
            said += [action for action in then if isinstance(action, PrintIdle)]
    assert len(said) == 2
    assert counted.scans < 30


# --- a job that stands still and is stopped, with or without --hang-timeout

COMPARING = {"policy": replace(POLICY, lax_progress_interval=20.0, stacks_timeout=2.0, grace_period=30.0)}
STILL_HERE = (*STARTED, *rested(20.5, progressed=True), *rested(40.5, 60.5, 80.5))  # for 60 s


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_of_a_job_that_stands_still_those_that_wait_are_looked_at_again_although_nobody_has_ended(signum: int):
    stopped = (*STILL_HERE, SignalReceived(signum, 81.0))
    state, actions = one_node(*stopped, **COMPARING)
    assert actions == [CaptureStacks(1.0, silently=True)]
    assert state.node.teardown.job_stands_still
    stood = (*stopped, StacksCaptured(81.1, ALL, WAIT))
    assert one_node(*stood, **COMPARING)[1] == [StopWorkers(signum, ALL)]
    assert one_node(*stood, DeadlineReached(86.1), **COMPARING)[1] == [FindStuck(WAIT)]  # rank 1 may be saving
    found = (*stood, DeadlineReached(86.1), StuckFound(WAIT, 86.2))
    assert one_node(*found, **COMPARING)[1] == [NameStuck(WAIT, 5.0), KillWorkers(WAIT)]


def test_with_hang_timeout_a_rank_that_does_not_wait_keeps_its_time_unless_the_job_has_hung():
    """It may save once its call returns: only the limit itself says that nobody expects that."""
    patient = {"policy": replace(COMPARING["policy"], progress_interval=20.0)}
    stood = (*STILL_HERE, SignalReceived(SIGTERM, 81.0), StacksCaptured(81.1, ALL, WAIT), DeadlineReached(86.1))
    assert one_node(*stood, **patient)[1] == [FindStuck(WAIT)]


@pytest.mark.parametrize("cause", [ended(1, 81.0, code=3), DeadlineReached(81.0)], ids=["failed", "--timeout"])
def test_so_are_they_whatever_ends_the_job(cause: node.Event):
    stood = (*STILL_HERE, cause, StacksCaptured(81.1, ALL, WAIT))
    state, _ = one_node(*stood, timeout=81.0, **COMPARING)
    assert (state.node.phase, state.node.teardown.stuck_deadline) == (Phase.STOPPING, 86.1)
    assert one_node(*stood, DeadlineReached(86.1), timeout=81.0, **COMPARING)[1] == [FindStuck(WAIT)]


def test_a_job_that_has_moved_within_a_minute_is_stopped_as_ever():
    moved = (
        *STARTED,
        *rested(20.5),
        *rested(40.5, progressed=True),
        *rested(60.5, 80.5),
        SignalReceived(SIGTERM, 81.0),
    )
    state, actions = one_node(*moved, **COMPARING)
    assert (actions, state.node.teardown.job_stands_still) == ([StopWorkers(SIGTERM, ALL)], False)


def test_of_several_nodes_one_that_stands_still_alone_waits_for_what_the_others_do():
    signalled, told = SignalReceived(SIGTERM, 81.0), node.StopOrdered(SIGTERM, 81.2, job_stands_still=True)
    stood = (node.GenerationBegun(0, ALL, 0.0), *STILL_HERE, signalled, StacksCaptured(81.1, ALL, WAIT))
    assert of_several(*stood, **COMPARING)[1] == [StopWorkers(SIGTERM, ALL)]
    assert of_several(*stood, DeadlineReached(86.1), **COMPARING)[1] == []
    assert of_several(*stood, told, DeadlineReached(86.1), **COMPARING)[1] == [FindStuck(WAIT)]


def test_all_nodes_are_told_that_the_job_stood_still_also_the_one_that_stops_already():
    signalled = job.NodeStopping(1, Why.SIGNALLED, SIGINT, 501.0)
    assert history(THREE, [*met(), *still_for(65.0), signalled])[1][-1] == StopNodes(
        (0, 1, 2), SIGINT, job_stands_still=True
    )
    assert history(THREE, [*met(), *still_for(55.0), signalled])[1][-1] == StopNodes((0, 2), SIGINT)
    seldom = job.NodeStopping(1, Why.SIGNALLED, SIGINT, 901.0)  # with a long --hang-timeout nodes report seldom
    assert history(THREE, [*met(), *still_for(65.0), seldom])[1][-1] == StopNodes((0, 2), SIGINT)
    one_moved = [*still_for(65.0), NodeIdle(2, 500.5, 500.5)]
    assert history(THREE, [*met(), *one_moved, signalled])[1][-1] == StopNodes((0, 2), SIGINT)
    assert history(THREE, [*met(), *still_for(65.0)[:2], signalled])[1][-1] == StopNodes((0, 2), SIGINT)


# --- several nodes are stopped for a limit of time

BEGUN: tuple[node.Event, ...] = (node.GenerationBegun(0, ALL, 0.0), *STARTED)
ORDERED: tuple[node.Event, ...] = (*BEGUN, node.StopOrdered(SIGTERM, 81.0, Why.HUNG, job_stands_still=True))
READ = StacksCaptured(81.1, ALL, WAIT)


@pytest.mark.parametrize("why", [Why.HUNG, Why.TIMED_OUT])
def test_no_worker_is_asked_to_end_before_the_stacks_are_read_on_all_nodes(why: Why):
    ordered: tuple[node.Event, ...] = (*BEGUN, node.StopOrdered(SIGTERM, 81.0, why, job_stands_still=True))
    assert of_several(*ordered, READ)[1] == [ReportStacksRead()]
    state, actions = of_several(*ordered, READ, node.AllStacksRead(81.7))
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert (state.phase_deadline, state.teardown.stuck_deadline) == (111.7, 86.7)
    # of a job that --timeout ends, one that does not wait may be about to go on
    compared = ALL if why is Why.HUNG else WAIT
    assert of_several(*ordered, READ, node.AllStacksRead(81.7), DeadlineReached(86.7))[1] == [FindStuck(compared)]


def test_a_node_that_takes_too_long_to_read_them_is_not_waited_for():
    state, actions = of_several(*ORDERED, READ, DeadlineReached(83.0))
    assert actions == [StopWorkers(SIGTERM, ALL)]
    assert state.teardown.may_be_stuck == ALL
    assert of_several(*ORDERED, READ, DeadlineReached(83.0), node.AllStacksRead(83.5))[1] == []
    assert of_several(*ORDERED, DeadlineReached(83.0), StacksCaptured(83.1, ALL, WAIT))[1] == []


def test_a_stop_for_another_reason_waits_for_no_other_node():
    failed_elsewhere = node.StopOrdered(SIGTERM, 81.0, Why.FAILED)
    assert of_several(*BEGUN, failed_elsewhere, READ)[1] == [StopWorkers(SIGTERM, ALL)]
    assert of_several(*BEGUN, failed_elsewhere, READ, node.AllStacksRead(81.7))[1] == []


def test_suspended_workers_are_not_woken_by_what_the_other_nodes_have_read():
    suspended = (*ORDERED, READ, SignalReceived(SIGTSTP, 81.2), node.AllStacksRead(81.7))
    assert of_several(*suspended)[1] == []
    resumed = (*suspended, SignalReceived(SIGCONT, 181.2))
    assert of_several(*resumed, DeadlineReached(181.2))[1] == [StopWorkers(SIGTERM, ALL)]


def test_all_nodes_stop_once_the_last_one_has_read_the_stacks():
    read = [job.NodeStacksRead(id) for id in range(3)]
    hung = [*met(), *STILL]
    assert history(POLICY_OF_THREE, [*hung, *read[:2]])[1][-1] == StopNodes((0, 1, 2), SIGTERM, job_stands_still=True)
    assert history(POLICY_OF_THREE, [*hung, *read])[1][-1] == job.TellAllStacksRead((0, 1, 2))
    assert history(POLICY_OF_THREE, [*hung, *read, *read])[1].count(job.TellAllStacksRead((0, 1, 2))) == 1
    assert history(POLICY_OF_THREE, [*met(), *read])[0].why is None
