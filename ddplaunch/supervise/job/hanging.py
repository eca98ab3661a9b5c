"""Whether the job hangs: no worker of any node has moved for long, by what the agents have seen. Pure."""

from __future__ import annotations

from signal import SIGTERM

from msgspec.structs import replace

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
    state = replace(
        state,
        still=state.still.with_item(event.id, (event.since, event.at)),
        moved_at=max(state.moved_at, event.since),
    )
    limit = state.policy.hang_timeout or NOTICED
    # of thousands of nodes few get as far as to have all others looked at
    if event.at - event.since < limit or state.moved_at <= state.noticed_at or _waits_for_another(state, event.id):
        return state, ()
    running = [member.id for member in state.taking_part if not member.has_ended]
    if (missing := next((id for id in running if id not in state.still), None)) is not None:
        return replace(state, still_missing=missing), ()
    since = max(state.still[id][0] for id in running)
    until = min(state.still[id][1] for id in running)
    if until - since < limit:
        # each of these has to report once more; the one that did last is likely to be the last again
        too_old = [id for id in running if state.still[id][1] - since < limit]
        return replace(state, still_missing=max(too_old, key=lambda id: state.still[id][1])), ()
    if state.policy.hang_timeout is not None:
        return stop(state, Why.HUNG, SIGTERM, event.at)
    state = replace(state, moved_at=since)
    if since <= state.noticed_at:
        return state, ()  # nothing has moved since it was said
    return replace(state, noticed_at=event.at), (actions.NameStill(until - since),)


def _waits_for_another(state: State, id: int) -> bool:
    """Whether all nodes were not still at the last scan, and cannot be before a node other than this has reported again."""
    missing = state.members.get(state.still_missing) if state.still_missing is not None else None
    return missing is not None and missing.id != id and missing.place is not None and not missing.has_ended
