"""What the next step depends on: the user's policy, how far the job has come, and what it is waiting for."""

from __future__ import annotations

from enum import Enum, auto

from ddplaunch.record import record
from ddplaunch.supervise.first_failure import first_failure
from ddplaunch.supervise.node.events import StartFailed
from ddplaunch.supervise.outcome import WorkerError, WorkerExit


class Phase(Enum):
    """What is being waited for."""

    RUNNING = auto()
    SETTLING = auto()  # a failure that only follows another was seen; its cause is waited for
    STOPPING = auto()  # stop was sent, the grace period runs
    KILLING = auto()  # SIGKILL was sent
    SWEEPING = auto()  # no worker lives; what they left behind is ended
    WAITING = auto()  # for the next generation; with several nodes for what the coordinator says
    ENDED = auto()


class Why(Enum):
    """Why the workers are no longer to run."""

    FINISHED = auto()
    FAILED = auto()
    SIGNALLED = auto()
    TIMED_OUT = auto()
    FRONT_LOST = auto()
    TOLD = auto()  # by the coordinator
    DISMISSED = auto()


@record(kw_only=True)
class Policy:
    """What the user decided about supervision."""

    ranks: frozenset[int]
    stop_signals: frozenset[int]
    grace_period: float = 10.0  # seconds
    max_restarts: int = 0
    timeout: float | None = None  # seconds
    debug_rank: int | None = None
    notices: frozenset[int] = frozenset()  # signals after which a job whose workers have left is to be queued again
    coordinated: bool = False  # several nodes: a coordinator says when to start, and what follows from an end


@record(kw_only=True)
class State:
    """Everything that the next step depends on."""

    policy: Policy
    phase: Phase = Phase.RUNNING
    why: Why | None = None
    signum: int = 0  # that asked the job to stop
    notice: int = 0  # the first of policy.notices that came in this generation
    abandoned: bool = False  # a person has stopped the job
    requeue: int = 0  # when ended: the notice after which the job should go back into the queue
    generation: int = 0
    short_lives: int = 0  # generations in a row that failed at once
    pending: frozenset[int] = frozenset()  # not started yet
    alive: frozenset[int] = frozenset()
    exits: tuple[WorkerExit, ...] = ()  # of this generation, in order of death
    raised: tuple[tuple[int, WorkerError], ...] = ()
    start_failure: StartFailed | None = None
    swept_with: int = 0  # the signal of the last sweep
    sparing: bool = False  # whether it left some time to those that tidy up behind others
    left: tuple[str, ...] = ()  # processes that the last sweep found
    generation_at: float = 0.0  # when this generation began
    phase_deadline: float | None = None  # when this phase has waited long enough
    job_deadline: float | None = None  # --timeout
    linger_deadline: float | None = None  # when those that ended with 0 are named
    suspended_at: float | None = None
    halted: bool = False  # nothing is started again
    dismissed: int | None = None  # the status that the coordinator gave, or that losing it stands for
    status: int | None = None  # when ended

    @property
    def deadline(self) -> float | None:
        """When the agent should wake at the latest."""
        if self.suspended_at is not None or self.phase is Phase.ENDED:
            return None
        deadlines = [self.phase_deadline]
        if self.phase in (Phase.RUNNING, Phase.SETTLING) and not self.debugger:
            deadlines += [self.linger_deadline]
        if self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.WAITING) and not self.debugger:
            deadlines += [self.job_deadline]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_going(self) -> bool:
        """Whether nothing has asked the workers to end yet."""
        return self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.WAITING)

    @property
    def is_idle(self) -> bool:
        """Whether there are no workers, and the coordinator decides what is next."""
        return self.policy.coordinated and self.phase is Phase.WAITING

    @property
    def is_done_here(self) -> bool:
        """Whether the workers of this node have finished, what they left behind is ended, and other nodes may be at work."""
        finished = self.phase is Phase.SWEEPING and self.why is Why.FINISHED
        return finished and self.policy.coordinated and self.dismissed is None

    @property
    def debugger(self) -> frozenset[int]:
        """The rank that a debugger's terminal belongs to, while it lives."""
        return self.alive & {self.policy.debug_rank}

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation."""
        return first_failure(self.exits, dict(self.raised))
