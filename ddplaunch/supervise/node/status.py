"""What a state amounts to: the status that the command ends with, and what a person should know of it. Pure."""

from __future__ import annotations

from signal import SIGKILL

from ddplaunch import exitcodes
from ddplaunch.record import replace
from ddplaunch.supervise.first_failure import failure_status
from ddplaunch.supervise.node.state import State, Why


def failed(state: State) -> str:
    """Say in a few words who failed."""
    first = state.failure
    if first is None:
        return "a worker could not be started"
    return f"rank {first.rank} failed ({first.error.type if first.error else first.how})"


def lingering(state: State) -> str:
    """Say that some workers ended well long before the others."""
    gone = ", ".join(str(exit.rank) for exit in sorted(state.exits, key=lambda exit: exit.rank))
    others = "another worker runs" if len(state.alive) == 1 else f"{len(state.alive)} workers run"
    return f"rank {gone} ended with status 0 a minute ago while {others} on: a collective that waits for it never ends"


def left_after(state: State) -> int:
    """Give the notice after which all workers of this node, the only one, have left; 0 if one failed, or none came.

    Of several nodes the coordinator says it.
    """
    if not state.notice or state.abandoned or state.policy.coordinated or state.start_failure is not None:
        return 0
    from ddplaunch.supervise.notice import all_left  # few jobs get a notice

    raised = dict(state.raised)
    exits = [replace(end, error=end.error or raised.get(end.rank)) for end in state.exits]
    ended = state.why in (Why.FINISHED, Why.FAILED, Why.SIGNALLED)
    return state.notice if ended and all_left(exits, state.notice, state.signum) else 0


def status_of(state: State) -> int:
    """Give the exit status of a job that has come to its end."""
    if state.dismissed is not None:
        return state.dismissed
    if state.requeue:
        return exitcodes.of_signal(state.requeue)
    match state.why:
        case Why.FAILED if state.start_failure is not None:
            return state.start_failure.status
        case Why.FAILED:
            first = state.failure
            assert first is not None
            return failure_status(first)
        case Why.SIGNALLED:
            return exitcodes.of_signal(state.signum)
        case Why.TIMED_OUT:
            return exitcodes.TIMEOUT
        case Why.FRONT_LOST:
            return exitcodes.of_signal(SIGKILL)
    return exitcodes.OK
