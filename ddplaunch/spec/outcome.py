"""The facts about workers and jobs that ended, as the report, the summary and the first-failure rule read them. Pure data.

They travel from agent to coordinator as they are: a receiver checks the types of their fields, which bound what a peer may send.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from signal import Signals
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from ddplaunch.system.fields import Duration, Keyword, Line, Number, Piece, Seconds, Signal, Size, Status, Text

# `ClusterEnding.text` where the table of causes has a row for it
PREEMPTED = "preempted"
OUT_OF_WALLTIME = "out of walltime"
ENDED_ITSELF = "its ddplaunch has ended"  # that of a node which somebody started there
CLOSED = "connection closed"  # after a whole message, so that the other side had nothing more to say


class Why(Enum):
    """Why workers are no longer to run: those of a node, or those of the whole job."""

    FINISHED = "finished"
    FAILED = "failed"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    HUNG = "hung"
    FRONT_LOST = "front_lost"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_JOINED = "node_joined"
    NOT_MET = "not_met"
    COORDINATOR = "coordinator"  # it ordered this node to stop
    JOB_ENDED = "job_ended"


# reasons after which all workers may start again
MAY_RESTART = (Why.FAILED, Why.HUNG, Why.NODE_LOST, Why.NODE_LEFT, Why.NODE_JOINED)
# reasons for which the coordinator stops all nodes at once, and shows where their workers stood
STOPS_ALL_NODES = (Why.HUNG, Why.TIMED_OUT)


class Frame(Struct, frozen=True, kw_only=True, array_like=True):
    """One line of a Python traceback."""

    file: Piece
    line: Number
    function: Piece
    source: Piece = ""  # the source line, stripped; empty: not known


class WorkerError(Struct, frozen=True, kw_only=True, array_like=True):
    """The exception that ended a worker, as its bootstrap (or torch's @record) wrote it to the error file."""

    type: Piece  # "RuntimeError", "torch.cuda.OutOfMemoryError"
    message: Text  # str(exception); may have several lines
    traceback: Text  # as Python printed it
    # outermost first; empty if only the text is known
    frames: Annotated[tuple[Frame, ...], Meta(max_length=100)] = ()
    at: Seconds | None = None  # CLOCK_MONOTONIC seconds of this host; None: not recorded


class Progress(Struct, frozen=True, kw_only=True, array_like=True):
    """How far a worker is, as its script says by `ddplaunch.progress()`, its Trainer of transformers, or its progress bar."""

    step: Size
    total: Size | None  # None: not known
    metrics: Annotated[tuple[tuple[Piece, Piece], ...], Meta(max_length=16)] = ()  # name and number: ("loss", "0.412")
    source: Keyword = "script"  # or "trainer", "bar"; of the job as a whole also "collectives"
    first_step: Size = 0  # of the first call in this generation
    seconds: Duration = 0.0  # from the first call to the last
    age: Duration = 0.0  # seconds since the last call


def progress_of_job(told: Mapping[int, Progress]) -> Progress | None:
    """Return how far a job is, as its lowest rank says: by `ddplaunch.progress()`, else a Trainer, else a progress bar."""
    order = {"script": 0, "trainer": 1}
    return min(told.items(), key=lambda each: (order.get(each[1].source, 2), each[0]))[1] if told else None


class WorkerExit(Struct, frozen=True, kw_only=True, array_like=True):
    """The end of one worker."""

    rank: Number
    local_rank: Number
    host: Line
    pid: Number
    device: Line
    code: Status | None  # exit status, None if a signal ended it
    signal: Signal | None  # the signal that ended it
    at: Seconds  # CLOCK_MONOTONIC seconds
    seconds: Duration  # how long it ran
    stopped_with: Signal | None = None  # the last signal that ddplaunch had sent to end it, None: it ended on its own
    stopped_at: Seconds | None = None  # when the first such was sent, CLOCK_MONOTONIC seconds
    core_dumped: bool = False
    peak_rss: Size = 0  # bytes, of the worker or the largest child it waited for
    cpu_seconds: Duration = 0.0  # user and system, of the worker and the children it waited for
    error: WorkerError | None = None
    stderr_tail: Text = ""  # the last lines of its stderr, decoded with errors replaced; "" if not captured
    log: Line | None = None  # path of its stderr log
    progress: Progress | None = None  # how far it was; None: its script did not say
    bar: Progress | None = None  # how far its progress bar was; None: its last line is none
    quiet: Duration | None = None  # seconds from its last output to its end; None: it has written nothing, or not to us

    def __post_init__(self) -> None:
        if (self.code is None) == (self.signal is None):
            raise ValueError("a worker ends with a status or by a signal")

    @property
    def status(self) -> int:
        """The exit status as a shell shows it: 128 + n if signal n ended it."""
        return 128 + self.signal if self.signal is not None else (self.code or 0)

    @property
    def how(self) -> str:
        """How it ended, as in a sentence: "exit status 3", "killed by SIGSEGV"."""
        if self.signal is None:
            return f"exit status {self.code}"
        try:
            return f"killed by {Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid}): {self.how}"


class StartFailure(Struct, frozen=True):
    """A worker that could not be started."""

    rank: Number
    host: Line
    reason: Line
    status: Annotated[int, Meta(ge=1, le=255)]  # that the command should end with
    errno: Number = 0  # of the system call that failed, if one has


class ClusterEnding(Struct, frozen=True):
    """Why the cluster has ended a job."""

    text: str = ""  # PREEMPTED, OUT_OF_WALLTIME or others, "" if it has not
    outcome: tuple[int, str] | None = None  # the status and the `why` of the job, where these are not the signal's
    queued: float | None = None  # seconds that the job has waited in the queue; None: not known


class ClusterQuestions(Protocol):
    """What a cluster can be asked about a job that it runs; each answer may take seconds."""

    def why_ending(self) -> ClusterEnding:
        """Find out why the cluster is ending the job, if it is."""

    def time_in_queue(self) -> ClusterEnding:
        """Find out how long the job has waited in the queue."""


class Traces(Struct, frozen=True, kw_only=True):
    """What only the node itself knows about the end of its workers."""

    oom_kills: Number  # processes that the kernel killed for memory while the job ran
    oom_kills_of_machine: bool = False  # not of our cgroup alone, which does not tell
    shm: tuple[Size, Size] | None  # bytes of /dev/shm, and how many of them are free
    log_folder: Line | None


class Intent(Struct, frozen=True, kw_only=True):
    """Whether the job is to be requeued, and what to print about it."""

    job: str  # its id, "" if this is no Slurm job
    requeues: bool
    text: str  # a sentence without its full stop
