"""The decision itself: a state and an event give the next state and what is to be done. It does nothing itself.

What an event means is decided here; how workers are stopped, whatever the reason, in `teardown`.
"""

from __future__ import annotations

from signal import SIGCONT, SIGINT, SIGTERM, SIGTSTP

from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.supervise.first_failure import follows
from ddplaunch.supervise.node import actions, events, looking
from ddplaunch.supervise.node.deadlines import reached
from ddplaunch.supervise.node.state import Phase, Policy, State
from ddplaunch.supervise.node.teardown import (
    SILENCE,
    SWEEP_GRACE,
    Result,
    end,
    escalate,
    expected,
    kill_stuck,
    resume,
    stop,
    stop_others,
    sweep,
    sweep_if_ended,
    swept,
    taken,
)
from ddplaunch.supervise.outcome import Why, WorkerError, WorkerExit

# seconds to wait for the end of the cause, which may have closed its connections long before, and for the others to fail likewise
CAUSE_TIMEOUT = 3.0
END_TIMEOUT = 10.0  # seconds that a worker has to end once it has recorded the exception that ends it
EARLY_EXIT_WARNING = 60.0  # seconds after which a worker that ended with 0 is named while the others run on

_NO_FURTHER = (Why.SIGNALLED, Why.FRONT_LOST)  # once this was reported, no generation is to begin


def begin(policy: Policy) -> State:
    """Return the first state, in which the coordinator is waited for."""
    return State(policy=policy)


def step(state: State, event: events.Event) -> Result:
    """Return the state after `event` and what is to be done."""
    match event:
        case events.WorkerStarted(rank, at):
            state = replace(state, pending=state.pending - {rank}, alive=state.alive | {rank})
            held: tuple[actions.Action, ...] = (actions.HoldTimeout(True),) if rank == state.policy.debug_rank else ()
            looks = bool(state.policy.look_every) and not state.pending
            if not looks and not state.pending and state.policy.look_at_rest:
                state = replace(state, look_at=at + state.policy.look_at_rest)
            return state, (*held, *((actions.Observe(),) if looks else ()))
        case events.WorkerRaised(rank, error, at, lingers):
            causes = state.causes if follows(error) else state.causes | {rank}
            state = replace(state, raised=(*state.raised, (rank, error)), causes=causes)
            return _lingering(state, rank, error, at) if lingers else (state, ())
        case events.ErrorRecorded(at):
            return (replace(state, raised_deadline=at + END_TIMEOUT) if state.raised_deadline is None else state), ()
        case events.StoreWanted():
            return state, (actions.RequestStore(),)
        case events.StoreOrdered():
            hosts = bool(state.alive) and not state.hosts_store
            return (replace(state, hosts_store=True), (actions.HostStore(),)) if hosts else (state, ())
        case events.StartFailed(failure, at):
            state = replace(state, pending=frozenset(), alive=state.alive - {failure.rank})
            if not state.is_going:
                return sweep_if_ended(state, at)
            return stop(replace(state, start_failure=failure), Why.FAILED, SIGTERM, at)
        case events.WorkerExited(exit, at):
            before = state
            state = replace(state, alive=state.alive - {exit.rank}, exits=(*state.exits, exit), still_since=at)
            released = (actions.HoldTimeout(False),) if before.is_held and not state.is_held else ()
            state, then = _exited(state, exit, at)
            return state, (*then, *released)
        case events.SignalReceived(signum):
            state, reported = _noted(state, signum)
            had: tuple[actions.Action, ...] = ()
            if event.by_cluster and state.phase is Phase.STOPPING and state.expected == signum:
                state, had = expected(state, by_cluster=True)
            state, then = _signalled(state, event)
            return state, (*reported, *had, *then)
        case events.FrontLost(at):
            return _front_lost(state, at)
        case events.GenerationBegun(generation, _, _) if state.why in _NO_FURTHER:
            return replace(state, generation=generation), (actions.ReportEnded(),)  # this crossed our report
        case events.GenerationBegun():
            return _start(state, event)
        case events.StopOrdered(signum, at, time_is_up, by_cluster):
            # a worker that failed because of what happened there may have been seen here first
            working = state.phase in (Phase.RUNNING, Phase.SETTLING)
            why = Why.TIMED_OUT if time_is_up else Why.COORDINATOR
            quiet = signum != SIGINT or event.silent >= SILENCE
            return stop(state, why, signum, at, by_cluster=by_cluster, explained=quiet) if working else (state, ())
        case events.KillOrdered(at):
            return escalate(state, at)
        case events.JobEnded(status, at):
            return _job_ended(replace(state, status=status), at)
        case events.Swept(left, at):
            state = replace(state, left=left)
            return (state, ()) if left or state.phase is not Phase.SWEEPING else swept(state)
        case events.StacksTaken() if not state.taking or state.phase is not Phase.STOPPING:
            return state, ()
        case events.StacksTaken() if state.suspended_at is not None:
            return replace(state, expected_by=state.suspended_at), ()  # asked to end now, they would go on
        case events.StacksTaken(at, waiting):
            return taken(state, at, waiting)
        case events.StuckFound(ranks):
            goes_on = state.phase is Phase.STOPPING and state.suspended_at is None
            return kill_stuck(state, ranks) if goes_on else (state, ())
        case events.TerminalAsked() | events.TerminalReturned() | events.DebuggerAttached() | events.DebuggerDetached():
            from ddplaunch.supervise.node import debugging  # few jobs are debugged

            return debugging.step(state, event)
        case events.Observed(moved, at):
            return looking.observed(state, at, moved=moved)
        case events.DeadlineReached(at):
            return reached(state, at)


def _start(state: State, begun: events.GenerationBegun) -> Result:
    begins = State(
        policy=replace(state.policy, ranks=begun.ranks),
        phase=Phase.RUNNING,
        generation=begun.generation,
        generation_at=begun.at,
        still_since=begun.at,
        alone=begun.alone,
        pending=begun.ranks,
        # what is not of one generation alone
        abandoned=state.abandoned,
        signum=state.signum,
        front_lost=state.front_lost,
        halted=state.halted,
        status=state.status,
    )
    return begins, (actions.StartWorkers(begun.generation),)


def _lingering(state: State, rank: int, error: WorkerError, at: float) -> Result:
    """Take the exception of a worker that does not end for its failure: others wait for it, and no message says why.

    Without a time it was recorded by torch's `@record`, which sees exceptions that the program may handle.
    """
    working = state.phase in (Phase.RUNNING, Phase.SETTLING)
    held = {*state.debugger, *state.queued}
    if not working or rank not in state.alive - held or error.at is None:
        return state, ()
    word = f"rank {rank} has raised {error.type} and does not end: a thread of it, or an exit handler, still runs"
    state, then = stop(state, Why.FAILED, SIGTERM, at)
    return state, (actions.Print(word), *then)


def _exited(state: State, exit: WorkerExit, at: float) -> Result:
    all_gone = not state.alive and not state.pending
    had_terminal = exit.rank in (state.policy.debug_rank, state.at_terminal)
    if state.interrupted and state.is_going and had_terminal and exit.signal == SIGINT:
        # there was no prompt to take it
        return stop(replace(state, signum=SIGINT), Why.SIGNALLED, SIGINT, at, explained=False)
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if exit.status != 0:
            # those before it follow, or the workers would have been asked to end
            cause_unknown = follows(exit) and not state.causes & state.alive
            # on other nodes there may be one even when all are gone here
            settles = cause_unknown and not (all_gone and state.alone)
            # whether the others fail at the same import says whether a restart helps
            if settles or (state.alive and _failed_at_import(exit)):
                deadline = state.phase_deadline if state.phase is Phase.SETTLING else at + CAUSE_TIMEOUT
                return replace(state, phase=Phase.SETTLING, phase_deadline=deadline), ()
            return stop(state, Why.FAILED, SIGTERM, at)
        case Phase.RUNNING | Phase.SETTLING if all_gone:
            if state.phase is Phase.SETTLING:
                return stop(state, Why.FAILED, SIGTERM, at) if state.alone else (state, ())
            return sweep(replace(state, why=Why.FINISHED), SIGTERM, at + SWEEP_GRACE)
        case Phase.RUNNING if state.warning_deadline is None:
            return replace(state, warning_deadline=at + EARLY_EXIT_WARNING), ()
    return sweep_if_ended(state, at)


def _failed_at_import(exit: WorkerExit) -> bool:
    if exit.error is None:
        return False
    from ddplaunch.supervise.import_failure import import_failure  # most jobs do not fail

    return bool(import_failure(exit.error))


def _noted(state: State, signum: int) -> Result:
    """Report a notice, or that the user has stopped a job that gets notices. What it does to the workers is decided elsewhere."""
    policy = state.policy
    if policy.notices and signum in policy.stop_signals - policy.notices - {SIGTERM} and not state.abandoned:
        return replace(state, abandoned=True), (actions.ReportNotice(signum),)
    finished = state.phase is Phase.ENDED or (state.phase is Phase.SWEEPING and state.why is Why.FINISHED)
    if signum not in policy.notices or state.notice or finished:
        return state, ()
    return replace(state, notice=signum), (actions.ReportNotice(signum),)


def _signalled(state: State, event: events.SignalReceived) -> Result:
    signum, at = event.signum, event.at
    if signum == SIGTSTP:
        return (replace(state, suspended_at=at), (actions.Suspend(),)) if state.suspended_at is None else (state, ())
    if signum == SIGCONT and state.suspended_at is not None:
        return resume(state, at)
    if signum == SIGINT and state.debugger:
        return replace(state, interrupted=True), (actions.ForwardSignal(signum, state.debugger),)
    if signum not in state.policy.stop_signals:
        have_had_it = event.is_copy or event.by_cluster
        return state, (actions.ForwardSignal(signum, state.alive),) if state.alive and not have_had_it else ()
    if state.is_going:
        if state.is_waiting and state.why is Why.SIGNALLED:
            if not event.escalates:
                return state, ()
            if 0 in state.policy.ranks:
                return state, (actions.Escalate(signum),)
            # the coordinator is elsewhere, and may not answer any more
            ended, then = end(replace(state, status=exitcodes.of_signal(state.signum)))
            return ended, (actions.Escalate(signum), *then)
        quiet = signum == SIGINT and event.silent >= SILENCE
        signalled = replace(state, signum=signum)
        return stop(signalled, Why.SIGNALLED, signum, at, by_cluster=event.by_cluster, explained=quiet)
    if state.is_done_here:
        return stop_others(replace(state, signum=signum), Why.SIGNALLED, signum, by_cluster=event.by_cluster)
    if state.has_finished_alone:
        return escalate(state, at) if event.escalates else (state, ())
    if state.why is Why.COORDINATOR and not state.signum:
        # a scheduler sends it to all nodes, and the report of another node came first
        return replace(state, signum=signum, halted=True), (actions.ReportStopping(Why.SIGNALLED, signum),)
    if not event.escalates:
        return _start_no_more(state, signum)
    state, then = escalate(state, at)
    return state, (*then, actions.Escalate(signum))


def _front_lost(state: State, at: float) -> Result:
    if state.is_done_here:
        return stop_others(state, Why.FRONT_LOST, SIGTERM)
    if state.is_going:
        return stop(state, Why.FRONT_LOST, SIGTERM, at)
    return resume(replace(state, front_lost=True), at)


def _start_no_more(state: State, signum: int) -> Result:
    """Go on with the stop that is under way, whatever its reason is, and begin nothing after it."""
    if state.halted or state.why in _NO_FURTHER:
        return state, ()
    return replace(state, halted=True), (actions.ReportStopping(Why.SIGNALLED, signum),)


def _job_ended(state: State, at: float) -> Result:
    if state.is_waiting:
        return end(state)
    working = state.phase in (Phase.RUNNING, Phase.SETTLING)
    return stop(state, Why.JOB_ENDED, SIGTERM, at) if working else (state, ())
