"""What happened: the events that `step` takes, in their order. Times are seconds of the agent's clock of deadlines."""

from __future__ import annotations

from ddplaunch.record import record
from ddplaunch.supervise.outcome import StartFailure, WorkerError, WorkerExit


@record
class WorkerStarted:
    """A worker has a process."""

    rank: int
    at: float


@record
class StartFailed:
    """A worker could not be given a process, or that never became its program."""

    failure: StartFailure
    at: float


@record
class WorkerRaised:
    """A worker that still runs has recorded the exception that is ending it."""

    rank: int
    error: WorkerError
    at: float
    lingers: bool = False  # it has had the time to end


@record
class ErrorRecorded:
    """Some worker may have recorded an exception, and is about to end."""

    at: float


@record
class StoreWanted:
    """A worker waits for torch's store at MASTER_PORT, which no process of node 0 hosts."""

    at: float


@record
class StoreOrdered:
    """The coordinator wants this node, where it is, to host that store."""

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
    escalates: bool = True  # a second one kills; False for one that is no second request, such as a copy of the first
    is_copy: bool = False  # it came from another process of ddplaunch before
    by_cluster: bool = False  # it was sent to all processes of the job, so the workers have had it
    silent: float = 0.0  # of Ctrl-C: seconds for which no worker has written anything


@record
class FrontLost:
    """The command that the user typed has ended."""

    at: float


@record
class DeadlineReached:
    """The state's deadline may have come."""

    at: float


@record
class StacksTaken:
    """Where the workers are is known, or cannot be."""

    at: float


@record
class Observed:
    """Whether any worker of this node has moved since the last look; the first look says that it has."""

    moved: bool
    at: float


@record
class TerminalAsked:
    """A worker has failed and asks for the terminal, for its debugger, before it ends."""

    rank: int
    what: str  # its exception, "ValueError: boom"
    at: float


@record
class TerminalReturned:
    """It has left its debugger, or has ended."""

    rank: int
    at: float


@record
class DebuggerAttached:
    """A debugger holds a worker, or may at any moment."""

    rank: int
    at: float


@record
class DebuggerDetached:
    """It does no longer, or the worker has ended."""

    rank: int
    at: float


@record
class Swept:
    """How many processes of the job, workers aside, still live."""

    left: tuple[str, ...]  # each as in a sentence, "pid 4711 (sleep)"
    at: float


@record
class GenerationBegun:
    """The coordinator has begun a generation, in which these are the ranks of this node."""

    generation: int
    ranks: frozenset[int]
    at: float
    alone: bool = False  # no other node takes part


@record
class StopOrdered:
    """The coordinator wants the workers to be stopped: something happened on another node, or the job's time is up."""

    signum: int
    at: float
    time_is_up: bool = False
    by_cluster: bool = False  # the cluster sends it to the workers of all nodes itself
    silent: float = 0.0  # of Ctrl-C: seconds for which no worker has written anything


@record
class KillOrdered:
    """The user of another node does not want to wait for the stop."""

    at: float


@record
class JobEnded:
    """The job has ended, at least for this node, and its command ends with this status."""

    status: int
    at: float


Event = (
    WorkerStarted
    | StartFailed
    | WorkerRaised
    | ErrorRecorded
    | StoreWanted
    | StoreOrdered
    | WorkerExited
    | SignalReceived
    | FrontLost
    | DeadlineReached
    | StacksTaken
    | Observed
    | TerminalAsked
    | TerminalReturned
    | DebuggerAttached
    | DebuggerDetached
    | Swept
    | GenerationBegun
    | StopOrdered
    | KillOrdered
    | JobEnded
)
