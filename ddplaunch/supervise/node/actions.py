"""What to do: the actions that `step` asks for. The agent carries them out, in their order."""

from __future__ import annotations

from ddplaunch.record import record
from ddplaunch.supervise.outcome import Why


@record
class StartWorkers:
    """Start all workers as this generation."""

    generation: int


@record
class ForwardSignal:
    """Pass a signal on to the groups of these workers; they go on."""

    signum: int
    ranks: frozenset[int]


@record
class StopWorkers:
    """Ask these workers' groups to end, and the groups of those that have ended already."""

    signum: int
    ranks: frozenset[int]
    by_cluster: bool = False  # they have had the signal, and get no second one


@record
class TakeStacks:
    """Take the stacks of all workers, to explain what happens to them; answer `StacksTaken` within so many seconds.

    `if_joined`: only if any has a process group, in which it may wait for others; else the answer comes at once.
    `ras`: they hang, and NCCL may know why.
    """

    within: float
    if_joined: bool = False
    ras: bool = False


@record
class Observe:
    """Look whether the workers move, answer `Observed`."""

    asks: bool = True  # those that compute are asked where they are, by a signal; else only what torch tells counts


@record
class NameRunning:
    """Print which workers still run though they were asked to end, and how long they may."""

    ranks: frozenset[int]
    left: float  # seconds until SIGKILL


@record
class KillWorkers:
    """SIGKILL these workers' groups."""

    ranks: frozenset[int]


@record
class Sweep:
    """Look for processes that workers left behind, signal those found, answer `Swept` now and whenever one ends."""

    signum: int
    sparing: bool = True  # not those that clean up after others and then end by themselves


@record
class LookForRaised:
    """Report each worker that has recorded an exception and still runs."""


@record
class RequestStore:
    """Request from the coordinator that torch's store be hosted on node 0."""


@record
class HostStore:
    """Host torch's store at MASTER_PORT, until the workers have ended."""


@record
class LendTerminal:
    """Give the terminal to this worker, which waits for it with its debugger, and show nothing of the others."""

    rank: int


@record
class ShowOutput:
    """Show again what the workers print: the terminal is back."""


@record
class RefuseTerminal:
    """Have this worker end without its debugger."""

    rank: int


@record
class Suspend:
    """SIGSTOP all workers' groups."""


@record
class Resume:
    """SIGCONT all workers' groups."""


@record
class Print:
    """Print a line for the user."""

    text: str


@record
class Exit:
    """Nothing is left: end with this status."""

    status: int


@record
class ReportStopping:
    """Report to the coordinator that this node stops, and why."""

    why: Why
    signum: int
    by_cluster: bool = False  # which sends the signal to the workers of all nodes itself


@record
class ReportNotice:
    """Report a signal to the coordinator that decides whether the job is queued again: a notice, or a user's stop."""

    signum: int


@record
class Escalate:
    """Report to the coordinator that the user does not want to wait for the stop."""

    signum: int


@record
class ReportStill:
    """Report to the coordinator that no worker of this node has moved for so many seconds."""

    seconds: float


@record
class HoldTimeout:
    """Report to the coordinator that the user debugs a worker, or does no longer: --timeout waits for that."""

    held: bool


@record
class ReportEnded:
    """Nothing is left: report to the coordinator how this node's workers ended, release what they held."""


Action = (
    StartWorkers
    | ForwardSignal
    | StopWorkers
    | TakeStacks
    | Observe
    | NameRunning
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
