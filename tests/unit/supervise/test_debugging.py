"""Histories of jobs whose workers are held by a debugger."""

from signal import SIGINT, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.node import *
from ddplaunch.spec.outcome import Why
from tests.unit.supervise import job_histories
from tests.unit.supervise.histories import ALL, POLICY, STARTED, ended, one_node
from tests.unit.supervise.job_histories import ELASTIC, THREE, history, met

LENT = (*STARTED, TerminalRequested(1, "ValueError: boom", 1.0))
SECOND = TerminalRequested(2, "KeyError: 3", 2.0)


def test_the_first_rank_that_fails_gets_the_terminal_and_the_next_is_held():
    assert one_node(*LENT)[1] == [
        Print("rank 1 failed (ValueError: boom): its debugger has the terminal, the others are held"),
        LendTerminal(1),
    ]
    held = "rank 2 failed, too (KeyError: 3), and is held while rank 1 is in the debugger"
    assert one_node(*LENT, SECOND)[1] == [Print(held)]


def test_when_the_debugger_is_left_those_that_failed_end_and_no_other_gets_the_terminal():
    left = (*LENT, SECOND, TerminalReturned(1, 9.0))
    assert one_node(*left)[1] == [ShowOutput(), RefuseTerminal(2)]
    assert one_node(*left, TerminalRequested(0, "RuntimeError: lost", 9.1))[1] == [RefuseTerminal(0)]
    assert one_node(*left, ended(1, 9.2, code=1))[1] == [StopWorkers(SIGTERM, ALL)]


def test_a_rank_that_fails_while_the_job_ends_has_no_debugger():
    assert one_node(*STARTED, ended(0, code=3), TerminalRequested(1, "lost", 1.1))[1] == [RefuseTerminal(1)]


def test_ctrl_c_is_for_the_debugger_and_sigterm_for_all():
    assert one_node(*LENT, SignalReceived(SIGINT, 2.0))[1] == [ForwardSignal(SIGINT, frozenset({1}))]
    assert one_node(*LENT, SignalReceived(SIGTERM, 2.0))[1] == [StopWorkers(SIGTERM, ALL)]


def test_a_death_elsewhere_ends_all_but_the_debugger():
    actions = one_node(*LENT, ended(0, 2.0, code=None, signal=9))[1]
    assert actions == [
        StopWorkers(SIGTERM, frozenset({0, 2})),
        Print("rank 0 failed (killed by SIGKILL); rank 1 stays in the debugger"),
    ]
    rest = (ended(2, 2.1, code=None, signal=15), TerminalReturned(1, 9.0), ended(1, 9.1, code=1))
    assert one_node(*LENT, ended(0, 2.0, code=None, signal=9), *rest)[1] == [Sweep(SIGTERM)]


def test_no_time_limit_runs_until_the_rank_has_ended():
    state, _ = one_node(*LENT, timeout=3.0)
    assert state.deadline is None
    left = (*LENT, TerminalReturned(1, 9.0))
    assert one_node(*left, timeout=3.0)[0].deadline is None
    assert one_node(*left, ended(1, 9.1, code=0), timeout=3.0)[0].deadline is not None


def test_a_rank_that_has_left_its_debugger_and_does_not_end_is_looked_at_again():
    recorded = (*STARTED, ErrorRecorded(0.9), TerminalRequested(1, "boom", 1.0))
    assert one_node(*recorded, DeadlineReached(60.0))[1] == []
    left = (*recorded, TerminalReturned(1, 99.0))
    assert one_node(*left, DeadlineReached(99.0 + node.END_TIMEOUT))[1] == [FindRaised()]


def test_ranks_that_a_debugger_is_attached_to_stop_the_time_and_are_not_still():
    looking = replace(POLICY, progress_interval=1.0)
    started = tuple(WorkerStarted(rank, 0.1) for rank in ALL)
    attached = (
        *started,
        ProgressChecked(True, 0.2),
        DebuggerAttached(0, 0.5),
        DebuggerAttached(1, 0.6),
        ProgressChecked(False, 50.0),
    )
    state, actions = one_node(*attached, policy=looking, timeout=3.0, hang_timeout=5.0)
    assert (state.deadline, actions) == (None, [])
    one = one_node(*attached, DebuggerDetached(0, 60.0), policy=looking, timeout=99.0)[0]
    assert one.deadline is None
    last = (*attached, DebuggerDetached(0, 60.0), DebuggerDetached(1, 61.0))
    state, _ = one_node(*last, policy=looking, timeout=99.0)
    assert state.progress.idle_since == 61.0
    assert one_node(*last, DeadlineReached(61.5), policy=looking)[1] == [CheckProgress()]


def test_a_rank_that_a_debugger_holds_at_its_exception_has_its_time_to_end_when_the_debugger_is_left():
    held = (*STARTED, DebuggerAttached(0, 0.5), ErrorRecorded(1.0))
    state, actions = one_node(*held, DeadlineReached(2.0 + node.END_TIMEOUT))
    assert (state.deadline, actions) == (None, [])
    left = (*held, DebuggerDetached(0, 99.0))
    assert one_node(*left)[0].deadline == 99.0 + node.END_TIMEOUT
    assert one_node(*left, DeadlineReached(99.0 + node.END_TIMEOUT))[1] == [FindRaised()]


def test_a_restart_may_be_debugged_again():
    ends = (
        TerminalReturned(1, 9.0),
        ended(1, 9.1, code=1),
        ended(0, 9.2, code=0),
        ended(2, 9.2, code=0),
        node.Swept((), 9.3),
    )
    again = (
        *LENT,
        *ends,
        DeadlineReached(99.0),
        *(WorkerStarted(rank, 99.1) for rank in ALL),
        TerminalRequested(0, "boom", 100.0),
    )
    assert LendTerminal(0) in one_node(*again, max_restarts=1)[1]


# --- a job of several nodes


def test_time_limits_wait_until_the_last_debugger_of_any_node_is_left():
    two = [*met(), job.LimitsPaused(1, True), job.LimitsPaused(2, True), job.LimitsPaused(1, False)]
    timed = replace(THREE, timeout=60.0)
    assert history(timed, [*two, job.DeadlineReached(60.0)])[0].why is None
    left = [*two, job.LimitsPaused(2, False), job.DeadlineReached(60.0)]
    assert history(timed, left)[0].why is Why.TIMED_OUT


def test_the_node_whose_debugger_time_limits_wait_for_is_named_once():
    toggled = [*met(), job.LimitsPaused(1, True), job.LimitsPaused(1, False), job.LimitsPaused(1, True)]
    words = [
        action
        for action in history(replace(THREE, timeout=60.0, hang_timeout=9.0), toggled)[1]
        if "holds" in str(action)
    ]
    assert words == [
        job.Print("node 1 (b) holds a worker in a debugger: --timeout and --hang-timeout wait until it is left")
    ]
    assert not any("holds" in str(action) for action in history(THREE, toggled)[1])


def test_a_node_that_is_lost_ends_or_starts_again_takes_its_debugger_with_it():
    timed = replace(ELASTIC, timeout=60.0, max_restarts=1)
    held = [*met(), job.LimitsPaused(2, True)]
    assert not history(timed, held)[0].has_time_limit
    assert not history(timed, [*held, job_histories.ended(2, 5.0)])[0].is_debugged
    lost = [*held, job.AgentLost(2, "silent for 10 s", 5.0)]
    assert not history(timed, lost)[0].is_debugged
    again = [*held, *job_histories.failing(1, 5.0), *(job_histories.stopping(id, 6.0) for id in (0, 2))]
    state, _ = history(timed, [*again, job.DeadlineReached(6.0)])
    assert (state.generation.number, state.has_time_limit) == (1, True)


def test_a_node_that_takes_no_part_holds_nothing():
    assert not history(THREE, [*met(), job.LimitsPaused(7, True)])[0].is_debugged
