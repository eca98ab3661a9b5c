"""How workers are brought to their end: stop, kill, sweep; then another start, a word to the coordinator, or the exit.

Each function gives the state after it and what is to be done, as `step` does. Pure.
"""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from ddplaunch.record import replace
from ddplaunch.supervise import backoff
from ddplaunch.supervise.node.actions import Action, Announce, Exit, Kill, Report, Resume, Retry, Say, Stop, Sweep
from ddplaunch.supervise.node.state import Phase, State, Why
from ddplaunch.supervise.node.status import failed, left_after, status_of

SWEEP_GRACE = 1.0  # seconds that what workers left behind gets after a clean end
TIDY_PATIENCE = 3.0  # seconds for those that tidy up: torch's manager of shared memory ends 2 s after its users
KILL_PATIENCE = 5.0  # seconds to wait for SIGKILL to work before a process counts as unkillable

Result = tuple[State, tuple[Action, ...]]


def stop(state: State, why: Why, signum: int, at: float) -> Result:
    """Ask the workers to end, with a grace period for all; without any, only say so."""
    ours = state.policy.coordinated and why not in (Why.TOLD, Why.DISMISSED)
    announced: tuple[Action, ...] = (Announce(why, signum),) if ours else ()
    if state.is_idle:
        return replace(_awake(state, at), why=why, job_deadline=None), announced
    state = replace(_awake(state, at), why=why, pending=frozenset(), phase=Phase.STOPPING)
    deadline = at + state.policy.grace_period
    held = state.debugger if why is Why.FAILED else frozenset()
    actions: tuple[Action, ...] = (Stop(signum, state.policy.ranks - held), *announced)
    if held:
        # whoever sits at the debugger decides when it ends
        actions = (*actions, Say(f"{failed(state)}; rank {state.policy.debug_rank} stays in the debugger"))
    if not state.alive:
        sweeping, sweeps = sweep(state, signum, deadline)
        return sweeping, (*actions, *sweeps)
    return replace(state, phase_deadline=deadline), actions


def told_others(state: State, why: Why, signum: int) -> Result:
    """Have the other nodes stop; here the workers have finished, and what they left behind is being ended already."""
    return replace(state, why=why, job_deadline=None), (Announce(why, signum),)


def counted(state: State, at: float) -> Result:
    """One worker less; when the last one is gone, what they left behind is next."""
    if not state.alive and not state.pending:
        if state.phase is Phase.STOPPING:
            # the grace period is one for all: the rest of it is for what workers left behind
            return sweep(state, state.signum or SIGTERM, state.phase_deadline or at + SWEEP_GRACE)
        if state.phase is Phase.KILLING:
            return sweep(state, SIGKILL, at + TIDY_PATIENCE)
    return state, ()


def hurried(state: State, at: float) -> Result:
    """Wait no longer for a stop that is under way; whoever does not want to wait wants no restart either."""
    if not state.is_going:
        state = replace(state, halted=True)
    if state.phase is Phase.STOPPING:
        return kill(state, at)
    if state.phase is Phase.SWEEPING:
        return sweep(state, SIGKILL, at + KILL_PATIENCE, sparing=False)
    return state, ()


def kill(state: State, at: float) -> Result:
    """Wait for the workers no longer."""
    state = _awake(state, at)
    return replace(state, phase=Phase.KILLING, phase_deadline=at + KILL_PATIENCE), (Kill(state.policy.ranks),)


def sweep(state: State, signum: int, deadline: float, *, sparing: bool = True) -> Result:
    """End what the workers, who are gone, left behind."""
    state = replace(state, phase=Phase.SWEEPING, phase_deadline=deadline, swept_with=signum, sparing=sparing)
    return state, (Sweep(signum, sparing),)


def swept(state: State, at: float) -> Result:
    """Go on where nothing is left of a generation."""
    if state.policy.coordinated and state.dismissed is None:
        return replace(state, phase=Phase.WAITING, phase_deadline=None), (Report(),)
    can_restart = state.why is Why.FAILED and state.start_failure is None and not state.halted
    can_restart = can_restart and state.dismissed is None and not left_after(state)
    if can_restart and state.generation < state.policy.max_restarts:
        lives = state.short_lives + 1 if at - state.generation_at < backoff.SHORT_LIFE else 0
        wait = backoff.pause(lives)
        waiting = replace(state, phase=Phase.WAITING, short_lives=lives, phase_deadline=at + wait)
        return waiting, (Retry(wait),)
    return end(state)


def end(state: State) -> Result:
    """Let the job end on this node."""
    state = replace(state, requeue=left_after(state))
    status = status_of(state)
    return replace(state, phase=Phase.ENDED, phase_deadline=None, status=status), (Exit(status),)


def resume(state: State, at: float) -> Result:
    """Let the workers go on, if they are suspended."""
    return (state, ()) if state.suspended_at is None else (_awake(state, at), (Resume(),))


def _awake(state: State, at: float) -> State:
    """Let every clock run on that stood still while the job was suspended."""
    if state.suspended_at is None:
        return state
    pause = at - state.suspended_at

    def later(deadline: float | None) -> float | None:
        return None if deadline is None else deadline + pause

    return replace(
        state,
        suspended_at=None,
        phase_deadline=later(state.phase_deadline),
        job_deadline=later(state.job_deadline),
        linger_deadline=later(state.linger_deadline),
    )
