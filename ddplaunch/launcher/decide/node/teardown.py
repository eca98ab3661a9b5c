"""How an agent stops its workers: stop, kill, sweep (end what they left behind); then a report, or the exit. Pure.

Each function returns the state after it and the actions to carry out, as `step` does.
"""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.node import actions
from ddplaunch.launcher.decide.node.state import DelayedStop, Phase, State
from ddplaunch.spec.outcome import Why
from ddplaunch.system.process.clock import is_due

SWEEP_GRACE = 1.0  # seconds that processes left behind get after a clean end
TIDY_TIMEOUT = 3.0  # seconds for processes that clean up: torch's manager of shared memory ends 2 s after its users
CLUSTER_SIGNALS_WITHIN = 2.0  # seconds in which a cluster that signals all workers itself reaches the last node
SILENCE = 30.0  # seconds without any output after which Ctrl-C may be meant for a job that hangs
NAMES_EVERY = 5.0  # seconds of a long stop after which the workers that still run are named, and again
# seconds that Ctrl-C waits at most for stacks, which come in a tenth of one unless the machine is busy
STACKS_WITHIN = 1.0
# seconds from stop to SIGKILL for a worker that has not moved since: no handler of Python runs in a collective, for example
HANG_GRACE = 5.0
KILL_TIMEOUT = 5.0  # seconds to wait for SIGKILL to work before a process counts as unkillable

_ORDERED = (Why.COORDINATOR, Why.TIMED_OUT, Why.JOB_ENDED)  # by the coordinator, which needs no report of the stop
_REPORTED_WITH_STACKS = (Why.FAILED, Why.TIMED_OUT, Why.COORDINATOR, Why.SIGNALLED)
# of these, the stops that wait for stacks only if a worker may be in a process group, and wait there for others
_STACKS_ONLY_IN_GROUP = (Why.FAILED, Why.COORDINATOR)

Result = tuple[State, tuple[actions.Action, ...]]


def stop(
    state: State,
    why: Why,
    signum: int,
    at: float,
    *,
    by_cluster: bool = False,
    shows_stacks: bool = True,
    stops_all: bool = False,
) -> Result:
    """Ask all workers to end within one grace period, and report the stop; before a generation has begun, only report.

    `by_cluster`: the cluster signals the workers itself, so ddplaunch sends no signal; after an order of the coordinator, that
    signal may still be on its way to this node.
    `shows_stacks`: first capture the workers' stacks, for the report, if the user wants that and this kind of stop allows it.
    After Ctrl-C, and where no worker makes progress, they are captured in any case, to know later who stands where it stood.
    `stops_all`: a limit of time is over, and all nodes get this order; none sends a signal before all have captured the stacks.
    """
    is_ordered = why in _ORDERED  # by the coordinator, which needs no report
    reports: tuple[actions.Action, ...] = () if is_ordered else (actions.ReportStopping(why, signum, by_cluster),)
    state, resumes = resume_if_suspended(state, at)  # suspended by Ctrl-Z
    then = (*reports, *resumes)
    if state.phase is Phase.WAITING:
        return replace(state, why=why), then
    # no worker is pending any more: none is started that has no process yet
    state = _with_grace_period(replace(state, why=why, pending=frozenset(), phase=Phase.STOPPING), at)
    if by_cluster and is_ordered and state.alive:
        delayed = DelayedStop(signum=signum, until=at + CLUSTER_SIGNALS_WITHIN)
        return replace(state, teardown=replace(state.teardown, delayed_stop=delayed)), resumes
    compares_stacks = signum == SIGINT or state.stands_still(at)
    wants_stacks = (shows_stacks or compares_stacks) and why in _REPORTED_WITH_STACKS and not by_cluster
    is_at_prompt = bool(state.terminal_holder)  # a debugger has the terminal
    if wants_stacks and state.policy.stacks_timeout and state.alive and not is_at_prompt:
        all_at_once = stops_all and not state.is_only_node
        state, captures = _stop_after_stacks(state, signum, at, shows_stacks=shows_stacks, awaits_all_nodes=all_at_once)
        return state, (*captures, *then)
    in_debugger = state.terminal_holder if why is Why.FAILED else frozenset()  # there the user decides when it ends
    then = (*_signal(state, signum, but=in_debugger, by_cluster=by_cluster), *then)
    if in_debugger:
        then = (*then, actions.Print(f"{_what_failed(state)}; rank {min(in_debugger)} stays in the debugger"))
    if state.alive:
        return state, then
    state, sweeps = sweep(state, signum, at + state.policy.grace_period)
    return state, (*then, *sweeps)


def _stop_after_stacks(state: State, signum: int, at: float, *, shows_stacks: bool, awaits_all_nodes: bool) -> Result:
    """Capture the workers' stacks first; when they are known, or the time is up, `stop_with_stacks` sends the signal.

    `shows_stacks`: the report shows them all; else the user waits less, and sees at most those of workers that then do not move.
    `awaits_all_nodes`: the coordinator stops all nodes at once, and says when those of all nodes are known.
    """
    interval = state.policy.progress_interval
    within = state.policy.stacks_timeout if shows_stacks else min(STACKS_WITHIN, state.policy.stacks_timeout)
    delayed = DelayedStop(signum=signum, until=at + within, awaits_stacks=True, awaits_all_nodes=awaits_all_nodes)
    state = _with_grace_period(state, at + within)
    state = replace(state, teardown=replace(state.teardown, delayed_stop=delayed))
    # with --hang-timeout (its checks have an interval) stacks are wanted anyway, else only if a worker is in a process group
    if_in_group = shows_stacks and state.why in _STACKS_ONLY_IN_GROUP and not interval
    captures = actions.CaptureStacks(
        within,
        if_in_group=if_in_group,
        asks_nccl=state.teardown.job_stands_still,  # whose service may know why
        silently=not shows_stacks,
        but=state.exiting_after_failure,
    )
    return state, (captures,)


def stop_with_stacks(state: State, at: float) -> Result:
    """Ask the workers to end, now that their stacks are known or their time is up; the grace period begins.

    Some are killed before the grace period is over if they do not move (`find_stuck`): if --hang-timeout has ended the job, any
    whose stacks were read; after Ctrl-C, or where the job or this node stands still, those that wait in a collective, where no
    signal handler runs.
    """
    state = _with_grace_period(state, at)
    before, delayed = state.teardown, state.teardown.delayed_stop
    assert delayed is not None
    may_be_stuck = frozenset[int]()
    if before.hang_timeout_is_over:
        may_be_stuck = delayed.with_stacks
    elif delayed.signum == SIGINT or before.job_stands_still or state.stands_still(at):
        may_be_stuck = delayed.in_collective
    if may_be_stuck and state.policy.grace_period > HANG_GRACE:  # else all are killed before
        state = replace(state, teardown=replace(before, may_be_stuck=may_be_stuck, stuck_deadline=at + HANG_GRACE))
    return send_stop(state)


def send_stop(state: State, *, by_cluster: bool = False) -> Result:
    """End the delay of a stop: ddplaunch sends the signal, unless the workers have it from the cluster."""
    delayed = state.teardown.delayed_stop
    assert delayed is not None
    stops = _signal(state, delayed.signum, by_cluster=by_cluster)
    return replace(state, teardown=replace(state.teardown, delayed_stop=None)), stops


def _signal(
    state: State, signum: int, *, but: frozenset[int] = frozenset(), by_cluster: bool = False
) -> tuple[actions.Action, ...]:
    """Return the signal of a stop, which spares the ranks `but` and those that are about to end by themselves."""
    ranks = state.policy.ranks - but - state.exiting_after_failure
    return (actions.StopWorkers(signum, ranks, by_cluster),) if ranks else ()


def _stop_those_still_exiting(state: State, at: float) -> Result:
    """Ask those to end, too, that were left to exit by themselves and have not: the grace period begins once more."""
    ranks = state.exiting_after_failure
    errors = dict(state.raised.errors)
    lines = (
        f"rank {rank} has raised {errors[rank].type} and does not end: its interpreter hangs" for rank in sorted(ranks)
    )
    state = _with_grace_period(replace(state, raised=replace(state.raised, exiting_by_themselves=frozenset())), at)
    return state, (*map(actions.Print, lines), actions.StopWorkers(SIGTERM, ranks))


def _with_grace_period(state: State, at: float) -> State:
    """Let the grace period begin at this time."""
    warns = state.policy.grace_period > 2 * NAMES_EVERY
    deadline = at + state.policy.grace_period
    return replace(state, phase_deadline=deadline, who_runs_line_at=at + NAMES_EVERY if warns else None)


def find_stuck(state: State, at: float) -> Result:
    """Ask which ranks still stand where they stood at the stop: these are killed before their grace period ends.

    In a job that does not hang, a rank may wait for a worker that is saving. It waits in vain only once a worker has ended:
    until then, look again later.
    """
    teardown = replace(state.teardown, stuck_deadline=None)
    state = replace(state, teardown=teardown)
    ranks = teardown.may_be_stuck & state.alive  # those whose stacks were captured before the stop
    if not ranks:
        return state, ()
    a_worker_has_ended = bool(state.exits) or teardown.another_node_ended  # here, or on another node
    if not teardown.job_stands_still and not a_worker_has_ended:
        return replace(state, teardown=replace(teardown, stuck_deadline=at + HANG_GRACE)), ()
    if state.who_runs_line_at is not None:
        # the line that names the workers which still run waits until the stuck ones are killed
        state = replace(state, who_runs_line_at=at + NAMES_EVERY)
    return state, (actions.FindStuck(ranks),)


def on_stuck_found(state: State, ranks: frozenset[int]) -> Result:
    """Kill the stuck workers: their stacks are the same as when they were asked to end.

    Nothing is done once the stop is over, or while Ctrl-Z suspends the workers, which then cannot move.
    """
    stuck = ranks & state.teardown.may_be_stuck & state.alive
    if not stuck or state.phase is not Phase.STOPPING or state.suspended_at is not None:
        return state, ()
    return state, (actions.NameStuck(stuck, HANG_GRACE), actions.KillWorkers(stuck))


def on_deadline(state: State, at: float, *, who_runs_line_is_due: bool) -> Result:
    """Carry out the next step of a stop whose time has come.

    In this order: send the signal that was delayed; look for stuck workers; stop those that had failed, and were left to exit by
    themselves; name the workers that still run; kill them.
    """
    delayed, seconds_left = state.teardown.delayed_stop, (state.phase_deadline or at) - at
    if delayed is not None and at >= delayed.until:
        return stop_with_stacks(state, at) if delayed.awaits_stacks else send_stop(state)
    if is_due(state.teardown.stuck_deadline, at):
        return find_stuck(state, at)
    if state.exiting_after_failure and is_due(state.raised.should_exit_by, at):
        return _stop_those_still_exiting(state, at)
    if who_runs_line_is_due and seconds_left > 0:
        asked = state.alive - state.exiting_after_failure
        names = (actions.NameRunning(asked, seconds_left),) if asked else ()
        return replace(state, who_runs_line_at=at + NAMES_EVERY), names
    if state.exiting_after_failure:
        # the grace period is over for those that were asked to end, and again for those that SIGKILL does not end
        kills = actions.KillWorkers(state.policy.ranks - state.exiting_after_failure - state.terminal_holder)
        return replace(state, phase_deadline=at + KILL_TIMEOUT, who_runs_line_at=None), (kills,)
    if state.terminal_holder and state.why is Why.FAILED:
        # the grace period is over for all but the rank in the debugger, which may stay there for as long as the user likes
        kills = actions.KillWorkers(state.policy.ranks - state.terminal_holder)
        return replace(state, phase_deadline=None), (kills,)
    return kill(state, at)


def _what_failed(state: State) -> str:
    """Return what failed, as in a sentence: "rank 1 failed (ValueError)"."""
    first = state.failure
    if first is not None:
        return f"rank {first.rank} failed ({first.error.type if first.error else first.how})"
    if state.raised.errors:
        rank, error = state.raised.errors[0]
        return f"rank {rank} failed ({error.type})"
    return "a worker could not be started"


def stop_other_nodes(state: State, why: Why, signum: int, *, by_cluster: bool = False) -> Result:
    """Report a stop, so that the other nodes stop. Here all workers have ended, and what they left behind is being swept."""
    return replace(state, why=why), (actions.ReportStopping(why, signum, by_cluster),)


def sweep_if_all_ended(state: State, at: float) -> Result:
    """Begin to sweep when a stop or a kill has ended the last worker: send a signal to what the workers left behind."""
    if state.alive or state.pending:
        return state, ()
    if state.phase is Phase.STOPPING:
        # processes that the workers left behind get the rest of the grace period
        return sweep(state, state.end.stop_signal or SIGTERM, state.phase_deadline or at + SWEEP_GRACE)
    if state.phase is Phase.KILLING:
        return sweep(state, SIGKILL, at + TIDY_TIMEOUT)
    return state, ()


def with_no_restart(state: State) -> State:
    """Return the state after which no generation begins: the job ends with the one that is being stopped."""
    return replace(state, end=replace(state.end, no_restart=True))


def escalate(state: State, at: float) -> Result:
    """Wait no longer for a stop that has begun: SIGKILL."""
    if state.is_ending:
        state = with_no_restart(state)
    if state.phase is Phase.STOPPING:
        return kill(state, at)
    if state.phase is Phase.SWEEPING:
        return sweep(state, SIGKILL, at + KILL_TIMEOUT, sparing=False)
    return state, ()


def kill_at_once(state: State, at: float) -> Result:
    """Kill all workers without a grace period, whatever is being waited for: other nodes may go on without this one now."""
    if state.phase in (Phase.WAITING, Phase.KILLING, Phase.ENDED):
        return state, ()
    state = replace(state, why=state.why or Why.COORDINATOR, pending=frozenset())
    if not state.alive:
        return sweep(state, SIGKILL, at + KILL_TIMEOUT, sparing=False)
    state, kills = kill(state, at)
    return state, (*kills, actions.Print("the workers of this node are killed: other nodes may go on without it"))


def kill(state: State, at: float) -> Result:
    """Kill all workers."""
    state, resumes = resume_if_suspended(state, at)
    state = replace(_without_deadlines(state), phase=Phase.KILLING, phase_deadline=at + KILL_TIMEOUT)
    return state, (actions.KillWorkers(state.policy.ranks), *resumes)


def sweep(state: State, signum: int, deadline: float, *, sparing: bool = True) -> Result:
    """End the processes that the workers, which have all ended, left behind; `sparing` as in `actions.Sweep`."""
    sweeps = actions.Sweep(signum, sparing)
    state = _without_deadlines(state)
    teardown = replace(state.teardown, last_sweep=sweeps)
    return replace(state, phase=Phase.SWEEPING, phase_deadline=deadline, teardown=teardown), (sweeps,)


def _without_deadlines(state: State) -> State:
    """Forget the deadlines of a phase that is over."""
    return replace(state, who_runs_line_at=None, teardown=state.teardown.without_deadlines())


def on_swept(state: State, leftovers: tuple[str, ...]) -> Result:
    """Note which processes of the workers still live; if none does, the generation has ended here."""
    state = replace(state, teardown=replace(state.teardown, leftovers=leftovers))
    return (state, ()) if leftovers or state.phase is not Phase.SWEEPING else swept(state)


def on_sweep_timeout(state: State, at: float) -> Result:
    """Sweep again, harder: with SIGKILL, then without sparing any; then name the processes that nothing can end."""
    last = state.teardown.last_sweep
    if last is None or last.signum != SIGKILL:
        return sweep(state, SIGKILL, at + TIDY_TIMEOUT)
    if last.sparing:  # it has left out processes that clean up and then end by themselves: they had their time
        return sweep(state, SIGKILL, at + KILL_TIMEOUT - TIDY_TIMEOUT, sparing=False)
    state, then = swept(state)  # those left are in uninterruptible sleep
    return state, (actions.Print(f"could not be ended: {', '.join(state.teardown.leftovers)}"), *then)


def swept(state: State) -> Result:
    """Report that nothing of the generation is left, and wait for the coordinator, unless it has ended the job already."""
    if state.end.status is not None:
        return end(state)
    lost = (actions.ReportStopping(Why.FRONT_LOST, SIGTERM),) if state.end.front_lost else ()
    return replace(state, phase=Phase.WAITING, phase_deadline=None), (actions.ReportEnded(), *lost)


def end(state: State) -> Result:
    """End the job on this node, with the status that the coordinator has sent."""
    assert state.end.status is not None
    return replace(state, phase=Phase.ENDED, phase_deadline=None), (actions.Exit(state.end.status),)


def resume_if_suspended(state: State, at: float) -> Result:
    """Let suspended workers go on, and move every deadline by the time of the suspension; else do nothing."""
    if state.suspended_at is None:
        return state, ()
    return state.resumed(at), (actions.Resume(),)
