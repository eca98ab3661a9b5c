"""How a coordinator begins, and when and with which nodes a generation (one start of all workers) begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events, rendezvous
from ddplaunch.launcher.decide.job.ending import Result, end_job
from ddplaunch.launcher.decide.job.limits import Limits
from ddplaunch.launcher.decide.job.members import Member, Members, Policy
from ddplaunch.launcher.decide.job.rendezvous import NEXT_LINE_AFTER, Rendezvous
from ddplaunch.launcher.decide.job.restarts import Generation
from ddplaunch.launcher.decide.job.state import Phase, State
from ddplaunch.spec.outcome import Why
from ddplaunch.system.process.clock import is_due

IS_A_SPARE = "{} is a spare: it waits until a node is lost or leaves"
_PORT_TRIED_EVERY = 0.1  # seconds from one try to have the port to the next


def first_state(policy: Policy, at: float, first_term: int) -> State:
    """Return the first state, in which the job waits for the agents.

    `first_term` is the term of the first generation: a number that rises with each generation, also from one coordinator to the
    next (DDPLAUNCH_TERM).
    """
    # where agents are started again one by one, nodes may have followed a coordinator that ended here just before: their
    # workers have been killed by the end of a lease
    earliest_start_if_incomplete = at + policy.lease if policy.nodes_are_replaceable else at
    return State(
        policy=policy,
        rendezvous=Rendezvous(earliest_start_if_incomplete=earliest_start_if_incomplete).opened(policy, at),
        generation=Generation(term=first_term - 1),
        limits=Limits(job_deadline=None if policy.timeout is None else at + policy.timeout),
    )


def start_if_enough(state: State, at: float, *, is_restart: bool) -> Result:
    """Start if enough agents have joined. A first start waits some time for more than `min_nodes`, a restart does not.

    Neither begins before `may_begin_at`, when no worker of another generation can be left: `start_generation` sees to it.
    """
    policy, members, deadline = state.policy, state.members, state.rendezvous.deadline
    is_enough = len(members) >= policy.min_nodes
    if state.rendezvous.is_complete(policy, members) or (is_enough and is_restart):
        return start_generation(state, at)
    if not is_enough:
        return replace(state, phase_deadline=None), ()  # the deadline of the rendezvous runs
    # `last_call`: seconds for further nodes to join
    waits_until = max(at + policy.last_call, state.may_begin_at)
    return replace(state, phase_deadline=waits_until if deadline is None else min(waits_until, deadline)), ()


def wait_for_nodes(state: State, at: float) -> State:
    """Return the state in which the job waits for nodes, from this time on."""
    opened = state.rendezvous.opened(state.policy, at)
    return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=None, rendezvous=opened)


def start_generation(state: State, at: float) -> Result:
    """Begin the next generation with all members but spares, once no worker of another one can be left on any node."""
    if at < state.may_begin_at:
        postponed = state.rendezvous.postponed(state.policy, at)
        return replace(state, phase=Phase.RENDEZVOUS, phase_deadline=state.may_begin_at, rendezvous=postponed), ()
    ordered = rendezvous.by_node_rank(rendezvous.next_members(state.policy, state.members))
    return _start_with(state, ordered, at)


def _start_with(state: State, ordered: Sequence[Member], at: float) -> Result:
    """Begin the next generation with these members, by node rank; all others are spares, which wait until one is lost or leaves.

    Where some are new, warn of differences between the nodes.
    """
    # without a node rank a member has taken no part in the last generation
    newcomers = [(rank, member) for rank, member in enumerate(ordered) if member.node_rank is None]
    ranked = [replace(member, node_rank=rank, has_ended=False) for rank, member in enumerate(ordered)]
    taking_part = {member.id for member in ranked}
    spares = [replace(member, node_rank=None) for member in state.members.values() if member.id not in taking_part]
    is_first = state.generation.is_before_first
    members = Members.of(sorted([*ranked, *spares], key=lambda member: member.id))
    state = state.next_generation(members, at)
    number = state.generation.number
    lines = rendezvous.disagreements(ordered) if newcomers else []
    if state.policy.spares and not is_first:
        lines += [f"{member.host} is node {rank} from now on" for rank, member in newcomers]
    elif state.policy.spares:
        lines += [IS_A_SPARE.format(member.host) for member in spares]
    ids = tuple(member.id for member in ordered)
    return state, (*map(actions.Print, lines), actions.BeginGeneration(number, ids, state.restarts.number))


def take_back_generation(state: State, at: float) -> State:
    """Take back a generation that no agent knows of: its port is taken, or nodes do not reach the first one. Start again soon."""
    return replace(
        state,
        phase=Phase.PAUSING,
        phase_deadline=at + _PORT_TRIED_EVERY,
        # no node has processes of it; their node ranks stay, by which they come first in the next generation
        members=Members.of(replace(member, has_ended=True) for member in state.members.values()),
        generation=replace(state.generation, number=state.generation.number - 1),
        rendezvous=state.rendezvous.without_port(at),  # it waits for a port from now on, for a limited time
    )


# --- nodes that do not come


def on_withdrawn(state: State, event: events.Withdrawn) -> Result:
    """Report that a node will not join; end a job that needs the node, or start if all other nodes are there."""
    policy, text = state.policy, f"{event.node} does not take part: {event.reason}"
    if not policy.nodes_are_replaceable:  # else another agent may come in its place
        state = with_given_up(state, event.node_rank)
    may_be_enough = policy.max_nodes - state.rendezvous.number_given_up >= policy.min_nodes
    if state.phase is Phase.RENDEZVOUS and (policy.needs_all or not may_be_enough):
        return end_job(replace(state, why=Why.NOT_MET), text, event.hint)
    state, then = start_if_complete(state, event.at)
    return state, (actions.Print(text), *then)


def with_given_up(state: State, node_rank: int | None) -> State:
    """Return the state in which the job does not wait for this node; None: for one node fewer, whichever it is."""
    return replace(state, rendezvous=state.rendezvous.without_node(node_rank))


def start_if_complete(state: State, at: float) -> Result:
    """Start if the job waited for nodes, and no further node can join."""
    is_complete = state.rendezvous.is_complete(state.policy, state.members)
    return start_generation(state, at) if state.phase is Phase.RENDEZVOUS and is_complete else (state, ())


def on_rendezvous_due(state: State, at: float) -> Result:
    """Print which nodes the rendezvous (the wait for nodes) waits for; once it has waited long enough, end the job."""
    policy, members = state.policy, state.members
    if not is_due(state.rendezvous.deadline, at):
        line = state.rendezvous.status_line(policy, members, at, state.waits_for_leases_until)
        waits = replace(state.rendezvous, status_line_at=at + NEXT_LINE_AFTER)
        return replace(state, rendezvous=waits), (actions.Print(line),)
    joined, missing = rendezvous.describe_joined(policy, members), rendezvous.describe_missing(policy, members)
    text = f"the rendezvous timed out: {joined}; missing: {missing}"
    if state.generation.is_before_first:
        return end_job(replace(state, why=Why.NOT_MET), text)
    hint = "type the same command on another node in time, or allow fewer nodes, as `--nnodes MIN:MAX` does"
    return end_job(replace(state, why=Why.NODE_LOST), f"too few nodes are left, and {text}", hint)
