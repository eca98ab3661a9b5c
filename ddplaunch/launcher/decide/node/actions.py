"""What to do: the actions that `step` asks for. The agent carries them out, in their order.

Those with a tag are reports to the coordinator, and travel as they are.
"""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.spec.outcome import Why
from ddplaunch.system.fields import Duration, Signal, SignalOrNone

_OWN_REASONS = (Why.FAILED, Why.SIGNALLED, Why.FRONT_LOST)  # the coordinator orders all other stops itself


class StartWorkers(Struct, frozen=True):
    """Start all workers as this generation."""

    generation: int


class ForwardSignal(Struct, frozen=True):
    """Pass a signal on to the process groups of these workers, which are not to end."""

    signum: int
    ranks: frozenset[int]


class StopWorkers(Struct, frozen=True):
    """Ask the process groups of these workers to end, also where the worker itself has ended."""

    signum: int
    ranks: frozenset[int]
    by_cluster: bool = False  # the cluster has sent them the signal: send no second one


class CaptureStacks(Struct, frozen=True):
    """Capture the stacks of all workers, to explain the stop; answer `StacksCaptured` within this many seconds.

    `if_in_group`: only if a worker may be in a process group, and wait there for others; else the answer comes at once.
    `asks_nccl`: the job stands still, and NCCL's RAS service may know why. `silently`: the user sees only the stacks of workers
    that do not move any more.
    `but`: not of these, whose interpreter ends: once its handlers are gone, the signal for the stacks would kill the worker.
    """

    within: float
    if_in_group: bool = False
    asks_nccl: bool = False
    silently: bool = False
    but: frozenset[int] = frozenset()


class FindStuck(Struct, frozen=True):
    """Find out which of these workers stand where they did when their stacks were captured; answer `StuckFound`."""

    ranks: frozenset[int]


class CheckProgress(Struct, frozen=True):
    """Check whether the workers make progress; answer `ProgressChecked`."""

    asks: bool = True  # ask workers that compute for their stacks, by a signal; else only torch's records count


class NameRunning(Struct, frozen=True):
    """Print which workers still run although they were asked to end, and for how long they may."""

    ranks: frozenset[int]
    seconds: float  # until SIGKILL


class NameStuck(Struct, frozen=True):
    """Print which workers are killed because they stand where they stood when they were asked to end, `seconds` ago."""

    ranks: frozenset[int]
    seconds: float


class KillWorkers(Struct, frozen=True):
    """SIGKILL these workers' groups."""

    ranks: frozenset[int]


class Sweep(Struct, frozen=True):
    """Look for processes that workers left behind, signal those found, answer `Swept` now and whenever one ends."""

    signum: int
    sparing: bool = True  # leave out processes that clean up after others and then end by themselves


class FindRaised(Struct, frozen=True):
    """Report each worker that has recorded an exception and still runs."""


class RequestStore(Struct, frozen=True, tag="request_store"):
    """Request from the coordinator that torch's store be hosted on node 0."""


class HostStore(Struct, frozen=True):
    """Host torch's store at MASTER_PORT, until the workers have ended."""


class LendTerminal(Struct, frozen=True):
    """Lend the terminal to this worker for its debugger, and show no output of the others."""

    rank: int


class ShowOutput(Struct, frozen=True):
    """Show again what the workers print: the terminal is back."""


class RefuseTerminal(Struct, frozen=True):
    """Have this worker end without its debugger."""

    rank: int


class Suspend(Struct, frozen=True):
    """SIGSTOP all workers' groups."""


class Resume(Struct, frozen=True):
    """SIGCONT all workers' groups."""


class Print(Struct, frozen=True):
    """Print a line for the user."""

    text: str


class Exit(Struct, frozen=True):
    """Nothing is left: end with this status."""

    status: int


class ReportStopping(Struct, frozen=True, tag="stopping"):
    """Report to the coordinator that this node stops, and why."""

    why: Why
    signum: SignalOrNone
    by_cluster: bool = False  # which sends the signal to the workers of all nodes itself

    def __post_init__(self) -> None:
        if self.why not in _OWN_REASONS:
            raise ValueError(f"no node stops by itself with the reason {self.why.value}")


class ReportNotice(Struct, frozen=True, tag="noticed"):
    """Report a signal to the coordinator that decides whether the job is queued again: a notice, or a user's stop."""

    signum: Signal


class Escalate(Struct, frozen=True, tag="escalate"):
    """Report to the coordinator that the user does not want to wait for the stop: a second signal came."""

    signum: Signal


class ReportStacksRead(Struct, frozen=True, tag="stacks_read"):
    """Report to the coordinator that the stacks of this node's workers have been read, for which the stop of all nodes waits."""


class ReportIdle(Struct, frozen=True, tag="idle"):
    """Report to the coordinator that no worker of this node has made progress for this many seconds."""

    seconds: Duration


class PauseLimits(Struct, frozen=True, tag="pause_limits"):
    """Report to the coordinator that a debugger holds a worker, for which --timeout waits, or that none does any more."""

    paused: bool


class ReportEnded(Struct, frozen=True):
    """Nothing is left: report to the coordinator how this node's workers ended, release what they held."""


Reports = ReportStopping | ReportNotice | Escalate | ReportStacksRead | ReportIdle | PauseLimits | RequestStore
_OnWorkers = StartWorkers | ForwardSignal | StopWorkers | KillWorkers | Sweep | Suspend | Resume
_Questions = CaptureStacks | FindStuck | FindRaised | CheckProgress
_OnTerminal = LendTerminal | ShowOutput | RefuseTerminal | Print | NameRunning | NameStuck
Action = Reports | _OnWorkers | _Questions | _OnTerminal | HostStore | ReportEnded | Exit
