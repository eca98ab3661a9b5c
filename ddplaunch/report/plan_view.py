"""The plan for people (a table), for programs (JSON) and for the shell (commands to paste). Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence

from ddplaunch.plan import Plan, WorkerPlan
from ddplaunch.plan.variables import of_generation
from ddplaunch.report.plan_data import plan_data
from ddplaunch.report.ranks import compress
from ddplaunch.report.words import count

PORT_TO_COME = 29500  # stands in pasted commands for the port that is reserved only when a job starts


def table(plan: Plan, origins: Mapping[str, str]) -> str:
    """Show the workers as a table, the job's values with their origins, and the variables that all workers share."""
    shared = _shared(plan.workers)
    head = [
        ("job", plan.run_id, ""),
        ("workers", f"{plan.world_size} on {count(plan.nnodes, 'node')}", plan.reasons["workers"]),
        ("cluster", plan.cluster, ""),
        ("address", plan.master_addr, plan.reasons["master_addr"]),
        ("port", str(plan.master_port or "-"), plan.reasons["master_port"]),
        ("backend", plan.backend, plan.reasons["backend"]),
        ("threads", shared.get("OMP_NUM_THREADS", "-"), plan.reasons["threads"]),
        ("pin", plan.pin, plan.reasons["pin"]),
        ("devices", count(len({d for w in plan.workers for d in w.devices}), "device"), plan.reasons["devices"]),
    ]
    columns = ["rank", "host", "local rank", "device", "owns", "cpus"]
    rows = [
        [
            str(worker.rank),
            worker.host,
            str(worker.local_rank),
            worker.device,
            " ".join(worker.devices) or "-",
            compress(worker.cpus) if worker.cpus else "any",
        ]
        for worker in plan.workers
    ]
    parts = [_aligned([[name, value, why] for name, value, why in head])]
    parts.append(_aligned([columns, *rows]))
    parts.append(f"command of each worker:\n  {shlex.join(plan.workers[0].argv)}")
    parts.append("variables of all workers:\n" + "\n".join(f"  {k}={v}" for k, v in sorted(shared.items())))
    given = {name: origin for name, origin in origins.items() if origin != "default"}
    if given:
        parts.append("asked for:\n" + _aligned([[f"  {name}", origin] for name, origin in sorted(given.items())]))
    parts.extend(f"note: {note}" for note in plan.notes)
    return "\n\n".join(parts) + "\n"


def as_json(plan: Plan, origins: Mapping[str, str]) -> str:
    """Show the plan as one JSON object; docs/reference/run-folder.md has its schema."""
    return json.dumps(plan_data(plan, origins), indent=1) + "\n"


def shell(plan: Plan) -> str:
    """Show each worker as a command line with all its variables, to paste into a shell of its own."""
    port = plan.master_port or PORT_TO_COME
    lines = []
    if plan.master_port is None:
        lines.append(f"# ddplaunch would reserve a free port; {port} stands for it here")
    for worker in plan.workers:
        first = of_generation(plan, worker, generation=0, port=port, error_file="", log_dir="")
        variables = {**worker.variables, **first}
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
        bound = f"taskset -c {compress(worker.cpus)} " if worker.cpus else ""
        lines.append(f"# rank {worker.rank}\nenv {assignments} {bound}{shlex.join(worker.argv)}")
    return "\n".join(lines) + "\n"


def _shared(workers: Sequence[WorkerPlan]) -> dict[str, str]:
    """The variables that have the same value in every worker."""
    first = workers[0].variables
    return {k: v for k, v in first.items() if all(worker.variables.get(k) == v for worker in workers)}


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
