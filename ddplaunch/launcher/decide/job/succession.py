"""Which coordinator goes on when the nodes of a job lose each other: the one here, or another one that takes over. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job.members import SELF_ID, FrozenMap, Member, Members, Policy
from ddplaunch.launcher.decide.job.rendezvous import FIRST_LINE, NEXT_LINE

# seconds from an answer of a node, which node 0 has received, in which node 0 neither goes on without this node nor comes to an
# end later than that: who refuses this node a connection then has ended, and has begun nothing without it
AT_ONCE = 4.0
SETTLE = (
    3.0  # seconds for the last nodes once enough are there: they notice a silent coordinator up to a heartbeat apart
)
NO_NODE: FrozenMap[bool] = FrozenMap.of({})


class Succession(Struct, frozen=True, kw_only=True):
    """Who goes on, if nodes lose each other. Times are of the coordinator's clock."""

    term: int = 0  # of the last electorate
    electorates: tuple[Electorate, ...] = ()  # of the last generation, and of one that not all nodes have acknowledged
    unacknowledged: FrozenMap[bool] = NO_NODE  # these nodes, by id
    took_over: bool = False  # from a coordinator that was lost, and has not begun a generation since
    lost_votes: tuple[Vote, ...] = ()  # of that coordinator, unless it is known to have ended
    refused: tuple[Vote, ...] = ()  # of nodes that no longer listen: they have ended, perhaps after they had gone on
    told: tuple[tuple[Vote, ...], ...] = ()  # of nodes that were to acknowledge the last electorate, their votes
    gather_until: float | None = None  # when its nodes are no longer waited for; None: they are not
    line_at: float | None = None  # when to print that they are waited for

    @classmethod
    def of_successor(
        cls,
        electorates: tuple[Electorate, ...],
        told: Iterable[tuple[Vote, ...]],
        skipped: int,
        at: float,
        within: float,
    ) -> Succession:
        """Return the succession of a coordinator that takes over, and waits so many seconds at most for the other nodes.

        It leaves out the next `skipped` terms, a number drawn by chance: a vote counts by its term, and other coordinators may
        go on from the same electorate. Of the nodes to which these electorates were announced, some had the votes `told` then.
        """
        return cls(
            term=electorates[-1].term + skipped,
            electorates=electorates,
            took_over=True,
            told=tuple(told),
            gather_until=at + within,
            line_at=at + FIRST_LINE,
        )

    def announced(self, size: int, unacknowledged: FrozenMap[bool]) -> Succession:
        """Return the succession once an electorate of so many nodes was announced, which these are to acknowledge."""
        electorates = (*self.electorates, Electorate(self.term + 1, size))
        return replace(self, term=self.term + 1, electorates=electorates, unacknowledged=unacknowledged)

    def has_announced_to(self, member: Member) -> bool:
        """Whether this member was to know, or knows, of the last electorate."""
        return member.id in self.unacknowledged or any(vote.term == self.term for vote in member.votes)

    def begun(self) -> Succession:
        """Return the succession once a generation begins: its electorate alone decides."""
        return replace(self, electorates=self.electorates[-1:], took_over=False, lost_votes=())

    def committed(self) -> Succession:
        """Return the succession without the electorate of a generation which was announced here, and does not begin."""
        committed = tuple(one for one in self.electorates if one.term != self.term or not self.unacknowledged)
        # before the first generation, nothing else decides between this coordinator and nodes that know of the first electorate
        return replace(self, electorates=committed or self.electorates[:1])

    def with_ended(self, votes: tuple[Vote, ...]) -> Succession:
        """Return the succession once the agent of the node with these votes is known to have ended."""
        return replace(self, electorates=tuple(one.without(votes) for one in self.electorates))

    def with_begun(self, member: Member) -> Succession:
        """Drop the electorates before that of a generation which this member has begun: all nodes have acknowledged that one."""
        terms = {vote.term for vote in member.votes}
        if not member.runs or len(terms) != 1 or terms.isdisjoint(one.term for one in self.electorates):
            return self
        return replace(self, electorates=tuple(one for one in self.electorates if one.term >= min(terms)))

    def with_unbegun(self, member: Member) -> Succession:
        """Drop later electorates of which this member was to know and does not: their generations never begin."""
        last = max((vote.term for vote in member.votes), default=0)
        as_told = (votes for votes in self.told if not set(votes).isdisjoint(member.votes))
        unbegun = {vote.term for votes in as_told for vote in votes if vote.term > last}
        kept = tuple(one for one in self.electorates if one.term not in unbegun)
        return replace(self, electorates=kept or self.electorates)

    def left_to_others(self) -> Succession:
        """Return the succession once other nodes go on with the job, and this coordinator ends it here."""
        return replace(self.gathering_ended(), electorates=())

    # --- a coordinator that has taken over waits for the nodes

    def gathered(self, policy: Policy, members: Members, at: float) -> Succession:
        """Decide how much longer to wait for the nodes of the coordinator that was lost."""
        if self.gather_until is None:
            return self
        # at least: a member may have no vote
        missing = max(one.size - len(one.ended) for one in self.electorates) - len(members)
        is_settling = self.gather_until - at <= SETTLE
        if missing > 1 and (is_settling or len(members) <= missing):
            return self  # to count them at each of thousands that come would take longer than they have
        unaccounted = max(one.count((*_votes(members), *self.refused))[1] for one in self.electorates)
        has_spares = policy.spares > 0 and len(members) < policy.most_running
        may_come = unaccounted > bool(self.lost_votes) or has_spares
        may_be_confirmed = bool(
            self.lost_votes
        )  # that the last coordinator has ended: by its host, or by who called it
        is_enough = self.may_go_on(members) and len(members) >= policy.min_nodes
        if not may_come and (is_enough or not may_be_confirmed):
            return self.gathering_ended()
        return self.settling(at) if is_enough else self

    def settling(self, at: float) -> Succession:
        """Return the succession that waits for the last nodes only."""
        return self if self.gather_until is None else replace(self, gather_until=min(self.gather_until, at + SETTLE))

    def gathering_ended(self) -> Succession:
        """Return the succession that waits for no nodes any more."""
        return replace(self, gather_until=None, line_at=None)

    def waiting(self, members: Members, at: float) -> tuple[Succession, str]:
        """Return a line on how long this coordinator waits for nodes, and the succession after it was printed."""
        assert self.gather_until is not None
        line = f"{members[SELF_ID].host} waits up to {ceil(self.gather_until - at)} s for other nodes"
        return replace(self, line_at=at + NEXT_LINE), line

    # --- whether this coordinator goes on

    def counts(self, members: Members, id: int) -> bool:
        """Whether this node has a vote in every electorate: this coordinator does not go on without it for AT_ONCE."""
        known = {one.term for one in self.electorates}
        return id in members and bool(known) and known <= {vote.term for vote in members[id].votes}

    def may_go_on(self, members: Members) -> bool:
        """Whether no other coordinator can go on with nodes of this job."""
        return all(self._is_enough(electorate, _votes(members)) for electorate in self.electorates)

    def _is_enough(self, electorate: Electorate, votes: list[Vote]) -> bool:
        """Return whether this electorate lets the coordinator go on: as many nodes follow it as are unaccounted for.

        A coordinator that has taken over needs one more. It may count one that no longer listens in place of that one, if the
        last coordinator has ended: without that, so few cannot have gone on before.
        """
        present, unaccounted = electorate.count(votes)
        if self.took_over and present == unaccounted and not self.lost_votes:
            return electorate.count((*votes, *self.refused))[1] < unaccounted
        return present >= unaccounted + self.took_over

    def why_not(self, members: Members) -> str:
        """Return why this coordinator may not go on."""
        counts = [electorate.count(_votes(members)) for electorate in self.electorates]
        present, unaccounted = max(counts, key=lambda found: found[1] - found[0])
        what = "more nodes than" if self.took_over else "as many nodes as"
        return (
            f"{_of_nodes(present)} of the last generation here, and {unaccounted} not known to have ended: a job goes on only "
            f"with {what} may be going on without it"
        )


def _of_nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _votes(members: Members) -> list[Vote]:
    """Return the votes of all members, of each one in a term."""
    return list(chain.from_iterable({one.term: one for one in member.votes}.values() for member in members.values()))
