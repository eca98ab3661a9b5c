"""How a coordinator begins, and how a generation starts: with which members, and after which announcement. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events, rendezvous
from ddplaunch.launcher.decide.job.ending import Result, end_job
from ddplaunch.launcher.decide.job.limits import Limits
from ddplaunch.launcher.decide.job.members import Member, Members, Policy
from ddplaunch.launcher.decide.job.rendezvous import NEXT_LINE, Rendezvous
from ddplaunch.launcher.decide.job.state import Phase, State
from ddplaunch.spec.outcome import Why
from ddplaunch.system.loop.deadline import is_due

_PORT_AGAIN = 0.1  # seconds from one try to have the port to the next


def begin(policy: Policy, at: float) -> State:
    """Return the first state, in which the job waits for the agents."""
    limits = Limits(job_deadline=None if policy.timeout is None else at + policy.timeout)
    # who followed a coordinator before this one has no workers by then
    rendezvous = replace(Rendezvous().opened(policy, at), alone_at=at + policy.lease)
    return State(policy=policy, rendezvous=rendezvous, limits=limits)


def start_if_enough(state: State, at: float, *, is_restart: bool) -> Result:
    """Start if enough agents have joined. A first start waits some time for more than `min_nodes`, a restart does not."""
    policy, members = state.policy, state.members
    has_enough = len(members) >= policy.min_nodes
    if state.rendezvous.is_complete(policy, members) or (has_enough and is_restart):
        return start(state, at)
    due = max(at + policy.last_call, state.rendezvous.alone_at)
    return replace(state, phase_deadline=due if has_enough else None), ()


def wait_for_nodes(state: State, at: float) -> State:
    """Wait for nodes from now on."""
    opened = state.rendezvous.opened(state.policy, at)
    return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=None, rendezvous=opened)


def start(state: State, at: float) -> Result:
    """Begin the next generation with all members but spares, once no worker of the last one can be left on any node."""
    until = state.rendezvous.earliest
    # a spare may be here ahead of a node whose workers still follow the coordinator before this one
    if state.policy.replaceable and state.generation.number < 0 and len(state.members) < state.policy.max_nodes:
        until = max(until, state.rendezvous.alone_at)
    if at < until:
        regrouping = state.rendezvous.regrouping(state.policy, at)
        return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=until, rendezvous=regrouping), ()
    ordered = rendezvous.by_node_rank(rendezvous.next_members(state.policy, state.members))
    return _begin(state, ordered, at)


def _begin(state: State, ordered: Sequence[Member], at: float) -> Result:
    """Begin the next generation with these members; where some are new, warn of differences between the nodes."""
    newcomers = [(rank, member) for rank, member in enumerate(ordered) if member.node_rank is None]
    ranked = [replace(member, node_rank=rank, has_ended=False, has_run=True) for rank, member in enumerate(ordered)]
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
