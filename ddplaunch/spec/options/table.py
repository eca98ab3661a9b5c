"""What an option is, and every option, once. The grammars of values are in `parsers.py`, how options combine in `resolve.py`."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from msgspec import Struct

from ddplaunch.spec.job import Given, Source
from ddplaunch.spec.options import parsers
from ddplaunch.spec.options.parsers import BadValue
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import BACKENDS, RESTART_KINDS
from ddplaunch.system.words import did_you_mean

# set for workers, and so never read as a default: a job started inside a worker is another job
WORKER_VARIABLES = frozenset(f"DDPLAUNCH_{name}" for name in ("RUN_ID", "BACKEND", "DEVICE", "INIT_METHOD", "LOG_DIR"))


class Reach(IntEnum):
    """Which agents of a job get an option as it was given."""

    HERE = 0  # none: it concerns only the host where the command was typed
    STEP = 1  # those of a Slurm step; on other hosts the order to each has a field for it
    JOB = 2  # all


class Option(Struct, frozen=True, kw_only=True):
    """One option, declared once."""

    name: str  # its flag without "--", with underscores
    group: str  # heading in the help
    help: str
    parse: Callable[[str], Any]  # raises BadValue
    default: str = ""  # the text of its default, for the help
    example: str = ""  # a right value, for hints
    metavar: str = "N"
    short: str = ""
    field: str | None = None  # of JobSpec; None: of the same name
    is_flag: bool = False
    implied_value: str | None = None  # where none is typed, as in `--debug SCRIPT`; None: it needs one
    repeatable: bool = False  # every value counts, not only the last
    takes_list: bool = False  # values stand between commas; a file may hold an array
    choices: tuple[str, ...] = ()  # for completion and spelling hints
    path_kind: str = ""  # "file" or "folder", "command" if a bare name is looked for on PATH
    may_be_empty: bool = False  # an empty text means that it is not given, as to torchrun
    verbatim: bool = False  # blanks around its text count
    pet: bool = False  # torchrun reads PET_NAME
    torchruns: bool = False  # one of torchrun's; said only of those without PET_NAME
    variable: bool = True  # DDPLAUNCH_NAME is read; not where that name has another meaning
    foreign: str = ""  # a variable of torch with the same meaning
    reach: Reach = Reach.JOB
    why_no_effect: str = ""  # of an option that is accepted for torchrun's sake alone

    @property
    def flag(self) -> str:
        """The flag as it is written on the command line."""
        return f"--{self.key}"

    @property
    def key(self) -> str:
        """The key in a configuration file."""
        return self.name.replace("_", "-")

    @property
    def is_torchruns(self) -> bool:
        """Whether it is an option of torchrun's, with a variable PET_NAME or without one."""
        return self.pet or self.torchruns

    @property
    def target(self) -> str:
        """The field of JobSpec that it sets."""
        return self.field or self.name

    @property
    def variables(self) -> tuple[tuple[str, Source], ...]:
        """The environment variables that give it a value."""
        upper = self.name.upper()
        candidates = (
            (self.foreign, Source.FOREIGN, bool(self.foreign)),
            (f"PET_{upper}", Source.PET, self.pet),
            (f"DDPLAUNCH_{upper}", Source.VARIABLE, self.variable and f"DDPLAUNCH_{upper}" not in WORKER_VARIABLES),
        )
        return tuple((name, source) for name, source, read in candidates if read)

    def words(self, text: str) -> list[str]:
        """Return the words of a command line for this value."""
        return [self.flag] if self.is_flag else [self.flag, text]

    def value(self, given: Given) -> Any:
        """Return a given value of this option, parsed; LaunchError if it is not a valid one."""
        try:
            return self.parse(given.text)
        except BadValue as error:
            example = error.example or self.example  # of the same mistake, else any right value
            hint = error.hint or (f"type for example `{given.spelled(example)}`" if example else None)
            if not error.hint and (meant := did_you_mean(given.text.lower(), self.choices)):
                hint = f"did you mean `{given.spelled(meant)}`?"
            raise LaunchError(f"{given}: {error}", hint=hint) from None


class Alias(Struct, frozen=True, kw_only=True):
    """A flag of another launcher that means the same as one of ours."""

    flag: str
    option: str  # the name of ours
    launcher: str
    of_all_nodes: bool = False  # it counts the workers of all nodes


_NAME = parsers.text("expected a name")
_PINS = ("device", "visible", "none")
_CPU_BINDS = ("none", "cores", "numa")
_NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")
_SHARING = ("file_descriptor", "file_system")
_OUTPUTS = ("prefix", "raw", "collapse", "rank0", "none")
_CLUSTERS = ("static", "slurm", "kubernetes", "mpi", "pbs", "lsf", "ssh", "local")
_SIMULATIONS = ("divide", "share")
SHELLS = ("bash", "zsh", "fish")
_START_METHODS = ("auto", "spawn", "fork", "forkserver")

_HOW_MANY = "How many workers"
_PROGRAM = "The program"
_DEVICES = "Devices and cores"
_GROUP = "Process group"
_SUPERVISION = "Supervision"
_SCHEDULERS = "Schedulers"
_OUTPUT = "Output"
_DEBUGGING = "Debugging"
_NODES = "Several nodes"
TORCHRUN = "torchrun's own options"

GROUPS = (_HOW_MANY, _PROGRAM, _DEVICES, _GROUP, _SUPERVISION, _SCHEDULERS, _OUTPUT, _DEBUGGING, _NODES, TORCHRUN)

# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option(name="nproc_per_node", group=_HOW_MANY, metavar="N|gpu|cpu|auto", pet=True,
           parse=parsers.nproc_per_node, choices=("gpu", "cpu", "auto"), example="4",
           help="Workers on each node. Default: one for each GPU, or one without GPUs."),
    Option(name="gpus_per_worker", group=_HOW_MANY, parse=parsers.number(1), example="2",
           help="GPUs that a worker has for itself."),
    Option(name="workers_per_gpu", group=_HOW_MANY, parse=parsers.number(1), example="2",
           help="Workers that share a GPU."),
    Option(name="mps", group=_HOW_MANY, is_flag=True, parse=parsers.switch,
           help="Start NVIDIA's MPS for the job. Workers that share a GPU then run on it at the same time, each with an "
                "equal part."),

    Option(name="module", short="-m", group=_PROGRAM, is_flag=True, pet=True, parse=parsers.switch,
           help="SCRIPT is a module's name, as in `python -m`."),
    Option(name="no_python", group=_PROGRAM, is_flag=True, pet=True, parse=parsers.switch,
           help="SCRIPT is a command. Run it without python."),
    Option(name="python", group=_PROGRAM, metavar="PATH", parse=parsers.path, path_kind="command", foreign="PYTHON_EXEC",
           example="python3.12", help="The interpreter of the workers. Default: the one that runs ddplaunch."),
    Option(name="env", group=_PROGRAM, metavar="NAME=VALUE", parse=parsers.variable, repeatable=True,
           variable=False, example="NCCL_DEBUG=INFO", reach=Reach.HERE,
           help="Set a variable for the workers. You may repeat this option."),
    Option(name="env_file", group=_PROGRAM, metavar="FILE", parse=parsers.path, path_kind="file", repeatable=True, field="env",
           example="train.env", reach=Reach.HERE,
           help="Set variables for the workers from NAME=VALUE lines of a file. --env wins over the file."),
    Option(name="start_method", group=_PROGRAM, metavar="HOW", pet=True, parse=parsers.one_of(*_START_METHODS),
           choices=_START_METHODS, example="forkserver", default="spawn",
           help="How to start workers. spawn (the default) and fork: each as a fresh process. forkserver: forked from one "
                "process on the node, which has imported torch for all of them. auto: forkserver, if the node has more "
                "workers than CPUs, no accelerators, and a script that imports torch first."),
    Option(name="preload", group=_PROGRAM, metavar="MODULES", parse=parsers.modules, takes_list=True,
           example="torch,transformers",
           help="Modules that the fork server imports. Default: torch, torch.distributed and torch._dynamo, which an "
                "optimizer needs for its first step."),
    Option(name="keep_warm", group=_PROGRAM, metavar="[MINUTES]", parse=parsers.number(1, 1440), implied_value="10", example="10",
           help="Keep the fork server for later runs that import the same modules, so that their workers start at once. "
                "It ends when no run has used it for this time (default: 10 minutes). Implies --start-method forkserver. "
                "`ddplaunch warm` shows it."),

    Option(name="devices", group=_DEVICES, metavar="LIST", parse=parsers.devices, takes_list=True,
           example="0,2", help="The accelerators to use, by index or UUID. cpu: use none."),
    Option(name="pin", group=_DEVICES, metavar="HOW", parse=parsers.one_of(*_PINS), choices=_PINS, example="device",
           help="How to bind a worker to its own device. device: the worker sees all devices, and its own is the current "
                "one. visible: the worker sees only its own. none: do not bind."),
    Option(name="threads", group=_DEVICES, parse=parsers.number(1), example="4",
           help="OMP_NUM_THREADS of each worker. Default: the usable CPUs divided among the workers."),
    Option(name="cpu_bind", group=_DEVICES, metavar="HOW", parse=parsers.one_of(*_CPU_BINDS), choices=_CPU_BINDS,
           example="cores", default="none", help="Bind each worker to CPUs near its device: none, cores or numa."),

    Option(name="backend", group=_GROUP, metavar="NAME", parse=parsers.one_of("auto", *BACKENDS), choices=("auto", *BACKENDS),
           example="gloo", default="auto", help="The process-group backend: auto, nccl, gloo, mpi, xccl or ucc."),
    Option(name="init_method", group=_GROUP, metavar="env|tcp|file:PATH", parse=parsers.init_method,
           choices=("env", "tcp"), example="env", default="env",
           help="How the workers find each other. Sets DDPLAUNCH_INIT_METHOD."),
    Option(name="master_addr", group=_GROUP, metavar="HOST", pet=True, may_be_empty=True,
           parse=parsers.host, example="10.0.0.1", reach=Reach.STEP,
           help="Address of node 0: MASTER_ADDR."),
    Option(name="master_port", group=_GROUP, metavar="PORT", pet=True, parse=parsers.number(0, 65535), example="29500",
           reach=Reach.STEP,
           help="Port of rank 0: MASTER_PORT. Default, or 0: reserve a free port."),
    Option(name="sharing_strategy", group=_GROUP, metavar="HOW", parse=parsers.one_of(*_SHARING), choices=_SHARING,
           example="file_system",
           help="How torch.multiprocessing shares CPU tensors between processes. file_descriptor (torch's default) keeps "
                "a file open for each tensor. file_system keeps names in /dev/shm instead."),

    Option(name="max_restarts", group=_SUPERVISION, metavar="N[/TIME]", pet=True, parse=parsers.restarts, example="3",
           default="0",
           help="How often all workers are restarted after a failure. 3/1h: up to three times in any hour. A restart that led "
                "to a new step is given back."),
    Option(name="spares", group=_SUPERVISION, parse=parsers.number(0), example="1", default="0",
           help="Further nodes, beyond --nnodes, that join and wait without workers. One of them takes the place of a node that "
                "is lost or leaves, and all workers start again."),
    Option(name="health_check", group=_SUPERVISION, metavar="COMMAND", parse=parsers.command_line, example="./check-gpus.sh",
           help="Run this shell command on each node before the workers start, and before each restart. A node on which it "
                "fails, or runs for 60 s, takes no part. The job goes on with spares, or with the nodes that --nnodes allows."),
    Option(name="restart_on", group=_SUPERVISION, metavar="LIST", parse=parsers.restart_on, takes_list=True,
           choices=RESTART_KINDS, example="node-lost,killed",
           help="Restart only after these kinds of failures: node-lost, killed (by a signal), cuda, nccl, timeout, hang, "
                "import, exception or exit (a status without an exception). Default: all of them."),
    Option(name="max_no_progress", group=_SUPERVISION, parse=parsers.number(1), example="3",
           help="End the job after so many generations in a row without a new step, with exit status 120, and do not requeue "
                "it. Steps are those of ddplaunch.progress() or a Trainer."),
    Option(name="grace_period", group=_SUPERVISION, metavar="TIME", parse=parsers.duration,
           example="30s", default="30s",
           help="From the stop signal to SIGKILL: 90, 90s, 15m or 1h30m. In a Slurm job or a pod the default is 25s."),
    Option(name="timeout", group=_SUPERVISION, metavar="TIME", parse=parsers.positive_duration, example="2h",
           help="Stop the job after this time, with exit status 124."),
    Option(name="hang_timeout", group=_SUPERVISION, metavar="TIME", parse=parsers.duration_from_1s, example="5m",
           help="Stop the workers if none of them has made progress for this time, and say who waits for whom. This is a "
                "failure, with exit status 123."),
    Option(name="straggler_check", group=_SUPERVISION, metavar="TIME|off", parse=parsers.duration_or_off, example="2m",
           default="30s",
           help="How often to check which rank comes last to the collectives, in a job with a process group (default: "
                "30s). off: never. ddplaunch names a rank that costs 5% of a step."),

    Option(name="forward_signals", group=_SCHEDULERS, metavar="LIST", parse=parsers.signals, takes_list=True, example="SIGXCPU",
           help="Further signals to pass on to the workers while the job goes on. SIGUSR1, SIGUSR2, SIGCONT and SIGWINCH "
                "are always passed on."),
    Option(name="requeue_on", group=_SCHEDULERS, metavar="LIST", parse=parsers.notices, takes_list=True, example="SIGUSR1",
           help="Signals that announce the end of a Slurm job. If all workers exit after one of them and none fails, "
                "ddplaunch requeues the job. The exit status is 128 + the signal."),
    Option(name="max_requeues", group=_SCHEDULERS, parse=parsers.number(0), example="10", default="10",
           help="How often a job may be requeued (default: 10). Slurm's own requeues count, too."),
    Option(name="notice_file", group=_SCHEDULERS, metavar="FILE", parse=parsers.path, path_kind="file",
           example="/run/spot-notice",
           help="When this file appears or changes on a node, give its workers the notice that the end is near: SIGUSR1, or "
                "the first signal of --requeue-on. A node that an elastic job can do without leaves."),
    Option(name="notice_command", group=_SCHEDULERS, metavar="COMMAND", parse=parsers.command_line,
           example="'curl -sf http://169.254.169.254/latest/meta-data/spot/instance-action'",
           help="Run this shell command every 5 s on each node. Once it exits with 0, give the same notice."),
    Option(name="stop_file", group=_SCHEDULERS, metavar="FILE", parse=parsers.path, path_kind="file", example="/shared/stop",
           help="When this file appears or changes on the coordinator's host, stop the job, as SIGTERM does. It is not "
                "requeued."),

    Option(name="output", group=_OUTPUT, metavar="HOW", parse=parsers.one_of(*_OUTPUTS, hint=parsers.hint_if_file),
           choices=_OUTPUTS, example="prefix", default="prefix",
           help="How to show the output of the workers. prefix: with the rank before each line. raw: unchanged. collapse: "
                "equal lines once. rank0: only rank 0. none: not at all."),
    Option(name="live", group=_OUTPUT, is_flag=True, parse=parsers.switch, reach=Reach.HERE,
           help="Below the output, on a terminal, show how far the job is and which ranks differ. The keyboard is ddplaunch's "
                "then: t shows where the ranks are, h the keys. The workers read /dev/null."),
    Option(name="timestamps", group=_OUTPUT, is_flag=True, parse=parsers.switch,
           help="Print the time of day before each line of a worker."),
    Option(name="log_dir", group=_OUTPUT, metavar="FOLDER", pet=True, may_be_empty=True,
           parse=parsers.path, path_kind="folder", example="logs",
           help="Make a folder for the logs of each run in this folder. /dev/null: keep no logs."),
    Option(name="keep_runs", group=_OUTPUT, metavar="DAYS", parse=parsers.number(0), example="90", default="30",
           help="Remove the folders of runs without --log-dir after this many days (default: 30). 0: never. Runs older "
                "than a day keep at most 2 GiB together."),
    Option(name="no_sample", group=_OUTPUT, is_flag=True, parse=parsers.switch,
           help="Do not record the CPU, memory and GPU use of the workers, the state of the code and the machine. "
                "`ddplaunch report` shows these records."),
    Option(name="notify", group=_OUTPUT, metavar="COMMAND", parse=parsers.command_line, example="./tell.sh",
           help="Run this shell command at the start and the end of the job, and at each restart and notice. It gets the "
                "event as JSON on stdin, runs on the coordinator's host, and may take 10 s."),
    Option(name="metrics_file", group=_OUTPUT, metavar="FILE", parse=parsers.path, path_kind="file", example="job.prom",
           help="Write figures of the job for Prometheus to this file every 15 s, on the coordinator's host."),
    Option(name="run_id", group=_OUTPUT, metavar="NAME", parse=parsers.name, example="baseline-1",
           help="Name of this run and of its folder, which gets a number if an earlier run has the name: NAME.1. Default: date, "
                "time and four characters."),
    Option(name="quiet", short="-q", group=_OUTPUT, is_flag=True, parse=parsers.switch, field="verbosity",
           help="ddplaunch itself prints errors only."),
    Option(name="verbose", short="-v", group=_OUTPUT, is_flag=True, parse=parsers.switch, field="verbosity",
           help="ddplaunch prints more about its decisions and actions."),

    Option(name="wrap", group=_DEBUGGING, metavar="COMMAND", parse=parsers.wrapper, example="'strace -f -o {run}/{rank}.strace'",
           help="Start each worker by this command, as `nsys profile -o {run}/{rank}` or `numactl --localalloc`. "
                "ddplaunch adds the command of the worker to it. {run} is the run folder. The other names are {rank}, "
                "{local_rank}, {node_rank}, {host}."),
    Option(name="wrap_ranks", group=_DEBUGGING, metavar="RANKS", parse=parsers.ranks, example="0,4-7",
           help="The ranks for --wrap. Default: all."),
    Option(name="debug", group=_DEBUGGING, metavar="[RANK]", parse=parsers.number(0), implied_value="0", field="debug_rank",
           variable=False, example="0", reach=Reach.HERE,
           help="Give this rank (default: 0) the terminal, for breakpoint() and pdb. The other ranks print only to their "
                "logs."),
    Option(name="debug_on_error", group=_DEBUGGING, is_flag=True, parse=parsers.switch, variable=False, reach=Reach.HERE,
           help="Open a debugger where the first rank fails, and give that rank the terminal. The other ranks wait until "
                "you leave the debugger."),
    Option(name="debugpy", group=_DEBUGGING, metavar="[RANKS]", parse=parsers.ranks, implied_value="0", field="debugpy_ranks",
           variable=False, takes_list=True, example="0,1",
           help="Let these ranks (default: 0) wait for VS Code or another client of debugpy before they begin. ddplaunch "
                "prints the lines for launch.json."),
    Option(name="no_flight_recorder", group=_DEBUGGING, is_flag=True, parse=parsers.switch,
           help="Keep torch from recording the collectives of each worker. `ddplaunch stacks` needs these records to say "
                "who waits for whom."),
    Option(name="simulate", group=_DEBUGGING, metavar="[divide|share]", parse=parsers.one_of(*_SIMULATIONS),
           choices=_SIMULATIONS, implied_value="divide", example="divide", reach=Reach.HERE,
           help="Start all nodes on this machine, each with an agent and an address of its own, as on several hosts. "
                "divide: each node gets its part of the accelerators. share: every node uses all of them."),
    Option(name="chaos", group=_DEBUGGING, metavar="LIST", parse=parsers.faults,
           takes_list=True, example="kill:5@2s,node:1@3s", reach=Reach.HERE,
           help="With --simulate: inject faults at times after the start, to see how the job reacts. A fault is kill, "
                "hang or slow with a rank, or node with a node rank. Example: kill:5@2s,node:1@3s,hang:2@1s,slow:0@500ms"),

    Option(name="nnodes", group=_NODES, metavar="N|MIN:MAX", pet=True, parse=parsers.nnodes, example="2", default="1",
           reach=Reach.HERE,
           help="Number of nodes. With MIN:MAX, nodes may leave and join while the job runs."),
    Option(name="hosts", group=_NODES, metavar="LIST", parse=parsers.text("expected hosts such as a,b:4"), takes_list=True,
           example="a,b:4", reach=Reach.HERE,
           help="Run on these hosts, over ssh: a,b:4,gpu[01-03]. The number after a host is its number of workers."),
    Option(name="hostfile", group=_NODES, metavar="FILE", parse=parsers.path, path_kind="file", example="hosts.txt",
           reach=Reach.HERE,
           help="Run on the hosts in this file. Each line is HOST, HOST:4 or HOST slots=4."),
    Option(name="include", group=_NODES, metavar="LIST", parse=parsers.text("expected hosts"), example="a,b", reach=Reach.HERE,
           help="Of those hosts, use only these: a,b, or a@b:0,2 for two of the accelerators of b."),
    Option(name="exclude", group=_NODES, metavar="LIST", parse=parsers.text("expected hosts"), example="b", reach=Reach.HERE,
           help="Of those hosts, leave out these: a,b, or a@b:0,2 for all of a and two of the accelerators of b."),
    Option(name="avoid_bad_nodes", group=_NODES, is_flag=True, parse=parsers.switch, reach=Reach.HERE,
           help="Leave out the listed hosts on which the machine has failed in the last 7 days, as `ddplaunch doctor --nodes` "
                "shows them. With `ddplaunch submit`, exclude such nodes of Slurm."),
    Option(name="remote_python", group=_NODES, metavar="PATH", parse=parsers.path, path_kind="command",
           example="/opt/venv/bin/python", reach=Reach.HERE,
           help="The interpreter that has ddplaunch on the other hosts. Default: the same path as here."),
    Option(name="cluster", group=_NODES, metavar="NAME", parse=parsers.one_of(*_CLUSTERS), choices=_CLUSTERS,
           example="slurm", reach=Reach.HERE,
           help="The cluster of the nodes, if ddplaunch does not detect it: static, slurm, kubernetes, mpi, pbs, lsf, ssh "
                "or local."),
    Option(name="node_rank", group=_NODES, pet=True, parse=parsers.number(0), example="0", reach=Reach.HERE,
           help="Rank of this node, if you start ddplaunch on each node yourself."),
    Option(name="local_addr", group=_NODES, metavar="HOST", pet=True, may_be_empty=True,
           parse=parsers.host, example="10.0.0.2", reach=Reach.HERE,
           help="The address at which other nodes reach this one."),
    Option(name="rdzv_timeout", group=_NODES, metavar="TIME", parse=parsers.positive_duration, example="10m", default="10m",
           help="How long the nodes wait for each other at the start. After that, the exit status is 121."),
    Option(name="heartbeat_timeout", group=_NODES, metavar="TIME", parse=parsers.duration_from_1s, example="30s",
           default="10s",
           help="A node that sends no heartbeat for this time, or whose agent does not run, is lost. The job ends with exit "
                "status 122, unless MIN nodes remain. By default, a host whose kernel does not answer either is lost earlier, "
                "after 6s to 10s."),
    Option(name="token_file", group=_NODES, metavar="FILE", parse=parsers.path, path_kind="file", example="token.txt",
           reach=Reach.HERE,
           help="A file with the secret that authenticates the nodes, if you start ddplaunch on each node yourself. You "
                "can also set DDPLAUNCH_TOKEN. Over ssh, ddplaunch makes a secret. In Slurm it does so too, if the nodes "
                "share your home."),
    Option(name="no_control", group=_NODES, is_flag=True, parse=parsers.switch, reach=Reach.STEP,
           help="Use no control channel between the nodes. A failure on one node does not stop the others."),

    Option(name="role", group=TORCHRUN, metavar="NAME", pet=True, may_be_empty=True, parse=_NAME, example="trainer",
           default="default",
           help="Name of the workers' role: ROLE_NAME."),
    Option(name="redirects", short="-r", group=TORCHRUN, metavar="STREAMS", pet=True, parse=parsers.streams, example="3",
           default="0",
           help="Streams that go only to the log. 1: stdout, 2: stderr, 3: both. 0:3,1:2 names local ranks."),
    Option(name="tee", short="-t", group=TORCHRUN, metavar="STREAMS", pet=True, parse=parsers.streams, example="3", default="0",
           help="Streams that go to the log and to the console."),
    Option(name="duplicate_stdout_filters", group=TORCHRUN, metavar="TEXTS", pet=True, may_be_empty=True,
           parse=parsers.needles, example="loss,accuracy",
           help="Copy lines of stdout that hold one of these texts to a file of their own."),
    Option(name="duplicate_stderr_filters", group=TORCHRUN, metavar="TEXTS", pet=True, may_be_empty=True,
           parse=parsers.needles, example="warning", help="The same for stderr."),
    Option(name="log_line_prefix_template", group=TORCHRUN, metavar="TEXT", pet=True, may_be_empty=True, verbatim=True,
           foreign="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", parse=str, example="'[${hostname}:${rank}] '",
           help="The text before each line, in place of the rank. ddplaunch replaces ${rank}, ${local_rank}, ${role_name} "
                "and ${hostname}."),
    Option(name="local_ranks_filter", group=TORCHRUN, metavar="LIST", pet=True, may_be_empty=True,
           parse=parsers.local_ranks, takes_list=True, example="0,1",
           help="Show only the output of these local ranks."),
    Option(name="signals_to_handle", group=TORCHRUN, metavar="LIST", pet=True, parse=parsers.signals, takes_list=True,
           field="stop_signals", example="SIGTERM,SIGINT", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
           help="Signals that stop the job. ddplaunch passes each of them on to the workers."),
    Option(name="shutdown_timeout", group=TORCHRUN, metavar="TIME", pet=True, field="grace_period",
           foreign="TORCH_ELASTIC_SHUTDOWN_TIMEOUT", parse=parsers.duration, example="30", default="30s",
           help="torchrun's name for --grace-period."),
    Option(name="virtual_local_rank", group=TORCHRUN, is_flag=True, pet=True, parse=parsers.switch,
           help="LOCAL_RANK is 0 for every worker, and each sees its own device only."),
    Option(name="numa_binding", group=TORCHRUN, metavar="HOW", parse=parsers.one_of(*_NUMA_BINDINGS),
           torchruns=True, choices=_NUMA_BINDINGS, example="node",
           help="torchrun's CPU binding: node, socket, exclusive or core-complex."),
    Option(name="standalone", group=TORCHRUN, is_flag=True, pet=True, parse=parsers.switch, reach=Reach.HERE,
           help="Run on one node with a free port. This is the default for one node."),
    Option(name="rdzv_backend", group=TORCHRUN, metavar="NAME", pet=True, parse=parsers.one_of(*_RENDEZVOUS),
           choices=_RENDEZVOUS, example="c10d", reach=Reach.HERE, help="torchrun's rendezvous: static, c10d, etcd or etcd-v2."),
    Option(name="rdzv_endpoint", group=TORCHRUN, metavar="HOST[:PORT]", pet=True, may_be_empty=True, parse=parsers.endpoint,
           example="10.0.0.1:29500", reach=Reach.HERE, help="The endpoint of the rendezvous, an address of node 0."),
    Option(name="rdzv_id", group=TORCHRUN, metavar="NAME", pet=True, may_be_empty=True, parse=_NAME, example="job-1",
           help="Name of the job that nodes share: TORCHELASTIC_RUN_ID."),
    Option(name="rdzv_conf", group=TORCHRUN, metavar="KEY=VALUE,...", pet=True, may_be_empty=True,
           parse=parsers.rendezvous_settings, example="join_timeout=60",
           help="Settings of torchrun's rendezvous. join_timeout and timeout mean --rdzv-timeout. last_call_timeout (30): "
                "how many seconds MIN nodes wait for more, up to MAX. is_host=1: this is node 0. is_host=0: this is not "
                "node 0."),
    Option(name="run_path", group=TORCHRUN, is_flag=True, pet=True, parse=parsers.switch,
           why_no_effect="a script is run as a file anyway", help="SCRIPT is a file's path, even with --no-python."),
    Option(name="monitor_interval", group=TORCHRUN, metavar="SECONDS", pet=True, parse=parsers.positive_number,
           example="0.1", why_no_effect="the system tells ddplaunch when a worker ends",
           help="How often torchrun checks its workers."),
    Option(name="event_log_handler", group=TORCHRUN, metavar="NAME", pet=True, parse=_NAME, example="null",
           why_no_effect="events are in events.jsonl of the run folder", help="Where torchrun sends its events."),
    Option(name="logs_specs", group=TORCHRUN, metavar="NAME", torchruns=True, parse=parsers.one_of("default"),
           may_be_empty=True, example="default", why_no_effect="logs are written as --log-dir, --redirects and --tee say",
           help="A plug-in for torchrun's logs. ddplaunch accepts only default."),
    Option(name="use_env", group=TORCHRUN, is_flag=True, torchruns=True, parse=parsers.switch,
           why_no_effect="LOCAL_RANK is always set, and no --local-rank is added to the script's arguments",
           help="An option of torch.distributed.launch: pass the local rank in a variable."),
    Option(name="print_completion", group=TORCHRUN, metavar="SHELL", torchruns=True, variable=False,
           parse=parsers.one_of(*SHELLS), choices=SHELLS, example="bash", help="The same as `ddplaunch completion SHELL`."),
)
ALIASES = (
    Alias(flag="--num-processes", option="nproc_per_node", launcher="accelerate", of_all_nodes=True),
    Alias(flag="--num-machines", option="nnodes", launcher="accelerate"),
    Alias(flag="--machine-rank", option="node_rank", launcher="accelerate"),
    Alias(flag="--main-process-ip", option="master_addr", launcher="accelerate"),
    Alias(flag="--main-process-port", option="master_port", launcher="accelerate"),
    Alias(flag="--gpu-ids", option="devices", launcher="accelerate"),
    Alias(flag="--num-gpus", option="nproc_per_node", launcher="DeepSpeed"),
    Alias(flag="--num-nodes", option="nnodes", launcher="DeepSpeed"),
    Alias(flag="-n", option="nproc_per_node", launcher="mpirun", of_all_nodes=True),
    Alias(flag="-np", option="nproc_per_node", launcher="mpirun", of_all_nodes=True),
    Alias(flag="--np", option="nproc_per_node", launcher="mpirun", of_all_nodes=True),
    Alias(flag="--num-proc", option="nproc_per_node", launcher="horovodrun", of_all_nodes=True),
    Alias(flag="--ntasks", option="nproc_per_node", launcher="srun", of_all_nodes=True),
    Alias(flag="--ntasks-per-node", option="nproc_per_node", launcher="srun"),
    Alias(flag="--nodes", option="nnodes", launcher="srun"),
)
# fmt: on

ALIAS_OF = {alias.flag: alias for alias in ALIASES}
BY_NAME = {option.name: option for option in OPTIONS}
