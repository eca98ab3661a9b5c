"""What outlives a coordinator: how another one takes over from it, and whether either may go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import MAX_SPENT, Electorate, History, Vote
from ddplaunch.launcher.decide.job.state import FIRST_NOTICE, Member, Phase, Policy, State
from ddplaunch.spec.outcome import Why
from ddplaunch.system.fields import line

# seconds from an answer of a node, which node 0 has received, in which node 0 neither goes on without this node nor comes to an
# end later than that: who refuses this node a connection then has ended, and has begun nothing without it
AT_ONCE = 4.0
SETTLE = (
    3.0  # seconds for the last nodes, once enough are there: a silent coordinator is noticed up to a heartbeat apart
)


def history(state: State, at: float) -> History:
    """Return what the nodes of the next generation are to know, should they lose this coordinator."""
    return History(
        generation=state.generation + 1,
        restarts=state.restarts,
        spent=tuple(at - spent for spent in state.spent[-MAX_SPENT:]),
        time_left=None if state.job_deadline is None else max(0.0, state.job_deadline - at),
        best_step=state.best_step,
        in_vain=state.in_vain,
        short_lives=state.short_lives,
        import_failure=line(state.import_failure),
        failed_machine=line(state.failed_machine),
        same_exception=line(state.same_exception),
    )


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

    What ran is being stopped on all of them. `since` is when `past` was announced, to nodes of which some had the votes
    `told` then. It leaves out the next `skipped` terms, a number drawn by chance: a vote counts by its term, and other
    coordinators may go on from the same electorate.
    """
    return State(
        policy=policy,
        phase=Phase.STOPPING,
        why=Why.NODE_LOST,
        has_begun=True,
        generation=past.generation,
        generation_at=since,
        term=electorates[-1].term + skipped,
        electorates=electorates,
        took_over=True,
        told=tuple(told),
        gather_until=at + within,
        notice_at=at + FIRST_NOTICE,
        restarts=past.restarts,
        spent=tuple(since - spent for spent in past.spent),
        job_deadline=None if past.time_left is None else since + past.time_left,
        best_step=past.best_step,
        in_vain=past.in_vain,
        short_lives=past.short_lives,
        import_failure=past.import_failure,
        failed_machine=past.failed_machine,
        same_exception=past.same_exception,
    )


def without_coordinator(state: State, lost: str, votes: tuple[Vote, ...], *, has_ended: bool) -> State:
    """Note how the last coordinator, which had these votes, was lost: "node 0 (a): connection closed"."""
    state = replace(state, lost=(lost,), lost_votes=votes)
    return with_ended(replace(state, lost_votes=()), votes) if has_ended else state


def with_ended(state: State, votes: tuple[Vote, ...]) -> State:
    """Note that the agent of the node with these votes has ended."""
    return replace(state, electorates=tuple(one.without(votes) for one in state.electorates))


def with_begun(state: State, member: Member) -> State:
    """Drop the electorates before that of a generation which this member has begun: all nodes have acknowledged that one."""
    terms = {vote.term for vote in member.votes}
    if not member.runs or len(terms) != 1 or terms.isdisjoint(one.term for one in state.electorates):
        return state
    return replace(state, electorates=tuple(one for one in state.electorates if one.term >= min(terms)))


def with_unbegun(state: State, member: Member) -> State:
    """Drop later electorates of which this member was to know and does not: their generations never begin."""
    last = max((vote.term for vote in member.votes), default=0)
    as_told = (votes for votes in state.told if not set(votes).isdisjoint(member.votes))
    unbegun = {vote.term for votes in as_told for vote in votes if vote.term > last}
    kept = tuple(one for one in state.electorates if one.term not in unbegun)
    return replace(state, electorates=kept or state.electorates)


def gathered(state: State, at: float) -> State:
    """Decide how much longer to wait for the nodes of the coordinator that was lost."""
    if state.gather_until is None:
        return state
    # at least: a member may have no vote
    missing = max(one.size - len(one.ended) for one in state.electorates) - len(state.members)
    is_settling = state.gather_until - at <= SETTLE
    if missing > 1 and (is_settling or len(state.members) <= missing):
        return state  # to count them at each of thousands that come would take longer than they have
    unaccounted = max(one.count((*_votes(state), *state.refused))[1] for one in state.electorates)
    has_spares = state.policy.spares > 0 and len(state.members) < state.most_running
    may_come = unaccounted > bool(state.lost_votes) or has_spares
    may_be_confirmed = bool(state.lost_votes)  # that the last coordinator has ended: by its host, or by who called it
    is_enough = may_go_on(state) and len(state.members) >= state.policy.min_nodes
    if not may_come and (is_enough or not may_be_confirmed):
        return replace(state, gather_until=None, notice_at=None)
    return replace(state, gather_until=min(state.gather_until, at + SETTLE)) if is_enough else state


def may_go_on(state: State) -> bool:
    """Whether no other coordinator can go on with nodes of this job."""
    return all(_is_enough(state, electorate) for electorate in state.electorates)


def _is_enough(state: State, electorate: Electorate) -> bool:
    """Return whether this electorate lets the coordinator go on: as many nodes follow it as are unaccounted for.

    A coordinator that has taken over needs one more. It may count one that no longer listens in place of that one, if the
    last coordinator has ended: without that, so few cannot have gone on before.
    """
    votes = _votes(state)
    present, unaccounted = electorate.count(votes)
    if state.took_over and present == unaccounted and not state.lost_votes:
        return electorate.count((*votes, *state.refused))[1] < unaccounted
    return present >= unaccounted + state.took_over


def why_not(state: State) -> str:
    """Return why this coordinator may not go on."""
    counts = [electorate.count(_votes(state)) for electorate in state.electorates]
    present, unaccounted = max(counts, key=lambda found: found[1] - found[0])
    what = "more nodes than" if state.took_over else "as many nodes as"
    return (
        f"{_of_nodes(present)} of the last generation here, and {unaccounted} not known to have ended: a job goes on only with "
        f"{what} may be going on without it"
    )


def _of_nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _votes(state: State) -> list[Vote]:
    """Return the votes of all members, of each one in a term."""
    return list(
        chain.from_iterable({one.term: one for one in member.votes}.values() for member in state.members.values())
    )
