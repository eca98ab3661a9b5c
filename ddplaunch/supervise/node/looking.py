"""When it is looked whether the workers move, and since when none has. The coordinator judges. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.supervise.node import actions
from ddplaunch.supervise.node.state import Phase, State
from ddplaunch.supervise.node.teardown import Result


def look(state: State, at: float) -> Result:
    """Have the look that is due, or was: after a pause of everything, the time in which it could not be looked does not count."""
    late = at - (state.look_at or at)
    asks = bool(state.policy.look_every)
    return replace(state, look_at=None, still_since=state.still_since + late), (actions.Observe(asks),)


def observed(state: State, at: float, *, moved: bool) -> Result:
    """Report each look that has found no movement; what a worker did before the first look counts as one."""
    if state.phase is not Phase.RUNNING:
        return state, ()
    state = replace(state, look_at=at + (state.policy.look_every or state.policy.look_at_rest))
    if moved or not state.looks:
        return replace(state, still_since=at), ()
    return state, (actions.ReportStill(at - state.still_since),)
