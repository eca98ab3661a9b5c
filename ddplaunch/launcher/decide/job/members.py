"""What the coordinator of a job knows of the nodes: the user's decisions about them (`Policy`), and who has joined.

Thousands of nodes join and end one by one, each in a new state: so the members are a mapping that never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

V = TypeVar("V")

SELF_ID = 0  # the id of the coordinator's own agent
KILLED_WITHIN = 2.0  # seconds from the end of a lease to the end of all that the agent has started
NO_MEMBER = -1  # no member's id
_SHARD = 128  # keys of a part: of ten thousand items, one more copies these and the list of some eighty parts


class FrozenMap(Mapping[int, "V"]):
    """A mapping that never changes: one with another item is a new one, which shares all but a small part with it.

    Close keys are in the same part, and each part is in the order in which its items came.
    """

    def __init__(self, parts: Mapping[int, dict[int, V]], length: int) -> None:
        self._parts = parts
        self._length = length

    @classmethod
    def of(cls, items: Mapping[int, V]) -> FrozenMap[V]:
        """Return a frozen map of these items."""
        parts: dict[int, dict[int, V]] = {}
        for key, value in items.items():
            parts.setdefault(key // _SHARD, {})[key] = value
        return cls(parts, len(items))

    def __getitem__(self, key: int) -> V:
        return self._parts[key // _SHARD][key]

    def __iter__(self) -> Iterator[int]:
        for part in self._parts.values():
            yield from part

    def __len__(self) -> int:
        return self._length

    def with_item(self, key: int, value: V) -> FrozenMap[V]:
        """Return a map in which `key` has this value."""
        part = self._parts.get(key // _SHARD, {})
        return FrozenMap({**self._parts, key // _SHARD: {**part, key: value}}, self._length + (key not in part))

    def without(self, key: int) -> FrozenMap[V]:
        """Return a map without `key`."""
        part = self._parts[key // _SHARD].copy()
        del part[key]
        return FrozenMap({**self._parts, key // _SHARD: part}, self._length - 1)


class Member(Struct, frozen=True, kw_only=True):
    """An agent, as the coordinator knows it."""

    id: int
    host: str
    workers: int
    requested_rank: int | None  # the node rank that its user gave it; None: any
    address: str = ""  # numeric, from which it is connected; "" of this node
    agreed: tuple[tuple[str, str], ...] = ()  # what all nodes should have in common: (what, value)
    node_rank: int | None = None  # its node rank in the generation that runs; None: it joined later
    has_ended: bool = False  # no process of this generation is left on its node
    why_left_behind: str = ""  # why the job goes on without its node after this generation: they do not hear each other
    # the signal at which it ends, when none of this generation is left there, and the others go on; 0: its node does not leave
    leave_signal: int = 0
    last_generation: int = -1  # that it has begun under a coordinator that is gone; -1: none
    last_term: int = -1  # the term of that generation
    was_left: bool = False  # a coordinator that it has reached is gone: other nodes may have begun a generation there

    @property
    def is_leaving(self) -> bool:
        """Whether its node leaves the job, which goes on."""
        return self.leave_signal > 0

    @property
    def runs(self) -> bool:
        """Whether its node takes part in the generation, and has not ended yet."""
        return self.node_rank is not None and not self.has_ended

    @property
    def fixed_rank(self) -> int | None:
        """The node rank that it has in every generation large enough; None: any. The coordinator's own agent is node 0."""
        return 0 if self.id == SELF_ID else self.requested_rank

    def __str__(self) -> str:
        return self.host if self.node_rank is None else f"node {self.node_rank} ({self.host})"


class Members(Mapping[int, Member]):
    """The members by id; frozen. One more or less costs no look at all others, nor a copy of them."""

    def __init__(self, by_id: FrozenMap[Member], id_by_rank: FrozenMap[int], running: int) -> None:
        self._by_id = by_id
        self._id_by_rank = id_by_rank  # of the members with a fixed node rank
        self._running = running  # how many of them run

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """Return these members."""
        by_id = {member.id: member for member in members}
        id_by_rank = {rank: member.id for member in by_id.values() if (rank := member.fixed_rank) is not None}
        return cls(FrozenMap.of(by_id), FrozenMap.of(id_by_rank), sum(member.runs for member in by_id.values()))

    def __getitem__(self, id: int) -> Member:
        return self._by_id[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def with_member(self, member: Member) -> Members:
        """Return the members with one that is new, or has changed."""
        before, rank = self._by_id.get(member.id), member.fixed_rank
        did_run = before is not None and before.runs
        running = self._running + member.runs - did_run
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.with_item(rank, member.id)
        return Members(self._by_id.with_item(member.id, member), id_by_rank, running)

    def without(self, id: int) -> Members:
        """Return the members without one of them."""
        member = self._by_id[id]
        rank = member.fixed_rank
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.without(rank)
        return Members(self._by_id.without(id), id_by_rank, self._running - member.runs)

    @property
    def all_have_ended(self) -> bool:
        """Whether no process of the generation is left on any node."""
        return self._running == 0

    @property
    def taking_part(self) -> tuple[Member, ...]:
        """The members of the generation that runs."""
        return tuple(member for member in self.values() if member.node_rank is not None)

    @property
    def running(self) -> tuple[int, ...]:
        """The ids of the nodes on which processes of this generation are left."""
        return tuple(member.id for member in self.values() if member.runs)

    def runs(self, id: int) -> bool:
        """Whether processes of this generation are left on this node."""
        return id in self and self[id].runs

    def holder_of_rank(self, node_rank: int) -> Member | None:
        """Return the member whose user gave it this node rank; the coordinator's own agent for 0."""
        id = self._id_by_rank.get(node_rank)
        return None if id is None else self._by_id[id]


class Policy(Struct, frozen=True, kw_only=True):
    """What the user decided about the nodes."""

    min_nodes: int
    max_nodes: int
    spares: int = 0  # of these nodes: they wait until another one is lost or leaves
    max_restarts: int = 0
    restart_window: float | None = None  # seconds in which so many are allowed; None: in the whole job
    restart_on: frozenset[str] | None = None  # kinds of failures that lead to a restart; None: all
    max_no_progress: int | None = None  # generations in a row without a new step after which the job ends
    rdzv_timeout: float = 600.0  # seconds to wait for the nodes
    last_call: float = 30.0  # seconds to wait for further nodes once `min_nodes` have joined
    timeout: float | None = None  # seconds for the whole job
    hang_timeout: float | None = None  # seconds in which no worker makes progress
    debugs: bool = False  # a debugger of the user may hold workers of any node
    straggler_check: float = 0.0  # seconds from one check for stragglers to the next; 0: that is not done
    nodes_are_replaceable: bool = False  # another agent may be started in place of a lost one
    nodes_may_leave: bool = False  # SIGTERM or SIGHUP to an agent of an elastic job concerns its node alone
    has_one_command: bool = False  # one command has started all agents (`launcher/elsewhere/lead.py`)
    notices: frozenset[int] = frozenset()  # signals after which a job whose workers exited has not finished
    # seconds from the last renewal of a lost node by which its workers have been killed; 0: the job needs all its nodes
    lease: float = 0.0
    host_names: tuple[str, ...] = ()  # of the hosts by node rank, as far as the cluster gives them
    # the command for another node, if users start it; its word `--node-rank=` lacks the rank
    command_elsewhere: tuple[str, ...] = ()

    @property
    def most_running(self) -> int:
        """How many nodes a generation has at most; any others are spares."""
        return self.max_nodes - self.spares

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when it loses a node of many, or has spares."""
        return self.min_nodes < self.max_nodes

    @property
    def needs_all(self) -> bool:
        """Whether the job cannot go on without one of its nodes, since it has no other and gets none."""
        return self.min_nodes == self.max_nodes and not self.nodes_are_replaceable
