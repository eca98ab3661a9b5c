"""What to do: the actions that `step` asks for. The agent carries them out, in their order.

Those with a tag are reports to the coordinator, and travel as they are.
"""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.fields import Duration, Signal, SignalOrNone
from ddplaunch.supervise.outcome import Why

_OWN_REASONS = (Why.FAILED, Why.SIGNALLED, Why.FRONT_LOST)  # the coordinator orders all other stops itself


class StartWorkers(Struct, frozen=True):
    """Start all workers as this generation."""

    generation: int


class ForwardSignal(Struct, frozen=True):
    """Pass a signal on to the groups of these workers; they go on."""

    signum: int
    ranks: frozenset[int]


class StopWorkers(Struct, frozen=True):
    """Ask these workers' groups to end, and the groups of those that have ended already."""

    signum: int
    ranks: frozenset[int]
    by_cluster: bool = False  # they have had the signal, and get no second one


class TakeStacks(Struct, frozen=True):
    """Take the stacks of all workers, to explain what happens to them; answer `StacksTaken` within so many seconds.

    `if_joined`: only if any has a process group, in which it may wait for others; else the answer comes at once.
    `ras`: they hang, and NCCL may know why.
    """

    within: float
    if_joined: bool = False
    ras: bool = False


class LookForStuck(Struct, frozen=True):
    """Look which of these workers still wait where they did when their stacks were taken; answer `StuckFound` with those."""

    ranks: frozenset[int]


class Observe(Struct, frozen=True):
    """Look whether the workers move, answer `Observed`."""

    asks: bool = True  # those that compute are asked where they are, by a signal; else only what torch tells counts


class NameRunning(Struct, frozen=True):
    """Print which workers still run though they were asked to end, and how long they may."""

    ranks: frozenset[int]
    left: float  # seconds until SIGKILL


class NameStuck(Struct, frozen=True):
    """Print which workers still wait in a collective so many seconds after they were asked to end, and are killed for it."""

    ranks: frozenset[int]
    seconds: float


class KillWorkers(Struct, frozen=True):
    """SIGKILL these workers' groups."""

    ranks: frozenset[int]


class Sweep(Struct, frozen=True):
    """Look for processes that workers left behind, signal those found, answer `Swept` now and whenever one ends."""

    signum: int
    sparing: bool = True  # not those that clean up after others and then end by themselves


class LookForRaised(Struct, frozen=True):
    """Report each worker that has recorded an exception and still runs."""


class RequestStore(Struct, frozen=True, tag="request_store"):
    """Request from the coordinator that torch's store be hosted on node 0."""


class HostStore(Struct, frozen=True):
    """Host torch's store at MASTER_PORT, until the workers have ended."""


class LendTerminal(Struct, frozen=True):
    """Return the terminal to this worker, which waits for it with its debugger, and show nothing of the others."""

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
    """Report to the coordinator that the user does not want to wait for the stop."""

    signum: Signal


class ReportStill(Struct, frozen=True, tag="still"):
    """Report to the coordinator that no worker of this node has moved for so many seconds."""

    seconds: Duration


class HoldTimeout(Struct, frozen=True, tag="held"):
    """Report to the coordinator that the user debugs a worker, or does no longer: --timeout waits for that."""

    held: bool


class ReportEnded(Struct, frozen=True):
    """Nothing is left: report to the coordinator how this node's workers ended, release what they held."""


Action = (
    StartWorkers
    | ForwardSignal
    | StopWorkers
    | TakeStacks
    | LookForStuck
    | Observe
    | NameRunning
    | NameStuck
    | KillWorkers
    | Sweep
    | LookForRaised
    | RequestStore
    | HostStore
    | LendTerminal
    | RefuseTerminal
    | ShowOutput
    | Suspend
    | Resume
    | Print
    | Exit
    | ReportStopping
    | ReportNotice
    | Escalate
    | ReportStill
    | HoldTimeout
    | ReportEnded
)
