"""What the next step of the coordinator depends on: the policy, the members, how far the job has come.

Thousands of nodes join and end one by one, each in a new state: so the members are a mapping that never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import chain
from typing import TypeVar

from msgspec import Struct

from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.first_failure import first_failure
from ddplaunch.spec.outcome import StartFailure, Why, WorkerExit
from ddplaunch.system.loop.deadline import soonest

V = TypeVar("V")

SELF_ID = 0  # the id of the coordinator's own agent
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
    has_ended: bool = False  # no process of this generation is left there
    leaves_by: int = 0  # the signal at which it ends, when none of this generation is left there, and the others go on
    votes: tuple[Vote, ...] = ()  # in the electorates
    is_known: bool = False  # it was a member for the coordinator from which this one takes over

    @property
    def is_leaving(self) -> bool:
        """Whether its node leaves the job, which goes on."""
        return self.leaves_by > 0

    @property
    def runs(self) -> bool:
        """Whether its node takes part in the generation, and has not ended yet."""
        return self.node_rank is not None and not self.has_ended

    @property
    def fixed_rank(self) -> int | None:
        """The node rank that it has in every generation; None: any. The coordinator's own agent is always node 0."""
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
        running = self._running + member.runs - (before is not None and before.runs)
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.with_item(rank, member.id)
        return Members(self._by_id.with_item(member.id, member), id_by_rank, running)

    def without(self, id: int) -> Members:
        """Return the members without one of them."""
        member = self._by_id[id]
        rank = member.fixed_rank
        id_by_rank = self._id_by_rank if rank is None else self._id_by_rank.without(rank)
        return Members(self._by_id.without(id), id_by_rank, self._running - member.runs)

    @property
    def have_ended(self) -> bool:
        """Whether no process of the generation is left on any node."""
        return self._running == 0

    def with_fixed_rank(self, node_rank: int) -> Member | None:
        """Return the member whose user gave it this node rank; the coordinator's own agent for 0."""
        id = self._id_by_rank.get(node_rank)
        return None if id is None else self._by_id[id]


NO_EXITS: FrozenMap[tuple[WorkerExit, ...]] = FrozenMap.of({})
NO_NODE: FrozenMap[bool] = FrozenMap.of({})
NO_NODE_IDLE: FrozenMap[tuple[float, float]] = FrozenMap.of({})


class Phase(Enum):
    """What the job waits for. These are all changes of phase; the tests hold `step` to them.

    phase       ends when                                                       then
    RENDEZVOUS  all nodes joined, or enough of them and no more came in time    RUNNING
    RENDEZVOUS  the job is stopped, or too few nodes joined in time             ENDED
    RUNNING     a node stops or is lost, one joins, the job's time is up        STOPPING
    RUNNING     no process is left on any node, as the others go on             ENDED
    RUNNING     another process has the port; no agent knows of the generation  PAUSING
    RUNNING     the same as STOPPING, and no process is left                    PAUSING
    STOPPING    no process is left, and another generation may follow           PAUSING
    STOPPING    no process is left, and none may                                ENDED
    PAUSING     the pause is over, and not enough nodes are there               RENDEZVOUS
    PAUSING     the pause is over, and enough nodes are there                   RUNNING
    PAUSING     the job is stopped, or a node is lost that cannot be replaced   ENDED

    Where another node may take over from the coordinator, ANNOUNCING precedes RUNNING:

    RENDEZVOUS  enough nodes joined                                             ANNOUNCING
    PAUSING     the pause is over, and enough nodes are there                   ANNOUNCING
    ANNOUNCING  all nodes have acknowledged the electorate                      RUNNING
    ANNOUNCING  a node is lost, and not enough are there                        RENDEZVOUS
    ANNOUNCING  the job is stopped, or may go on without this part of it        ENDED
    """

    RENDEZVOUS = auto()  # for the agents of the next generation
    RUNNING = auto()
    STOPPING = auto()  # all nodes were ordered to stop; some still have workers
    PAUSING = auto()  # between two generations
    ANNOUNCING = auto()  # the nodes of the next generation learn who may take over
    ENDED = auto()


BETWEEN = (Phase.RENDEZVOUS, Phase.PAUSING, Phase.ANNOUNCING)  # no process of any generation is left

FIRST_NOTICE = 3.0  # seconds until it is first printed which nodes the job waits for


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
    replaceable: bool = False  # whether another agent may be started in place of a lost one
    has_successors: bool = False  # whether another node takes over when the coordinator is lost
    may_leave: bool = False  # whether SIGTERM or SIGHUP to an agent of an elastic job concerns its node alone
    dispatched: bool = (
        False  # whether one command has started the agents on all hosts (`launcher/elsewhere/dispatcher.py`)
    )
    notices: frozenset[int] = frozenset()  # signals after which a job whose workers exited has not finished
    names: tuple[str, ...] = ()  # of the hosts by node rank, as far as the cluster gives them
    command: tuple[str, ...] = ()  # of another node, if users start it; the word `--node-rank=` lacks the rank


class State(Struct, frozen=True, kw_only=True):
    """Everything that the next step depends on."""

    policy: Policy
    phase: Phase = Phase.RENDEZVOUS
    phase_deadline: float | None = None  # when this phase has waited long enough
    members: Members = Members.of(())
    why: Why | None = None  # why the generation, or the job, is to end
    signum: int = 0  # the signal that is the reason
    suspended_at: float | None = None

    # of the rendezvous
    given_up: int = 0  # nodes that were given up before they joined
    rdzv_deadline: float | None = None  # when the rendezvous times out
    notice_at: float | None = None  # when to print which nodes the job waits for, or which finished early

    # of who goes on, if nodes lose each other
    term: int = 0  # of the last electorate
    electorates: tuple[
        Electorate, ...
    ] = ()  # that of the last generation, and of one that not all nodes have acknowledged
    unacknowledged: FrozenMap[bool] = NO_NODE  # these nodes, by id
    took_over: bool = False  # from a coordinator that was lost, and has not begun a generation since
    lost_votes: tuple[Vote, ...] = ()  # those of that coordinator, unless it is known to have ended
    refused: tuple[
        Vote, ...
    ] = ()  # those of nodes that no longer listen: they have ended, perhaps after they had gone on
    told: tuple[tuple[Vote, ...], ...] = ()  # of nodes that were to acknowledge the last electorate, their votes
    gather_until: float | None = None  # when its nodes are no longer waited for; None: they are not

    # of this generation
    generation: int = -1
    generation_at: float = 0.0  # when it began
    node_exits: FrozenMap[tuple[WorkerExit, ...]] = NO_EXITS  # by the id of the node
    lost: tuple[str, ...] = ()  # nodes that were lost, and how: "node 2 (c): silent for 10 s"
    notice: int = 0  # the first of policy.notices that came to any node
    debugging: frozenset[int] = frozenset()  # ids of nodes with a worker in a debugger
    named_as_debugging: frozenset[int] = frozenset()  # ids of nodes for which it was printed that time limits wait
    idle: FrozenMap[tuple[float, float]] = NO_NODE_IDLE  # from when to when no worker of a node made progress, by id
    progress_at: float = float("-inf")  # when any worker last made progress, as far as is known
    idle_awaits: int | None = None  # id of a node that must report again before all nodes can be known to be idle
    idle_named_at: float = float("-inf")  # when it was last printed that no worker makes progress

    # from one generation to the next
    restarts: int = 0  # after failures, all in all
    spent: tuple[float, ...] = ()  # when those were that count for --max-restarts
    best_step: int = -1  # that any worker has reached in any generation, as far as scripts say it
    has_progressed: bool = False  # the last generation that failed had reached a new step
    in_vain: int = 0  # generations in a row that failed without a new step
    gave_up: bool = False  # they are too many: the job ends, and is not queued again
    short_lives: int = 0  # generations in a row that failed at once
    import_failure: str = ""  # the import in the first lines by which the last generation failed, with its host
    failed_machine: str = ""  # the host on which the last generation failed first, if the reason may be the machine's
    same_exception: str = ""  # that all ranks of the last generation raised at the same line
    has_begun: bool = False  # workers were started, or may have been
    start_failure: StartFailure | None = None
    leftovers: tuple[str, ...] = ()  # processes that could not be ended
    halted: bool = False  # nothing is started again
    abandoned: bool = False  # the user has stopped the job: it is not queued again
    regroup_at: float = (
        0.0  # no generation begins before: the signal by which a node leaves may be on its way to others
    )
    port_deadline: float | None = None  # until when a restart waits for its port; None: no other process has had it
    job_deadline: float | None = None  # when the time of the whole job is up

    # of the end
    status: int | None = None
    is_cut_off: bool = False  # it has ended here alone: other nodes may go on
    requeue: int = 0  # the notice after which the job should go back into the queue
    ended_idle: bool = False  # there were no workers then: `node_exits` are of the generation before

    @property
    def deadline(self) -> float | None:
        """When `step` is to get `DeadlineReached` at the latest."""
        goes_on = self.suspended_at is None or self.phase is Phase.RENDEZVOUS
        return soonest(
            self.rdzv_deadline,
            self.notice_at,
            self.gather_until,
            self.phase_deadline if goes_on else None,
            self.job_deadline if self.has_time_limit else None,
        )

    @property
    def has_time_limit(self) -> bool:
        """Whether the job is to stop when its time is up."""
        is_ending = self.phase in (Phase.STOPPING, Phase.ENDED)
        return self.suspended_at is None and not is_ending and not self.is_debugged

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger holds a worker of any node, so that the time limits wait."""
        return any(map(self.runs, self.debugging))

    @property
    def may_wait_for_port(self) -> bool:
        """Whether a port that is taken may soon be free: processes of the last generation may not be gone quite yet."""
        return self.generation > 0 and (self.port_deadline is None or self.generation_at < self.port_deadline)

    @property
    def most_running(self) -> int:
        """How many nodes a generation has at most; any others are spares."""
        return self.policy.max_nodes - self.policy.spares

    @property
    def spares(self) -> tuple[Member, ...]:
        """The members that wait until another one is lost or leaves."""
        waits = len(self.members) > self.most_running
        return tuple(member for member in self.members.values() if member.node_rank is None) if waits else ()

    @property
    def unneeded_spares(self) -> tuple[int, ...]:
        """The ids of the spares that have not taken part in any generation; () before the first one, when no node is a spare."""
        if not self.policy.spares or self.generation < 0:
            return ()
        return tuple(one.id for one in self.members.values() if one.node_rank is None and not one.votes)

    @property
    def needs_all(self) -> bool:
        """Whether the job cannot go on without one of its nodes, since it has no other and gets none."""
        return self.policy.min_nodes == self.policy.max_nodes and not self.policy.replaceable

    @property
    def taking_part(self) -> tuple[Member, ...]:
        """The members of the generation that runs."""
        return tuple(member for member in self.members.values() if member.node_rank is not None)

    @property
    def running(self) -> tuple[int, ...]:
        """The ids of the nodes on which processes of this generation are left."""
        return tuple(member.id for member in self.members.values() if member.runs)

    def counts(self, id: int) -> bool:
        """Whether this node has a vote in every electorate: this coordinator does not go on without it for AT_ONCE."""
        known = {one.term for one in self.electorates}
        return id in self.members and bool(known) and known <= {vote.term for vote in self.members[id].votes}

    def runs(self, id: int) -> bool:
        """Whether processes of this generation are left on this node."""
        return id in self.members and self.members[id].runs

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """The ends of this generation's workers, on all nodes; gathered here, so that each node's end costs little."""
        return tuple(chain.from_iterable(self.node_exits.values()))

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation on any node."""
        return first_failure(self.exits)
