"""The facts about workers and jobs that ended, as the report, the summary and the first-failure rule read them. Pure data."""

from __future__ import annotations

from enum import Enum, auto
from signal import Signals

from msgspec import Struct

# `ClusterEnding.text` where the table of causes has a row for it
PREEMPTED = "preempted"
OUT_OF_WALLTIME = "out of walltime"


class Why(Enum):
    """Why workers are no longer to run: those of a node, or those of the whole job."""

    FINISHED = auto()
    FAILED = auto()
    SIGNALLED = auto()
    TIMED_OUT = auto()
    HUNG = auto()
    FRONT_LOST = auto()
    NODE_LOST = auto()
    NODE_LEFT = auto()
    NODE_JOINED = auto()
    NOT_MET = auto()
    COORDINATOR = auto()  # it ordered this node to stop
    JOB_ENDED = auto()


class Frame(Struct, frozen=True, kw_only=True):
    """One line of a Python traceback."""

    file: str
    line: int
    function: str
    source: str = ""  # the source line, stripped; empty: not known


class WorkerError(Struct, frozen=True, kw_only=True):
    """The exception that ended a worker, as its bootstrap (or torch's @record) wrote it to the error file."""

    type: str  # "RuntimeError", "torch.cuda.OutOfMemoryError"
    message: str  # str(exception); may have several lines
    traceback: str  # as Python printed it
    frames: tuple[Frame, ...] = ()  # outermost first; empty if only the text is known
    at: float | None = None  # CLOCK_MONOTONIC seconds of this host; None: not recorded


class WorkerExit(Struct, frozen=True, kw_only=True):
    """The end of one worker."""

    rank: int
    local_rank: int
    host: str
    pid: int
    device: str
    code: int | None  # exit status, None if a signal ended it
    signal: int | None  # the signal that ended it
    at: float  # CLOCK_MONOTONIC seconds
    seconds: float  # how long it ran
    stopped_with: int | None = None  # the last signal that ddplaunch had sent to end it, None: it ended on its own
    stopped_at: float | None = None  # when the first such was sent, CLOCK_MONOTONIC seconds
    core_dumped: bool = False
    peak_rss: int = 0  # bytes, of the worker or the largest child it waited for
    cpu_seconds: float = 0.0  # user and system, of the worker and the children it waited for
    error: WorkerError | None = None
    stderr_tail: str = ""  # the last lines of its stderr, decoded with errors replaced; "" if not captured
    log: str | None = None  # path of its stderr log

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

    rank: int
    host: str
    reason: str
    status: int  # that the command should end with
    errno: int = 0  # of the system call that failed, if one has


class ClusterEnding(Struct, frozen=True):
    """Why the cluster has ended a job."""

    text: str = ""  # PREEMPTED, OUT_OF_WALLTIME or others, "" if it has not
    outcome: tuple[int, str] | None = None  # the status and the `why` of the job, where these are not the signal's


class Traces(Struct, frozen=True, kw_only=True):
    """What only the node itself knows about the end of its workers."""

    oom_kills: int  # processes that the kernel killed for memory while the job ran
    oom_kills_of_machine: bool = False  # not of our cgroup alone, which does not tell
    shm: tuple[int, int] | None  # bytes of /dev/shm, and how many of them are free
    log_folder: str | None


class Intent(Struct, frozen=True, kw_only=True):
    """Whether the job is to be requeued, and what to print about it."""

    job: str  # its id, "" if this is no Slurm job
    requeues: bool
    text: str  # a sentence without its full stop
