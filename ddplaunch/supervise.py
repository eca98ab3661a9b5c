"""DECIDE: what follows from what happened. `step(state, event)` gives the next state and what to do; it does nothing itself.

Time comes inside the events (`at`, CLOCK_MONOTONIC seconds). The agent carries the actions out, answers `Sweep` with
`Swept`, and wakes when `state.deadline` has come. What other agents say will be further events of the same step.
"""

from __future__ import annotations

from enum import Enum, auto
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGTSTP

from ddplaunch import exitcodes
from ddplaunch.first_failure import failure_status, first_failure, follows
from ddplaunch.outcome import WorkerError, WorkerExit
from ddplaunch.record import record, replace

SETTLE = 3.0  # seconds to wait for the culprit, which may have closed its connections long before it ends
SWEEP_GRACE = 1.0  # seconds that what workers left behind gets after a clean end
KILL_PATIENCE = 5.0  # seconds to wait for SIGKILL to work before a process counts as unkillable
LINGER = 60.0  # seconds after which a worker that ended with 0 is named while the others run on
SHORT_LIFE = 5.0  # seconds; a generation that fails sooner makes the next one wait
LONGEST_BACKOFF = 30.0  # seconds


# --- events: what happened -------------------------------------------------------------------------------------------


@record
class WorkerStarted:
    """A worker has a process."""

    rank: int
    at: float


@record
class StartFailed:
    """A worker could not be given a process, or that never became its program."""

    rank: int
    reason: str
    status: int
    at: float


@record
class WorkerRaised:
    """A worker that still runs has recorded the exception that is ending it."""

    rank: int
    error: WorkerError
    at: float


@record
class WorkerExited:
    """A worker's process has ended."""

    exit: WorkerExit
    at: float


@record
class SignalReceived:
    """A signal came to ddplaunch."""

    signum: int
    at: float
    escalates: bool = True  # a second one kills; False for a copy of a signal that we may have had already


@record
class FrontLost:
    """The command that the user typed has ended."""

    at: float


@record
class DeadlineReached:
    """The state's deadline may have come."""

    at: float


@record
class Swept:
    """How many processes of the job, workers aside, still live."""

    left: tuple[str, ...]  # each as in a sentence, "pid 4711 (sleep)"
    at: float


Event = (
    WorkerStarted
    | StartFailed
    | WorkerRaised
    | WorkerExited
    | SignalReceived
    | FrontLost
    | DeadlineReached
    | Swept
)


# --- actions: what to do ---------------------------------------------------------------------------------------------


@record
class Start:
    """Start all workers as this generation."""

    generation: int


@record
class Forward:
    """Pass a signal on to the groups of these workers; they go on."""

    signum: int
    ranks: frozenset[int]


@record
class Stop:
    """Ask these workers' groups to end, and the groups of those that have ended already."""

    signum: int
    ranks: frozenset[int]


@record
class Kill:
    """SIGKILL these workers' groups."""

    ranks: frozenset[int]


@record
class Sweep:
    """Look for processes that workers left behind, signal those found, answer `Swept` now and whenever one ends."""

    signum: int


@record
class Retry:
    """All is gone, and another generation follows after `wait` seconds: tell of the failure, let go of what it held."""

    wait: float


@record
class Suspend:
    """SIGSTOP all workers' groups."""


@record
class Resume:
    """SIGCONT all workers' groups."""


@record
class Say:
    """Tell the user."""

    text: str


@record
class Exit:
    """All is gone: end with this status."""

    status: int


Action = Start | Forward | Stop | Kill | Sweep | Retry | Suspend | Resume | Say | Exit


# --- state -----------------------------------------------------------------------------------------------------------


class Phase(Enum):
    """What is being waited for."""

    RUNNING = auto()
    SETTLING = auto()  # a failure that only follows another was seen; its cause is waited for
    STOPPING = auto()  # stop was sent, the grace period runs
    KILLING = auto()  # SIGKILL was sent
    SWEEPING = auto()  # no worker lives; what they left behind is ended
    WAITING = auto()  # for the next generation
    ENDED = auto()


class Why(Enum):
    """Why the workers are no longer to run."""

    FINISHED = auto()
    FAILED = auto()
    SIGNALLED = auto()
    TIMED_OUT = auto()
    FRONT_LOST = auto()


@record(kw_only=True)
class Policy:
    """What the user decided about supervision."""

    ranks: frozenset[int]
    stop_signals: frozenset[int]
    grace_period: float = 10.0  # seconds
    max_restarts: int = 0
    timeout: float | None = None  # seconds
    debug_rank: int | None = None


@record(kw_only=True)
class State:
    """Everything that the next step depends on."""

    policy: Policy
    phase: Phase = Phase.RUNNING
    why: Why | None = None
    signum: int = 0  # that asked the job to stop
    generation: int = 0
    short_lives: int = 0  # generations in a row that failed at once
    pending: frozenset[int] = frozenset()  # not started yet
    alive: frozenset[int] = frozenset()
    exits: tuple[WorkerExit, ...] = ()  # of this generation, in order of death
    raised: tuple[tuple[int, WorkerError], ...] = ()
    start_failure: StartFailed | None = None
    swept_with: int = 0  # the signal of the last sweep
    left: tuple[str, ...] = ()  # processes that the last sweep found
    generation_at: float = 0.0  # when this generation began
    phase_deadline: float | None = None  # when this phase has waited long enough
    job_deadline: float | None = None  # --timeout
    linger_deadline: float | None = None  # when those that ended with 0 are named
    suspended_at: float | None = None
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
    def debugger(self) -> frozenset[int]:
        """The rank that a debugger's terminal belongs to, while it lives."""
        return self.alive & {self.policy.debug_rank}

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation."""
        return first_failure(self.exits, dict(self.raised))


Result = tuple[State, tuple[Action, ...]]


def begin(policy: Policy, at: float) -> Result:
    """Start the job."""
    state = State(policy=policy, job_deadline=None if policy.timeout is None else at + policy.timeout)
    return _start(state, 0, at)


def step(state: State, event: Event) -> Result:
    """Give the state after `event` and what is to be done."""
    match event:
        case WorkerStarted(rank, _):
            return replace(state, pending=state.pending - {rank}, alive=state.alive | {rank}), ()
        case WorkerRaised(rank, error, _):
            return replace(state, raised=(*state.raised, (rank, error))), ()
        case StartFailed(rank, _, _, at):
            state = replace(state, pending=frozenset(), alive=state.alive - {rank})
            if not _going(state):
                return _counted(state, at)
            return _stop(replace(state, start_failure=event), Why.FAILED, SIGTERM, at)
        case WorkerExited(exit, at):
            return _exited(replace(state, alive=state.alive - {exit.rank}, exits=(*state.exits, exit)), exit, at)
        case SignalReceived():
            return _signalled(state, event)
        case FrontLost(at):
            return _stop(state, Why.FRONT_LOST, SIGTERM, at) if _going(state) else _resume(state, at)
        case Swept(left, at):
            state = replace(state, left=left)
            return (state, ()) if left or state.phase is not Phase.SWEEPING else _swept(state, at)
        case DeadlineReached(at):
            return _deadline(state, at)


def _going(state: State) -> bool:
    """Whether nothing has asked the workers to end yet."""
    return state.phase in (Phase.RUNNING, Phase.SETTLING, Phase.WAITING)


def _start(state: State, generation: int, at: float) -> Result:
    state = replace(
        state,
        phase=Phase.RUNNING,
        why=None,
        generation=generation,
        pending=state.policy.ranks,
        exits=(),
        raised=(),
        left=(),
        generation_at=at,
        phase_deadline=None,
        linger_deadline=None,
    )
    return state, (Start(generation),)


def _exited(state: State, exit: WorkerExit, at: float) -> Result:
    all_gone = not state.alive and not state.pending
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if exit.status != 0:
            cause_unknown = all(follows(bad) for bad in state.exits if bad.status != 0) and not _culprit_raised(state)
            if cause_unknown and not all_gone:
                deadline = state.phase_deadline if state.phase is Phase.SETTLING else at + SETTLE
                return replace(state, phase=Phase.SETTLING, phase_deadline=deadline), ()
            return _stop(state, Why.FAILED, SIGTERM, at)
        case Phase.RUNNING | Phase.SETTLING if all_gone:
            if state.phase is Phase.SETTLING:
                return _stop(state, Why.FAILED, SIGTERM, at)
            return _sweep(replace(state, why=Why.FINISHED), SIGTERM, at + SWEEP_GRACE)
        case Phase.RUNNING if state.linger_deadline is None:
            return replace(state, linger_deadline=at + LINGER), ()
    return _counted(state, at)


def _counted(state: State, at: float) -> Result:
    """One worker less; when the last one is gone, what they left behind is next."""
    if not state.alive and not state.pending:
        if state.phase is Phase.STOPPING:
            # the grace period is one for all: the rest of it is for what workers left behind
            return _sweep(state, state.signum or SIGTERM, state.phase_deadline or at + SWEEP_GRACE)
        if state.phase is Phase.KILLING:
            return _sweep(state, SIGKILL, at + KILL_PATIENCE)
    return state, ()


def _culprit_raised(state: State) -> bool:
    """Whether some worker has recorded an exception that does not merely follow another's end."""
    dead = {exit.rank for exit in state.exits}
    return any(rank not in dead and not follows(error) for rank, error in state.raised)


def _signalled(state: State, event: SignalReceived) -> Result:
    signum, at = event.signum, event.at
    if signum == SIGTSTP:
        return (replace(state, suspended_at=at), (Suspend(),)) if state.suspended_at is None else (state, ())
    if signum == SIGCONT and state.suspended_at is not None:
        return _resume(state, at)
    if signum == SIGINT and state.debugger:
        return state, (Forward(signum, state.debugger),)
    if signum not in state.policy.stop_signals:
        return state, (Forward(signum, state.alive),) if state.alive else ()
    if _going(state):
        return _stop(replace(state, signum=signum), Why.SIGNALLED, signum, at)
    if not event.escalates or signum == SIGHUP == state.signum:
        return state, ()  # the kernel and the shell both tell of a closed terminal
    if state.phase is Phase.STOPPING:
        return _kill(state, at)
    if state.phase is Phase.SWEEPING:
        return _sweep(state, SIGKILL, at + KILL_PATIENCE)
    return state, ()


def _resume(state: State, at: float) -> Result:
    return (state, ()) if state.suspended_at is None else (_awake(state, at), (Resume(),))


def _awake(state: State, at: float) -> State:
    """Let every clock run on that stood still while the job was suspended."""
    if state.suspended_at is None:
        return state
    pause = at - state.suspended_at

    def later(deadline: float | None) -> float | None:
        return None if deadline is None else deadline + pause

    return replace(
        state,
        suspended_at=None,
        phase_deadline=later(state.phase_deadline),
        job_deadline=later(state.job_deadline),
        linger_deadline=later(state.linger_deadline),
    )


def _stop(state: State, why: Why, signum: int, at: float) -> Result:
    state = replace(_awake(state, at), why=why, pending=frozenset(), phase=Phase.STOPPING)
    deadline = at + state.policy.grace_period
    held = state.debugger if why is Why.FAILED else frozenset()
    actions: tuple[Action, ...] = (Stop(signum, state.policy.ranks - held),)
    if held:
        # whoever sits at the debugger decides when it ends
        actions = (*actions, Say(f"{_failed(state)}; rank {state.policy.debug_rank} stays in the debugger"))
    if not state.alive:
        swept, sweep = _sweep(state, signum, deadline)
        return swept, (*actions, *sweep)
    return replace(state, phase_deadline=deadline), actions


def _failed(state: State) -> str:
    first = state.failure
    if first is None:
        return "a worker could not be started"
    return f"rank {first.rank} failed ({first.error.type if first.error else first.how})"


def _kill(state: State, at: float) -> Result:
    state = _awake(state, at)
    return replace(state, phase=Phase.KILLING, phase_deadline=at + KILL_PATIENCE), (Kill(state.policy.ranks),)


def _sweep(state: State, signum: int, deadline: float) -> Result:
    return replace(state, phase=Phase.SWEEPING, phase_deadline=deadline, swept_with=signum), (Sweep(signum),)


def _deadline(state: State, at: float) -> Result:
    if state.deadline is None or at < state.deadline:
        return state, ()
    if _going(state) and state.job_deadline is not None and at >= state.job_deadline and not state.debugger:
        return _stop(state, Why.TIMED_OUT, SIGTERM, at)
    match state.phase:
        case Phase.RUNNING | Phase.SETTLING if _is_lingering(state, at):
            return replace(state, linger_deadline=float("inf")), (Say(_lingering(state)),)
        case Phase.SETTLING:
            return _stop(state, Why.FAILED, SIGTERM, at)
        case Phase.STOPPING if state.debugger and state.why is Why.FAILED:
            return replace(state, phase_deadline=None), (Kill(state.policy.ranks - state.debugger),)
        case Phase.STOPPING:
            return _kill(state, at)
        case Phase.KILLING:
            return _sweep(replace(state, alive=frozenset()), SIGKILL, at)
        case Phase.SWEEPING if state.swept_with != SIGKILL:
            return _sweep(state, SIGKILL, at + KILL_PATIENCE)
        case Phase.SWEEPING:
            # uninterruptible sleep: nobody can end it, so it is named instead of waited for
            ended, actions = _end(state)
            return ended, (Say(f"could not be ended: {', '.join(state.left)}"), *actions)
        case Phase.WAITING:
            return _start(state, state.generation + 1, at)
    return state, ()


def _is_lingering(state: State, at: float) -> bool:
    return state.linger_deadline is not None and at >= state.linger_deadline and not state.debugger


def _lingering(state: State) -> str:
    gone = sorted(exit.rank for exit in state.exits)
    return (
        f"rank {', '.join(map(str, gone))} ended with status 0 a minute ago while {len(state.alive)} workers run on: "
        "if they wait for it in a collective, they wait for ever"
    )


def _swept(state: State, at: float) -> Result:
    if state.why is Why.FAILED and state.start_failure is None and state.generation < state.policy.max_restarts:
        short = at - state.generation_at < SHORT_LIFE
        lives = state.short_lives + 1 if short else 0
        wait = min(2.0 ** (lives - 2), LONGEST_BACKOFF) if lives > 1 else 0.0
        waiting = replace(state, phase=Phase.WAITING, short_lives=lives, phase_deadline=at + wait)
        return waiting, (Retry(wait),)
    return _end(state)


def _end(state: State) -> Result:
    status = _status(state)
    return replace(state, phase=Phase.ENDED, phase_deadline=None, status=status), (Exit(status),)


def _status(state: State) -> int:
    match state.why:
        case Why.FAILED if state.start_failure is not None:
            return state.start_failure.status
        case Why.FAILED:
            first = state.failure
            assert first is not None
            return failure_status(first)
        case Why.SIGNALLED:
            return exitcodes.of_signal(state.signum)
        case Why.TIMED_OUT:
            return exitcodes.TIMEOUT
        case Why.FRONT_LOST:
            return exitcodes.of_signal(SIGKILL)
    return exitcodes.OK

