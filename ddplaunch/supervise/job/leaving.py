"""A node that leaves: SIGTERM came to one agent of an elastic job, as before a pod or spot machine is taken; the others go on.

Pure. Where the others cannot go on, and for every other signal to stop, the job ends.
"""

from __future__ import annotations

from signal import SIGTERM

from msgspec.structs import replace

from ddplaunch.supervise.job.ending import MAY_RESTART
from ddplaunch.supervise.job.events import NodeStopping
from ddplaunch.supervise.job.state import OWN, Member, Phase, State
from ddplaunch.supervise.outcome import Why

# seconds from such a signal to the next generation: who deletes the whole job does not reach all nodes at once, and node 0,
# with which the job ends, may be the last
REGROUP = 2.0


def leaves(state: State, event: NodeStopping) -> bool:
    """Whether this node leaves a job that goes on without it, or waits for another in its place."""
    policy, stay = state.policy, len(staying(state, event.id))
    asked = event.why is Why.SIGNALLED and event.signum == SIGTERM and not event.by_cluster
    is_ending = state.phase is Phase.STOPPING and (state.halted or state.why not in MAY_RESTART)
    may_leave = policy.may_leave and policy.min_nodes < policy.max_nodes and SIGTERM not in policy.notices
    return (
        asked and may_leave and event.id != OWN and not is_ending and (policy.replaceable or stay >= policy.min_nodes)
    )


def marked(state: State, who: int, at: float) -> State:
    """Note that this node leaves once nothing of the generation is left there."""
    members = state.members.with_member(replace(state.members[who], is_leaving=True))
    return replace(state, members=members, regroup_at=at + REGROUP)


def staying(state: State, who: int) -> tuple[Member, ...]:
    """The members that do not leave, when this one does."""
    return tuple(member for member in state.members.values() if member.id != who and not member.is_leaving)


def announced(state: State, who: int) -> str:
    """Say who leaves, and what the others do."""
    lacking = state.policy.min_nodes - len(staying(state, who))
    others = f"once {lacking} more {'has' if lacking == 1 else 'have'} joined" if lacking > 0 else "without it"
    return f"{state.members[who]} leaves (SIGTERM): all workers start again {others}"
