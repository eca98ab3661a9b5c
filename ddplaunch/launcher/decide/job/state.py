"""What the next step of the coordinator depends on: how far the job has come, and a record for each part of that."""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.job.limits import Idleness, Limits
from ddplaunch.launcher.decide.job.members import Member, Members, Policy
from ddplaunch.launcher.decide.job.rendezvous import Rendezvous, have_all_workers
from ddplaunch.launcher.decide.job.restarts import Generation, Restarts
from ddplaunch.spec.outcome import Why
from ddplaunch.system.process.clock import soonest

FURTHER_REPORTS_WITHIN = 2.0  # seconds after the first report that the first node is not heard


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
    """

    RENDEZVOUS = auto()  # for the agents of the next generation
    RUNNING = auto()
    STOPPING = auto()  # all nodes were ordered to stop; some still have workers
    PAUSING = auto()  # between two generations
    ENDED = auto()


BETWEEN_GENERATIONS = (Phase.RENDEZVOUS, Phase.PAUSING)  # no process of any generation is left


class End(Struct, frozen=True, kw_only=True):
    """Whether the job is to end, whatever becomes of its workers, and how it has ended."""

    no_restart: bool = False  # no generation follows the one that runs, or is being stopped
    abandoned: bool = False  # the user has stopped the job: it is not queued again
    front_of_node_0_is_lost: bool = False  # so node 0 leaves, and not by a signal
    status: int | None = None  # the exit status; None: the job has not ended
    requeue: int = 0  # the notice after which the job should go back into the queue
    between_generations: bool = False  # it has ended while no worker ran: `State.generation` is the one before


class Partition(Struct, frozen=True, kw_only=True):
    """Which nodes of the generation that runs do not hear the first one, though the coordinator hears all."""

    not_hearing: tuple[tuple[int, str], ...] = ()  # their ids, and why they do not
    due: float | None = None  # when to decide which nodes go on, by the coordinator's clock

    def with_node(self, id: int, reason: str, at: float) -> Partition:
        """Return the record after another node has reported that it does not hear the first one."""
        if id in dict(self.not_hearing):
            return self
        due = at + FURTHER_REPORTS_WITHIN if self.due is None else self.due
        return replace(self, not_hearing=(*self.not_hearing, (id, reason)), due=due)


class State(Struct, frozen=True, kw_only=True):
    """Everything that the next step depends on. Times are of the coordinator's clock."""

    policy: Policy
    phase: Phase = Phase.RENDEZVOUS
    phase_deadline: float | None = None  # when this phase has waited long enough
    members: Members = Members.of(())
    why: Why | None = None  # why the generation, or the job, is to end
    signum: int = 0  # the signal that is the reason
    workers_may_have_begun: bool = False  # in any generation; a lost node has not said whether it had started any

    rendezvous: Rendezvous = Rendezvous()
    generation: Generation = Generation()
    limits: Limits = Limits()
    idleness: Idleness = Idleness()
    partition: Partition = Partition()
    restarts: Restarts = Restarts()
    end: End = End()

    def next_generation(self, members: Members, at: float) -> State:
        """Return the state in which the next generation runs with these members.

        Its number and its term, which grows from run to run, are above those of any generation that a node has begun, also
        under a coordinator that is gone.
        """
        return replace(
            self,
            phase=Phase.RUNNING,
            phase_deadline=None,
            members=members,
            why=None,
            signum=0,
            rendezvous=self.rendezvous.closed(),
            generation=self.generation.next(
                at,
                after=max(member.last_generation for member in members.values()),
                after_term=max(member.last_term for member in members.values()),
            ),
            limits=self.limits.next_generation(),
            idleness=self.idleness.next_generation(),
            partition=Partition(),
        )

    @property
    def deadline(self) -> float | None:
        """When `step` is to get `DeadlineReached` at the latest: the soonest time of all records; None: at no time."""
        if self.phase is Phase.ENDED:
            return None
        is_running = self.phase is Phase.RUNNING
        # Ctrl-Z holds workers up, but no node that is to join
        is_held_up = self.limits.suspended_at is not None and self.phase is not Phase.RENDEZVOUS
        return soonest(
            self.rendezvous.deadline,
            self.rendezvous.status_line_at,
            self.generation.early_exits_line_at if is_running else None,
            self.partition.due if is_running else None,  # when it is decided which of nodes that lost each other go on
            None if is_held_up else self.phase_deadline,
            self.limits.job_deadline if self.has_time_limit else None,  # none in a debugger, or during a stop
        )

    @property
    def may_begin_at(self) -> float:
        """When the next generation may begin: from then on no worker of another one can be left on any node."""
        rendezvous = self.rendezvous
        if not self.generation.is_before_first or have_all_workers(self.policy, self.members):
            return rendezvous.earliest_start
        return max(rendezvous.earliest_start, rendezvous.earliest_start_if_incomplete)

    @property
    def waits_for_leases_until(self) -> float | None:
        """Until when enough nodes wait for no further node, but for the end of leases of others; None: they do not."""
        # `starting` sets the deadline of the phase to the end of the leases if nothing else is waited for
        return self.may_begin_at if self.phase_deadline == self.may_begin_at else None

    @property
    def has_time_limit(self) -> bool:
        """Whether the job is to stop when its time is up."""
        is_ending = self.phase in (Phase.STOPPING, Phase.ENDED)
        return self.limits.suspended_at is None and not is_ending and not self.is_debugged

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger holds a worker of any node, so that the limits of time wait."""
        return any(map(self.members.runs, self.limits.debugging))

    @property
    def may_wait_for_port(self) -> bool:
        """Whether a port that is taken may soon be free: processes of the last generation may not be gone quite yet."""
        until = self.rendezvous.port_deadline
        return self.generation.number > 0 and (until is None or self.generation.began_at < until)

    @property
    def spares(self) -> tuple[Member, ...]:
        """The members that wait until another one is lost or leaves."""
        waits = len(self.members) > self.policy.most_running
        return tuple(member for member in self.members.values() if member.node_rank is None) if waits else ()

    @property
    def unneeded_spares(self) -> tuple[int, ...]:
        """The ids of the spares that have not taken part in any generation; () before the first one, when no node is a spare."""
        if not self.policy.spares or self.generation.is_before_first:
            return ()
        return tuple(one.id for one in self.members.values() if one.node_rank is None and one.last_generation < 0)
