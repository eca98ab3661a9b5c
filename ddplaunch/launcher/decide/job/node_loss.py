"""What the coordinator decides when a node is lost or leaves, or when nodes lose each other (a partition): who goes on. Pure.

A node is lost when its agent is heard no more, or has ended (`on_agent_lost`). It leaves an elastic job when SIGTERM came to its
agent, as before a pod or a spot machine is taken, or SIGHUP, since its terminal was closed (`leaves_job`). In both cases all
workers are stopped; `ending` then starts all again on the nodes that are left, or ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGHUP, SIGTERM

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events
from ddplaunch.launcher.decide.job.ending import (
    NO_FAILURE,
    Result,
    end_job,
    ended_here,
    go_on_if_ended,
    leave_job,
    stop_nodes,
    with_no_restart,
)
from ddplaunch.launcher.decide.job.members import SELF_ID, Member
from ddplaunch.launcher.decide.job.starting import start_if_enough, take_back_generation
from ddplaunch.launcher.decide.job.state import BETWEEN_GENERATIONS, FURTHER_REPORTS_WITHIN, Partition, Phase, State
from ddplaunch.spec.outcome import ENDED_ITSELF, MAY_RESTART, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.words import signal_name

# seconds from SIGTERM to a node until the next generation: somebody who deletes the whole job does not reach all nodes at
# once, and node 0, with which the job ends, may be the last
PAUSE_AFTER_LEAVE = 2.0


# --- a node that is lost


def on_agent_lost(state: State, lost: events.AgentLost) -> Result:
    """Decide what the loss of a node means for the job; called once the connection of its agent has ended, for any reason."""
    member, at = state.members[lost.id], lost.at
    # when its lease is over, the lost agent has killed its workers; until then they may live
    state = _with_wait_for_lease(state, lost)
    state = replace(state, members=state.members.without(lost.id))
    if state.phase in BETWEEN_GENERATIONS and _cannot_go_on_without(state):
        # between generations it has no node rank: the failure summary names it by the rank that its user gave it
        named = member if member.requested_rank is None else replace(member, node_rank=member.requested_rank)
        generation = replace(state.generation, lost=(f"{named}: {lost.reason}",))
        return end_job(replace(state, why=Why.NODE_LOST, generation=generation))
    if state.phase is Phase.RENDEZVOUS:
        state, then = start_if_enough(state, at, is_restart=not state.generation.is_before_first)
        return state, (actions.Print(f"{member.host} has left: {lost.reason}"), *then)
    if member.runs:
        return _on_running_node_lost(state, member, lost.reason, at)
    was_spare = state.policy.spares and member.node_rank is None
    how = "has left" if lost.reason == ENDED_ITSELF else f"is lost: {lost.reason}"
    state, then = go_on_if_ended(state, at)
    return state, (actions.Print(f"{member.host}, a spare, {how}"), *then) if was_spare else then


def _on_running_node_lost(state: State, member: Member, reason: str, at: float) -> Result:
    """Stop all other nodes, since workers of the lost node may have been running; during a stop, wait for one node fewer."""
    state = replace(state, workers_may_have_begun=True)
    if member.is_leaving:
        # the others start again without it in any case: its loss is no failure, but how its workers have ended is not known
        node_exits = state.generation.node_exits.with_item(member.id, ())
        return go_on_if_ended(replace(state, generation=replace(state.generation, node_exits=node_exits)), at)
    state = replace(state, generation=state.generation.with_lost(f"{member}: {reason}"))
    if state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, at)
    else:
        why = Why.NODE_LOST if state.why in NO_FAILURE else state.why
        state, then = go_on_if_ended(replace(state, why=why), at)
    return state, (actions.Print(f"{member} is lost: {reason}"), *then)


def _with_wait_for_lease(state: State, lost: events.AgentLost) -> State:
    """Return the state in which no generation begins until the lease of a lost node is over: until then its workers may live.

    Without a lease, the job needs all its nodes and ends. Nothing is waited for if the workers are known to have ended.
    """
    if not state.policy.lease or lost.has_ended or not state.members.runs(lost.id):
        return state
    renewed_at = lost.at if lost.renewed_at is None else lost.renewed_at
    return replace(state, rendezvous=state.rendezvous.no_start_before(renewed_at + state.policy.lease))


def _cannot_go_on_without(state: State) -> bool:
    """Whether a job between two generations cannot go on without the node that was lost, since none comes in its place."""
    policy = state.policy
    has_too_few = not state.generation.is_before_first and len(state.members) < policy.min_nodes
    return policy.needs_all or (has_too_few and not policy.nodes_are_replaceable)


# --- a node that leaves


def leaves_job(state: State, event: events.NodeStopping) -> bool:
    """Whether this node leaves a job that goes on without it, or waits for another in its place; else the job ends."""
    policy = state.policy
    asks_to_leave = event.why is Why.SIGNALLED and event.signum in (SIGTERM, SIGHUP) and not event.by_cluster
    is_elastic = policy.min_nodes < policy.max_nodes
    may_leave = policy.nodes_may_leave and is_elastic and SIGTERM not in policy.notices
    return asks_to_leave and may_leave and not is_ending(state) and _goes_on_without(state, event.id)


def _goes_on_without(state: State, id: int) -> bool:
    return state.policy.nodes_are_replaceable or _number_staying(state, id) >= state.policy.min_nodes


def is_ending(state: State) -> bool:
    """Whether no generation follows the one that is being stopped."""
    return state.phase is Phase.STOPPING and (state.end.no_restart or state.why not in MAY_RESTART)


def _number_staying(state: State, id: int) -> int:
    """Return how many members stay when this one leaves."""
    return sum(member.id != id and not member.is_leaving for member in state.members.values())


def on_node_leaving(state: State, event: events.NodeStopping) -> Result:
    """Go on without this node: its agent ends once the generation has ended there, and all other nodes start again."""
    id, at, member = event.id, event.at, state.members[event.id]
    lacking = state.policy.min_nodes - _number_staying(state, id)
    when = f"once {lacking} more {'has' if lacking == 1 else 'have'} joined" if lacking > 0 else "without it"
    line = actions.Print(f"{member} leaves ({signal_name(event.signum)}): all workers start again {when}")
    # the signal may still be on its way to further nodes: no generation begins before
    members = state.members.with_member(replace(member, leave_signal=event.signum))
    state = replace(state, members=members, rendezvous=state.rendezvous.no_start_before(at + PAUSE_AFTER_LEAVE))
    if not member.runs:
        all_start_again = state.phase in (Phase.STOPPING, Phase.PAUSING)  # else the line would not be true
        state, then = on_agent_lost(state, events.AgentLost(id, ENDED_ITSELF, at))
        return state, (*((line,) if all_start_again else ()), *then, actions.Release(id, event.signum))
    if state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LEFT, SIGTERM, at, but=id)
        return state, (line, *then)
    # a stop goes on, and keeps its reason, unless that was only a node that joined
    return _with_reason_node_left(state), (line,)


def _with_reason_node_left(state: State) -> State:
    """Return a state in which workers are being stopped, also because a node leaves: a node that joined is the lesser reason."""
    return replace(state, why=Why.NODE_LEFT) if state.why is Why.NODE_JOINED else state


# --- node 0 that leaves, with the coordinator: the other nodes wait until another node 0 is started


def others_would_wait(state: State) -> bool:
    """Whether the other nodes would wait for node 0 to be started again, should it end; else the job ends with node 0."""
    policy = state.policy
    return policy.is_elastic and policy.nodes_are_replaceable and len(state.members) > 1


def on_node_0_leaving(state: State, event: events.NodeStopping) -> Result:
    """Have the other nodes wait for node 0, once the workers have ended everywhere: all have the time to save something."""
    own = replace(state.members[SELF_ID], leave_signal=event.signum)
    line = f"{own} leaves ({signal_name(event.signum)}): the others wait until node 0 is started again"
    state = replace(state, members=state.members.with_member(own))
    if state.phase in BETWEEN_GENERATIONS:
        state, then = leave_job(state, event.signum)
    elif state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LEFT, SIGTERM, event.at, but=SELF_ID)
    else:  # a stop goes on, and keeps its reason, unless that was only a node that joined
        state, then = _with_reason_node_left(state), ()
    return state, (actions.Print(line), *then)


def on_own_unfit(state: State, reason: str) -> Result:
    """Leave the job to the other nodes if these wait for node 0, on which no worker has been started; else do nothing."""
    if not others_would_wait(state) or is_ending(state):
        return state, ()
    return ended_here(state, exitcodes.NODE_LOST), (actions.LeaveJob(0, reason),)


_MOST_NAMED = 8  # nodes


def on_first_node_unheard(state: State, event: events.FirstNodeUnheard) -> State:
    """Note that a node does not hear the first one, which itself cannot say so."""
    if state.members[event.id].node_rank == 0:
        return state
    return replace(state, partition=state.partition.with_node(event.id, event.reason, event.at))


def on_partition_due(state: State, at: float, *, is_first_silent: bool) -> Result:
    """Stop all workers, and leave the smaller part behind; end the job if no part is large enough to go on.

    While the first node is silent it may be lost itself: wait until it answers or is lost.
    """
    if is_first_silent:
        return replace(state, partition=replace(state.partition, due=at + FURTHER_REPORTS_WITHIN)), ()
    unheard = {id: reason for id, reason in state.partition.not_hearing if state.members.runs(id)}
    state = replace(state, partition=Partition())
    split = _split(state, unheard, verb="hear")
    if split is None:  # the nodes that lost the first one have ended, or the first one has
        return state, ()
    generation = replace(state.generation, lost=(*state.generation.lost, *split.lost))
    state, releases = _leave_behind(replace(state, generation=generation), split)
    if not split.left_behind:  # no part is large enough to go on: the job ends
        state = with_no_restart(state)
    state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, at)
    return state, (actions.Print(split.text), *releases, *then)


def on_left_behind_ended(state: State, member: Member, at: float) -> Result:
    """Have the agent of a node end that is left behind, now that its workers have ended; go on without it."""
    state, then = go_on_if_ended(replace(state, members=state.members.without(member.id)), at)
    return state, (actions.LeaveBehind(member.id, member.why_left_behind), *then)


def on_first_node_unreached(state: State, event: events.FirstNodeUnreached) -> Result:
    """Take the generation back that no agent knows of yet; leave the smaller part behind, or end the job."""
    split = _split(state, {id: reason for id, reason in event.nodes if id in state.members}, verb="reach")
    # at once, and without the wait for a free port that `take_back_generation` begins: no port was taken
    rendezvous = state.rendezvous
    state = replace(take_back_generation(state, event.at), rendezvous=rendezvous, phase_deadline=event.at)
    if split is None:  # those nodes are members no more: the others begin again
        return state, ()
    if not split.left_behind:  # no part is large enough to go on
        generation = replace(state.generation, lost=split.lost)
        return end_job(replace(state, why=Why.NODE_LOST, generation=generation))
    state, releases = _leave_behind(state, split)
    return state, (actions.Print(split.text), *releases)


class _Split(Struct, frozen=True):
    """Which nodes do not go on, and why."""

    left_behind: tuple[Member, ...]  # (): no part is large enough to go on alone
    # the nodes that the job loses, each as in `Generation.lost`; of a job that ends, the far ones
    lost: tuple[str, ...]
    text: str  # what happened, and who goes on, in sentences


def _split(state: State, reasons: Mapping[int, str], verb: str) -> _Split | None:
    """Return how the nodes split: the far part, those in `reasons`, does not hear, or reach, the first node; the near part does.

    The larger part goes on; of equal ones, the near. `left_behind` is the other one, () if neither has enough nodes to go on.
    None: there is no split, for the far nodes are gone, or the first node has finished.
    """
    members = state.members.taking_part
    first = next((member for member in members if member.node_rank == 0), None)
    far = tuple(member for member in members if member.id in reasons)
    if first is None or not first.runs or not far:  # a first node that has finished is needed no longer
        return None
    near = tuple(member for member in members if member.id not in reasons)
    spares = len(state.members) - len(members)
    larger, smaller = (near, far) if len(near) >= len(far) else (far, near)
    ways = ((larger, smaller), (smaller, larger))  # which part goes on, and which is left behind
    left_behind = next((rest for kept, rest in ways if len(kept) + spares >= state.policy.min_nodes), ())
    what = f"{_names(far)} {'does' if len(far) == 1 else 'do'} not {verb} {first}: {reasons[far[0].id]}"
    if left_behind == near:
        lost = tuple(f"{member}: {what}" for member in near)
    else:
        lost = tuple(f"{member}: it does not {verb} {first}: {reasons[member.id]}" for member in far)
    if left_behind:
        without = _names(left_behind) if left_behind == near else "it" if len(left_behind) == 1 else "them"
        what = f"{what}. The job goes on without {without}"
    return _Split(left_behind, lost, what)


def _leave_behind(state: State, split: _Split) -> Result:
    """Have the agents of the smaller part end: now where no worker runs, elsewhere once the workers have been stopped."""
    members, ends_now = state.members, []
    for member in split.left_behind:
        if members.runs(member.id):
            members = members.with_member(replace(member, why_left_behind=split.text))
        else:
            members = members.without(member.id)
            ends_now.append(actions.LeaveBehind(member.id, split.text))
    return replace(state, members=members), tuple(ends_now)


def _names(members: Sequence[Member]) -> str:
    """Name these nodes in a sentence."""
    named = [str(member) for member in members[:_MOST_NAMED]]
    if len(members) > _MOST_NAMED:
        return f"{', '.join(named)} and {len(members) - _MOST_NAMED} more"
    return " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
