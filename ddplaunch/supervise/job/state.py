"""What the coordinator's next step depends on: the policy, who is there, how far the job has come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import chain

from msgspec import Struct

from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.first_failure import first_failure
from ddplaunch.supervise.frozen_map import FrozenMap
from ddplaunch.supervise.outcome import StartFailure, Why, WorkerExit

OWN = 0  # the id of the coordinator's own agent


class Phase(Enum):
    """What is being waited for."""

    RENDEZVOUS = auto()  # the agents of the next generation
    RUNNING = auto()
    STOPPING = auto()  # all were ordered to stop; some still have workers
    PAUSING = auto()  # between two generations
    ENDED = auto()


class Policy(Struct, frozen=True, kw_only=True):
    """What the user decided about the nodes."""

    min_nodes: int  # nodes
    max_nodes: int
    max_restarts: int = 0
    rdzv_timeout: float = 600.0  # seconds to wait for the nodes
    last_call: float = 30.0  # seconds to wait for further nodes once `min_nodes` have joined
    timeout: float | None = None  # seconds for the whole job
    hang_timeout: float | None = None  # seconds in which no worker moves
    debugs: bool = False  # a debugger of the user may hold workers of any node
    straggler_check: float = 0.0  # seconds from one look at who comes last to the next; 0: that is not done
    replaceable: bool = False  # whether a lost node's agent may be started anew
    may_leave: bool = False  # whether SIGTERM to an agent of an elastic job concerns its node alone
    called: bool = False  # whether the agents are on hosts where a command elsewhere has started them
    notices: frozenset[int] = frozenset()  # signals after which a job whose workers have left is to be queued again
    names: tuple[str, ...] = ()  # of the hosts by node rank, as far as the cluster gives them
    command: tuple[str, ...] = ()  # of another node, if users start it; the word `--node-rank=` lacks the rank


class Member(Struct, frozen=True, kw_only=True):
    """An agent, as the coordinator knows it."""

    id: int
    host: str
    workers: int
    wanted: int | None  # the place it has been given by its user; None: any
    agreed: tuple[tuple[str, str], ...] = ()  # what all should have in common: (what, value)
    place: int | None = None  # in the generation that runs; None: it joined later
    has_ended: bool = False  # nothing of this generation is left there
    is_leaving: bool = False  # it ends when nothing of this generation is left there, and the others go on

    def __str__(self) -> str:
        return self.host if self.place is None else f"node {self.place} ({self.host})"


class Members(Mapping[int, Member]):
    """The members by id; frozen. Thousands join and end one by one, and none of that looks at, or copies, all others."""

    def __init__(self, by_id: FrozenMap[Member], by_place: FrozenMap[int], running: int) -> None:
        self._by_id = by_id
        self._by_place = by_place  # that they were given by their user
        self._running = running  # those of whose workers some are left

    @classmethod
    def of(cls, members: Iterable[Member]) -> Members:
        """Return these members."""
        by_id = {member.id: member for member in members}
        by_place = {place: member.id for member in by_id.values() if (place := _wanted(member)) is not None}
        return cls(FrozenMap.of(by_id), FrozenMap.of(by_place), sum(map(_runs, by_id.values())))

    def __getitem__(self, id: int) -> Member:
        return self._by_id[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def with_member(self, member: Member) -> Members:
        """Return these with one that is new, or has changed."""
        before, place = self._by_id.get(member.id), _wanted(member)
        running = self._running + _runs(member) - (before is not None and _runs(before))
        by_place = self._by_place if place is None else self._by_place.with_item(place, member.id)
        return Members(self._by_id.with_item(member.id, member), by_place, running)

    def without(self, id: int) -> Members:
        """Return these without one."""
        member = self._by_id[id]
        place = _wanted(member)
        by_place = self._by_place if place is None else self._by_place.without(place)
        return Members(self._by_id.without(id), by_place, self._running - _runs(member))

    @property
    def have_ended(self) -> bool:
        """Whether nothing of the generation is left on any node."""
        return self._running == 0

    def at(self, place: int) -> Member | None:
        """The member that was given this place by its user; the coordinator's own has the first."""
        id = self._by_place.get(place)
        return None if id is None else self._by_id[id]


def _wanted(member: Member) -> int | None:
    return 0 if member.id == OWN else member.wanted


def _runs(member: Member) -> bool:
    return member.place is not None and not member.has_ended


_NOBODY = Members.of(())


NO_NODE_STILL: FrozenMap[tuple[float, float]] = FrozenMap.of({})
NO_EXITS: FrozenMap[tuple[WorkerExit, ...]] = FrozenMap.of({})


class State(Struct, frozen=True, kw_only=True):
    """Everything that the next step depends on."""

    policy: Policy
    phase: Phase = Phase.RENDEZVOUS
    members: Members = _NOBODY
    given_up: int = 0  # that were given up before they joined
    why: Why | None = None
    signum: int = 0
    notice: int = 0  # the first of policy.notices that came to any node in this generation
    abandoned: bool = False  # the user has stopped the job
    requeue: int = 0  # when ended: the notice after which the job should go back into the queue
    generation: int = -1
    restarts: int = 0  # of --max-restarts that are used
    short_lives: int = 0
    import_failure: str = (
        ""  # in the first lines of a program, by which the generation before this one ended; with its host
    )
    generation_at: float = 0.0
    still: FrozenMap[tuple[float, float]] = NO_NODE_STILL  # from when to when no worker of a node has moved, by id
    moved_at: float = float("-inf")  # when one of them has, as far as is known
    still_missing: int | None = None  # a node without whose next report not all are known to be still
    noticed_at: float = float("-inf")  # when it was last said that nothing moves
    node_exits: FrozenMap[tuple[WorkerExit, ...]] = NO_EXITS  # of this generation, by the id of the node
    start_failure: StartFailure | None = None
    lost: tuple[str, ...] = ()  # nodes that were lost in this generation, and how: "node 2 (c): silent for 10 s"
    left: tuple[str, ...] = ()  # processes that could not be ended
    has_begun: bool = False  # workers were started, or may have been
    ended_idle: bool = False  # the job ended while there were no workers: `node_exits` are of the generation before
    halted: bool = False  # nothing is started again
    regroup_at: float = 0.0  # no generation begins before: what made a node leave may be on its way to others
    port_deadline: float | None = None  # until when a restart may wait for its port; None: nobody else has had that
    phase_deadline: float | None = None  # when this phase has waited long enough
    rdzv_deadline: float | None = None  # when the rendezvous times out
    notice_at: float | None = None  # when to report what is being waited for
    job_deadline: float | None = None  # when the time of the whole job is up
    suspended_at: float | None = None
    held: frozenset[int] = frozenset()  # ids of nodes that say that a debugger holds a worker of this generation
    named_as_held: frozenset[int] = frozenset()  # those of which it was said that time limits wait for them
    status: int | None = None

    @property
    def deadline(self) -> float | None:
        """When `step` is to take `DeadlineReached` at the latest."""
        deadlines = [self.rdzv_deadline, self.notice_at]
        if self.suspended_at is None or self.phase is Phase.RENDEZVOUS:
            deadlines += [self.phase_deadline]
        if self.has_time_limit:
            deadlines += [self.job_deadline]
        return soonest(*deadlines)

    @property
    def has_time_limit(self) -> bool:
        """Whether the job is to stop when its time is up."""
        is_ending = self.phase in (Phase.STOPPING, Phase.ENDED)
        return self.suspended_at is None and not is_ending and not self.is_debugged

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger holds a worker of any node, so that the time of the job may be up only when it is left."""
        return any(id in self.members and _runs(self.members[id]) for id in self.held)

    @property
    def may_wait_for_port(self) -> bool:
        """Whether a port that is taken may be free in time: what has ended with the last generation may not be gone quite yet."""
        return self.generation > 0 and (self.port_deadline is None or self.generation_at < self.port_deadline)

    @property
    def needs_all(self) -> bool:
        """Whether the job cannot go on when one of its nodes is lost, since it has no other and gets none."""
        return self.policy.min_nodes == self.policy.max_nodes and not self.policy.replaceable

    @property
    def taking_part(self) -> tuple[Member, ...]:
        """The members of the generation that runs."""
        return tuple(member for member in self.members.values() if member.place is not None)

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """The ends of this generation's workers, on all nodes; gathered when they are asked for, not whenever a node ends."""
        return tuple(chain.from_iterable(self.node_exits.values()))

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation on any node."""
        return first_failure(self.exits)
