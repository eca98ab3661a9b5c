"""`ddplaunch ps`: the running jobs of this user, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddplaunch.control.questions import NoAnswer, NodeStatus, WorkerStatus
from ddplaunch.control.requests import NodeReply
from ddplaunch.errors import below, count
from ddplaunch.report.words import duration, size
from ddplaunch.runs import find
from ddplaunch.runs.client import RunReplies
from ddplaunch.runs.find import Elsewhere

_COLUMNS = ("rank", "host", "pid", "device", "state", "cpu", "memory", "quiet")
_NUMBERS = ("pid", "cpu", "memory", "quiet")  # flush right


def show(env: Mapping[str, str], *, as_json: bool) -> str:
    """Ask all running jobs how they are, and give the answer for stdout."""
    here = find.running(env)
    there = find.elsewhere(env, here)
    if as_json:
        import json

        return json.dumps([*map(_data, here), *map(_data_elsewhere, there)], indent=1)
    blocks = [*map(render, here), *map(_render_elsewhere, there)]
    return "\n\n".join(blocks) if blocks else "none of your jobs runs here"


def render(replies: RunReplies) -> str:
    """Write one run, and the ranks of it below."""
    run = replies.run
    if run is None:
        return f"{find.name_of(replies)}: {below(replies.problem)}"
    restarts = f", restart {run.restarts} of {run.max_restarts}" if run.restarts else ""
    nodes = f" on {count(run.nnodes, 'node')}" if run.nnodes > 1 else ""
    phase = {"rendezvous": "waits for its nodes", "pausing": "pauses before a restart"}.get(run.phase, run.phase)
    workers = f", {count(run.world_size, 'worker')}{nodes}" if run.world_size else ""
    pace = f", {_pace(run.steps_per_second)}" if run.steps_per_second else ""
    head = f"{run.run_id}: {phase}{workers}, for {duration(run.seconds)}{restarts}{pace}"
    lines = [f"{head}: {below(run.command)}"]
    rows = [_row(node, worker) for node in _by_rank(replies.nodes) for worker in _workers(node)]
    lines += _table([dict(zip(_COLUMNS, _COLUMNS, strict=True)), *rows]) if rows else []
    if run.straggler:
        lines.append(f"  {below(run.straggler)}")
    lines += [f"  {_name(node)} {node.answer.reason}" for node in replies.nodes if isinstance(node.answer, NoAnswer)]
    if replies.problem:
        lines.append(f"  {below(replies.problem)}")
    return "\n".join(lines)


def _row(node: NodeReply, worker: WorkerStatus) -> dict[str, str]:
    alive = worker.pid != 0 and worker.state != "ended"
    return {
        "rank": str(worker.rank),
        "host": node.host,
        "pid": str(worker.pid) if worker.pid else "",
        "device": worker.device,
        "state": worker.how or worker.state,
        "cpu": f"{_cpu_percent(worker):.0f}%" if alive else "",
        "memory": size(worker.rss) if alive else "",
        "quiet": duration(worker.quiet) if alive and worker.quiet is not None else "",
    }


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    shown = [name for name in _COLUMNS if any(row[name] for row in rows[1:])]
    widths = {name: max(len(row[name]) for row in rows) for name in shown}
    return [
        "  "
        + "  ".join(
            row[name].rjust(widths[name]) if name in _NUMBERS else row[name].ljust(widths[name]) for name in shown
        ).rstrip()
        for row in rows
    ]


def _render_elsewhere(run: Elsewhere) -> str:
    return f"{run.run_id}: runs on {run.host} (`ssh {run.host} ddplaunch ps`)"


def _data(replies: RunReplies) -> dict[str, Any]:
    run = replies.run
    facts = {name: getattr(run, name) for name in run.__struct_fields__} if run is not None else {}
    return {
        "run_id": find.name_of(replies),
        **facts,
        "problem": replies.problem,
        "nodes": [
            {
                "node_rank": node.node_rank,
                "host": node.host,
                "problem": node.answer.reason if isinstance(node.answer, NoAnswer) else "",
            }
            for node in replies.nodes
        ],
        "workers": [
            {
                "node_rank": node.node_rank,
                "host": node.host,
                **{name: getattr(worker, name) for name in worker.__struct_fields__},
                "cpu_percent": round(_cpu_percent(worker), 1),
            }
            for node in _by_rank(replies.nodes)
            for worker in _workers(node)
        ],
    }


def _data_elsewhere(run: Elsewhere) -> dict[str, Any]:
    return {"run_id": run.run_id, "host": run.host, "folder": run.folder, "problem": f"runs on {run.host}"}


def _by_rank(nodes: Sequence[NodeReply]) -> list[NodeReply]:
    return sorted(nodes, key=lambda node: (node.node_rank is None, node.node_rank))


def _workers(node: NodeReply) -> tuple[WorkerStatus, ...]:
    return node.answer.workers if isinstance(node.answer, NodeStatus) else ()


def _name(node: NodeReply) -> str:
    return node.host if node.node_rank is None else f"node {node.node_rank} ({node.host})"


def _pace(steps_per_second: float) -> str:
    """Write how fast it steps: "3.2 steps/s", "14 s a step"."""
    return f"{steps_per_second:.3g} steps/s" if steps_per_second >= 1 else f"{duration(1 / steps_per_second)} a step"


def _cpu_percent(worker: WorkerStatus) -> float:
    """Since it was started, as ps(1) says it."""
    return 100 * worker.cpu_seconds / worker.seconds if worker.seconds else 0.0
