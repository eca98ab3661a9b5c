"""Whether the job hangs: no worker of any node has moved for long, by what the agents have seen. Pure."""

from __future__ import annotations

from signal import SIGTERM

from ddplaunch.record import replace
from ddplaunch.supervise.job import actions
from ddplaunch.supervise.job.ending import Result, stop
from ddplaunch.supervise.job.events import NodeStill
from ddplaunch.supervise.job.state import Phase, State
from ddplaunch.supervise.outcome import Why

NOTICED = 300.0  # seconds without any movement after which that is said, where --hang-timeout does not end the job


def still(state: State, event: NodeStill) -> Result:
    """Note that no worker of a node has moved for some time; if that is so on every node for too long, stop all, or say so."""
    if state.phase is not Phase.RUNNING or state.suspended_at is not None or state.is_debugged:
        return state, ()
    state = replace(state, still=state.still.with_item(event.id, (event.since, event.at)))
    # of thousands of nodes few get as far as to have all others looked at
    limit = state.policy.hang_timeout or NOTICED
    since, until = _all_still(state) if event.at - event.since >= limit else (0.0, 0.0)
    if until - since < limit:
        return state, ()
    if state.policy.hang_timeout is not None:
        return stop(state, Why.HUNG, SIGTERM, event.at)
    if since <= state.noticed_at:
        return state, ()  # nothing has moved since it was said
    return replace(state, noticed_at=event.at), (actions.NameStill(until - since),)


def _all_still(state: State) -> tuple[float, float]:
    """From when to when all nodes were seen to be still at the same time."""
    since, until = float("-inf"), float("inf")
    for member in state.taking_part:
        if not member.has_ended:
            if member.id not in state.still:
                return 0.0, 0.0
            began, seen = state.still[member.id]
            since, until = max(since, began), min(until, seen)
    return since, until
