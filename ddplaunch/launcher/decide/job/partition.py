"""What follows a partition, in which nodes lose each other though the coordinator hears all: the larger part goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGTERM

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events
from ddplaunch.launcher.decide.job.ending import Result, end_job, go_on_if_ended, stop_nodes, with_no_restart
from ddplaunch.launcher.decide.job.members import Member
from ddplaunch.launcher.decide.job.starting import take_back_generation
from ddplaunch.launcher.decide.job.state import REPORTED_WITHIN, Partition, State
from ddplaunch.spec.outcome import Why

_MOST_NAMED = 8  # nodes


def on_unheard(state: State, event: events.Unheard) -> State:
    """Note that a node does not hear the first one, which itself cannot say so."""
    if state.members[event.id].node_rank == 0:
        return state
    return replace(state, partition=state.partition.with_node(event.id, event.reason, event.at))


def on_partition_due(state: State, at: float, *, is_first_silent: bool) -> Result:
    """Stop all workers, and leave the smaller part behind; end the job if no part is large enough to go on.

    While the first node is silent it may be lost itself: wait until it answers or is lost.
    """
    if is_first_silent:
        return replace(state, partition=replace(state.partition, due=at + REPORTED_WITHIN)), ()
    unheard = {id: reason for id, reason in state.partition.nodes if state.members.runs(id)}
    state = replace(state, partition=Partition())
    split = _split(state, unheard, "hear")
    if split is None:  # the nodes that lost the first one have ended, or the first one has
        return state, ()
    generation = replace(state.generation, lost=(*state.generation.lost, *split.lost))
    state, releases = _leave_behind(replace(state, generation=generation), split)
    if not split.left_behind:  # no part goes on
        state = with_no_restart(state)
    state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, at)
    return state, (actions.Print(split.text), *releases, *then)


def on_left_behind_ended(state: State, member: Member, at: float) -> Result:
    """Have the agent of a node end that is left behind, now that its workers have ended; go on without it."""
    state, then = go_on_if_ended(replace(state, members=state.members.without(member.id)), at)
    return state, (actions.LeaveBehind(member.id, member.left_behind), *then)


def on_unreached(state: State, event: events.Unreached) -> Result:
    """Take the generation back that no agent knows of yet; leave the smaller part behind, or end the job."""
    split = _split(state, {id: reason for id, reason in event.nodes if id in state.members}, "reach")
    rendezvous = state.rendezvous  # as it was: no port was taken, and the next generation waits for none
    state = replace(take_back_generation(state, event.at), rendezvous=rendezvous, phase_deadline=event.at)
    if split is None:  # those nodes are lost, and the others begin again
        return state, ()
    if not split.left_behind:
        generation = replace(state.generation, lost=split.lost)
        return end_job(replace(state, why=Why.NODE_LOST, generation=generation))
    state, releases = _leave_behind(state, split)
    return state, (actions.Print(split.text), *releases)


class _Split(Struct, frozen=True):
    """Which nodes do not go on, and why."""

    left_behind: tuple[Member, ...]  # (): no part is large enough to go on alone
    lost: tuple[
        str, ...
    ]  # the nodes that the job loses, each as in `Generation.lost`; of a job that ends, the far ones
    text: str  # what happened, and who goes on, in sentences


def _split(state: State, reasons: Mapping[int, str], verb: str) -> _Split | None:
    """Return how the nodes split: the far part, those in `reasons`, does not hear, or reach, the first node; the near part does.

    The larger part goes on; of equal ones, the near. None: the far nodes are gone, or the first node has finished.
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
            members = members.with_member(replace(member, left_behind=split.text))
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
