"""How workers are stopped: stop, kill, sweep; then a report to the coordinator, or the exit.

Each function gives the state after it and what is to be done, as `step` does. Pure.
"""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from msgspec.structs import replace

from ddplaunch.supervise.node import actions
from ddplaunch.supervise.node.state import Phase, State
from ddplaunch.supervise.outcome import Why

SWEEP_GRACE = 1.0  # seconds that what workers left behind gets after a clean end
TIDY_TIMEOUT = 3.0  # seconds for those that clean up: torch's manager of shared memory ends 2 s after its users
EXPECTED_WITHIN = 2.0  # seconds in which a cluster that signals all workers itself reaches the last node
SILENCE = 30.0  # seconds without any output after which Ctrl-C may be meant for a job that does not move
SLOW_STOP = 5.0  # seconds of a long stop after which those that still run are named, and again
HANG_GRACE = (
    5.0  # seconds that those have which wait in a collective of a job that hangs: no handler of Python runs there
)
KILL_TIMEOUT = 5.0  # seconds to wait for SIGKILL to work before a process counts as unkillable

_ORDERED = (Why.COORDINATOR, Why.TIMED_OUT, Why.JOB_ENDED)  # by the coordinator, which needs no report of it

# stops of which the report may say where the workers were
_EXPLAINED = (Why.FAILED, Why.TIMED_OUT, Why.COORDINATOR, Why.SIGNALLED)

_SOON = (Why.FAILED, Why.COORDINATOR)  # those of them that are not to wait for an answer
_LEAST_LOOKS = 3  # without any movement, before the coordinator stops a job that hangs

Result = tuple[State, tuple[actions.Action, ...]]


def stop(state: State, why: Why, signum: int, at: float, *, by_cluster: bool = False, explained: bool = True) -> Result:
    """Ask the workers to end, with a grace period for all; without any, only report it.

    `by_cluster`: the cluster asks them itself, and has done so on this node if it was not an order that came first.
    `explained`: it is to be found out before where they are.
    """
    ours = why not in _ORDERED
    reported: tuple[actions.Action, ...] = (actions.ReportStopping(why, signum, by_cluster),) if ours else ()
    state, resumed = resume(state, at)
    if state.is_waiting:
        return replace(state, why=why), (*reported, *resumed)
    state = replace(state, why=why, pending=frozenset(), phase=Phase.STOPPING)
    asked = _given_grace(state, at)
    held = state.debugger if why is Why.FAILED else frozenset()
    if by_cluster and not ours and state.alive:
        return replace(asked, expected=signum, expected_by=at + EXPECTED_WITHIN), resumed
    if (
        explained
        and why in _EXPLAINED
        and state.policy.stacks_within
        and state.alive
        and not (state.debugger or by_cluster)
    ):
        by = at + state.policy.stacks_within
        looks = state.policy.look_every
        hangs = why is Why.COORDINATOR and 0 < _LEAST_LOOKS * looks <= at - state.still_since
        taking = replace(_given_grace(asked, by), taking=True, expected=signum, expected_by=by, hangs=hangs)
        taken = actions.TakeStacks(state.policy.stacks_within, if_joined=why in _SOON and not looks, ras=hangs)
        return taking, (taken, *reported, *resumed)
    stops = actions.StopWorkers(signum, state.policy.ranks - held, by_cluster)
    then: tuple[actions.Action, ...] = (stops, *reported, *resumed)
    if held:
        # the user of the debugger decides when it ends
        then = (*then, actions.Print(f"{_failed(state)}; rank {min(held)} stays in the debugger"))
    if not state.alive:
        sweeping, sweeps = sweep(state, signum, at + state.policy.grace_period)
        return sweeping, (*then, *sweeps)
    return asked, then


def _given_grace(state: State, at: float) -> State:
    """Let the grace period begin at this time."""
    warns = state.policy.grace_period > 2 * SLOW_STOP
    deadline = at + state.policy.grace_period
    return replace(state, phase_deadline=deadline, warning_deadline=at + SLOW_STOP if warns else None)


def taken(state: State, at: float, waiting: frozenset[int] = frozenset()) -> Result:
    """Have the workers asked to end, now that it is known where they are, or that some do not say so.

    `waiting` are those that wait in a collective. In a job that hangs most of them never come to a handler of the signal.
    """
    state = _given_grace(state, at)
    if state.hangs and waiting and state.policy.grace_period > HANG_GRACE:
        state = replace(state, waiting=waiting, stuck_deadline=at + HANG_GRACE)
    return expected(state, by_cluster=False)


def look_for_stuck(state: State, at: float) -> Result:
    """Have it found out which of those that waited when the job hung still do; what they all wait for may have ended since."""
    state = replace(state, stuck_deadline=None)
    if not (waiting := state.waiting & state.alive):
        return state, ()
    if state.warning_deadline is not None:
        state = replace(state, warning_deadline=at + SLOW_STOP)  # the others are named once these are killed
    return state, (actions.LookForStuck(waiting),)


def kill_stuck(state: State, ranks: frozenset[int]) -> Result:
    """Kill those of these workers that still live, and say so."""
    stuck = ranks & state.waiting & state.alive
    return state, (actions.NameStuck(stuck, HANG_GRACE), actions.KillWorkers(stuck)) if stuck else ()


def expected(state: State, *, by_cluster: bool) -> Result:
    """Have the workers asked by the cluster, or by us in its place."""
    stops = actions.StopWorkers(state.expected, state.policy.ranks, by_cluster)
    return replace(state, taking=False, expected=0, expected_by=None), (stops,)


def _failed(state: State) -> str:
    first = state.failure
    if first is None and state.raised:
        rank, error = state.raised[0]
        return f"rank {rank} failed ({error.type})"
    if first is None:
        return "a worker could not be started"
    return f"rank {first.rank} failed ({first.error.type if first.error else first.how})"


def stop_others(state: State, why: Why, signum: int, *, by_cluster: bool = False) -> Result:
    """Have the other nodes stop; here the workers have finished, and what they left behind is being ended already."""
    return replace(state, why=why), (actions.ReportStopping(why, signum, by_cluster),)


def sweep_if_ended(state: State, at: float) -> Result:
    """One worker less; when the last one is gone, what they left behind is next."""
    if not state.alive and not state.pending:
        if state.phase is Phase.STOPPING:
            # the grace period is one for all: the rest of it is for what workers left behind
            return sweep(state, state.signum or SIGTERM, state.phase_deadline or at + SWEEP_GRACE)
        if state.phase is Phase.KILLING:
            return sweep(state, SIGKILL, at + TIDY_TIMEOUT)
    return state, ()


def escalate(state: State, at: float) -> Result:
    """Wait no longer for a stop that is under way."""
    if not state.is_going:
        state = replace(state, halted=True)
    if state.phase is Phase.STOPPING:
        return kill(state, at)
    if state.phase is Phase.SWEEPING:
        return sweep(state, SIGKILL, at + KILL_TIMEOUT, sparing=False)
    return state, ()


def kill(state: State, at: float) -> Result:
    """Wait for the workers no longer."""
    state, resumed = resume(state, at)
    killing = replace(state, phase=Phase.KILLING, phase_deadline=at + KILL_TIMEOUT)
    return killing, (actions.KillWorkers(state.policy.ranks), *resumed)


def sweep(state: State, signum: int, deadline: float, *, sparing: bool = True) -> Result:
    """End what the workers, which have ended, left behind."""
    state = replace(state, phase=Phase.SWEEPING, phase_deadline=deadline, swept_with=signum, sparing=sparing)
    return state, (actions.Sweep(signum, sparing),)


def swept(state: State) -> Result:
    """Leave the rest to the coordinator, unless it has reported how the job ends."""
    if state.status is not None:
        return end(state)
    lost = (actions.ReportStopping(Why.FRONT_LOST, SIGTERM),) if state.front_lost else ()
    return replace(state, phase=Phase.WAITING, phase_deadline=None), (actions.ReportEnded(), *lost)


def end(state: State) -> Result:
    """Let the job end on this node."""
    assert state.status is not None
    return replace(state, phase=Phase.ENDED, phase_deadline=None), (actions.Exit(state.status),)


def resume(state: State, at: float) -> Result:
    """Let the workers go on, if they are suspended, with every deadline moved by the time that they were."""
    if state.suspended_at is None:
        return state, ()
    pause = at - state.suspended_at

    def later(deadline: float | None) -> float | None:
        return None if deadline is None else deadline + pause

    state = replace(
        state,
        suspended_at=None,
        expected_by=later(state.expected_by),
        stuck_deadline=later(state.stuck_deadline),
        phase_deadline=later(state.phase_deadline),
        warning_deadline=later(state.warning_deadline),
        raised_deadline=later(state.raised_deadline),
        look_at=later(state.look_at),
        still_since=state.still_since + pause,
    )
    return state, (actions.Resume(),)
