"""How a coordinator begins, and how a generation starts: with which members, and after which announcement. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import Electorate, History, Vote
from ddplaunch.launcher.decide.job import actions, events, rendezvous
from ddplaunch.launcher.decide.job.ending import Result, cut_off, end_job
from ddplaunch.launcher.decide.job.limits import Limits
from ddplaunch.launcher.decide.job.members import SELF_ID, FrozenMap, Member, Members, Policy
from ddplaunch.launcher.decide.job.rendezvous import NEXT_LINE, Rendezvous
from ddplaunch.launcher.decide.job.restarts import Generation, Restarts
from ddplaunch.launcher.decide.job.state import Phase, State
from ddplaunch.launcher.decide.job.succession import Succession
from ddplaunch.spec.outcome import Why
from ddplaunch.system.loop.deadline import is_due

_PORT_AGAIN = 0.1  # seconds from one try to have the port to the next


def begin(policy: Policy, at: float, first_term: int) -> State:
    """Return the first state, in which the job waits for the agents; `first_term` is that of the first generation."""
    limits = Limits(job_deadline=None if policy.timeout is None else at + policy.timeout)
    before_first = Generation(term=first_term - 1)
    return State(policy=policy, rendezvous=Rendezvous().opened(policy, at), generation=before_first, limits=limits)


def take_over(
    policy: Policy,
    past: History,
    electorates: tuple[Electorate, ...],
    since: float,
    at: float,
    within: float,
    *,
    told: Iterable[tuple[Vote, ...]] = (),
    skipped: int = 0,
) -> State:
    """Return the state of a coordinator that takes over and waits for the other nodes, so many seconds at most.

    The workers that ran are being stopped on all nodes. `since` is when `past` was announced; for `told` and `skipped` see
    `Succession.of_successor`.
    """
    return State(
        policy=policy,
        phase=Phase.STOPPING,
        why=Why.NODE_LOST,
        has_begun=True,
        generation=Generation(number=past.generation, term=past.term, began_at=since),
        succession=Succession.of_successor(electorates, told, skipped, at, within),
        restarts=Restarts.of(past, since),
        limits=Limits(job_deadline=None if past.time_left is None else since + past.time_left),
    )


def without_coordinator(state: State, lost: str, votes: tuple[Vote, ...], *, has_ended: bool) -> State:
    """Note how the last coordinator, which had these votes, was lost: "node 0 (a): connection closed"."""
    succession = state.succession.with_ended(votes) if has_ended else replace(state.succession, lost_votes=votes)
    return replace(state, generation=replace(state.generation, lost=(lost,)), succession=succession)


def history(state: State, at: float) -> History:
    """Return what the nodes of the next generation are to know, should they lose this coordinator."""
    return state.restarts.history(state.generation, state.time_left(at), at)


def start_if_enough(state: State, at: float, *, is_restart: bool) -> Result:
    """Start if enough agents have joined. A first start waits some time for more than `min_nodes`, a restart does not."""
    policy, members = state.policy, state.members
    has_enough = len(members) >= policy.min_nodes
    if state.rendezvous.is_complete(policy, members) or (has_enough and is_restart):
        return start(state, at)
    return replace(state, phase_deadline=at + policy.last_call if has_enough else None), ()


def wait_for_nodes(state: State, at: float) -> State:
    """Wait for nodes from now on."""
    opened = state.rendezvous.opened(state.policy, at)
    return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=None, rendezvous=opened)


def start(state: State, at: float) -> Result:
    """Begin the next generation with all members but spares; before that, if another may take over, let them know who decides."""
    state = replace(state, succession=state.succession.committed())
    if not state.may_go_on:
        return cut_off(state)
    if at < state.rendezvous.regroup_at:
        regrouping = state.rendezvous.regrouping(state.policy, at)
        until = regrouping.regroup_at
        return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=until, rendezvous=regrouping), ()
    ordered = rendezvous.by_node_rank(rendezvous.next_members(state.policy, state.members))
    return _announce(state, ordered, at) if state.policy.has_successors else _begin(state, ordered, at)


def _announce(state: State, ordered: Sequence[Member], at: float) -> Result:
    """Let the nodes of the next generation know who decides if this coordinator is lost; begin once they have acknowledged."""
    term = state.succession.term + 1
    kept = {one.term for one in state.succession.electorates}
    voting = {member.id: Vote(term, rank) for rank, member in enumerate(ordered)}
    members = Members.of(_with_votes(member, kept, voting.get(member.id)) for member in state.members.values())
    # also who takes no part, but has let this coordinator go on: it could let another one do so with the same vote
    unacknowledged = FrozenMap.of({one.id: True for one in members.values() if one.votes and one.id != SELF_ID})
    state = replace(
        state,
        phase=Phase.ANNOUNCING,
        phase_deadline=None,
        members=members,
        rendezvous=state.rendezvous.closed(),
        succession=state.succession.announced(len(ordered), unacknowledged),
    )
    ids = tuple(member.id for member in ordered)
    announced = actions.Announce(ids, state.succession.electorates, history(state, at))
    state, then = _begin_if_acknowledged(state, at)
    return state, (announced, *then)


def _with_votes(member: Member, kept: Collection[int], new: Vote | None = None) -> Member:
    """Return the member with its votes in the electorates of these terms, and with a new one if there is one."""
    votes = tuple(vote for vote in member.votes if vote.term in kept)
    return replace(member, votes=votes if new is None else (*votes, new))


def on_acknowledged(state: State, id: int, term: int, at: float) -> Result:
    """Note that a node knows who decides in the next generation, which begins with the last of them."""
    succession = state.succession
    if term != succession.term or id not in succession.unacknowledged:
        return state, ()  # of an announcement that another one has replaced
    succession = replace(succession, unacknowledged=succession.unacknowledged.without(id))
    return _begin_if_acknowledged(replace(state, succession=succession), at)


def _begin_if_acknowledged(state: State, at: float) -> Result:
    """Begin once all nodes know who decides; if others have joined meanwhile, let all know of these first."""
    if state.phase is not Phase.ANNOUNCING or state.succession.unacknowledged:
        return state, ()
    members = Members.of(_with_votes(member, {state.succession.term}) for member in state.members.values())
    state = replace(state, members=members, succession=state.succession.begun())
    if any(not member.votes for member in rendezvous.next_members(state.policy, members).values()):
        return start(state, at)
    ordered = sorted((member for member in members.values() if member.votes), key=lambda one: one.votes[0].rank)
    return _begin(state, ordered, at)


def _begin(state: State, ordered: Sequence[Member], at: float) -> Result:
    """Begin the next generation with these members; where some are new, warn of differences between the nodes."""
    newcomers = [(rank, member) for rank, member in enumerate(ordered) if member.node_rank is None]
    ranked = [replace(member, node_rank=rank, has_ended=False) for rank, member in enumerate(ordered)]
    taking_part = {member.id for member in ranked}
    spares = [replace(member, node_rank=None) for member in state.members.values() if member.id not in taking_part]
    members = Members.of(sorted([*ranked, *spares], key=lambda member: member.id))
    state = state.next_generation(members, at)
    number = state.generation.number
    lines = rendezvous.disagreements(ordered) if newcomers else []
    if state.policy.spares and number > 0:
        lines += [f"{member.host} is node {rank} from now on" for rank, member in newcomers]
    ids = tuple(member.id for member in ordered)
    return state, (*map(actions.Print, lines), actions.BeginGeneration(number, ids, state.restarts.number))


def take_back(state: State, at: float) -> State:
    """Take back a generation that no agent knows of yet, because its port was taken; begin again after a pause."""
    return replace(
        state,
        phase=Phase.PAUSING,
        phase_deadline=at + _PORT_AGAIN,
        members=Members.of(replace(member, has_ended=True) for member in state.members.values()),
        generation=replace(state.generation, number=state.generation.number - 1),
        rendezvous=state.rendezvous.without_port(at),
    )


# --- nodes that do not come


def on_withdrawn(state: State, event: events.Withdrawn) -> Result:
    """Report that a node will not join; end a job that needs the node, or start if all other nodes are there."""
    policy, text = state.policy, f"{event.node} does not take part: {event.reason}"
    if not policy.replaceable and not policy.dispatched:  # a dispatcher sends `NodeGivenUp` for the same node
        state = with_given_up(state)
    is_enough = policy.max_nodes - state.rendezvous.given_up >= policy.min_nodes
    if state.phase is Phase.RENDEZVOUS and (policy.needs_all or not is_enough):
        return end_job(replace(state, why=Why.NOT_MET), text, event.hint)
    state, then = start_if_complete(state, event.at)
    return state, (actions.Print(text), *then)


def with_given_up(state: State) -> State:
    """Wait for one node fewer."""
    return replace(state, rendezvous=replace(state.rendezvous, given_up=state.rendezvous.given_up + 1))


def start_if_complete(state: State, at: float) -> Result:
    """Start if the job waited for nodes, and no further node can join."""
    is_complete = state.rendezvous.is_complete(state.policy, state.members)
    return start(state, at) if state.phase is Phase.RENDEZVOUS and is_complete else (state, ())


def on_rendezvous_due(state: State, at: float) -> Result:
    """End a rendezvous in vain, or print which nodes it waits for."""
    policy, members = state.policy, state.members
    if not is_due(state.rendezvous.deadline, at):
        line = state.rendezvous.waiting(policy, members, at)
        return replace(state, rendezvous=replace(state.rendezvous, line_at=at + NEXT_LINE)), (actions.Print(line),)
    joined, missing = rendezvous.joined(policy, members), rendezvous.missing(policy, members)
    text = f"the rendezvous timed out: {joined}; missing: {missing}"
    if state.generation.number < 0:
        return end_job(replace(state, why=Why.NOT_MET), text)
    hint = "type the same command on another node in time, or allow fewer nodes, as `--nnodes MIN:MAX` does"
    return end_job(replace(state, why=Why.NODE_LOST), f"too few nodes are left, and {text}", hint)
