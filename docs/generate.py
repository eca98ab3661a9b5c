"""Writes what follows from the code: `python docs/generate.py`; with `--check`, fails if something is stale.

It writes the tables of the reference and the map of the code; what needs more words stands in the guides.
docs/reference/run-folder.md is written by hand, except for its list of events.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from ddplaunch.cli.command import MOMENTS, TOPICS, VERBS, Command, Context
from ddplaunch.cli.main import application
from ddplaunch.launcher.tell.causes import CAUSES
from ddplaunch.plan import Plan
from ddplaunch.plan.cluster.by_flags import discover_local
from ddplaunch.plan.cluster.discover import KINDS
from ddplaunch.plan.devices import Device, Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import make_plan
from ddplaunch.plan.variables import environment
from ddplaunch.record.events import SCHEMA
from ddplaunch.spec.job import JobSpec, Program, ProgramKind
from ddplaunch.spec.options.table import GROUPS, OPTIONS, Option
from ddplaunch.spec.options.token import VARIABLE as TOKEN
from ddplaunch.system.exitcodes import MEANINGS
from ddplaunch.worker import distributed
from docs import code_map, gpus_seen, topics

# when each event happens: a new one fails here until it is explained
_EVENTS = {
    "job_started": "everything is decided; the first event but for `node_joined`",
    "generation_started": "all workers are about to be started, the first time or again",
    "worker_started": "a worker has a process",
    "worker_start_failed": "a worker could not be started",
    "worker_raised": "a worker that still runs has recorded the exception that is ending it",
    "worker_exited": "a worker has ended, well or badly",
    "signal_received": "a signal came to `ddplaunch`",
    "signal_forwarded": "a signal was passed on to workers that go on",
    "stop_sent": "workers were asked to end",
    "kill_sent": "the grace period is over, or a second signal came: SIGKILL",
    "swept": "after the workers' end, `ddplaunch` looked for what they left behind; empty `left`: nothing is there any more",
    "job_suspended": "Ctrl-Z: the workers were stopped",
    "job_resumed": "the workers go on",
    "paused": "the agent did not run, though it should have woken: SIGSTOP, a frozen cgroup, a machine that slept",
    "front_lost": "the process that the user started was killed",
    "output_dropped": "output was not shown, because nothing read the command's stdout for seconds",
    "notice": "something that `ddplaunch` also said on stderr",
    "straggler": "node 0 only: most steps wait for one rank, by `--straggler-check`; said at most once in five minutes",
    "generation_failed": "a worker failed, or the job hung, and all workers will be started again",
    "node_joined": "node 0 only: an agent has come that was not there before, of this node or another",
    "node_stopping": "node 0 only: a node has begun to stop its workers",
    "node_left": "node 0 only: an agent is gone",
    "left_after_notice": "all workers have left after a signal of `--requeue-on` or a notice, and none failed",
    "job_ended": "everything is gone; the last event",
}

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddplaunch"
REFERENCE = ROOT / "docs/reference"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MAP = ROOT / "docs/pictures/modules.svg"
_CODES_BEGIN = "<!-- exit codes: written by docs/generate.py from the code -->"
_CODES_END = "<!-- end of the exit codes -->"
RUN_FOLDER = REFERENCE / "run-folder.md"
_EVENTS_BEGIN = "<!-- events: written by docs/generate.py from the code -->"
_EVENTS_END = "<!-- end of the events -->"
SEEN = ROOT / "docs/reference/compatibility.md"
FRONT, CHEAT_SHEET = (ROOT / "docs" / name for name in ("README.md", "cheat-sheet.md"))
_VERBS_BEGIN, _VERBS_END = "<!-- verbs: written by docs/generate.py from the code -->", "<!-- end of the verbs -->"
# where each verb is explained: a new one fails here until a page explains it
_PAGE_OF = {
    "plan": "guides/one-machine.md#look-before-you-start",
    "doctor": "guides/doctor.md",
    "check": "guides/simulate.md#check-that-all-ranks-agree",
    "submit": "recipes/slurm.md#let-ddplaunch-write-the-script",
    "ps": "guides/running-jobs.md",
    "top": "guides/running-jobs.md#watch-it",
    "logs": "guides/running-jobs.md#read-its-output",
    "stacks": "guides/hangs.md",
    "profile": "guides/profile.md",
    "attach": "guides/debugging.md#look-into-a-running-worker",
    "stop": "guides/running-jobs.md#stop-it",
    "report": "guides/report.md#the-report",
    "warm": "concepts/start-methods.md#import-once-for-several-runs---keep-warm",
    "shim": "guides/from-torchrun.md#programs-that-start-torchrun-themselves",
    "completion": "guides/configuration.md#complete-options-in-your-shell",
}
_MAP_BEGINS, _MAP_ENDS = "<!-- the map: written by docs/generate.py from the code -->", "<!-- end of the map -->"
TOPIC_TEXTS = PACKAGE / "cli/topics"
_NOTE = "<!-- written by docs/generate.py from the code: change it there -->"

# every variable that a worker gets from ddplaunch: a new one fails here until it is explained
_VARIABLES = {
    "RANK": "which worker of the job it is, from 0",
    "LOCAL_RANK": "which worker of its node it is, from 0; always 0 with `--virtual-local-rank`",
    "WORLD_SIZE": "how many workers the job has",
    "LOCAL_WORLD_SIZE": "how many workers its node has",
    "NODE_RANK": "which node of the job it is on, from 0. torchrun does not set it, but Lightning and others read it",
    "GROUP_RANK": "torchrun's name for the same",
    "GROUP_WORLD_SIZE": "how many nodes the job has",
    "ROLE_NAME": "what `--role` says",
    "ROLE_RANK": "its rank among the workers of its role: as RANK, since a job has one role",
    "ROLE_WORLD_SIZE": "how many workers have its role: as WORLD_SIZE",
    "MASTER_ADDR": "where rank 0 is found: 127.0.0.1 on one node, the address of node 0 on several, unless "
    "`--master-addr` or `--rdzv-endpoint` says otherwise",
    "MASTER_PORT": "the port at which the workers meet: reserved for this job, a new one for each restart, unless "
    "`--master-port` names one",
    "TORCHELASTIC_RUN_ID": "the name of the run, or the value of `--rdzv-id`; because it is set, "
    "`torch.distributed.is_torchelastic_launched()` returns True",
    "TORCHELASTIC_RESTART_COUNT": "how often the workers were started again, 0 at first; in Slurm every requeue of the job "
    "counts too (SLURM_RESTART_COUNT)",
    "TORCHELASTIC_MAX_RESTARTS": "the value of `--max-restarts`",
    "TORCHELASTIC_USE_AGENT_STORE": "`False`, because a worker of node 0, mostly rank 0, hosts the store at MASTER_PORT, "
    "and no agent does",
    "TORCHELASTIC_ERROR_FILE": "the file for the exception that ends the worker. ddplaunch's bootstrap writes it, and so "
    "does torch's `@record`; empty if there is no room for it",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1, unless you have set it",
    "OMP_NUM_THREADS": "the usable CPUs divided among the workers of the node; `--threads`, or the variable in your "
    "environment, wins",
    "PYTHONUNBUFFERED": "1, unless you have set it, so that output appears at once, and a crash loses none",
    "DDPLAUNCH_RUN_ID": "the name of the run, and of its folder unless an earlier run has that",
    "DDPLAUNCH_BACKEND": "the process-group backend for this job; pass it to `init_process_group`",
    "DDPLAUNCH_DEVICE": "the worker's own device, by its name inside the worker",
    "DDPLAUNCH_INIT_METHOD": "the address for `--init-method`: `env://`, `tcp://...` or `file://...`",
    "DDPLAUNCH_LOG_DIR": "the folder of the run; empty if there is none",
    "DDPLAUNCH_TERM": "the term: the same in all workers of a start, and greater in each later start and run, so that no "
    "[checkpoint is replaced by an older one](../guides/stopping-and-restarting.md#name-checkpoints-by-their-term). Not set "
    "where nodes do not talk (`--no-control`), nor by `plan --sh`",
}
_INSIDE = ("DDPLAUNCH_PIN_DEVICE",)  # from the launcher to the bootstrap, which takes it out of the environment

_SOMETIMES = {
    "CUDA_VISIBLE_DEVICES": "the worker's own devices with `--pin visible`; all of the job's with `--devices`, and where "
    "only a list of UUIDs makes an index certain",
    "HIP_VISIBLE_DEVICES": "the same on AMD GPUs",
    "ZE_AFFINITY_MASK": "the same on Intel GPUs",
    "FORCE_COLOR": "`1` if a terminal shows the output ([why](../concepts/output.md)), unless it or `NO_COLOR` is set",
    "TTY_COMPATIBLE": "`1` in the same case, unless you have set it; `TTY_INTERACTIVE` likewise",
    "COLUMNS": "the width of that terminal minus the room for ranks, unless you have set it; `LINES` its height",
    "GLOO_SOCKET_IFNAME": "with several nodes, the interface by which this node reaches node 0, unless you have set it, "
    "even to the empty text",
    "DDPLAUNCH_NOTICE_SIGNALS": "the signals of `--requeue-on`, as `SIGUSR1,SIGTERM`",
    "PYTHONBREAKPOINT": "`0` in the ranks that `--debug` does not name, so that they ignore `breakpoint()`, unless "
    "you have set it",
    "TORCH_FR_BUFFER_SIZE": f"`{distributed.ENTRIES}`, the number of collectives that torch's flight recorder keeps. "
    "Not set if you set this variable or `TORCH_NCCL_TRACE_BUFFER_SIZE`, nor with `--no-flight-recorder`",
    "NCCL_SOCKET_IFNAME": "the same for NCCL, as `=eth0`, which means exactly this name",
    "DDPLAUNCH_SHARING_STRATEGY": "the value of `--sharing-strategy`; a worker sets it when it imports torch.multiprocessing",
    "CUDA_MPS_PIPE_DIRECTORY": "with `--mps`, the folder in which workers find the MPS daemon of this job",
    "CUDA_MPS_LOG_DIRECTORY": "with `--mps`, the folder of its logs",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "with `--mps`, 100 divided by the workers on the GPU, unless you have set it",
}
_READ = {
    TOKEN: "the secret by which the nodes of a job know each other, as in `--token-file`; workers do not get it",
    "PYTHON_EXEC": "the interpreter of the workers, as `--python`",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "as `--shutdown-timeout`",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "the text before each line of a worker, in place of `[RANK] `; "
    "ddplaunch replaces `${role_name}`, `${rank}` and `${local_rank}`",
    "PYTHONBREAKPOINT": "the debugger that `breakpoint()`, `--debug` and `--debug-on-error` open, as `ipdb.set_trace`; else pdb",
    "CUDA_VISIBLE_DEVICES": "which NVIDIA GPUs there are; on AMD, where HIP_VISIBLE_DEVICES is not set, which of those",
    "CUDA_DEVICE_ORDER": "whether CUDA counts GPUs of different models by PCI address",
    "ROCR_VISIBLE_DEVICES": "which AMD GPUs there are",
    "HIP_VISIBLE_DEVICES": "which of those",
    "ZE_AFFINITY_MASK": "which Intel GPUs there are",
    "ZE_FLAT_DEVICE_HIERARCHY": "whether a tile of an Intel card counts as a device, or only the card",
    "OMP_NUM_THREADS": "passed on as it is, unless `--threads` is given",
    "XDG_STATE_HOME": "where the run folders are: in `ddplaunch/runs` below it; `~/.local/state` if it is not set",
    "TMPDIR": "where the workers' exceptions are written if there is no room in /dev/shm",
    "NO_COLOR": "no colours; wins over the next two",
    "FORCE_COLOR": "colours, even where the output is no terminal",
    "CLICOLOR_FORCE": "the same",
    "CLICOLOR": "0: no colours",
    "TERM": "`dumb`: no colours",
    "SHELL": "which shell `ddplaunch completion` is for, if it is not told",
}


def pages() -> dict[str, str]:
    """Return every generated page by the name of its file."""
    return {
        "cli.md": _cli(),
        "exit-status.md": _exit_status(),
        "variables.md": _variables(),
        "causes.md": _causes(),
        "python.md": _python(),
    }


def _page(*parts: str) -> str:
    return "\n\n".join((_NOTE, *parts)) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


# --- options


def _cli() -> str:
    parts = [
        "# The command line",
        "\n".join(["```", *map(_usage, VERBS), "```"]),
        "`ddplaunch SCRIPT` is `ddplaunch run SCRIPT`. `plan` takes the same words: `--json` prints [the plan as "
        "JSON](run-folder.md#planjson), `--sh` the command and the variables of each worker to paste into a shell.",
        "Options come before SCRIPT, and the arguments of the script after it. `_` and `-` mean the same in the name of an "
        "option. Each option also has a variable and a key for configuration files: `--nproc-per-node` is "
        "`DDPLAUNCH_NPROC_PER_NODE` and `nproc-per-node`. An option without such a variable says so. "
        "[Configuration](../guides/configuration.md) says which value wins.",
    ]
    for group in GROUPS:
        options = [option for option in OPTIONS if option.group == group]
        parts += [f"## {group}", *(_option(option) for option in options)]
    return _page(*parts, *_submit())


_GROUP = Context(application, info_name="ddplaunch")


def _command(verb: str) -> Command:
    command = application.get_command(_GROUP, verb)
    assert isinstance(command, Command)
    return command


def _usage(verb: str) -> str:
    command = _command(verb)
    usage = click.unstyle(command.get_usage(Context(command, parent=_GROUP, info_name=verb)))
    return usage.removeprefix("Usage: ").strip()


def _submit() -> list[str]:
    submit = _command("submit")
    assert submit.epilog is not None
    return [
        "## ddplaunch submit",
        f"`{_usage('submit')}` checks the job, writes a batch script and hands it to sbatch. "
        "[Let ddplaunch write the script](../recipes/slurm.md#let-ddplaunch-write-the-script) shows how. Options before `--` "
        "go to sbatch as they are, except these:",
        _table(["option", "meaning"], [[f"`{option.opts[-1]}`", option.help or ""] for option in submit.own_options]),
        re.sub(r"--[\w=%.-]*[\w%]|%x\S*out", r"`\g<0>`", submit.epilog),
    ]


def _option(option: Option) -> str:
    names = f"{option.short}, {option.flag}" if option.short else option.flag
    title = names if option.is_flag else f"{names} {option.metavar}"
    text = f"{option.help} **No effect here**: {option.why_no_effect}." if option.why_no_effect else option.help
    facts = [f"Default: `{option.default}`."] if option.default else []
    usual = f"DDPLAUNCH_{option.name.upper()}"
    variables = [name for name, _ in reversed(option.variables)]
    if usual not in variables:
        facts.append(f"No variable `{usual}`.")
    if others := [f"`{name}`" for name in variables if name != usual]:
        facts.append(f"Also {', '.join(others)}.")
    return "\n\n".join([f"### `{title}`", text, *[" ".join(facts)] * bool(facts)])


# --- exit status


# what to do about each status of `exitcodes.MEANINGS`; links as they are in docs/reference
_REMEDIES = {
    "0": "",
    "1-119": "read [the failure summary](../guides/failures.md), which names the rank, the line and the log",
    "2": "type the line that the hint shows. If workers ran, it is the status of one of them",
    "120": "[find out why no step is made](../guides/stopping-and-restarting.md#spend-restarts-wisely). "
    "`ddplaunch logs` has all attempts",
    "121": "type the command of the message on the nodes that are missing, or read "
    "[why nodes do not meet](../guides/several-nodes.md#when-nodes-do-not-meet)",
    "122": "look into the log of that node, and start or submit the job again. With `--nnodes MIN:MAX` or "
    "[`--spares`](../guides/elastic.md) it goes on without the node",
    "123": "look at the stacks in the failure summary, or in `stacks/` of the run folder. They show "
    "[who waits for whom](../guides/hangs.md)",
    "124": "give it more time with `--timeout`, or continue from a checkpoint",
    "125": "report it, with the traceback on stderr",
    "126": "`chmod +x` the program, or check its first line",
    "127": "check the name and the current folder, and use `--no-python` for a program that is not Python",
    "128+n": "nothing after 130 or 143, because somebody stopped it. After 137 look for "
    "[a lack of memory](../symptoms.md#a-worker-fails), after 134, 135 or 139 for "
    "[a crash in compiled code](../guides/failures.md#see-a-crash-in-compiled-code)",
}


def _exit_status() -> str:
    rows = [[f"`{status}`", meaning, _REMEDIES[status]] for status, meaning in MEANINGS.items()]
    return _page(
        "# Exit status (exit codes)",
        topics.marked("exit-codes", _table(["exit code", "meaning", "what to do"], rows)),
        "ddplaunch passes the status of a worker on as it is. If a script itself exits with 124, `why` in "
        "[summary.json](run-folder.md#summaryjson) tells that from `--timeout`.",
        "A job that a signal stopped ends with 128 + n, even if every worker saved and exited with 0. So does a job "
        "whose workers left after a signal of "
        "[`--requeue-on`](../recipes/slurm.md#save-before-the-time-limit-and-requeue), requeued or not, or after a notice. "
        "So a script that checks the status does not go on with unfinished training.",
        "With `--max-restarts`, the status is that of the last generation.",
        "Every node ends with the same status, with these exceptions. A node that was not let in ends with 2. A node that "
        "lost the others ends with 121 before the start and 122 after it. A spare that was not needed ends with 0. 121 "
        "is also the status if a host cannot be reached over ssh, or has no ddplaunch. "
        "[One job, one fate](../concepts/one-fate.md#what-happens-when) says when each status is given.",
    )


# --- variables


def _variables() -> str:
    known = _of_a_worker()
    unexplained = known.keys() - _VARIABLES.keys() - set(_INSIDE)
    gone = _VARIABLES.keys() - known.keys()
    assert not unexplained, f"say in docs/generate.py what a worker's {unexplained} mean"
    assert not gone, f"workers no longer get {gone}: take them out of docs/generate.py"
    return _page(
        "# Variables",
        "## What every worker gets",
        "Your environment passes through. ddplaunch adds `--env`, `--env-file` and these variables, here of "
        "rank 1 of `ddplaunch --nproc-per-node 4 train.py` on a machine with 4 GPUs and 16 CPUs.",
        topics.marked(
            "environment",
            _table(
                ["variable", "example", "meaning"],
                [[f"`{name}`", f"`{known[name]}`", meaning] for name, meaning in _VARIABLES.items()],
            ),
        ),
        "## What some workers get",
        _table(["variable", "value"], [[f"`{name}`", meaning] for name, meaning in _SOMETIMES.items()]),
        "## What ddplaunch reads",
        topics.marked(
            "environment",
            "An option has a variable: `DDPLAUNCH_` and its name, such as `DDPLAUNCH_NPROC_PER_NODE`. Those of torchrun also "
            f"have torchrun's, such as `PET_NPROC_PER_NODE`. {', '.join(_without_variable())} have none.",
        ),
        "[The command line](cli.md) names the variable of each option. ddplaunch also reads:",
        _table(["variable", "meaning"], [[f"`{name}`", meaning] for name, meaning in _READ.items()]),
        "## Where the nodes are",
        "The first of these that ddplaunch finds counts, except that an mpirun inside a Slurm job comes before Slurm. "
        "`--cluster` names one. Inside a worker, the variables in this table do not count. "
        "[Several nodes](../guides/several-nodes.md) explains each.",
        _table(["cluster", "found by"], [[f"`{name}`", kind.needs] for name, kind in KINDS.items()]),
    )


def _without_variable() -> list[str]:
    return [f"`{option.flag}`" for option in OPTIONS if not option.variables]


def _of_a_worker() -> Mapping[str, str]:
    """The variables of a real plan: rank 1 of 4, each on a GPU of its own."""
    plan = _example()
    worker = plan.workers[1]
    folder = f"~/.local/state/ddplaunch/runs/{plan.run_id}"
    error_file = f"/dev/shm/ddplaunch-errors-{plan.run_id}-5c0ffee1/0-1.json"
    return environment(
        {}, plan, worker, generation=0, term=1795858200000, port=43217, error_file=error_file, log_dir=folder
    )


def _example() -> Plan:
    gpus = tuple(Device(kind="cuda", index=index, visible_as=str(index)) for index in range(4))
    node = Node(
        host="localhost",
        hardware=Hardware(devices=gpus, cpus=tuple(range(16))),
        devices=gpus,
        python="python",
        bootstrap="bootstrap.py",
        env={},
    )
    spec = JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"), nproc_per_node=4)
    return make_plan(spec, discover_local(spec, "localhost"), node, run_id="20261121-093000-7f3a")


# --- events


def _events() -> dict[str, tuple[Path, str]]:
    """Return the page of the run folder, of which the list of events is a part."""
    assert _EVENTS.keys() == SCHEMA.keys(), f"say in docs/generate.py when {_EVENTS.keys() ^ SCHEMA.keys()} happens"
    before, begins, rest = RUN_FOLDER.read_text(encoding="utf-8").partition(_EVENTS_BEGIN)
    _, ends, after = rest.partition(_EVENTS_END)
    events = "\n\n".join(_event(name, fields) for name, fields in SCHEMA.items())
    return {"docs/reference/run-folder.md": (RUN_FOLDER, f"{before}{begins}\n\n{events}\n\n{ends}{after}")}


def _event(name: str, fields: Mapping[str, str]) -> str:
    when = f"**`{name}`**: {_EVENTS[name]}."
    return "\n\n".join(
        [when, *["\n".join(f"- `{field}`: {meaning}" for field, meaning in fields.items())] * bool(fields)]
    )


# --- causes


def _causes() -> str:
    words = {
        name: name.upper()
        for name in (
            "device",
            "rank",
            "signal",
            "memory",
            "kills",
            "interpreter",
            "shm",
            "module",
            "library",
            "flag",
            "interface",
            "workers",
            "program",
        )
    }
    words["full"] = words["device"]
    rows = [[row.name, row.advice.format(**words)] for row in CAUSES]
    return _page(
        "# Causes of failures",
        "The hint below a [failure summary](../guides/failures.md) comes from this table: the first row that fits "
        "what the worker said, the signal that ended it and the state of the machine. Words in capitals stand for what "
        "was found.",
        _table(["cause", "hint"], rows),
    )


# --- python


def _python() -> str:
    return _page(
        "# Functions",
        "What `import ddplaunch` offers. [In the script](../guides/in-the-script.md) shows what scripts can use.",
        *(f"## `{name}`\n\n```python\n{head}\n```\n\n{text}" for name, head, text in sorted(_offered())),
    )


def _offered() -> Iterator[tuple[str, str, str]]:
    """Return name, head and docstring of each public name of the package; read, not imported, since some of it needs torch."""
    package = PACKAGE / "__init__.py"
    for found in ast.walk(ast.parse(package.read_text(encoding="utf-8"))):
        if isinstance(found, ast.ImportFrom) and found.module and found.module.startswith("ddplaunch."):
            module = PACKAGE.parent.joinpath(*found.module.split("."))
            text = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text(
                encoding="utf-8"
            )
            names = {alias.name for alias in found.names}
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                    head = "\n".join(text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1])
                    text_of_page = _as_page(ast.get_docstring(node) or "") + _attributes(node, text)
                    yield node.name, head.removeprefix("def ").removesuffix(":"), text_of_page


def _attributes(of: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    """Make a table of the attributes that a class declares, with the comments beside them."""
    lines = [source.splitlines()[node.lineno - 1] for node in of.body if isinstance(node, ast.AnnAssign)]
    parts = [re.fullmatch(r"    (\w+): (.+?)(?: = \S+)?(?:  # (.+))?", line) for line in lines]
    rows = [[f"`{found[1]}`", f"`{found[2]}`", found[3] or ""] for found in parts if found]
    return "\n\n" + _table(["attribute", "type", "meaning"], rows) if rows else ""


def _as_page(docstring: str) -> str:
    """Make a list of what a docstring says is raised."""
    text, raises, errors = docstring.partition("\nRaises:\n")
    return text + raises + re.sub(r"^    (\w+): ", r"- `\1`: ", f"\n{errors}", flags=re.MULTILINE).rstrip()


# --- parts of pages that are written by hand


def _exit_codes() -> dict[str, tuple[Path, str]]:
    """The cheat sheet, of which the exit codes with their meanings are a part."""
    codes = [(status.replace("-", " to ").replace("+", " + "), meaning) for status, meaning in MEANINGS.items()]
    return _with_part(CHEAT_SHEET, _CODES_BEGIN, _CODES_END, _table(["exit code", "meaning"], codes))


def _verbs() -> dict[str, tuple[Path, str]]:
    """The first page, of which the table of the verbs is a part."""
    rows = [
        ["" if number else moment.lower(), f"[`ddplaunch {verb}`]({_PAGE_OF[verb]})", VERBS[verb][1]]
        for moment, verbs in MOMENTS.items()
        for number, verb in enumerate(verbs)
    ]
    return _with_part(FRONT, _VERBS_BEGIN, _VERBS_END, _table(["when", "type", ""], rows))


def _with_part(page: Path, begin: str, end: str, part: str) -> dict[str, tuple[Path, str]]:
    """Return a page, by its name, with the part between two marks replaced."""
    before, begins, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ends, after = rest.partition(end)
    assert begins, f"{page} has no {begin}"
    assert ends, f"{page} has no {end}"
    return {_name(page): (page, f"{before}{begins}\n\n{part}\n\n{ends}{after}")}


def _map() -> dict[str, tuple[Path, str]]:
    """The picture of the map, and the page of which the map is a part."""
    layers = code_map.read(PACKAGE, ROOT / "pyproject.toml")
    page = _with_part(CONTRIBUTING, _MAP_BEGINS, _MAP_ENDS, f"```text\n{code_map.as_text(layers)}\n```")
    return page | {"docs/pictures/modules.svg": (MAP, f"{code_map.as_picture(layers)}\n")}


# --- the topics of `ddplaunch help`


def _topics(generated: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Return the text of each topic; of the `generated` pages, as they are to be."""
    pages = {path: generated.get(_name(path)) or path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
    texts = topics.read(pages)
    assert texts.keys() == TOPICS.keys(), (
        f"mark a part of a page, or take the marks out: {texts.keys() ^ TOPICS.keys()}"
    )
    return {_name(path): (path, text) for name, text in texts.items() for path in [TOPIC_TEXTS / f"{name}.md"]}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- what was seen on GPUs


def _seen() -> dict[str, tuple[Path, str]]:
    """The page of versions and programs, of which the table is a part."""
    table = gpus_seen.as_text(SEEN.with_name("gpu-seen.json"))
    return _with_part(SEEN, gpus_seen.BEGINS, gpus_seen.ENDS, table)


def main(arguments: Sequence[str]) -> int:
    """Write the files, or with --check only say which are stale, and give the exit status."""
    written = {f"docs/reference/{name}": (REFERENCE / name, text) for name, text in pages().items()}
    written |= _map() | _exit_codes() | _verbs() | _seen() | _events()
    written |= _topics({name: text for name, (_, text) in written.items()})
    stale = {name: (path, text) for name, (path, text) in written.items() if not _is(path, text)}
    if "--check" in arguments:
        for name in stale:
            print(f"{name} is stale: python docs/generate.py")
        return 1 if stale else 0
    for name, (path, text) in stale.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
