"""How a generation ends, and what follows: another one after a pause, or the end of the job with its status. Pure."""

from __future__ import annotations

from signal import SIGKILL

from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.supervise.deadline import SHORT_LIFE, pause
from ddplaunch.supervise.first_failure import failure_status, follows
from ddplaunch.supervise.job import actions
from ddplaunch.supervise.job.state import Phase, State
from ddplaunch.supervise.outcome import Why, WorkerExit

Result = tuple[State, tuple[actions.Action, ...]]

MAY_RESTART = (Why.FAILED, Why.HUNG, Why.NODE_LOST, Why.NODE_LEFT, Why.NODE_JOINED)
NO_HARM = (Why.NODE_LEFT, Why.NODE_JOINED)  # said when all stop


def stop(state: State, why: Why, signum: int, at: float, *, but: int | None = None, by_cluster: bool = False) -> Result:
    """Have the workers of all nodes stop, but for those of the node that does so already."""
    ids = tuple(member.id for member in state.taking_part if not member.has_ended and member.id != but)
    stopping = replace(state, phase=Phase.STOPPING, why=why, signum=signum, notice_at=None)
    ended, then = all_ended(stopping, at)
    return ended, (actions.StopNodes(ids, signum, by_cluster), *then) if ids else then


def all_ended(state: State, at: float) -> Result:
    """Go on when nothing is left on any node."""
    if not state.members.have_ended:
        return state, ()
    if state.phase is Phase.RUNNING:
        return end(replace(state, why=Why.FINISHED))
    if state.phase is not Phase.STOPPING:
        return state, ()
    late = state.why in (Why.TIMED_OUT, Why.HUNG, *NO_HARM)
    if late and state.exits and all(exit.stopped_with is None for exit in state.exits):
        # the time was up, all waited, or a node came or left, while what finished workers had left behind was swept
        return end(replace(state, why=Why.FAILED if state.failure else Why.FINISHED))
    return restart_or_end(state, at)


def restart_or_end(state: State, at: float) -> Result:
    """Start another generation where one is left and may follow; else end the job."""
    failure = state.failure
    if _left_after(state):
        return end(state)
    if state.why is Why.FAILED and state.lost and state.start_failure is None and (not failure or follows(failure)):
        state = replace(state, why=Why.NODE_LOST)
    if state.halted or state.start_failure is not None or state.why not in MAY_RESTART:
        return end(state)
    policy, here = state.policy, len(state.members)
    counts = state.why in (Why.FAILED, Why.HUNG) or (state.why is Why.NODE_LOST and here < policy.min_nodes)
    if counts and (state.restarts == policy.max_restarts or (here < policy.min_nodes and not policy.replaceable)):
        return end(state)
    if failure is not None and (reason := _why_in_vain(state, failure)):
        ended, then = end(state)
        return ended, (actions.Print(f"not started again: {reason}"), *then)
    lives = state.short_lives + 1 if at - state.generation_at < SHORT_LIFE else 0
    wait = max(0.0 if state.why is Why.NODE_JOINED else pause(lives), state.regroup_at - at)
    going_on = replace(
        state,
        phase=Phase.PAUSING,
        restarts=state.restarts + counts,
        short_lives=lives,
        phase_deadline=at + wait,
        port_deadline=None,
        import_failure=_import_failure(failure) if state.why is Why.FAILED else "",
    )
    return going_on, () if state.why in NO_HARM else (actions.ReportFailure(wait),)


def _why_in_vain(state: State, failure: WorkerExit) -> str:
    """Return why the next generation would fail as this one did, in a sentence; "" if nothing says so.

    Where other ranks have been stopped before they came that far, one restart shows it: what one rank lacks, as a file that
    another one was about to write, may be there then.
    """
    if state.why is not Why.FAILED or not (found := _import_failure(failure)):
        return ""
    from ddplaunch.supervise.import_failure import shared_by_all

    if shared_by_all(state.exits):
        ranks = "the only rank" if len(state.exits) == 1 else f"all {len(state.exits)} ranks"
        return f"{ranks} failed at the same import in the first lines of the program, as at any further start"
    if found == state.import_failure:
        return f"rank {failure.rank} failed at the same import in the first lines of the program as before the restart"
    return ""


def _import_failure(failure: WorkerExit | None) -> str:
    """Return where a worker failed and at which import in its first lines; "" if it was not there."""
    if failure is None or failure.error is None:
        return ""
    from ddplaunch.supervise.import_failure import import_failure  # most jobs do not fail

    found = import_failure(failure.error)
    return f"{failure.host}: {found}" if found else ""


def end(state: State, error: str = "") -> Result:
    """End the job; `error` says what was wrong, if it is not in the state."""
    state = replace(state, requeue=_left_after(state))
    status = _status(state)
    ended = replace(state, phase=Phase.ENDED, phase_deadline=None, rdzv_deadline=None, notice_at=None, status=status)
    return ended, (actions.EndJob(status, error, state.requeue),)


def _left_after(state: State) -> int:
    """Return the notice after which all workers of all nodes have left; 0 if one failed, a node was lost, or none came."""
    if not state.notice or state.abandoned or state.lost or state.start_failure is not None:
        return 0
    from ddplaunch.supervise.notice import all_left  # few jobs get a notice

    ended = state.why in (Why.FINISHED, Why.FAILED, Why.SIGNALLED, Why.FRONT_LOST)
    return state.notice if ended and all_left(state.exits, state.notice, state.signum) else 0


def _status(state: State) -> int:
    if state.requeue:
        return exitcodes.of_signal(state.requeue)
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
            return exitcodes.of_signal(SIGKILL)  # to other nodes it is a node that was lost
        case Why.NOT_MET:
            return exitcodes.RENDEZVOUS
        case Why.FINISHED:
            return exitcodes.OK
    return exitcodes.NODE_LOST
