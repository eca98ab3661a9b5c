"""The decision itself: a state and an event give the next state and what is to be done. It does nothing itself.

What an event means is said here; how workers are brought to their end, whatever the reason, in `teardown`.
"""

from __future__ import annotations

from signal import SIGCONT, SIGINT, SIGKILL, SIGTERM, SIGTSTP

from ddplaunch import exitcodes
from ddplaunch.record import replace
from ddplaunch.supervise.first_failure import follows
from ddplaunch.supervise.node.actions import Announce, Forward, Hurry, Kill, Report, Say, Start, Suspend, TellNotice
from ddplaunch.supervise.node.events import (
    Begun,
    DeadlineReached,
    Dismissed,
    Event,
    FrontLost,
    SignalReceived,
    StartFailed,
    Swept,
    ToldToKill,
    ToldToStop,
    WorkerExited,
    WorkerRaised,
    WorkerStarted,
)
from ddplaunch.supervise.node.state import Phase, Policy, State, Why
from ddplaunch.supervise.node.status import lingering
from ddplaunch.supervise.node.teardown import (
    KILL_PATIENCE,
    SWEEP_GRACE,
    TIDY_PATIENCE,
    Result,
    counted,
    end,
    hurried,
    kill,
    resume,
    stop,
    sweep,
    swept,
    told_others,
)
from ddplaunch.supervise.outcome import WorkerExit

SETTLE = 3.0  # seconds to wait for the culprit, which may have closed its connections long before it ends
LINGER = 60.0  # seconds after which a worker that ended with 0 is named while the others run on

_NO_FURTHER = (Why.SIGNALLED, Why.TIMED_OUT, Why.FRONT_LOST)  # once it was announced, no generation is to begin


def begin(policy: Policy, at: float) -> Result:
    """Start the job; with several nodes wait for the coordinator's word."""
    state = State(policy=policy, job_deadline=None if policy.timeout is None else at + policy.timeout)
    return (replace(state, phase=Phase.WAITING), ()) if policy.coordinated else _start(state, 0, at)


def step(state: State, event: Event) -> Result:
    """Give the state after `event` and what is to be done."""
    match event:
        case WorkerStarted(rank, _):
            return replace(state, pending=state.pending - {rank}, alive=state.alive | {rank}), ()
        case WorkerRaised(rank, error, _):
            return replace(state, raised=(*state.raised, (rank, error))), ()
        case StartFailed(rank, _, _, at):
            state = replace(state, pending=frozenset(), alive=state.alive - {rank})
            if not state.is_going:
                return counted(state, at)
            return stop(replace(state, start_failure=event), Why.FAILED, SIGTERM, at)
        case WorkerExited(exit, at):
            return _exited(replace(state, alive=state.alive - {exit.rank}, exits=(*state.exits, exit)), exit, at)
        case SignalReceived(signum):
            state, told = _noted(state, signum)
            state, actions = _signalled(state, event)
            return state, (*told, *actions)
        case FrontLost(at):
            if state.is_done_here:
                return told_others(state, Why.FRONT_LOST, SIGTERM)
            return stop(state, Why.FRONT_LOST, SIGTERM, at) if state.is_going else resume(state, at)
        case Begun(generation, _, _) if state.why in _NO_FURTHER:
            return replace(state, generation=generation), (Report(),)  # the coordinator has not heard of it yet
        case Begun(generation, ranks, at):
            deadline = state.job_deadline if 0 in ranks else None  # node 0 watches the time for all
            state = replace(state, policy=replace(state.policy, ranks=ranks), job_deadline=deadline)
            return _start(state, generation, at)
        case ToldToStop(signum, at):
            # a worker that failed because of what happened there may have been seen here first
            working = state.phase in (Phase.RUNNING, Phase.SETTLING)
            return stop(state, Why.TOLD, signum, at) if working else (state, ())
        case ToldToKill(at):
            return hurried(state, at)
        case Dismissed(status, at):
            return _dismissed(replace(state, dismissed=status), at)
        case Swept(left, at):
            state = replace(state, left=left)
            return (state, ()) if left or state.phase is not Phase.SWEEPING else swept(state, at)
        case DeadlineReached(at):
            return _deadline(state, at)


def _start(state: State, generation: int, at: float) -> Result:
    state = replace(
        state,
        phase=Phase.RUNNING,
        why=None,
        generation=generation,
        notice=0,  # these workers have not been told
        pending=state.policy.ranks,
        exits=(),
        raised=(),
        left=(),
        generation_at=at,
        phase_deadline=None,
        linger_deadline=None,
    )
    return state, (Start(generation),)


def _exited(state: State, exit: WorkerExit, at: float) -> Result:
    all_gone = not state.alive and not state.pending
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if exit.status != 0:
            cause_unknown = all(follows(bad) for bad in state.exits if bad.status != 0) and not _culprit_raised(state)
            # on other nodes there may be one even when all are gone here
            if cause_unknown and (not all_gone or state.policy.coordinated):
                deadline = state.phase_deadline if state.phase is Phase.SETTLING else at + SETTLE
                return replace(state, phase=Phase.SETTLING, phase_deadline=deadline), ()
            return stop(state, Why.FAILED, SIGTERM, at)
        case Phase.RUNNING | Phase.SETTLING if all_gone:
            if state.phase is Phase.SETTLING:
                if state.policy.coordinated:
                    return state, ()
                return stop(state, Why.FAILED, SIGTERM, at)
            return sweep(replace(state, why=Why.FINISHED), SIGTERM, at + SWEEP_GRACE)
        case Phase.RUNNING if state.linger_deadline is None:
            return replace(state, linger_deadline=at + LINGER), ()
    return counted(state, at)


def _culprit_raised(state: State) -> bool:
    """Whether some worker has recorded an exception that does not merely follow another's end."""
    dead = {exit.rank for exit in state.exits}
    return any(rank not in dead and not follows(error) for rank, error in state.raised)


def _noted(state: State, signum: int) -> Result:
    """Remember that the end was announced, or that a person wants it. What a signal does to the workers is not said here."""
    policy = state.policy
    if signum in policy.stop_signals - policy.notices - {SIGTERM}:
        return replace(state, abandoned=True), ()
    finished = state.phase is Phase.ENDED or (state.phase is Phase.SWEEPING and state.why is Why.FINISHED)
    if signum not in policy.notices or state.notice or finished:
        return state, ()
    return replace(state, notice=signum), (TellNotice(signum),) if policy.coordinated else ()


def _signalled(state: State, event: SignalReceived) -> Result:
    signum, at = event.signum, event.at
    if signum == SIGTSTP:
        return (replace(state, suspended_at=at), (Suspend(),)) if state.suspended_at is None else (state, ())
    if signum == SIGCONT and state.suspended_at is not None:
        return resume(state, at)
    if signum == SIGINT and state.debugger:
        return state, (Forward(signum, state.debugger),)
    if signum not in state.policy.stop_signals:
        return state, (Forward(signum, state.alive),) if state.alive else ()
    if state.is_going:
        if state.is_idle and state.why is Why.SIGNALLED:
            if not event.escalates:
                return state, ()
            if 0 in state.policy.ranks:
                return state, (Hurry(),)
            # the coordinator is elsewhere, and may not answer any more
            ended, actions = end(replace(state, dismissed=exitcodes.of_signal(state.signum)))
            return ended, (Hurry(), *actions)
        return stop(replace(state, signum=signum), Why.SIGNALLED, signum, at)
    if state.is_done_here:
        return told_others(replace(state, signum=signum), Why.SIGNALLED, signum)
    if state.why is Why.TOLD and not state.signum:
        # a scheduler sends it to all nodes, and the coordinator has heard of that from another one first
        return replace(state, signum=signum, halted=True), (Announce(Why.SIGNALLED, signum),)
    if not event.escalates:
        return _told_to_end(state, signum)
    state, actions = hurried(state, at)
    return state, (*actions, *((Hurry(),) if state.policy.coordinated else ()))


def _told_to_end(state: State, signum: int) -> Result:
    """Go on with the stop that is under way, whatever its reason is, and begin nothing after it."""
    if state.halted or state.why in _NO_FURTHER:
        return state, ()
    return replace(state, halted=True), (Announce(Why.SIGNALLED, signum),) if state.policy.coordinated else ()


def _dismissed(state: State, at: float) -> Result:
    if state.is_idle:
        return end(state)
    working = state.phase in (Phase.RUNNING, Phase.SETTLING)
    return stop(state, Why.DISMISSED, SIGTERM, at) if working else (state, ())


def _deadline(state: State, at: float) -> Result:
    if state.deadline is None or at < state.deadline:
        return state, ()
    if state.is_going and state.job_deadline is not None and at >= state.job_deadline and not state.debugger:
        return stop(state, Why.TIMED_OUT, SIGTERM, at)
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if _is_lingering(state, at):
            return replace(state, linger_deadline=float("inf")), (Say(lingering(state)),)
        case Phase.SETTLING:
            return stop(state, Why.FAILED, SIGTERM, at)
        case Phase.STOPPING if state.debugger and state.why is Why.FAILED:
            return replace(state, phase_deadline=None), (Kill(state.policy.ranks - state.debugger),)
        case Phase.STOPPING:
            return kill(state, at)
        case Phase.KILLING:
            return sweep(replace(state, alive=frozenset()), SIGKILL, at, sparing=False)
        case Phase.SWEEPING if state.swept_with != SIGKILL:
            return sweep(state, SIGKILL, at + TIDY_PATIENCE)
        case Phase.SWEEPING if state.sparing:
            return sweep(state, SIGKILL, at + KILL_PATIENCE - TIDY_PATIENCE, sparing=False)
        case Phase.SWEEPING:
            # uninterruptible sleep: nobody can end it, so it is named instead of waited for
            ended, actions = swept(replace(state, halted=True), at)
            return ended, (Say(f"could not be ended: {', '.join(state.left)}"), *actions)
        case Phase.WAITING if not state.policy.coordinated:
            return _start(state, state.generation + 1, at)
    return state, ()


def _is_lingering(state: State, at: float) -> bool:
    return state.linger_deadline is not None and at >= state.linger_deadline and not state.debugger
