"""`ddplaunch ps`: the running jobs of this user, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from ddplaunch.record.events import progress_data
from ddplaunch.record.folders import short
from ddplaunch.record.run import Node
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import NoAnswer
from ddplaunch.spec.outcome import Progress, progress_of_job
from ddplaunch.system.console.tables import (
    COMMAND,
    GOOD,
    NAME,
    ODD,
    Block,
    Look,
    Words,
    line,
    section,
    table,
    written,
)
from ddplaunch.system.fields import line as printable
from ddplaunch.system.words import count, duration
from ddplaunch.tools.runs import choice, find
from ddplaunch.tools.runs.client import RunReplies
from ddplaunch.tools.runs.columns import COLUMNS, Column, Row, percent_of_cpu, rows_of
from ddplaunch.tools.runs.find import Known, name_of, of_running

_METRICS = 3  # that the first line shows
PHASES = {
    "rendezvous": "waits for its nodes",
    "waiting": "waits for node 0",
    "pausing": "pauses before a restart",
}


def show(env: Mapping[str, str], named: str | None = None, *, as_json: bool) -> str:
    """Ask all running jobs for their state, or that with a name, and return the text for stdout.

    Raises:
        LaunchError: no running job has the name, or several may be meant.
    """
    here: list[RunReplies] = []
    there: list[Known] = []
    if named is None:
        found = find.look(env)
        here, there = found.here, found.there
    elif (run := choice.choose_running(env, named, "ps", *(["--json"] if as_json else [])).replies) is not None:
        here = [run]
    if as_json:
        import json

        return json.dumps([*map(_data, here), *map(_data_elsewhere, there)], indent=1)
    blocks = [*map(render, here), *map(_render_elsewhere, there)]
    return written(blocks, Look.of_stdout(env)) if blocks else "none of your jobs runs here"


def render(replies: RunReplies) -> Block:
    """Show one run, and its workers below it."""
    run = replies.run
    if run is None:  # it does not answer: the line says why, and what its folder tells
        return facts_of(replies)
    parts: list[Block] = [facts_of(replies)]
    if rows := rows_of(replies):
        parts.append(_table(rows))
    problems = [*find.silent(replies.nodes), *([printable(replies.problem)] if replies.problem else [])]
    parts += [line((f"  {printable(run.idle_why)}", ODD))] if idle_in_words(run) and run.idle_why else []
    parts += [line(f"  {printable(run.straggler)}")] if run.straggler else []
    return section(*parts, *(line(("  " + problem, ODD)) for problem in problems))


def facts_of(replies: RunReplies) -> Words:
    """Return the line that says what a run is and does; of a run that does not answer, why, and what its folder tells."""
    run = replies.run
    if run is None:
        return line((short(name_of(replies)), NAME), f": {printable(replies.problem)}{_on_disk(replies)}")
    restarts = f", restart {run.restarts}" if run.restarts else ""
    if 0 < run.restarts <= run.max_restarts:  # beyond: some restarts do not count for --max-restarts
        restarts += f" of {run.max_restarts}"
    nodes = f" on {count(run.nnodes, 'node')}" if run.nnodes > 1 else ""
    nodes += f" (spare: {printable(run.spares)})" if run.spares else ""
    phase = idle_in_words(run) or PHASES.get(run.phase, run.phase)
    workers = f", {count(run.world_size, 'worker')}{nodes}" if run.world_size else ""
    pace = f", {written_pace(run.steps_per_second)}" if run.steps_per_second else ""
    phase_style = GOOD if phase == "running" else ODD
    progress = progress_of(replies)
    progress_texts = [written_progress(progress, run), *(written_metrics(progress) if progress is not None else [])]
    so_far = "".join(f", {part}" for part in progress_texts if part)
    facts = f"{workers}, for {duration(run.seconds)}{restarts}{so_far}{pace}: "
    command = run.command.replace("\n", r"\n")
    return line((short(name_of(replies)), NAME), ": ", (phase, phase_style), facts, (command, COMMAND))


def idle_in_words(run: requests.Run) -> str:
    """Say for how long no worker has made progress, once the job has said so: "stands still for 2 min"; "" while it moves."""
    if run.idle_for is None or run.phase != "running":
        return ""
    return f"stands still for {duration(run.idle_for)}"


def _on_disk(replies: RunReplies) -> str:
    """Say of a run that does not answer what its folder tells: its script, and the process to look at."""
    pid = Node(replies.socket_path.folder).object("plan").get("agent_pid")
    facts = [of_running(replies).program, f"pid {pid}" if isinstance(pid, int) else ""]
    told = ", ".join(filter(None, facts))
    return f" ({told})" if told else ""


def _table(rows: Sequence[Row]) -> Block:
    """Show workers in columns, and leave out the columns that are empty in all rows; the first column is flush left."""
    cells = {column: _cells(column, rows) for column in COLUMNS if column.in_ps}
    shown = [column for column, texts in cells.items() if any(map(str, texts))]
    right = [column.name for column in shown[1:] if column.right]
    columns = (cells[column] for column in shown)
    return table(zip(*columns, strict=True), header=[column.name for column in shown], right=right, indent=2)


def _cells(column: Column, rows: Sequence[Row]) -> list[str | Words]:
    return ["" if column.of_living and not row.is_alive else column.cell(row) for row in rows]


def progress_of(replies: RunReplies) -> Progress | None:
    """Return how far the job is, as its workers say."""
    told = {worker.rank: worker.progress for _, worker in replies.workers}
    return progress_of_job({rank: progress for rank, progress in told.items() if progress is not None})


def written_progress(progress: Progress | None, run: requests.Run) -> str:
    """Write how far a job is: "step 412 of 1,000 (41%)"; "about step 412" by its collectives; "" where that is not known."""
    if progress is None:
        return f"about step {run.steps:,}" if run.steps else ""
    share = f" of {progress.total:,} ({progress.step / progress.total:.0%})" if progress.total else ""
    return f"{'bar' if progress.source == 'bar' else 'step'} {progress.step:,}{share}"


def written_metrics(progress: Progress) -> list[str]:
    """Write the first metrics that a script reports: "loss 0.412"."""
    return [f"{printable(name)} {printable(value)}" for name, value in progress.metrics[:_METRICS]]


def _render_elsewhere(run: Known) -> Block:
    return line((run.name, NAME), f": runs on {run.host} (`", (run.line_there(("ps",)), COMMAND), "`)")


def _data(replies: RunReplies) -> dict[str, Any]:
    """Return what --json prints about one run."""
    run = replies.run
    facts = {name: getattr(run, name) for name in run.__struct_fields__} if run is not None else {}
    return {
        **facts,
        "run_id": name_of(replies),
        "name": short(name_of(replies)),
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
                **asdict(worker),
                "progress": progress_data(worker.progress),
                "cpu_percent": round(percent_of_cpu(worker), 1),
            }
            for node, worker in replies.workers
        ],
    }


def _data_elsewhere(run: Known) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "host": run.host,
        "folder": run.folder,
        "problem": f"runs on {run.host}",
    }


def written_pace(steps_per_second: float) -> str:
    """Write how fast it steps: "3.2 steps/s", "14 s a step"."""
    return f"{steps_per_second:.3g} steps/s" if steps_per_second >= 1 else f"{duration(1 / steps_per_second)} a step"
