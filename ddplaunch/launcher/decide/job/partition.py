"""What follows a partition, in which nodes lose each other though the coordinator hears all: the larger part goes on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from signal import SIGTERM

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events
from ddplaunch.launcher.decide.job.ending import Result, end_job, go_on_if_ended, halt, stop
from ddplaunch.launcher.decide.job.members import Member, Members
from ddplaunch.launcher.decide.job.starting import take_back
from ddplaunch.launcher.decide.job.state import SETTLE, Partition, State
from ddplaunch.spec.outcome import Why

_MOST_NAMED = 8  # nodes


def on_unheard(state: State, event: events.Unheard) -> State:
    """Note that a node does not hear the first one, which itself cannot say so."""
    if state.members[event.id].node_rank == 0:
        return state
    return replace(state, partition=state.partition.with_node(event.id, event.reason, event.at))


def on_partition_due(state: State, at: float, *, is_first_silent: bool) -> Result:
    """Stop all workers; let the smaller part go, or end the job if no part is large enough.

    A first node that is silent may be lost itself, which will show.
    """
    if is_first_silent:
        return replace(state, partition=replace(state.partition, due=at + SETTLE)), ()
    unheard = {id: reason for id, reason in state.partition.nodes if state.members.runs(id)}
    state = replace(state, partition=Partition())
    split = _split(state, unheard, "hear")
    if split is None:
        return state, ()
    lost = replace(state.generation, lost=(*state.generation.lost, *split.lost))
    state = replace(state, generation=lost, members=_with_let_go(state.members, split))
    if not split.let_go:
        state = halt(state)
    gone = [member for member in split.let_go if not member.runs]  # with its workers, whose end was no loss
    for member in gone:
        state = replace(state, members=state.members.without(member.id))
    state, then = stop(state, Why.NODE_LOST, SIGTERM, at)
    releases = [actions.LetGo(member.id, split.text) for member in gone]
    return state, (actions.Print(split.text), *releases, *then)


def on_let_go_ended(state: State, member: Member, at: float) -> Result:
    """Let a node go whose workers have ended, and go on without it."""
    state, then = go_on_if_ended(replace(state, members=state.members.without(member.id)), at)
    return state, (actions.LetGo(member.id, member.let_go), *then)


def on_unreached(state: State, event: events.Unreached) -> Result:
    """Take the generation back that no agent knows of yet; let the smaller part go, or end the job."""
    split = _split(state, {id: reason for id, reason in event.nodes if id in state.members}, "reach")
    state = replace(take_back(state, event.at), rendezvous=state.rendezvous, phase_deadline=event.at)
    if split is None:
        return state, ()
    if not split.let_go:
        generation = replace(state.generation, lost=split.lost)
        return end_job(replace(state, why=Why.NODE_LOST, generation=generation))
    for member in split.let_go:
        state = replace(state, members=state.members.without(member.id))
    releases = [actions.LetGo(member.id, split.text) for member in split.let_go]
    return state, (actions.Print(split.text), *releases)


class _Split(Struct, frozen=True):
    """Which nodes do not go on, and why."""

    let_go: tuple[Member, ...]  # (): no part is large enough to go on alone
    lost: tuple[str, ...]  # the nodes that are lost with that, each as in `Generation.lost`
    text: str  # all of it in a sentence


def _split(state: State, reasons: Mapping[int, str], verb: str) -> _Split | None:
    """Return how the nodes part of which some do not hear, or reach, the first one; None if all of these are gone.

    Those are one part, the first node and those that hear it the other. The larger one is kept, or else the first node's.
    """
    members = state.members.taking_part
    first = next((member for member in members if member.node_rank == 0), None)
    far = tuple(member for member in members if member.id in reasons)
    if first is None or not first.runs or not far:  # a first node that has finished is needed no longer
        return None
    near = tuple(member for member in members if member.id not in reasons)
    spares = len(state.members) - len(members)
    parts = ((near, far), (far, near)) if len(near) >= len(far) else ((far, near), (near, far))
    let_go = next((left for kept, left in parts if len(kept) + spares >= state.policy.min_nodes), ())
    cut = f"{_names(far)} {'does' if len(far) == 1 else 'do'} not {verb} {first}: {reasons[far[0].id]}"
    if let_go == near:
        lost = tuple(f"{member}: {cut}" for member in near)
    else:
        lost = tuple(f"{member}: it does not {verb} {first}: {reasons[member.id]}" for member in far)
    if let_go:
        without = _names(let_go) if let_go == near else "it" if len(let_go) == 1 else "them"
        cut = f"{cut}. The job goes on without {without}"
    return _Split(let_go, lost, cut)


def _with_let_go(members: Members, split: _Split) -> Members:
    for member in split.let_go:
        members = members.with_member(replace(member, let_go=split.text))
    return members


def _names(members: Sequence[Member]) -> str:
    """Name these nodes in a sentence."""
    named = [str(member) for member in members[:_MOST_NAMED]]
    if len(members) > _MOST_NAMED:
        return f"{', '.join(named)} and {len(members) - _MOST_NAMED} more"
    return " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
