"""How a generation ends, and what follows: another one after a pause, or the end of the job with its status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from signal import SIGKILL, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import ended_otherwise, failed_itself, failure_status, follows
from ddplaunch.launcher.decide.job import actions
from ddplaunch.launcher.decide.job.restarts import (
    failed_import,
    failed_machine,
    is_budget_spent,
    same_exception,
    sick_node,
    why_in_vain,
    with_progress,
)
from ddplaunch.launcher.decide.job.state import Phase, State
from ddplaunch.launcher.decide.job.succession import may_go_on, why_not
from ddplaunch.spec.outcome import Why, WorkerExit
from ddplaunch.system import exitcodes

Result = tuple[State, tuple[actions.Action, ...]]

SHORT_LIFE = 5.0  # seconds; a generation that fails sooner makes the next one wait
_LONGEST_PAUSE = 30.0  # seconds
MAY_RESTART = (Why.FAILED, Why.HUNG, Why.NODE_LOST, Why.NODE_LEFT, Why.NODE_JOINED)
HARMLESS = (Why.NODE_LEFT, Why.NODE_JOINED)  # reasons of a restart that are no failure: the stop itself was printed


def stop(state: State, why: Why, signum: int, at: float, *, but: int | None = None, by_cluster: bool = False) -> Result:
    """Order all nodes to stop their workers, except for the node `but`, which does so already."""
    ids = tuple(id for id in state.running if id != but)
    state, then = go_on_if_ended(replace(state, phase=Phase.STOPPING, why=why, signum=signum, notice_at=None), at)
    return state, (actions.StopNodes(ids, signum, by_cluster), *then) if ids else then


def go_on_if_ended(state: State, at: float) -> Result:
    """Decide what follows once no process of the generation is left on any node."""
    if not state.members.have_ended:
        return state, ()
    if state.phase is Phase.RUNNING:
        return _end_after_notice(replace(state, why=Why.FINISHED))
    if state.phase is not Phase.STOPPING or state.gather_until is not None:
        return state, ()
    no_failure = state.why in (Why.TIMED_OUT, Why.HUNG, *HARMLESS) and not state.lost
    if no_failure and state.exits and all(exit.stopped_with is None for exit in state.exits):
        # the reason to stop came when all workers had ended, while processes that they left behind were being swept
        return end(replace(state, why=Why.FAILED if state.failure else Why.FINISHED))
    return _restart_or_end(state, at)


def _restart_or_end(state: State, at: float) -> Result:
    """Start another generation where that is allowed and may help; else end the job."""
    failure = state.failure
    if _exited_after_notice(state):
        return _end_after_notice(state)
    only_follows = state.start_failure is None and (failure is None or follows(failure))
    if state.why is Why.FAILED and state.lost and only_follows:
        state = replace(state, why=Why.NODE_LOST)
    if state.start_failure is not None and state.why in HARMLESS:
        state = replace(state, why=Why.FAILED)  # for a node that left or joined alone, another generation would follow
    if state.halted or state.start_failure is not None or state.why not in MAY_RESTART:
        return end(state)
    policy = state.policy
    too_few = len(state.members) < policy.min_nodes
    # of an elastic job that has nodes enough a lost one costs no restart
    counts = state.why in (Why.FAILED, Why.HUNG) or (state.why is Why.NODE_LOST and too_few)
    if state.why not in HARMLESS and not (counts and policy.max_restarts == 0):
        state = with_progress(state)
    if counts and not state.gave_up and (is_budget_spent(state, at) or (too_few and not policy.replaceable)):
        return end(state)
    if state.why not in HARMLESS and (reason := why_in_vain(state)):
        return _announced(f"not started again: {reason}", end(state))
    if not may_go_on(state):
        return cut_off(state)
    if failure is None or (sick := sick_node(state)) is None:
        return _restart(state, failure, at, counts=counts)
    left = replace(state, members=state.members.without(sick.id))
    if not may_go_on(left):
        return _restart(state, failure, at, counts=counts)
    reason = f"left out, since its workers failed first twice in a row: {failure.how}"
    state, then = _restart(left, failure, at, counts=counts)
    hint = "`ddplaunch doctor` examines it"
    return state, (*then, actions.Refuse(sick.id, reason, exitcodes.NODE_LOST, hint, unfit=sick))


def cut_off(state: State) -> Result:
    """End the job here, since nodes that are cut off may be going on with it."""
    hint = "`ddplaunch ps` on the other nodes shows whether it goes on there; if it does not, start it again"
    ended_idle = state.phase is not Phase.STOPPING
    return end(replace(state, why=Why.NODE_LOST, ended_idle=ended_idle, is_cut_off=True), why_not(state), hint)


def _end_after_notice(state: State) -> Result:
    """End a job whose workers have exited; after a notice it is not queued again if it made no progress for too long."""
    if _exited_after_notice(state) and (seen := with_progress(state)).gave_up:
        return _announced(f"not queued again: {why_in_vain(seen)}", end(seen))
    return end(state)


def _announced(text: str, result: Result) -> Result:
    state, then = result
    return state, (actions.Print(text), *then)


def _restart(state: State, failure: WorkerExit | None, at: float, *, counts: bool) -> Result:
    """Pause before the next generation, the longer the more generations in a row failed at once; report this failure."""
    lives = state.short_lives + 1 if at - state.generation_at < SHORT_LIFE else 0
    wait = max(0.0 if state.why is Why.NODE_JOINED else pause(lives), state.regroup_at - at)
    failed = state.why is Why.FAILED
    state = replace(
        state,
        phase=Phase.PAUSING,
        restarts=state.restarts + counts,
        spent=(*state.spent, at)[-state.policy.max_restarts :] if counts else state.spent,
        short_lives=lives,
        phase_deadline=at + wait,
        port_deadline=None,
        import_failure=failed_import(failure) if failed else "",
        same_exception=same_exception(state) if failed else "",
        failed_machine=failed_machine(state),
    )
    return state, () if state.why in HARMLESS else (actions.ReportFailure(wait),)


def pause(short_lives: int) -> float:
    """Return the seconds to wait after so many generations in a row that failed at once."""
    return min(2.0 ** (short_lives - 2), _LONGEST_PAUSE) if short_lives > 1 else 0.0


def end(state: State, error: str = "", hint: str = "") -> Result:
    """End the job; `error` says what was wrong, if it is not in the state, and `hint` what to type."""
    state = replace(state, requeue=0 if state.gave_up else _exited_after_notice(state))
    status = _status(state)
    ended = replace(
        state,
        phase=Phase.ENDED,
        phase_deadline=None,
        rdzv_deadline=None,
        notice_at=None,
        gather_until=None,
        status=status,
    )
    return ended, (actions.EndJob(status, error, state.requeue, hint),)


def _status(state: State) -> int:
    """Return the exit status of the job."""
    if state.requeue:
        return exitcodes.of_signal(state.requeue)
    if state.gave_up:
        return exitcodes.NO_PROGRESS
    match state.why:
        case Why.FAILED if state.start_failure is not None:
            return state.start_failure.status
        case Why.FAILED if (first := state.failure) is not None:
            return failure_status(first)
        case Why.SIGNALLED:
            return exitcodes.of_signal(state.signum)
        case Why.TIMED_OUT:
            return exitcodes.TIMEOUT
        case Why.HUNG:
            return exitcodes.HANG
        case Why.FRONT_LOST if len(state.members) == 1:
            return exitcodes.of_signal(SIGKILL)  # of several nodes, one without its front is a lost node
        case Why.NOT_MET:
            return exitcodes.RENDEZVOUS
        case Why.FINISHED:
            return exitcodes.OK
    return exitcodes.NODE_LOST


# --- a notice: a signal by which a scheduler or a user announces the end of the job, for which the workers save and exit


def _exited_after_notice(state: State) -> int:
    """Return the notice after which all workers of all nodes exited; 0 if one failed, a node was lost, or none came."""
    if not state.notice or state.abandoned or state.lost or state.start_failure is not None:
        return 0
    has_ended = state.why in (Why.FINISHED, Why.FAILED, Why.SIGNALLED, Why.FRONT_LOST)
    return state.notice if has_ended and all_exited_after(state.exits, state.notice, state.signum) else 0


def all_exited_after(exits: Iterable[WorkerExit], *signals: int) -> bool:
    """Whether all of these workers exited by one of these signals, SIGTERM or their own choice, and none failed by itself."""
    noticed = {SIGTERM, *signals} - {0}
    return not any(_failed_otherwise(end, noticed) for end in exits)


def _failed_otherwise(end: WorkerExit, noticed: set[int]) -> bool:
    """Whether a worker failed, and not by one of the signals `noticed`, nor because another worker had ended."""
    if end.status == 0 or follows(end):
        return False
    # a signal ends a program without a handler; shells and many handlers exit with 128 + its number
    by_signal = end.signal in noticed or end.code in {exitcodes.of_signal(signum) for signum in noticed}
    if by_signal and (end.error is None or end.error.type in ("KeyboardInterrupt", "SystemExit")):
        return False
    return failed_itself(end) or ended_otherwise(end)
