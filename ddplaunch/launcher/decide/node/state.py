"""What an agent's `step` decides from: the user's policy, how far the job has come on this node, and which deadlines run."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import all_exited_after, first_failure
from ddplaunch.launcher.decide.node.actions import Sweep
from ddplaunch.spec.outcome import StartFailure, Why, WorkerError, WorkerExit
from ddplaunch.system.process.clock import later, soonest

END_TIMEOUT = 10.0  # seconds that a worker has to end once it has recorded the exception that ends it
_LEAST_CHECKS = 3  # checks in a row that found no progress, after which a node stands still


class Phase(Enum):
    """What this node waits for. These are all changes of phase; the tests hold `step` to them.

    phase     ends when                                                        then
    WAITING   the coordinator begins a generation                              RUNNING
    WAITING   the job has ended                                                ENDED
    RUNNING   a worker failed, perhaps only because another one did            SETTLING
    RUNNING   anything asks the workers to end                                 STOPPING
    RUNNING   a stop finds no worker that lives                                SWEEPING
    RUNNING   other nodes may go on without this one, so its workers end now   KILLING
    RUNNING   all workers ended with status 0                                  SWEEPING
    SETTLING  the cause is known, or was waited for long enough                STOPPING
    SETTLING  the same, and no worker lives                                    SWEEPING
    SETTLING  other nodes may go on without this one, so its workers end now   KILLING
    STOPPING  the grace period is over, or the user does not want to wait      KILLING
    STOPPING  the last worker has ended                                        SWEEPING
    KILLING   the last worker has ended, or cannot even be killed              SWEEPING
    SWEEPING  the workers left no process behind, or none that can be killed   WAITING
    SWEEPING  the same, and the job has ended                                  ENDED
    """

    WAITING = auto()  # for the coordinator: there are no workers
    RUNNING = auto()
    # a failure that only follows another one was seen, or a failed import; which others fail is waited for
    SETTLING = auto()
    STOPPING = auto()  # the workers were asked to end; the grace period runs
    KILLING = auto()  # SIGKILL was sent
    SWEEPING = auto()  # no worker lives; processes that workers left behind are being ended
    ENDED = auto()


class Policy(Struct, frozen=True, kw_only=True):
    """What the user decided about supervision."""

    ranks: frozenset[int]
    stop_signals: frozenset[int]
    grace_period: float = 30.0  # seconds
    debug_rank: int | None = None
    stacks_timeout: float = 0.0  # seconds to capture the workers' stacks before they are stopped; 0: that is not done
    progress_interval: float = 0.0  # seconds from one check of progress to the next; 0: only the quiet ones below
    lax_progress_interval: float = 0.0  # the same for checks that may come late, and send the workers no signal
    notices: frozenset[int] = frozenset()  # signals that announce the end of the job: its workers save and exit


class DelayedStop(Struct, frozen=True, kw_only=True):
    """A stop whose signal ddplaunch has not sent yet: the cluster sends it itself, or the workers' stacks come first."""

    signum: int
    until: float  # then ddplaunch sends the signal in any case
    awaits_stacks: bool = False  # whether it waits for the workers' stacks, not for the cluster
    awaits_all_nodes: bool = False  # whether it waits for those of other nodes, too: their workers lose these as peers
    with_stacks: frozenset[int] = frozenset()  # ranks whose stacks were read
    in_collective: frozenset[int] = frozenset()  # those of them that wait there for others


class End(Struct, frozen=True, kw_only=True):
    """What is known of the end of the job, from one generation to the next."""

    stop_signal: int = 0  # the signal by which somebody asked this node to stop the job; 0: nobody did
    abandoned: bool = False  # the user has stopped a job that would be queued again after a notice
    front_lost: bool = False  # while the workers were being stopped: no generation may begin after that
    no_restart: bool = False  # no generation follows the one that is being stopped, as the coordinator knows
    status: int | None = None  # of the job, once the coordinator has sent it or is lost


class Raised(Struct, frozen=True, kw_only=True):
    """The exceptions that workers recorded before they ended."""

    errors: tuple[tuple[int, WorkerError], ...] = ()  # by rank
    causes: frozenset[int] = frozenset()  # ranks whose errors do not merely follow another worker's end
    # when a worker that has recorded an exception should have ended; None: none has
    should_exit_by: float | None = None
    # ranks of `causes` whose program is over: only their interpreter still ends, and a stop for a failure lets it
    exiting_by_themselves: frozenset[int] = frozenset()


class Progress(Struct, frozen=True, kw_only=True):
    """What the checks of progress have found while the workers run."""

    check_at: float | None = None  # when to check again whether the workers make progress
    idle_since: float = 0.0  # when a worker last made progress
    is_idle: bool = False  # the last report said that no worker made progress


class Debugging(Struct, frozen=True, kw_only=True):
    """Which workers are held in debuggers, or wait for one."""

    at_terminal: int | None = None  # the rank that failed and has the terminal for its debugger
    was_debugged: bool = False  # that rank has left its debugger, and ends
    queued: tuple[int, ...] = ()  # ranks that failed as well, and wait until that rank has left its debugger
    attached: frozenset[int] = frozenset()  # ranks that `ddplaunch attach` holds, or a client of debugpy
    got_ctrl_c: bool = False  # Ctrl-C went to the rank at the terminal


class Teardown(Struct, frozen=True, kw_only=True):
    """How far a stop of the workers has come."""

    delayed_stop: DelayedStop | None = None
    job_stands_still: bool = False  # no worker of the job, on any node, had made progress for long before the stop
    hang_timeout_is_over: bool = False  # --hang-timeout has ended the job
    another_node_ended: bool = False  # all workers of another node have ended since the stop
    # ranks to be killed early if they stand where they stood before the stop
    may_be_stuck: frozenset[int] = frozenset()
    stuck_deadline: float | None = None  # when to look where those stand
    last_sweep: Sweep | None = None
    leftovers: tuple[str, ...] = ()  # processes that the last sweep found

    def without_deadlines(self) -> Teardown:
        """Return the teardown when the phase that its deadlines limit is over."""
        return replace(self, delayed_stop=None, stuck_deadline=None)

    def later(self, seconds: float) -> Teardown:
        """Return the teardown after a suspension, which its deadlines do not count."""
        delayed = self.delayed_stop
        delayed = replace(delayed, until=delayed.until + seconds) if delayed is not None else None
        return replace(self, delayed_stop=delayed, stuck_deadline=later(self.stuck_deadline, seconds))


class State(Struct, frozen=True, kw_only=True):
    """Everything that the next step depends on. Times are of this node's clock."""

    policy: Policy
    phase: Phase = Phase.WAITING
    phase_deadline: float | None = None  # when this phase has waited long enough
    who_runs_line_at: float | None = None  # when to name the workers that exited early, or that still run in a stop
    suspended_at: float | None = None
    end: End = End()

    # of this generation
    why: Why | None = None  # why its workers are to end
    generation: int = 0
    generation_at: float = 0.0  # when it began
    is_only_node: bool = False  # no other node takes part in the generation
    pending: frozenset[int] = frozenset()  # ranks that have no process yet
    alive: frozenset[int] = frozenset()
    exits: tuple[WorkerExit, ...] = ()  # in order of death
    start_failure: StartFailure | None = None
    notice: int = 0  # the first of policy.notices that came
    hosts_store: bool = False  # this node hosts torch's store, because a worker of another node waited for it
    raised: Raised = Raised()
    progress: Progress = Progress()
    debugging: Debugging = Debugging()
    teardown: Teardown = Teardown()

    def resumed(self, at: float) -> State:
        """Return the state after the suspension (Ctrl-Z) that ends at this time: every deadline moves by its length."""
        assert self.suspended_at is not None
        seconds = at - self.suspended_at
        progress, raised = self.progress, self.raised
        check_at, idle_since = later(progress.check_at, seconds), progress.idle_since + seconds
        return replace(
            self,
            suspended_at=None,
            phase_deadline=later(self.phase_deadline, seconds),
            who_runs_line_at=later(self.who_runs_line_at, seconds),
            raised=replace(raised, should_exit_by=later(raised.should_exit_by, seconds)),
            progress=replace(progress, check_at=check_at, idle_since=idle_since),
            teardown=self.teardown.later(seconds),
        )

    @property
    def deadline(self) -> float | None:
        """When the agent must feed `DeadlineReached` at the latest; None: at no time. While suspended, no deadline runs."""
        if self.suspended_at is not None or self.phase is Phase.ENDED:
            return None
        # an agent without --hang-timeout does not wake to check alone: that time is in `lax_deadline`, and may be kept late
        must_check = self.workers_can_progress and self.policy.progress_interval > 0
        # of a worker that has raised; but a debugger may hold it at the very exception that is to end it
        is_awaited = self.workers_go_on and not self.debugger_may_hold_any
        should_end = is_awaited or bool(self.phase is Phase.STOPPING and self.exiting_after_failure)
        delayed_stop = self.teardown.delayed_stop
        return soonest(
            self.phase_deadline,
            None if self.debugger_suspends_limits else self.who_runs_line_at,
            self.raised.should_exit_by if should_end else None,
            delayed_stop.until if delayed_stop is not None else None,  # the stop signal is sent then at the latest
            self.teardown.stuck_deadline,  # when to look which workers have not moved since the stop
            self.progress.check_at if must_check else None,
        )

    @property
    def lax_deadline(self) -> float | None:
        """When to check progress without --hang-timeout: it does no harm if the agent wakes late for that."""
        return self.progress.check_at if self.workers_can_progress and not self.policy.progress_interval else None

    @property
    def is_ending(self) -> bool:
        """Whether the workers were asked to end, or have ended: in all phases after RUNNING and SETTLING."""
        return not self.workers_go_on and self.phase is not Phase.WAITING

    @property
    def workers_go_on(self) -> bool:
        """Whether there are workers, and nothing has asked them to end yet."""
        return self.phase in (Phase.RUNNING, Phase.SETTLING)

    @property
    def workers_can_progress(self) -> bool:
        """Whether nothing keeps the workers from making progress: all run, and neither Ctrl-Z nor a debugger holds any."""
        return self.phase is Phase.RUNNING and self.suspended_at is None and not self.debugger_suspends_limits

    def stands_still(self, at: float) -> bool:
        """Whether some checks in a row have found no progress of any worker here; those of other nodes may have made some."""
        interval = self.policy.progress_interval or self.policy.lax_progress_interval
        return self.progress.is_idle and at - self.progress.idle_since >= _LEAST_CHECKS * interval

    @property
    def is_sweeping_after_success(self) -> bool:
        """Whether all workers of this node ended with status 0, and processes that they left behind are being ended."""
        return self.phase is Phase.SWEEPING and self.why is Why.FINISHED

    @property
    def terminal_holder(self) -> frozenset[int]:
        """The rank whose debugger has the terminal, while the worker's program runs: a set of one rank, or of none."""
        return (self.alive - self.raised.exiting_by_themselves) & {
            self.policy.debug_rank,
            None if self.debugging.was_debugged else self.debugging.at_terminal,
        }

    @property
    def debugger_may_hold_any(self) -> bool:
        """Whether a debugger may hold any worker now, perhaps at the exception that is to end it."""
        return bool(self.terminal_holder or self.alive & self.debugging.attached)

    @property
    def debugger_suspends_limits(self) -> bool:
        """Whether the time limits wait, since a debugger holds a worker, for which the other workers may wait."""
        return bool(self.alive & {self.policy.debug_rank, self.debugging.at_terminal, *self.debugging.attached})

    @property
    def exiting_after_failure(self) -> frozenset[int]:
        """The ranks that have failed and are ending by themselves: a stop for a failure anywhere leaves them alone for now."""
        # an order of the coordinator for another reason has emptied the set
        is_for_failure = self.why in (Why.FAILED, Why.COORDINATOR)
        return self.alive & self.raised.exiting_by_themselves if is_for_failure else frozenset()

    def all_have_obeyed_notice(self, exits: Iterable[WorkerExit]) -> bool:
        """Whether a notice has come, and all workers, whose `exits` these are, have exited for it."""
        return bool(self.notice) and all_exited_after(exits, self.notice, self.end.stop_signal)

    @property
    def failure(self) -> WorkerExit | None:
        """The first failure of this generation."""
        return first_failure(self.exits, dict(self.raised.errors))
