"""What happened: the events that `step` takes, in their order. Times are seconds of the agent's clock of deadlines.

Those with a tag are orders of the coordinator, and travel as they are; on arrival they get the time of the receiver.
"""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.spec.outcome import StartFailure, Why, WorkerError, WorkerExit
from ddplaunch.system.fields import Duration, Seconds, Signal


class WorkerStarted(Struct, frozen=True):
    """A worker has a process."""

    rank: int
    at: float


class StartFailed(Struct, frozen=True):
    """A worker could not be given a process, or that never became its program."""

    failure: StartFailure
    at: float


class WorkerRaised(Struct, frozen=True):
    """A worker that still runs has recorded the exception that is ending it."""

    rank: int
    error: WorkerError
    at: float
    lingers: bool = False  # it has not ended in the time that it had


class ErrorRecorded(Struct, frozen=True):
    """A worker may have recorded an exception, and is about to end."""

    at: float


class ExceptionFinal(Struct, frozen=True):
    """Nothing of a worker's program runs any more after the exception that it has recorded: only its interpreter still ends."""

    rank: int
    at: float


class StoreWanted(Struct, frozen=True):
    """A worker waits for torch's store at MASTER_PORT, which no process of node 0 hosts."""

    at: float


class StoreOrdered(Struct, frozen=True, tag="store"):
    """The coordinator wants this node, which has rank 0, to host torch's store."""

    at: Seconds


class WorkerExited(Struct, frozen=True):
    """A worker's process has ended."""

    exit: WorkerExit
    at: float


class SignalReceived(Struct, frozen=True):
    """A signal came to ddplaunch."""

    signum: int
    at: float
    is_request: bool = True  # to stop: a second one kills the workers; False: it is a copy of the first signal
    # a program's first request to stop: a stop for another reason keeps its grace period
    is_first_by_program: bool = False
    is_typed: bool = False  # a person may have typed it, as by Ctrl-C
    is_copy: bool = False  # another process of ddplaunch has passed it on
    repeats_request_of: int = 0  # the signal whose request to stop it repeats, in place of making a second one; 0: none
    quit_kills: bool = False  # SIGQUIT would kill the workers now: it is neither ignored nor without that meaning
    by_cluster: bool = False  # it was sent to all processes of the job, so the workers have had it
    silent_for: float = 0.0  # of Ctrl-C: seconds for which no worker has written anything
    coordinator_is_here: bool = False  # the coordinator is on this node, and answers


class FrontLost(Struct, frozen=True):
    """The command that the user typed has ended."""

    at: float


class DeadlineReached(Struct, frozen=True):
    """The state's deadline may have come."""

    at: float


class StacksCaptured(Struct, frozen=True):
    """The stacks of the workers were captured, or cannot be."""

    at: float
    with_stacks: frozenset[int] = frozenset()  # ranks whose stacks were read
    in_collective: frozenset[int] = frozenset()  # those of them that wait there for others


class StuckFound(Struct, frozen=True):
    """These workers stand at the same line, in the same collective if in any, as when their stacks were captured."""

    ranks: frozenset[int]
    at: float


class ProgressChecked(Struct, frozen=True):
    """Whether any worker of this node has made progress since the last check; the first check says that one has."""

    progressed: bool
    at: float


class TerminalRequested(Struct, frozen=True):
    """A worker has failed and asks for the terminal, for its debugger, before it ends."""

    rank: int
    what: str  # its exception, "ValueError: boom"
    at: float


class TerminalReturned(Struct, frozen=True):
    """The worker at the terminal has left its debugger, or has ended."""

    rank: int
    at: float


class DebuggerAttached(Struct, frozen=True):
    """A debugger holds a worker, or may at any moment."""

    rank: int
    at: float


class DebuggerDetached(Struct, frozen=True):
    """No debugger holds the worker any more, or the worker has ended."""

    rank: int
    at: float


class Swept(Struct, frozen=True):
    """How many processes of the job, workers aside, still live."""

    leftovers: tuple[str, ...]  # each as in a sentence, "pid 4711 (sleep)"
    at: float


class GenerationBegun(Struct, frozen=True):
    """The coordinator has begun a generation, in which these are the ranks of this node."""

    generation: int
    ranks: frozenset[int]
    at: float
    is_only_node: bool = False  # no other node takes part


class StopOrdered(Struct, frozen=True, tag="stop"):
    """The coordinator wants the workers to be stopped: something happened on another node, or the job's time is up."""

    signum: Signal
    at: Seconds
    why: Why = Why.COORDINATOR  # as far as it is not for this node alone to know
    by_cluster: bool = False  # the cluster sends it to the workers of all nodes itself
    silent_for: Duration = 0.0  # of Ctrl-C: seconds for which no worker has written anything
    another_node_ended: bool = False  # said again during a stop: all workers of another node have ended since
    job_stands_still: bool = False  # no worker of any node has made progress for long; may be said again during a stop


class AllStacksRead(Struct, frozen=True, tag="all_stacks_read"):
    """The stacks of the workers of all nodes have been read before a stop: its signal need not wait any more."""

    at: Seconds


class KillOrdered(Struct, frozen=True, tag="kill"):
    """The user of another node does not want to wait for the stop."""

    at: Seconds


class LeaseOver(Struct, frozen=True):
    """Nobody has said for too long that the coordinator still hears this node: it may begin a generation without this node."""

    at: float


class JobEnded(Struct, frozen=True):
    """The job has ended, at least for this node, and its command ends with this status."""

    status: int
    at: float


_Orders = GenerationBegun | StopOrdered | AllStacksRead | KillOrdered | LeaseOver | JobEnded | StoreOrdered
_OfWorkers = (
    WorkerStarted | StartFailed | WorkerRaised | ErrorRecorded | ExceptionFinal | StoreWanted | WorkerExited | Swept
)
_Answers = ProgressChecked | StacksCaptured | StuckFound
OfDebuggers = TerminalRequested | TerminalReturned | DebuggerAttached | DebuggerDetached
Event = _Orders | _OfWorkers | _Answers | OfDebuggers | SignalReceived | FrontLost | DeadlineReached
