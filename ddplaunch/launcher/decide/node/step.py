"""What an agent decides about its node's workers: a state and an event give the next state and the actions to carry out. Pure.

`step` is the table of events. How workers are stopped, whatever the reason, is in `teardown`, which of them a debugger holds in
`debuggers`.
"""

from __future__ import annotations

from math import inf
from signal import SIGCONT, SIGINT, SIGKILL, SIGTERM, SIGTSTP

from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import follows_another, import_failure
from ddplaunch.launcher.decide.node import actions, debuggers, events, teardown
from ddplaunch.launcher.decide.node.state import END_TIMEOUT, Phase, Progress, State
from ddplaunch.launcher.decide.node.teardown import Result
from ddplaunch.spec.outcome import STOPS_ALL_NODES, StartFailure, Why, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.process.clock import is_due, soonest

# seconds to wait for the end of the cause, which may have closed its connections long before, and for the others to fail likewise
CAUSE_TIMEOUT = 3.0
# seconds for others to fail likewise, once the exception of a worker is final and before they are asked to end
LIKEWISE_TIMEOUT = 0.1
EARLY_EXIT_WARNING = 60.0  # seconds after which a worker that ended with 0 is named while the others run on

_ENDS_THE_JOB = (Why.SIGNALLED, Why.FRONT_LOST)  # once a node has reported this, no generation is to begin


def step(state: State, event: events.Event) -> Result:
    """Return the state after `event`, and the actions to carry out."""
    match event:
        # the coordinator orders
        case events.GenerationBegun(generation) if _has_reported_the_end(state):
            # the order crossed our report, or comes from a coordinator that has not had it: no worker is started, none is left
            return replace(state, generation=generation, exits=(), start_failure=None), (actions.ReportEnded(),)
        case events.GenerationBegun():
            return _on_generation_begun(state, event)
        case events.StopOrdered():
            return _on_stop_ordered(state, event)
        case events.AllStacksRead(at):
            return _on_all_stacks_read(state, at)
        case events.KillOrdered(at):
            return teardown.escalate(state, at)
        case events.LeaseOver(at):
            return teardown.kill_at_once(state, at)
        case events.JobEnded(status, at):
            return _on_job_ended(state, status, at)
        case events.StoreOrdered():
            return _on_store_ordered(state)
        # the user, or a scheduler
        case events.SignalReceived():
            return _on_signal(state, event)
        case events.FrontLost(at):
            return _on_front_lost(state, at)
        # workers
        case events.WorkerStarted(rank, at):
            return _on_worker_started(state, rank, at)
        case events.StartFailed(failure, at):
            return _on_start_failed(state, failure, at)
        case events.ErrorRecorded(at):
            return _on_error_recorded(state, at), ()
        case events.WorkerRaised():
            return _on_worker_raised(state, event)
        case events.ExceptionFinal(rank, at):
            return _on_exception_final(state, rank, at), ()
        case events.StoreWanted():
            return state, (actions.RequestStore(),)
        case events.WorkerExited(exit, at):
            return _on_worker_exited(state, exit, at)
        case events.Swept(leftovers):
            return teardown.on_swept(state, leftovers)
        # answers to questions about workers
        case events.ProgressChecked(progressed, at):
            return _on_progress_checked(state, at, progressed=progressed)
        case events.StacksCaptured():
            return _on_stacks_captured(state, event)
        case events.StuckFound(ranks):
            return teardown.on_stuck_found(state, ranks)
        case (
            events.TerminalRequested()
            | events.TerminalReturned()
            | events.DebuggerAttached()
            | events.DebuggerDetached()
        ):
            return debuggers.step(state, event)
        # time
        case events.DeadlineReached(at):
            return _on_deadline(state, at)


# --- orders of the coordinator


def _has_reported_the_end(state: State) -> bool:
    """Whether this node has reported, or knows by its own signal, that no generation is to begin."""
    return state.why in _ENDS_THE_JOB or (state.end.no_restart and state.end.stop_signal > 0)


def _on_generation_begun(state: State, begun: events.GenerationBegun) -> Result:
    """Start the workers of a generation; forget the last generation, except for `end`, which is about the whole job."""
    state = State(
        policy=replace(state.policy, ranks=begun.ranks),
        phase=Phase.RUNNING,
        generation=begun.generation,
        generation_at=begun.at,
        is_only_node=begun.is_only_node,
        pending=begun.ranks,
        progress=Progress(idle_since=begun.at),
        end=state.end,
    )
    return state, (actions.StartWorkers(begun.generation),)


def _on_job_ended(state: State, status: int, at: float) -> Result:
    """Stop the workers if they run, and end with the status of the job once none is left."""
    state = replace(state, end=replace(state.end, status=status))
    if state.phase is Phase.WAITING:
        return teardown.end(state)
    return teardown.stop(state, Why.JOB_ENDED, SIGTERM, at) if state.workers_go_on else (state, ())


def _on_stop_ordered(state: State, event: events.StopOrdered) -> Result:
    """Stop the workers for what happened on another node, or since a time limit of the job is over."""
    # they are stopped already, by an earlier order or for a failure here: note what says that some wait in vain
    if not state.workers_go_on:
        before = state.teardown
        another_node_ended = before.another_node_ended or event.another_node_ended
        stands_still = before.job_stands_still or event.job_stands_still
        return replace(
            state, teardown=replace(before, another_node_ended=another_node_ended, job_stands_still=stands_still)
        ), ()
    why = Why.TIMED_OUT if event.why is Why.TIMED_OUT else Why.COORDINATOR
    # Ctrl-C while workers write something (`silent_for`: how long none has) is meant to end the job at once
    shows_stacks = event.signum != SIGINT or event.silent_for >= teardown.SILENCE
    hang_timeout_is_over = event.why is Why.HUNG
    begun = replace(state.teardown, job_stands_still=event.job_stands_still, hang_timeout_is_over=hang_timeout_is_over)
    # only a stop for a failure leaves workers alone that exit by themselves: this one asks all to end
    raised = state.raised if event.why is Why.FAILED else replace(state.raised, exiting_by_themselves=frozenset())
    return teardown.stop(
        replace(state, teardown=begun, raised=raised),
        why,
        event.signum,
        event.at,
        by_cluster=event.by_cluster,
        shows_stacks=shows_stacks,
        stops_all=event.why in STOPS_ALL_NODES,  # for a limit of time: each node first reads its stacks
    )


def _on_store_ordered(state: State) -> Result:
    """Host torch's store, since a worker of another node waits for it; but once only, and not when no worker lives here."""
    if not state.alive or state.hosts_store:
        return state, ()
    return replace(state, hosts_store=True), (actions.HostStore(),)


# --- signals, and the end of the front


def _on_signal(state: State, event: events.SignalReceived) -> Result:
    """Suspend, resume, forward or stop, by the signal; first report a signal that decides whether the job is queued again."""
    signum, at = event.signum, event.at
    # a copy: the same signal has just come another way, and reached the workers then
    workers_have_it = event.by_cluster or event.is_copy
    state, then = _report_notice(state, signum)
    delayed = state.teardown.delayed_stop
    if event.by_cluster and delayed is not None and delayed.signum == signum:
        # the stop that the coordinator ordered has waited for this signal
        state, stops = teardown.send_stop(state, by_cluster=True)
        then = (*then, *stops)
    more: tuple[actions.Action, ...] = ()
    if signum == SIGTSTP:
        if state.suspended_at is None:
            state, more = replace(state, suspended_at=at), (actions.Suspend(),)
    elif signum == SIGCONT and state.suspended_at is not None:
        state, more = teardown.resume_if_suspended(state, at)
    elif signum == SIGINT and state.terminal_holder:
        # Ctrl-C at a debugger's prompt is for the debugger, and stops nothing
        more = (actions.ForwardSignal(signum, state.terminal_holder),)
        state = replace(state, debugging=replace(state.debugging, got_ctrl_c=True))
    elif signum in state.policy.stop_signals:
        state, more = _on_stop_signal(state, event)
    elif state.alive and not workers_have_it:
        more = (actions.ForwardSignal(signum, state.alive),)
    return state, (*then, *more)


def _report_notice(state: State, signum: int) -> Result:
    """Report a notice (a signal that announces the end of the job), or that the user has stopped a job that gets notices.

    The coordinator decides by these whether the job is queued again. What follows for the workers is decided elsewhere.
    """
    policy = state.policy
    if policy.notices and signum in policy.stop_signals - policy.notices - {SIGTERM} and not state.end.abandoned:
        return replace(state, end=replace(state.end, abandoned=True)), (actions.ReportNotice(signum),)
    is_over = state.phase is Phase.ENDED or state.is_sweeping_after_success
    if signum not in policy.notices or state.notice or is_over:
        return state, ()
    return replace(state, notice=signum), (actions.ReportNotice(signum),)


def _on_stop_signal(state: State, event: events.SignalReceived) -> Result:
    """Stop the job at the first signal to stop. A second request (`is_request`: it does not just repeat one) kills the workers.

    While workers end for another reason, a failure or a time limit, the first signal of a program leaves them time to save.
    A signal may also come when there are no workers yet, when they have all ended, or while another node has the stop begun.
    """
    signum, at = event.signum, event.at
    stopped_before_workers_ran = state.phase is Phase.WAITING and state.why is Why.SIGNALLED
    if stopped_before_workers_ran:
        return _on_second_signal_without_workers(state, event)
    if not state.is_ending:
        # `silent_for`: seconds for which no worker has written anything
        seems_to_hang = signum == SIGINT and event.silent_for >= teardown.SILENCE
        state = _with_stop_signal(state, signum)
        return teardown.stop(state, Why.SIGNALLED, signum, at, by_cluster=event.by_cluster, shows_stacks=seems_to_hang)
    if _may_other_nodes_run(state):  # all workers here have finished
        state = _with_stop_signal(state, signum)
        return teardown.stop_other_nodes(state, Why.SIGNALLED, signum, by_cluster=event.by_cluster)
    if state.is_sweeping_after_success and state.is_only_node:  # the job has finished: no stop is left to report
        return teardown.escalate(state, at) if event.is_request else (state, ())
    was_stopped_by_another_node = state.why is Why.COORDINATOR and not state.end.stop_signal
    if was_stopped_by_another_node:
        # a scheduler signals all nodes: another node has reported this signal first, so this is no second signal
        state = _with_stop_signal(state, signum)
        return teardown.with_no_restart(state), (actions.ReportStopping(Why.SIGNALLED, signum),)
    leaves_time_to_save = event.is_first_by_program and state.phase is Phase.STOPPING
    if event.is_request and not leaves_time_to_save:
        state, then = teardown.escalate(state, at)
        return state, (*then, actions.Escalate(signum))
    if state.end.no_restart or state.why in _ENDS_THE_JOB:
        return state, ()  # the coordinator knows already that the job ends
    # the stop goes on, whatever its reason is, and no generation begins after it
    return teardown.with_no_restart(state), (actions.ReportStopping(Why.SIGNALLED, signum),)


def _on_second_signal_without_workers(state: State, event: events.SignalReceived) -> Result:
    """Pass a second signal on to the coordinator. If that is on another node, it may not answer any more: end at once."""
    if not event.is_request:
        return state, ()  # a copy of the first signal
    escalates = actions.Escalate(event.signum)
    if event.coordinator_is_here:
        return state, (escalates,)
    status = exitcodes.of_signal(state.end.stop_signal)
    state, then = teardown.end(replace(state, end=replace(state.end, status=status)))
    return state, (escalates, *then)


def _with_stop_signal(state: State, signum: int) -> State:
    """Note the signal that asked the job to stop."""
    return replace(state, end=replace(state.end, stop_signal=signum))


def _on_front_lost(state: State, at: float) -> Result:
    """End the job, since its front (the command that the user typed) has ended; during a stop, only see that nothing follows."""
    if _may_other_nodes_run(state):
        return teardown.stop_other_nodes(state, Why.FRONT_LOST, SIGTERM)
    if not state.is_ending:
        return teardown.stop(state, Why.FRONT_LOST, SIGTERM, at)
    # nobody can resume suspended workers any more
    return teardown.resume_if_suspended(replace(state, end=replace(state.end, front_lost=True)), at)


def _may_other_nodes_run(state: State) -> bool:
    """Whether the workers of this node have finished while those of other nodes may still run."""
    return state.is_sweeping_after_success and not state.is_only_node and state.end.status is None


# --- workers


def _on_worker_started(state: State, rank: int, at: float) -> Result:
    """Note that a worker has a process. With that of --debug's rank time limits wait; with the last, checks of progress begin."""
    state = replace(state, pending=state.pending - {rank}, alive=state.alive | {rank})
    then: tuple[actions.Action, ...] = (actions.PauseLimits(paused=True),) if rank == state.policy.debug_rank else ()
    if state.pending:
        return state, then
    if state.policy.progress_interval:
        return state, (*then, actions.CheckProgress())  # `ProgressChecked` answers, and sets the time of the next check
    if state.policy.lax_progress_interval:  # without --hang-timeout
        check_at = at + state.policy.lax_progress_interval
        state = replace(state, progress=replace(state.progress, check_at=check_at))
    return state, then


def _on_start_failed(state: State, failure: StartFailure, at: float) -> Result:
    """Stop all workers, since one could not be started: the agent starts no further one."""
    state = replace(state, pending=frozenset(), alive=state.alive - {failure.rank})
    if state.is_ending:
        return teardown.sweep_if_all_ended(state, at)
    return teardown.stop(replace(state, start_failure=failure), Why.FAILED, SIGTERM, at)


def _on_error_recorded(state: State, at: float) -> State:
    """Give a worker that has recorded an exception some time to end; the first such worker counts."""
    if state.raised.should_exit_by is not None:
        return state
    return replace(state, raised=replace(state.raised, should_exit_by=at + END_TIMEOUT))


def _on_worker_raised(state: State, event: events.WorkerRaised) -> Result:
    """Note the exception of a worker. Stop all if the worker lives on (`lingers`), since the others wait for it in silence.

    `causes`: ranks whose exceptions do not follow from another's end. `exiting_by_themselves`: of these, those whose program is
    over; a stop for a failure lets them end.
    """
    rank, error = event.rank, event.error
    raised = replace(state.raised, errors=(*state.raised.errors, (rank, error)))
    if not follows_another(error):
        raised = replace(raised, causes=raised.causes | {rank})
    exiting = raised.exiting_by_themselves
    what_lasts = "its interpreter hangs" if rank in exiting else "a thread of it, or an exit handler, still runs"
    if event.lingers:
        raised = replace(raised, exiting_by_themselves=exiting - {rank})  # this one does not
    state = replace(state, raised=raised)
    # the rank whose debugger has the terminal, and those that wait for it
    held_for_debugger = state.terminal_holder.union(state.debugging.queued)
    should_have_ended = event.lingers and state.workers_go_on and rank in state.alive - held_for_debugger
    # without a time torch's `@record` wrote it, which also sees exceptions that the program handles
    may_be_handled = error.at is None
    if not should_have_ended or may_be_handled:
        return state, ()
    line = f"rank {rank} has raised {error.type} and does not end: {what_lasts}"
    state, then = teardown.stop(state, Why.FAILED, SIGTERM, event.at)
    return state, (actions.Print(line), *then)


def _on_exception_final(state: State, rank: int, at: float) -> State:
    """Have the other workers stopped soon, though this one still ends its interpreter, which takes half a second with torch.

    Its end alone decides if it may not be the cause, if its import fails at a restart too, or if it was asked to end before.
    """
    error = dict(state.raised.errors).get(rank)
    may_be_cause = rank in state.alive & state.raised.causes - state.raised.exiting_by_themselves
    # without a time torch's `@record` wrote it, perhaps for an exception that the program handles
    if error is None or error.at is None or not (may_be_cause and state.workers_go_on):
        return state
    exiting = state.raised.exiting_by_themselves | {rank}
    state = replace(state, raised=replace(state.raised, exiting_by_themselves=exiting, should_exit_by=at + END_TIMEOUT))
    others_run = bool((state.alive | state.pending) - exiting) or not state.is_only_node
    if not others_run or import_failure(error):
        return state
    deadline = soonest(state.phase_deadline, at + LIKEWISE_TIMEOUT)  # others that fail likewise do so by then
    return replace(state, phase=Phase.SETTLING, phase_deadline=deadline)


def _on_worker_exited(state: State, exit: WorkerExit, at: float) -> Result:
    """Decide what the end of a worker means for the other workers; time limits go on if it was the last one in a debugger.

    Once all have ended that were asked to, what they left behind is ended, too (swept).
    """
    if exit.rank in state.raised.exiting_by_themselves and exit.status == 0:
        # a destructor has ended the interpreter with 0; the others are stopped for the exception, which stays the failure
        exit = replace(exit, code=1)
    limits_waited = state.debugger_suspends_limits
    progress = replace(state.progress, idle_since=at)
    state = replace(state, alive=state.alive - {exit.rank}, exits=(*state.exits, exit), progress=progress)
    limits_go_on = (actions.PauseLimits(paused=False),) if limits_waited and not state.debugger_suspends_limits else ()
    # by --debug, or in a debugger after it had failed
    had_terminal = exit.rank in (state.policy.debug_rank, state.debugging.at_terminal)
    died_of_ctrl_c = state.debugging.got_ctrl_c and had_terminal and exit.signal == SIGINT
    if died_of_ctrl_c and state.workers_go_on:
        # the program ran, and no prompt was there to take Ctrl-C: it was meant for the job
        state, then = teardown.stop(_with_stop_signal(state, SIGINT), Why.SIGNALLED, SIGINT, at, shows_stacks=False)
    elif not state.workers_go_on:
        state, then = teardown.sweep_if_all_ended(state, at)
    elif exit.status != 0:
        state, then = _on_failure(state, exit, at)
    else:
        state, then = _on_success(state, at)
    return state, (*then, *limits_go_on)


def _on_failure(state: State, exit: WorkerExit, at: float) -> Result:
    """Stop all workers; but wait first (SETTLING) if this failure follows another, or if all may fail at the same import."""
    all_ended = not state.alive and not state.pending
    # known, too, if a worker that has recorded the cause is still on its way out
    cause_is_known = not follows_another(exit) or bool(state.raised.causes & state.alive)
    # where all have ended here, the cause may still be on another node
    waits_for_cause = not cause_is_known and not (all_ended and state.is_only_node)
    # if the others fail at the same import, a restart does not help
    waits_for_same_import = bool(state.alive) and import_failure(exit.error) != ""
    if waits_for_cause or waits_for_same_import:
        deadline = state.phase_deadline if state.phase is Phase.SETTLING else at + CAUSE_TIMEOUT
        return replace(state, phase=Phase.SETTLING, phase_deadline=deadline), ()
    return teardown.stop(state, Why.FAILED, SIGTERM, at)


def _on_success(state: State, at: float) -> Result:
    """Sweep (end what the workers left behind) when all have ended; warn some time after the first, which others may wait for."""
    if state.alive or state.pending:
        warns = state.phase is Phase.RUNNING and state.who_runs_line_at is None
        return (replace(state, who_runs_line_at=at + EARLY_EXIT_WARNING) if warns else state), ()
    if state.phase is Phase.SETTLING:
        # the failure that was seen here may follow one on another node: the deadline of the phase stops these then
        return teardown.stop(state, Why.FAILED, SIGTERM, at) if state.is_only_node else (state, ())
    return teardown.sweep(replace(state, why=Why.FINISHED), SIGTERM, at + teardown.SWEEP_GRACE)


# --- progress and stacks


def _on_progress_checked(state: State, at: float, *, progressed: bool) -> Result:
    """Report for how long no worker has made progress. The first check cannot compare, and always says `progressed`."""
    if state.phase is not Phase.RUNNING:
        return state, ()
    interval = state.policy.progress_interval or state.policy.lax_progress_interval
    before, check_at = state.progress, at + interval
    if progressed or not state.workers_can_progress:
        # the coordinator is told that these workers are idle no more, if it was told that they were
        then = (actions.ReportIdle(0.0),) if before.is_idle else ()
        return replace(state, progress=Progress(check_at=check_at, idle_since=at)), then
    progress = replace(before, check_at=check_at, is_idle=True)
    return replace(state, progress=progress), (actions.ReportIdle(at - progress.idle_since),)


def _on_stacks_captured(state: State, event: events.StacksCaptured) -> Result:
    """Stop the workers, whose stacks are read now; if the stop waits for all nodes, only report that they are read."""
    delayed = state.teardown.delayed_stop
    if delayed is None or not delayed.awaits_stacks:
        return state, ()  # the time for them was up, and the workers have been asked to end
    delayed = replace(delayed, with_stacks=event.with_stacks, in_collective=event.in_collective)
    state = replace(state, teardown=replace(state.teardown, delayed_stop=delayed))
    if delayed.awaits_all_nodes:
        return state, (actions.ReportStacksRead(),)
    return _stop_unless_suspended(state, event.at)  # after Ctrl-Z: once the user resumes the job


def _on_all_stacks_read(state: State, at: float) -> Result:
    """Ask the workers to end, if the stop has waited for the stacks of the other nodes."""
    delayed = state.teardown.delayed_stop
    return _stop_unless_suspended(state, at) if delayed is not None and delayed.awaits_all_nodes else (state, ())


def _stop_unless_suspended(state: State, at: float) -> Result:
    """Ask the workers to end; those that Ctrl-Z suspends only when the user resumes them, as the signal would wake them."""
    delayed = state.teardown.delayed_stop
    if delayed is None or state.suspended_at is None:
        return teardown.stop_with_stacks(state, at)
    delayed = replace(delayed, until=state.suspended_at)
    return replace(state, teardown=replace(state.teardown, delayed_stop=delayed)), ()


# --- time


def _on_deadline(state: State, at: float) -> Result:
    """Do what is due at this time, one thing a call: the agent feeds `DeadlineReached` again while a deadline has passed.

    Where the phase alone decides, the grace period or timeout of that phase (`phase_deadline`) is over.
    """
    due = soonest(state.deadline, state.lax_deadline)  # the second: of checks for which alone the agent does not wake
    if due is None or at < due:
        return state, ()
    exit_is_overdue = is_due(state.raised.should_exit_by, at) and not state.debugger_may_hold_any
    who_runs_line_is_due = is_due(state.who_runs_line_at, at) and not state.debugger_suspends_limits
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if exit_is_overdue:
            # of a worker that recorded an exception: the agent answers with `WorkerRaised` if it has not ended
            return replace(state, raised=replace(state.raised, should_exit_by=None)), (actions.FindRaised(),)
        case Phase.RUNNING | Phase.SETTLING if who_runs_line_is_due:
            return _on_early_exits_due(state)
        case Phase.RUNNING:
            return _on_check_due(state, at)
        case Phase.SETTLING:  # the cause of a failure was waited for long enough
            return teardown.stop(state, Why.FAILED, SIGTERM, at)
        case Phase.STOPPING:
            return teardown.on_deadline(state, at, who_runs_line_is_due=who_runs_line_is_due)
        case Phase.KILLING:  # SIGKILL did not end them: they count as ended, and what they left behind is not spared
            return teardown.sweep(replace(state, alive=frozenset()), SIGKILL, at, sparing=False)
        case Phase.SWEEPING:
            return teardown.on_sweep_timeout(state, at)
    return state, ()


def _on_early_exits_due(state: State) -> Result:
    """Print which workers have finished while others run on; no later line follows."""
    gone = ", ".join(map(str, sorted(exit.rank for exit in state.exits)))
    ranks = "rank" if len(state.exits) == 1 else "ranks"
    others = "another worker runs" if len(state.alive) == 1 else f"{len(state.alive)} workers run"
    hint = "a collective that waits for it never ends"
    line = f"{ranks} {gone} ended with status 0 a minute ago while {others} on: {hint}"
    return replace(state, who_runs_line_at=inf), (actions.Print(line),)


def _on_check_due(state: State, at: float) -> Result:
    """Check whether the workers make progress, if that is due."""
    check_at = state.progress.check_at
    if check_at is None or at < check_at:
        return state, ()
    late = at - check_at  # seconds, in which the whole machine may have been paused: they do not count as idle
    progress = replace(state.progress, check_at=None, idle_since=state.progress.idle_since + late)
    return replace(state, progress=progress), (actions.CheckProgress(asks=bool(state.policy.progress_interval)),)
