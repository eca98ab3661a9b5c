"""What the next step depends on: the user's policy, how far the job has come, and what it is waiting for."""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct

from ddplaunch.supervise.deadline import soonest
from ddplaunch.supervise.first_failure import first_failure
from ddplaunch.supervise.outcome import StartFailure, Why, WorkerError, WorkerExit


class Phase(Enum):
    """What is being waited for."""

    RUNNING = auto()
    SETTLING = auto()  # a failure that only follows another was seen; its cause is waited for
    STOPPING = auto()  # stop was sent, the grace period runs
    KILLING = auto()  # SIGKILL was sent
    SWEEPING = auto()  # no worker lives; what they left behind is ended
    WAITING = auto()  # for the coordinator: there are no workers
    ENDED = auto()


class Policy(Struct, frozen=True, kw_only=True):
    """What the user decided about supervision."""

    ranks: frozenset[int]
    stop_signals: frozenset[int]
    grace_period: float = 30.0  # seconds
    debug_rank: int | None = None
    stacks_within: float = 0.0  # seconds to find out where workers are before they are stopped; 0: that is not done
    look_every: float = 0.0  # seconds from one look whether the workers move to the next; 0: that is not done
    look_at_rest: float = 0.0  # the same where a look may come late, and harms nobody who computes
    notices: frozenset[int] = frozenset()  # signals after which a job whose workers have left is to be queued again


class State(Struct, frozen=True, kw_only=True):
    """Everything that the next step depends on."""

    policy: Policy
    phase: Phase = Phase.WAITING
    why: Why | None = None
    signum: int = 0  # that asked the job to stop
    notice: int = 0  # the first of policy.notices that came in this generation
    abandoned: bool = False  # the user has stopped the job
    interrupted: bool = False  # Ctrl-C went to the worker in the debugger
    at_terminal: int | None = None  # the rank that has failed and has the terminal for its debugger
    was_debugged: bool = False  # that rank has left its debugger, and ends
    queued: tuple[int, ...] = ()  # those that wait for it
    attached: frozenset[int] = frozenset()  # those that a debugger is attached to
    generation: int = 0
    alone: bool = False  # no other node takes part in this generation
    pending: frozenset[int] = frozenset()  # not started yet
    alive: frozenset[int] = frozenset()
    exits: tuple[WorkerExit, ...] = ()  # of this generation, in order of death
    raised: tuple[tuple[int, WorkerError], ...] = ()
    causes: frozenset[int] = frozenset()  # ranks of those errors that do not merely follow another worker's end
    start_failure: StartFailure | None = None
    swept_with: int = 0  # the signal of the last sweep
    sparing: bool = False  # whether it left some time to those that clean up after others
    left: tuple[str, ...] = ()  # processes that the last sweep found
    generation_at: float = 0.0  # when this generation began
    expected: int = 0  # the signal to stop that the cluster is about to send the workers
    expected_by: float | None = None  # when we send it, if the cluster has not
    taking: bool = False  # the stop waits until it is known where the workers are
    hangs: bool = False  # the stop ends a job that hangs
    waiting: frozenset[int] = (
        frozenset()
    )  # of a job that hangs: those that waited in a collective when they were asked to end
    stuck_deadline: float | None = None  # when it is looked whether these still do
    phase_deadline: float | None = None  # when this phase has waited long enough
    warning_deadline: float | None = None  # when those that ended with 0 are named; of a stop, those that still run
    raised_deadline: float | None = None  # when a worker that has recorded an exception should have ended
    look_at: float | None = None  # when to look again whether the workers move
    still_since: float = 0.0  # when a worker has last moved
    suspended_at: float | None = None
    hosts_store: bool = False  # torch's store, since a worker of another node has asked for it
    front_lost: bool = False  # while the workers were being stopped: no generation is to begin after that
    halted: bool = False  # the coordinator knows that nothing is to be started again
    status: int | None = None  # of the job, once the coordinator gave it or is lost

    @property
    def deadline(self) -> float | None:
        """When the agent should wake at the latest."""
        if self.suspended_at is not None or self.phase is Phase.ENDED:
            return None
        warns = self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.STOPPING) and not self.is_held
        return soonest(
            self.phase_deadline,
            self.warning_deadline if warns else None,
            self.raised_deadline if self.is_going and not self.debugger else None,
            self.expected_by if self.phase is Phase.STOPPING else None,
            self.stuck_deadline if self.phase is Phase.STOPPING else None,
            self.look_at if self.looks and self.policy.look_every else None,
        )

    @property
    def rest_until(self) -> float | None:
        """When the agent should wake, give or take."""
        return self.look_at if self.looks and not self.policy.look_every else None

    @property
    def is_going(self) -> bool:
        """Whether nothing has asked the workers to end yet."""
        return self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.WAITING)

    @property
    def looks(self) -> bool:
        """Whether it matters just now that no worker moves."""
        return self.phase is Phase.RUNNING and self.suspended_at is None and not self.is_held

    @property
    def is_waiting(self) -> bool:
        """Whether there are no workers, and the coordinator decides what is next."""
        return self.phase is Phase.WAITING

    @property
    def has_finished_alone(self) -> bool:
        """Whether the job's workers have finished, all of them here, and what they left behind is being ended."""
        return self.phase is Phase.SWEEPING and self.why is Why.FINISHED and self.alone

    @property
    def is_done_here(self) -> bool:
        """Whether the workers of this node have finished, what they left behind is ended, and other nodes may be at work."""
        finished = self.phase is Phase.SWEEPING and self.why is Why.FINISHED
        return finished and not self.alone and self.status is None

    @property
    def debugger(self) -> frozenset[int]:
        """The rank that a debugger's terminal belongs to, while it lives."""
        return self.alive & {self.policy.debug_rank, None if self.was_debugged else self.at_terminal}

    @property
    def is_held(self) -> bool:
        """Whether a debugger holds any worker, so that no time limit may run and the others may well wait."""
        return bool(self.alive & {self.policy.debug_rank, self.at_terminal, *self.attached})

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation."""
        return first_failure(self.exits, dict(self.raised))
