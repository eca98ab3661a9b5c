"""The plan of a job, as `ddplaunch plan` shows it: as tables, as JSON, and as commands to paste into a shell. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import environment, of_generation
from ddplaunch.spec.job import JobSpec, Source
from ddplaunch.spec.options.table import BY_NAME
from ddplaunch.system.console import tables as console
from ddplaunch.system.console.tables import COMMAND, NAME, NOTE, ODD, Block, line, section, sentence
from ddplaunch.system.redaction import HIDDEN, Redactor, is_secret
from ddplaunch.system.words import compress, count, these_ranks

UNKNOWN = "unknown until "  # how the reason of a value begins that hosts decide which were not asked
_VARIABLES = {"backend": "DDPLAUNCH_BACKEND", "devices": "DDPLAUNCH_DEVICE", "threads": "OMP_NUM_THREADS"}  # by reason
PORT_TO_COME = 29500  # stands in pasted commands for the port that is reserved only when a job starts


def unknown_variables(reasons: Mapping[str, str]) -> list[str]:
    """Return the variables of workers that hosts decide which were not asked, as the reasons of a plan say."""
    return [variable for name, variable in _VARIABLES.items() if reasons[name].startswith(UNKNOWN)]


def table(plan: Plan, spec: JobSpec, warm: str = "", known: Sequence[str] = ()) -> list[Block]:
    """Return the plan as text: values with reasons, the workers, their commands and, with -v, their variables.

    `warm` is what is known of the interpreter that is kept warm, `known` are secrets that are hidden wherever they stand.
    """
    redactor = Redactor(known)
    plan = replace(plan, reasons=redactor.data(plan.reasons), notes=tuple(map(redactor.text, plan.notes)))
    shared = _shared_variables(plan.workers)
    have_no_term = spec.no_control and plan.nnodes > 1  # nodes without a control channel have none in common
    term = None if have_no_term else 0  # any number: only the names of these variables are shown
    set_at_start = of_generation(plan, generation=0, term=term, port=0)
    columns, lines_on_variables = _columns(plan, shared, [*set_at_start, *unknown_variables(plan.reasons)])
    blocks = [console.table(_head(plan, spec, warm), styles=(NAME, "", NOTE), wraps=True)]
    if plan.notes:
        blocks.append(section(*(sentence(("note: ", ODD), note) for note in plan.notes)))
    found = _found_elsewhere(spec, redactor)
    if found:
        title = line(("from variables and files:", NAME))
        blocks.append(section(title, console.table(found, styles=(COMMAND, NOTE), indent=2)))
    blocks.append(console.table(zip(*columns.values(), strict=True), header=[*columns], styles=(NAME,)))
    blocks.append(section(line(("command:", NAME)), _commands(plan, redactor)))
    if spec.verbosity <= 0:
        blocks.append(section(line("with -v: the variables of the workers")))
        return blocks
    variables = (
        line("  ", (name, COMMAND), f"={shlex.quote(value)}")
        for name, value in sorted(plan.shown(shared, redactor).items())
    )
    return [
        *blocks,
        section(line(("variables of each worker:", NAME)), *lines_on_variables),
        section(line(("variables of all workers:", NAME)), *variables),
    ]


def _commands(plan: Plan, redactor: Redactor) -> Block:
    """Return a table of the workers' commands, with the ranks that run each if they differ."""
    ranks: dict[tuple[str, ...], list[int]] = {}  # by command
    for worker in plan.workers:
        ranks.setdefault(worker.argv, []).append(worker.rank)
    commands = [(these_ranks(those), shlex.join(redactor.argv(argv))) for argv, those in ranks.items()]
    if len(commands) > 1:
        return console.table(commands, styles=("", COMMAND), indent=2)
    return console.table([commands[0][1:]], styles=(COMMAND,), indent=2)


def as_json(plan: Plan, origins: Mapping[str, str], known: Sequence[str] = ()) -> str:
    """Return the plan as one JSON object; docs/reference/run-folder.md has its schema."""
    data = plan.data(origins, known)
    if plan.reasons["backend"].startswith(UNKNOWN):
        data["backend"] = None
    if plan.reasons["devices"].startswith(UNKNOWN):
        data["workers"] = [{**worker, "device": None} for worker in data["workers"]]
    return json.dumps(data, indent=1) + "\n"


def shell(plan: Plan) -> str:
    """Return each worker as a command line with all its variables, to paste into a shell of its own: its arguments are whole."""
    port = plan.master_port or PORT_TO_COME
    lines = []
    if plan.master_port is None:
        lines.append(f"# ddplaunch would reserve a free port; {port} stands for it here")
    if plan.secret:
        lines.append(f"# export first, with their values, which are not shown: {' '.join(sorted(plan.secret))}")
    if unknown := unknown_variables(plan.reasons):
        lines.append(f"# each host would also set, when it knows its devices and CPUs: {' '.join(unknown)}")
    redactor = Redactor()
    redactor.argv(plan.workers[0].argv)  # only to find out whether there is a secret: a command to paste hides none
    if redactor.hidden:
        lines.append("# the arguments of the script seem to hold a secret")
    for worker in plan.workers:
        variables = environment({}, plan, worker, generation=0, term=None, port=port)
        shown = sorted((name, value) for name, value in variables.items() if name not in plan.secret)
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown)
        bound = f"taskset -c {compress(worker.cpus)} " if worker.cpus else ""
        lines.append(f"# rank {worker.rank}\nenv {assignments} {bound}{shlex.join(worker.argv)}")
    return "\n".join(lines) + "\n"


def _head(plan: Plan, spec: JobSpec, warm: str) -> list[tuple[str, ...]]:
    """Return the rows about the whole job: name, value, reason; `warm` is what is known of the interpreter that is kept warm."""
    devices = {device for worker in plan.workers for device in worker.devices}
    threads = {worker.variables.get("OMP_NUM_THREADS", "") for worker in plan.workers}
    where = plan.workers[0].host if plan.nnodes == 1 else count(plan.nnodes, "node")

    def known(name: str, value: str) -> tuple[str, str, str]:
        """Return the row of a value that the hosts of the workers decide, "-" where they were not asked."""
        reason = plan.reasons[name]
        return name, "-" if reason.startswith(UNKNOWN) else value, reason

    rows: list[tuple[str, ...]] = [
        ("workers", f"{plan.world_size} on {where}", plan.reasons["workers"]),
        ("cluster", plan.cluster, ""),
        ("address", plan.master_addr, plan.reasons["master_addr"]),
        ("port", str(plan.master_port or "-"), plan.reasons["master_port"]),
        known("backend", plan.backend),
        known("threads", ", ".join(sorted(threads, key=lambda number: (len(number), number)))),
        known("devices", str(len(devices))),
    ]
    if spec.spares:
        rows.insert(1, ("spares", str(spec.spares), "nodes that wait until another one is lost or leaves"))
    if plan.interpreter is not None and "python" in plan.reasons:
        rows.append(("python", plan.interpreter, plan.reasons["python"]))
    if plan.preload is not None:
        rows.append(
            ("start", "forked", f"{plan.reasons['start']}, once {', '.join(plan.preload) or 'nothing'} is imported")
        )
    if warm:
        rows.append(("kept warm", warm, spec.origin("keep_warm")))
    if plan.init_method != "env":
        rows.append(("init", plan.init_method, spec.origin("init_method")))
    if devices:
        rows.append(("pin", plan.pin, plan.reasons["pin"]))
    return rows


def _columns(
    plan: Plan, shared: Mapping[str, str], set_at_start: Iterable[str]
) -> tuple[dict[str, list[str]], list[Block]]:
    """Return the table of the workers by column, and lines on which of their variables have the same values as a column.

    A variable whose values differ from worker to worker, and are not those of a column, is a column itself. `shared` are the
    variables of all workers, `set_at_start` those that each start sets anew.
    """
    workers = plan.workers
    columns = {"rank": [str(worker.rank) for worker in workers]}
    if plan.nnodes > 1:
        columns["node"] = [str(worker.node_rank) for worker in workers]
        columns["host"] = [worker.host for worker in workers]
        columns["local rank"] = [str(worker.local_rank) for worker in workers]
    if not plan.reasons["devices"].startswith(UNKNOWN):
        columns["device"] = [worker.device for worker in workers]
    if any(worker.devices for worker in workers):
        # UUIDs are cut short where that leaves them different
        devices = {device for worker in workers for device in worker.devices}
        short = {device: "-".join(device.split("-")[:2]) for device in devices}
        if len(set(short.values())) < len(devices):
            short = {device: device for device in devices}
        columns["owns"] = [" ".join(short[device] for device in worker.devices) or "-" for worker in workers]
    if any(worker.cpus for worker in workers):
        columns["cpus"] = [compress(worker.cpus) or "any" for worker in workers]
    like_column: dict[str, list[str]] = {}
    for name in sorted({name for worker in workers for name in worker.variables} - shared.keys()):
        values = [worker.variables.get(name, "-") for worker in workers]
        same = next((column for column, others in columns.items() if others == values), None)
        if same is None:
            columns[name] = values
        else:
            like_column.setdefault(same, []).append(name)
    lines = {
        **{f"its {column}": names for column, names in like_column.items()},
        "set at the start": sorted(set_at_start),
    }
    widest = max(map(len, lines))
    return columns, [sentence(f"  {label.ljust(widest)}  ", " ".join(names), COMMAND) for label, names in lines.items()]


def _found_elsewhere(spec: JobSpec, redactor: Redactor) -> list[tuple[str, str]]:
    """Return the options that were found in variables and files: as they would be typed, and where they were found."""
    found = [one for one in spec.given if one.source not in (Source.COMMAND_LINE, Source.DEFAULT)]
    rows = [(shlex.join(redactor.argv(BY_NAME[one.name].words(one.text))), one.origin) for one in found]
    is_env_typed = spec.origin("env").startswith("-")  # by "--env": found nowhere else
    if not is_env_typed:
        shown = (
            (name, HIDDEN if name in spec.origins_of_secrets or is_secret(name) else redactor.variable(name, value))
            for name, value in spec.env
        )
        variables = " ".join(f"--env {shlex.quote(f'{name}={value}')}" for name, value in shown)
        rows += [(variables, spec.origin("env"))] if variables else []
    return rows


def _shared_variables(workers: Sequence[WorkerPlan]) -> dict[str, str]:
    """Return the variables that have the same value in every worker."""
    first = workers[0].variables
    return {k: v for k, v in first.items() if all(worker.variables.get(k) == v for worker in workers)}
