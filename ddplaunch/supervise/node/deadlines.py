"""What is due when a deadline of the state is reached. Pure; the deadlines are set where what they limit begins."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM

from msgspec.structs import replace

from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.node import actions, looking
from ddplaunch.supervise.node.state import Phase, State
from ddplaunch.supervise.node.teardown import (
    KILL_TIMEOUT,
    SLOW_STOP,
    TIDY_TIMEOUT,
    Result,
    expected,
    kill,
    look_for_stuck,
    stop,
    sweep,
    swept,
    taken,
)
from ddplaunch.supervise.outcome import Why


def reached(state: State, at: float) -> Result:
    """Do what is due at this time, if anything is."""
    due = soonest(state.deadline, state.rest_until)
    if due is None or at < due:
        return state, ()
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if _is_due(state.raised_deadline, at) and not state.debugger:
            return replace(state, raised_deadline=None), (actions.LookForRaised(),)
        case Phase.RUNNING | Phase.SETTLING if _is_warning_due(state, at):
            return replace(state, warning_deadline=float("inf")), (actions.Print(_early_exit_warning(state)),)
        case Phase.RUNNING if state.look_at is not None and at >= state.look_at:
            return looking.look(state, at)
        case Phase.SETTLING:
            return stop(state, Why.FAILED, SIGTERM, at)
        case Phase.STOPPING if state.expected_by is not None and at >= state.expected_by:
            return taken(state, at) if state.taking else expected(state, by_cluster=False)
        case Phase.STOPPING if _is_due(state.stuck_deadline, at):
            return look_for_stuck(state, at)
        case Phase.STOPPING if _is_warning_due(state, at) and at < (state.phase_deadline or at):
            left = (state.phase_deadline or at) - at
            return replace(state, warning_deadline=at + SLOW_STOP), (actions.NameRunning(state.alive, left),)
        case Phase.STOPPING if state.debugger and state.why is Why.FAILED:
            return replace(state, phase_deadline=None), (actions.KillWorkers(state.policy.ranks - state.debugger),)
        case Phase.STOPPING:
            return kill(state, at)
        case Phase.KILLING:
            return sweep(replace(state, alive=frozenset()), SIGKILL, at, sparing=False)
        case Phase.SWEEPING if state.swept_with != SIGKILL:
            return sweep(state, SIGKILL, at + TIDY_TIMEOUT)
        case Phase.SWEEPING if state.sparing:
            return sweep(state, SIGKILL, at + KILL_TIMEOUT - TIDY_TIMEOUT, sparing=False)
        case Phase.SWEEPING:
            # uninterruptible sleep: nothing can end it, so it is named instead of waited for
            ended, then = swept(state)
            return ended, (actions.Print(f"could not be ended: {', '.join(state.left)}"), *then)
    return state, ()


def _is_due(deadline: float | None, at: float) -> bool:
    return deadline is not None and at >= deadline


def _is_warning_due(state: State, at: float) -> bool:
    return _is_due(state.warning_deadline, at) and not state.is_held


def _early_exit_warning(state: State) -> str:
    """Name the workers that ended with 0 long before the others."""
    gone = ", ".join(str(exit.rank) for exit in sorted(state.exits, key=lambda exit: exit.rank))
    others = "another worker runs" if len(state.alive) == 1 else f"{len(state.alive)} workers run"
    ranks = "rank" if len(state.exits) == 1 else "ranks"
    return (
        f"{ranks} {gone} ended with status 0 a minute ago while {others} on: a collective that waits for it never ends"
    )
