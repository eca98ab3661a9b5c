"""Whether the job hangs: no worker of any node has moved for --hang-timeout, by what the agents have seen. Pure."""

from __future__ import annotations

from signal import SIGTERM

from ddplaunch.record import replace
from ddplaunch.supervise.job.ending import Result, stop
from ddplaunch.supervise.job.events import NodeStill
from ddplaunch.supervise.job.state import Phase, State
from ddplaunch.supervise.outcome import Why


def still(state: State, event: NodeStill) -> Result:
    """Note that no worker of a node has moved for some time, and stop all if that is so on every node for too long."""
    limit = state.policy.hang_timeout
    if limit is None or state.phase is not Phase.RUNNING or state.suspended_at is not None or state.is_debugged:
        return state, ()
    state = replace(state, still=state.still.with_item(event.id, (event.since, event.at)))
    # of thousands of nodes few get as far as to have all others looked at
    hangs = event.at - event.since >= limit and _all_still(state) >= limit
    return stop(state, Why.HUNG, SIGTERM, event.at) if hangs else (state, ())


def _all_still(state: State) -> float:
    """Seconds for which all nodes were seen to be still at the same time."""
    since, until = float("-inf"), float("inf")
    for member in state.taking_part:
        if not member.has_ended:
            if member.id not in state.still:
                return 0.0
            began, seen = state.still[member.id]
            since, until = max(since, began), min(until, seen)
    return until - since
