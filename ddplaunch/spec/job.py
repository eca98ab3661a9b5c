"""What the user asked for, with every value checked and its origin kept; decides nothing and inspects no machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from signal import Signals
from typing import Any

from msgspec import Struct

from ddplaunch.system.own_files import worker_program

RUNNER = worker_program("call.py")  # the program of the workers of `launch()`


class Source(IntEnum):
    """Where the value of an option was written; a higher one wins."""

    DEFAULT = 0  # chosen where the command was typed, and sent to the agents of the job
    PYPROJECT = 1
    FILE = 2  # ddplaunch.toml
    FOREIGN = 3  # a variable that torch reads besides PET_*
    PET = 4
    VARIABLE = 5  # DDPLAUNCH_*
    COMMAND_LINE = 6
    CALL = 7  # a keyword of a call in Python


class Given(Struct, frozen=True, kw_only=True):
    """The value of an option as it was written, with its origin; so it is sent to the other agents of a job."""

    name: str  # of the option
    text: str
    source: Source
    origin: str  # "--nproc-per-node", "PET_NPROC_PER_NODE", "ddplaunch.toml"
    form: str  # how a value is written there: "--nproc-per-node {}", "PET_NPROC_PER_NODE={}", 'pin = "{}"'

    def __str__(self) -> str:
        return self.spelled(self.text) + (
            f" in {self.origin}" if self.source in (Source.PYPROJECT, Source.FILE) else ""
        )

    def spelled(self, text: str) -> str:
        """Return this text as it is written at that origin."""
        if self.source is Source.COMMAND_LINE:
            text = text or '""'
        elif self.source is Source.CALL and not text.isdecimal() and text not in ("True", "False"):
            text = f"'{text}'"
        return self.form.replace("{}", text)

    @classmethod
    def typed(cls, name: str, text: str) -> Given:
        """Return a value as if it had been typed."""
        flag = f"--{name.replace('_', '-')}"
        return cls(name=name, text=text, source=Source.COMMAND_LINE, origin=flag, form=f"{flag} {{}}")

    @classmethod
    def chosen(cls, name: str, text: str, origin: str = "default") -> Given:
        """Return a value that ddplaunch has chosen where nobody gave one, for the other agents of the job."""
        return cls(name=name, text=text, source=Source.DEFAULT, origin=origin, form=f"--{name.replace('_', '-')} {{}}")

    def fields(self) -> tuple[str, ...]:
        """Return the texts from which `from_fields` makes the same value."""
        return (self.name, self.text, self.source.name, self.origin, self.form)

    @classmethod
    def from_fields(cls, fields: Iterable[str]) -> Given:
        """Return the value that `fields` has taken apart."""
        name, text, source, origin, form = fields
        return cls(name=name, text=text, source=Source[source], origin=origin, form=form)


class ProgramKind(Enum):
    """How the program of a worker is started."""

    SCRIPT = "script"  # python SCRIPT ARGS: a file, a directory or a zip file with __main__.py
    MODULE = "module"  # python -m MODULE ARGS
    COMMAND = "command"  # PROGRAM ARGS (--no-python)


class Program(Struct, frozen=True, kw_only=True):
    """What every worker runs."""

    kind: ProgramKind
    target: str  # a path, a module's dotted name, or a command
    args: tuple[str, ...] = ()
    python: str | None = None  # interpreter; None: ours

    @property
    def shown(self) -> tuple[str, ...]:
        """What people know it by, and its arguments; a function of `launch()` is the argument of what runs it."""
        return self.args if self.target == RUNNER else (self.target, *self.args)


class Streams(Enum):
    """Which of a worker's streams an option means; torchrun writes them as a bit mask."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


class StreamChoice(Struct, frozen=True, kw_only=True):
    """torchrun's Std: one choice for all local ranks ("3") or one for each ("0:3,1:2")."""

    default: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = {}

    def of(self, local_rank: int) -> Streams:
        """Return the choice for this local rank."""
        return self.by_local_rank.get(local_rank, self.default)


class Fault(Struct, frozen=True, kw_only=True):
    """A fault that --chaos injects into a simulated job."""

    kind: str  # "kill" a worker, lose a "node", "hang" a worker, "slow" one down
    target: int  # a rank; the rank of a node for "node"
    after: float  # seconds from the start of the first generation


class JobSpec(Struct, frozen=True, kw_only=True):
    """One job as it was asked for: flags, PET_* and DDPLAUNCH_* variables and files, merged.

    `origins` names for each field where its value came from, e.g. "--nproc-per-node",
    "PET_NNODES", "ddplaunch.toml"; a field that is not in it has its default.
    """

    program: Program

    # how many, where
    nnodes: tuple[int, int] = (1, 1)  # minimum, maximum
    nproc_per_node: int | str | None = None  # a number, "gpu", "cpu", "auto"; None: GPUs, else 1
    cluster: str | None = None  # "static", "slurm", "kubernetes", "mpi", "pbs", "lsf", "ssh", "local"; None: discover
    hosts: str | None = None  # a list of hosts as it was given: a,b:4,rack[1-3]
    hostfile: str | None = None  # path
    include: str | None = None  # of the listed hosts, those to use, and their devices
    exclude: str | None = None  # of the listed hosts, those not to use, or devices of them
    avoid_bad_nodes: bool = False  # leave out the listed hosts whose machine has failed lately
    simulate: str | None = None  # "divide" this machine's devices among nodes on it, "share" them
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None  # None or 0: reserve a free one
    local_addr: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = {}
    rdzv_timeout: float = 600.0  # seconds in which all nodes must have joined
    last_call: float = 30.0  # seconds to wait for one more node once the minimum has joined
    heartbeat_timeout: float = 10.0  # seconds without a heartbeat after which a node is lost
    token_file: str | None = None  # path of a file that holds the job's secret
    no_sample: bool = False  # nothing is recorded of what the workers use
    no_flight_recorder: bool = False  # torch records no collectives, unless the user has it do so
    no_control: bool = False  # no control channel between the nodes
    remote_python: str | None = None  # interpreter of ddplaunch on the other hosts; None: ours
    standalone: bool = False
    run_id: str | None = None

    # devices and cores
    devices: tuple[str, ...] | None = None  # indices or GPU-/MIG- UUIDs, in order; ("cpu",): none
    gpus_per_worker: int | None = None
    workers_per_gpu: int | None = None
    mps: bool = False  # NVIDIA's MPS for workers that share a GPU
    pin: str | None = None  # "device", "visible", "none"; None: by kind of program
    virtual_local_rank: bool = False
    threads: int | None = None  # OMP_NUM_THREADS of each worker
    cpu_bind: str = "none"  # "none", "cores", "numa"
    numa_binding: str | None = None  # torchrun's: "node", "socket", "exclusive", "core-complex"

    # process group
    backend: str = "auto"  # "auto", "nccl", "gloo", "mpi", "xccl", "ucc"
    init_method: str = "env"  # "env", "tcp", "file:PATH"

    sharing_strategy: str | None = None  # of torch.multiprocessing: "file_descriptor", "file_system"; None: torch's own

    # variables
    env: tuple[tuple[str, str], ...] = ()  # --env and --env-file, later ones win
    # names in `env` whose values are shown nowhere, with the option that gave them
    origins_of_secrets: Mapping[str, str] = {}
    role: str = "default"

    # processes
    start_method: str = "spawn"  # "spawn": each worker is a fresh process; "forkserver": forked from a warm one
    preload: tuple[str, ...] | None = None  # what the fork server imports; None: torch and what its steps import
    keep_warm: int | None = None  # minutes for which the fork server stays for the next run; None: it ends with this

    # supervision
    grace_period: float = 30.0  # seconds from stop to kill
    max_restarts: int = 0
    restart_window: float | None = None  # seconds in which so many restarts are allowed; None: in the whole job
    restart_on: frozenset[str] | None = None  # kinds of failures that lead to a restart; None: all
    health_check: str | None = None  # a command of the shell; a node on which it fails takes no part
    spares: int = 0  # of the nodes: they wait until another one is lost or leaves
    max_no_progress: int | None = None  # generations in a row without a new step after which the job ends
    timeout: float | None = None  # seconds the whole job may take
    hang_timeout: float | None = None  # seconds without progress of any worker after which the job hangs
    straggler_check: float = 30.0  # seconds from one check for stragglers to the next; 0: never
    forward_signals: tuple[Signals, ...] = ()  # forwarded besides SIGUSR1, SIGUSR2 and SIGCONT
    stop_signals: tuple[Signals, ...] = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT)
    requeue_on: tuple[Signals, ...] = ()  # notices: a Slurm job whose workers exited after one is requeued
    max_requeues: int = 10
    notice_file: str | None = None  # path; what happens to it announces the end of the job, or of this node
    notice_command: str | None = None  # of the shell; its success does
    stop_file: str | None = None  # path; what happens to it stops the job
    wrap: tuple[str, ...] = ()  # a command before each worker's own; names in braces stand for what the worker has
    wrap_ranks: frozenset[int] | None = None  # that it is for; None: all
    debug_rank: int | None = None
    debugpy_ranks: frozenset[int] | None = None  # that wait for a client of debugpy
    debug_on_error: bool = False  # a worker that fails gets the terminal for a debugger
    chaos: tuple[Fault, ...] = ()  # faults to inject

    # output
    output: str = "prefix"  # "prefix", "raw", "collapse", "rank0", "none"
    log_line_prefix_template: str | None = None  # in place of the rank before each line; string.Template
    redirects: StreamChoice = StreamChoice()
    tee: StreamChoice = StreamChoice()
    timestamps: bool = False
    live: bool = False  # rows about the job below the output, on a terminal
    log_dir: str | None = None
    notify: str | None = None  # a command of the shell
    metrics_file: str | None = None  # path
    keep_runs: int = 30  # days for which the folders of runs stay; 0: for ever
    local_ranks_filter: frozenset[int] | None = None  # local ranks shown on the console; None: all
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    verbosity: int = 0  # -1 quiet, 0, 1 verbose

    origins: Mapping[str, str] = {}
    given: tuple[Given, ...] = ()  # all values as they were given, except for variables: other agents read them again
    # options of torchrun without effect here, files that are ignored: why, one sentence each
    remarks: tuple[str, ...] = ()

    @property
    def signals(self) -> tuple[Signals, ...]:
        """The signals with an effect on the job, besides those that are always forwarded."""
        return (*self.stop_signals, *self.forward_signals, *self.requeue_on)

    @property
    def notices(self) -> tuple[Signals, ...]:
        """The signals that may announce the end of the job: those of --requeue-on, or what a file or a command stands for."""
        has_others = self.notice_file is not None or self.notice_command is not None
        return self.requeue_on or ((Signals.SIGUSR1,) if has_others else ())

    @property
    def ending_signals(self) -> frozenset[int]:
        """The signals that ask the job to end."""
        return frozenset(self.stop_signals) - frozenset(self.forward_signals)

    @property
    def terminal_option(self) -> str | None:
        """What gives a worker the terminal, for a debugger, as it was written; None: nothing does."""
        if self.debug_on_error:
            return "--debug-on-error"
        return None if self.debug_rank is None else self.typed("debug_rank", self.debug_rank)

    @property
    def may_shorten_silence(self) -> bool:
        """Whether a host that answers nothing may be lost before `heartbeat_timeout`, since nobody has set that."""
        return self.origin("heartbeat_timeout") == "default"

    def origin(self, name: str) -> str:
        """Return where the value of this field came from."""
        return self.origins.get(name, "default")

    def typed(self, name: str, value: object) -> str:
        """Return the option of this field with `value`, as the user typed it: "--nnodes 4", or "nnodes = 4 in pyproject.toml"."""
        origin = self.origin(name)
        if origin.startswith("-"):
            return f"{origin} {value}"
        if origin.endswith("()"):  # a call in Python: "launch()"
            return f"{name}={value} in {origin}"
        if origin.endswith(".toml"):
            return f"{name.replace('_', '-')} = {value} in {origin}"
        return f"{origin}={value}"  # a variable


_DEFAULTS = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target=""))


def default(name: str) -> Any:
    """Return the default of this field of JobSpec; None for a required one."""
    return getattr(_DEFAULTS, name)
