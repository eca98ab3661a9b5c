"""What the coordinator waits for before the next generation, which nodes take part, with which ranks, what they share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job.members import SELF_ID, Member, Members, Policy
from ddplaunch.system.words import duration

FIRST_LINE_AFTER = 3.0  # seconds until it is first printed which nodes the job waits for
NEXT_LINE_AFTER = 30.0  # seconds from one such line to the next
PORT_TIMEOUT = 2.0  # seconds that a restart waits for its port


class Rendezvous(Struct, frozen=True, kw_only=True):
    """What the next generation waits for: nodes, a signal on its way, a port. Times are of the coordinator's clock."""

    given_up_ranks: frozenset[int] = frozenset()  # node ranks of nodes that were given up before they joined
    given_up_unranked: int = 0  # how many further nodes were given up, whose users gave them no rank
    deadline: float | None = None  # when the job waits no longer for nodes; None: it does not wait
    status_line_at: float | None = None  # when to print which nodes the job waits for
    # no generation begins before: workers of a lost node may live, or a signal to leave may be on its way to further nodes
    earliest_start: float = 0.0
    # the same for the first generation while nodes are missing: these may follow a coordinator that has just ended
    earliest_start_if_incomplete: float = 0.0
    port_deadline: float | None = None  # until when a restart waits for its port; None: no other process has had it

    def opened(self, policy: Policy, at: float) -> Rendezvous:
        """Return the rendezvous that waits for nodes from this time on."""
        deadline = max(at + policy.rdzv_timeout, self.earliest_start, self.earliest_start_if_incomplete)
        return replace(self, deadline=deadline, status_line_at=at + FIRST_LINE_AFTER)

    def postponed(self, policy: Policy, at: float) -> Rendezvous:
        """Return the rendezvous that waits until it may begin; a node that is lost again and again postpones it no more."""
        if self.deadline is None:
            return self.opened(policy, at)
        return replace(self, deadline=max(self.deadline, self.earliest_start))

    def closed(self) -> Rendezvous:
        """Return the rendezvous that waits for no nodes: enough are there, or the job has ended."""
        return replace(self, deadline=None, status_line_at=None)

    def no_start_before(self, at: float) -> Rendezvous:
        """Return the rendezvous after which no generation begins before this time."""
        return replace(self, earliest_start=max(self.earliest_start, at))

    def without_port(self, at: float) -> Rendezvous:
        """Return the rendezvous after a generation found another process at its port."""
        return self if self.port_deadline is not None else replace(self, port_deadline=at + PORT_TIMEOUT)

    def without_node(self, node_rank: int | None) -> Rendezvous:
        """Return the rendezvous that does not wait for a node, which may have said so before; None: a node without a rank."""
        if node_rank is None:
            return replace(self, given_up_unranked=self.given_up_unranked + 1)
        return replace(self, given_up_ranks=self.given_up_ranks | {node_rank})

    @property
    def number_given_up(self) -> int:
        """How many nodes were given up before they joined."""
        return len(self.given_up_ranks) + self.given_up_unranked

    def is_complete(self, policy: Policy, members: Members) -> bool:
        """Whether the job waits for no further node: all are here except spares, if node ranks say which nodes are spares."""
        # all but spares, and but those that were given up, as they will not come
        expected = min(policy.most_running, policy.max_nodes - self.number_given_up)
        if len(members) < max(policy.min_nodes, expected):
            return False
        any_may_be_a_spare = any(member.fixed_rank is None for member in members.values())
        if not policy.spares or any_may_be_a_spare:
            return True
        # the nodes of the highest ranks are the spares
        waited_for = set(range(policy.most_running)) - self.given_up_ranks
        # those that were given up without a rank may be any of the absent ones
        absent = sum(members.holder_of_rank(rank) is None for rank in waited_for)
        return absent <= self.given_up_unranked

    def status_line(self, policy: Policy, members: Members, at: float, leases_until: float | None = None) -> str:
        """Return a line on how many nodes have joined, how long the rendezvous waits or has waited, and for which.

        `leases_until`: the rendezvous waits for no node, but until nodes that are not here can have no workers any more; None: it
        waits for nodes.
        """
        assert self.deadline is not None
        here, seconds_left = len(members), self.deadline - at
        if here >= policy.min_nodes:
            enough = f"{here} of {policy.min_nodes} to {policy.max_nodes} nodes joined"
            if leases_until is not None:
                return f"{enough}; starting in {ceil(leases_until - at)} s: nodes that are not here may have workers until then"
            within = min(policy.last_call, ceil(seconds_left))
            return f"{enough}; starting unless another joins within {within:g} s"
        waited = duration(round(policy.rdzv_timeout - seconds_left))
        after = f"{describe_joined(policy, members)} after {waited} of {duration(policy.rdzv_timeout)}"
        if policy.command_elsewhere:  # users start the nodes
            return f"{after}; on {_command_of_a_missing_node(policy, members)}"
        return f"{after}; waiting for {describe_missing(policy, members)}"


def why_refused(policy: Policy, members: Members, member: Member) -> str | None:
    """Return why an agent cannot take part; None if the agent can."""
    max_nodes, wanted = policy.max_nodes, member.requested_rank
    if wanted is not None and wanted >= max_nodes:
        return f"node rank {wanted}: the job has {_nodes(max_nodes)}, node ranks 0 to {max_nodes - 1}"
    if wanted is not None and (other := members.holder_of_rank(wanted)) is not None:
        return f"node rank {wanted} is taken by {other.host}"
    if len(members) == max_nodes:
        hosts = ", ".join(other.host for other in list(members.values())[:8])
        return f"the job has its {_nodes(max_nodes)} already: {hosts}"
    return None


def hint_to_refused(policy: Policy, members: Members, member: Member) -> str:
    """Return what to type on a node that cannot take part."""
    if len(members) == policy.max_nodes:
        hint = "for more nodes type a greater `--nnodes` on each; for another job, another port on each of its nodes"
    else:
        free = next(rank for rank in range(policy.max_nodes) if members.holder_of_rank(rank) is None)
        hint = f"give each node a rank of its own: `--node-rank {free}` is free"
    other = None if member.requested_rank is None else members.holder_of_rank(member.requested_rank)
    if other is not None and other.host == member.host:
        hint += "; or, if the agent with that rank has just ended, try again once the job has noticed"
    return hint


def have_all_workers(policy: Policy, members: Members) -> bool:
    """Whether no node but these can have workers, even if another coordinator had the job before.

    The job has no more nodes than these, and either none of them knows of another coordinator, or each of them but this one's own
    has begun the same last generation there, by its term: so no further node has taken part in that one.
    """
    others = [member for member in members.values() if member.id != SELF_ID]
    last_terms = {member.last_term for member in others}
    know_another = any(member.was_left for member in others)
    some_began_none = -1 in last_terms
    is_full = len(members) == policy.max_nodes
    return is_full and len(last_terms) <= 1 and not (know_another and some_began_none)


def next_members(policy: Policy, members: Members) -> dict[int, Member]:
    """Return the members of the next generation, by id: all but spares.

    Members of the last generation come first, so that no spare is one again; then those that took part in the last generation
    under another coordinator.
    """

    def precedence(member: Member) -> tuple[object, ...]:
        began_last = -member.last_term
        ranks = _or_last(member.node_rank), began_last, _or_last(member.requested_rank)
        return member.id != SELF_ID, *ranks, member.id

    ordered = sorted(members.values(), key=precedence)
    return {member.id: member for member in ordered[: policy.most_running]}


def by_node_rank(members: Mapping[int, Member]) -> tuple[Member, ...]:
    """Return the agents of the next generation by node rank.

    The coordinator's own agent, where it has one, is node 0; others have the rank that their user gave them, if the job is large
    enough for it. Of the rest, agents of the last generation come before new ones, so that ranks change as little as they can.
    """
    number = len(members)
    ranked: dict[int, Member] = {}
    rest = []
    for member in members.values():
        rank = member.fixed_rank
        if rank is not None and rank < number:
            ranked[rank] = member
        else:
            rest.append(member)
    # a rank that is too high for this number of nodes still orders them
    rest.sort(key=lambda member: (_or_last(member.requested_rank), _or_last(member.node_rank), member.id))
    free = (rank for rank in range(number) if rank not in ranked)
    ranked.update(zip(free, rest, strict=True))
    return tuple(ranked[rank] for rank in range(number))


def _command_of_a_missing_node(policy: Policy, members: Members) -> str:
    """Return on which missing node to type which command: "node 1 run: ddplaunch ...; likewise on node 2".

    Where users give each node its rank, the word `--node-rank=` of the command lacks the number.
    """
    command = policy.command_elsewhere
    if "--node-rank=" not in command:
        absent = policy.min_nodes - len(members)
        return f"{_nodes(absent).replace(' ', ' more ')} run: {' '.join(command)}"
    taken = {member.fixed_rank for member in members.values()}
    first, *others = (rank for rank in range(policy.max_nodes) if rank not in taken)
    text = " ".join(f"{word}{first}" if word == "--node-rank=" else word for word in command)
    more = ", ".join(map(str, others[:8])) + (", ..." if others[8:] else "")
    return f"node {first} run: {text}" + (f"; likewise on node {more}" if others else "")


def describe_joined(policy: Policy, members: Members) -> str:
    """Return how many nodes have joined: "2 of 3 nodes joined (a, b)"."""
    hosts = [member.host for member in members.values()]
    named = f" ({', '.join(hosts[:8])}{', ...' if hosts[8:] else ''})" if hosts else ""
    return f"{len(hosts)} of {_nodes(policy.min_nodes)} joined{named}"


def describe_missing(policy: Policy, members: Members) -> str:
    """Return the nodes that have not joined yet, as far as known: "node 1 (b), node 2 (c)", or "2 more"."""
    here = members.values()
    taken = {member.fixed_rank for member in here}
    all_have_ranks = all(member.fixed_rank is not None for member in here)
    # node 0 alone, which has its rank in any case, does not show whether users give ranks to the others
    users_give_ranks = "--node-rank=" in policy.command_elsewhere
    are_ranks_given = bool(policy.host_names) or users_give_ranks or len(here) > 1
    is_fixed_size = policy.min_nodes == policy.max_nodes
    if not (is_fixed_size and all_have_ranks and are_ranks_given):
        return f"{policy.min_nodes - len(here)} more"
    absent = [rank for rank in range(policy.max_nodes) if rank not in taken]
    names = dict(enumerate(policy.host_names))
    shown = ", ".join(f"node {rank} ({names[rank]})" if rank in names else f"node {rank}" for rank in absent[:8])
    return f"{shown}{', ...' if len(absent) > 8 else ''}"


def disagreements(members: Sequence[Member]) -> list[str]:
    """Return a sentence for each value (in `agreed`, by name) that differs between nodes and should not, as torch's version."""
    sentences = []
    for what in dict.fromkeys(name for member in members for name, _ in member.agreed):
        holders: dict[str, str] = {}
        for member in members:
            if value := dict(member.agreed).get(what):
                holders.setdefault(value, member.host)
        if len(holders) > 1:
            found = ", ".join(f"{value} on {host}" for value, host in list(holders.items())[:4])
            sentences.append(f"warning: {what} is not the same on all nodes: {found}")
    return sentences


def _or_last(node_rank: int | None) -> float:
    """Return a key that sorts nodes without a rank behind all others."""
    return inf if node_rank is None else node_rank


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
