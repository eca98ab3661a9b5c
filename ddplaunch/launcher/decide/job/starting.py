"""How a generation starts: with which members, and after which announcement of its electorate. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job import actions, rendezvous
from ddplaunch.launcher.decide.job.ending import Result, cut_off
from ddplaunch.launcher.decide.job.state import (
    FIRST_NOTICE,
    NO_EXITS,
    NO_NODE_IDLE,
    SELF_ID,
    FrozenMap,
    Member,
    Members,
    Phase,
    State,
)
from ddplaunch.launcher.decide.job.succession import history, may_go_on

PORT_TIMEOUT = 2.0  # seconds that a restart waits for its port
_PORT_AGAIN = 0.1  # seconds from one try to the next


def start_if_enough(state: State, at: float, *, is_restart: bool) -> Result:
    """Start if enough agents have joined. A first start waits some time for more than `min_nodes`, a restart does not."""
    has_enough = len(state.members) >= state.policy.min_nodes
    if is_complete(state) or (has_enough and is_restart):
        return start(state, at)
    return replace(state, phase_deadline=at + state.policy.last_call if has_enough else None), ()


def is_complete(state: State) -> bool:
    """Whether no further node can join."""
    policy = state.policy
    return len(state.members) >= max(policy.min_nodes, min(state.most_running, policy.max_nodes - state.given_up))


def waiting(state: State, at: float) -> State:
    """Wait for nodes."""
    rdzv_deadline, notice_at = at + state.policy.rdzv_timeout, at + FIRST_NOTICE
    return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=None, rdzv_deadline=rdzv_deadline, notice_at=notice_at)


def start(state: State, at: float) -> Result:
    """Begin the next generation with all members but spares; before that, if another may take over, let them know who decides."""
    state = replace(state, electorates=_committed(state))
    if not may_go_on(state):
        return cut_off(state)
    if at < state.regroup_at:
        until = waiting(state, at).rdzv_deadline if state.rdzv_deadline is None else state.rdzv_deadline
        return replace(waiting(state, at), phase_deadline=state.regroup_at, rdzv_deadline=until), ()
    ordered = rendezvous.by_node_rank(rendezvous.taking_part(state))
    if not state.policy.has_successors:
        return _begin(state, ordered, at)
    term = state.term + 1
    kept = {one.term for one in state.electorates}
    voting = {member.id: Vote(term, rank) for rank, member in enumerate(ordered)}
    members = Members.of(_with_votes(member, kept, voting.get(member.id)) for member in state.members.values())
    state = replace(
        state,
        phase=Phase.ANNOUNCING,
        phase_deadline=None,
        rdzv_deadline=None,
        notice_at=None,
        members=members,
        term=term,
        electorates=(*state.electorates, Electorate(term, len(ordered))),
        # also who takes no part, but has let this coordinator go on: it could let another one do so with the same vote
        unacknowledged=FrozenMap.of({one.id: True for one in members.values() if one.votes and one.id != SELF_ID}),
    )
    announced = actions.Announce(tuple(member.id for member in ordered), state.electorates, history(state, at))
    state, then = _begin_if_acknowledged(state, at)
    return state, (announced, *then)


def _committed(state: State) -> tuple[Electorate, ...]:
    """Return the electorates without that of a generation which was announced here, and does not begin."""
    committed = tuple(one for one in state.electorates if one.term != state.term or not state.unacknowledged)
    # before the first generation, nothing else decides between this coordinator and nodes that know of the first electorate
    return committed or state.electorates[:1]


def _with_votes(member: Member, kept: Collection[int], new: Vote | None = None) -> Member:
    """Return the member with its votes in the electorates of these terms, and with a new one if there is one."""
    votes = tuple(vote for vote in member.votes if vote.term in kept)
    return replace(member, votes=votes if new is None else (*votes, new))


def on_acknowledged(state: State, id: int, at: float) -> Result:
    """Note that a node knows who decides in the next generation, which begins with the last of them."""
    if id not in state.unacknowledged:
        return state, ()
    return _begin_if_acknowledged(replace(state, unacknowledged=state.unacknowledged.without(id)), at)


def _begin_if_acknowledged(state: State, at: float) -> Result:
    """Begin once all nodes know who decides; if others have joined meanwhile, let all know of these first."""
    if state.phase is not Phase.ANNOUNCING or state.unacknowledged:
        return state, ()
    members = Members.of(_with_votes(member, {state.term}) for member in state.members.values())
    state = replace(state, members=members, electorates=state.electorates[-1:], took_over=False, lost_votes=())
    if any(not member.votes for member in rendezvous.taking_part(state).values()):
        return start(state, at)
    ordered = sorted((member for member in members.values() if member.votes), key=lambda one: one.votes[0].rank)
    return _begin(state, ordered, at)


def _begin(state: State, ordered: Sequence[Member], at: float) -> Result:
    """Begin the next generation with these members; where some are new, warn of differences between the nodes."""
    newcomers = [(rank, member) for rank, member in enumerate(ordered) if member.node_rank is None]
    ranked = [replace(member, node_rank=rank, has_ended=False) for rank, member in enumerate(ordered)]
    taking_part = {member.id for member in ranked}
    spares = [replace(member, node_rank=None) for member in state.members.values() if member.id not in taking_part]
    state = replace(
        state,
        phase=Phase.RUNNING,
        phase_deadline=None,
        members=Members.of(sorted([*ranked, *spares], key=lambda member: member.id)),
        why=None,
        signum=0,
        suspended_at=None,
        rdzv_deadline=None,
        notice_at=None,
        generation=state.generation + 1,
        generation_at=at,
        node_exits=NO_EXITS,
        lost=(),
        notice=0,  # these workers have not received it
        debugging=frozenset(),
        named_as_debugging=frozenset(),
        idle=NO_NODE_IDLE,
    )
    lines = rendezvous.disagreements(ordered) if newcomers else []
    if state.policy.spares and state.generation > 0:
        lines += [f"{member.host} is node {rank} from now on" for rank, member in newcomers]
    ids = tuple(member.id for member in ordered)
    return state, (*map(actions.Print, lines), actions.BeginGeneration(state.generation, ids, state.restarts))


def take_back(state: State, at: float) -> State:
    """Take back a generation that no agent knows of yet, because its port was taken; begin again after a pause."""
    return replace(
        state,
        phase=Phase.PAUSING,
        members=Members.of(replace(member, has_ended=True) for member in state.members.values()),
        generation=state.generation - 1,
        phase_deadline=at + _PORT_AGAIN,
        port_deadline=at + PORT_TIMEOUT if state.port_deadline is None else state.port_deadline,
    )
