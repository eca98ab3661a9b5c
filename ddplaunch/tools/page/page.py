"""The page of a run: one HTML file without a script, which loads nothing. Pure but for the logs and stacks, which are read here.

All texts pass through `markup.tag`, which escapes them, and the page forbids scripts and requests to the browser as well.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any

import msgspec

from ddplaunch.record import log_reader
from ddplaunch.record.folders import short
from ddplaunch.record.run import Reached
from ddplaunch.record.time_spent import Spent, attempt, time_spent
from ddplaunch.system.fields import Duration, Size, clean
from ddplaunch.system.redaction import Redactor, diff
from ddplaunch.system.words import compress, count, duration, size, some
from ddplaunch.tools.page.collectives import waits
from ddplaunch.tools.page.history import History, Life, NodeHistory, mapping_or_empty, mappings_in
from ddplaunch.tools.page.pictures import Html, charts, join, scrolling, styles, table, tag, timeline, unfolding

_POLICY = "default-src 'none';style-src 'unsafe-inline';base-uri 'none';form-action 'none'"
# bytes of the page that a text takes at most, escaped characters counted as they are written
_FAILED_LOG_ROOM, _LOG_ROOM, _ALL_LOGS_ROOM = 100_000, 20_000, 300_000
_STACKS_ROOM, _ALL_STACKS_ROOM = 60_000, 200_000
_DIFF_ROOM, _PACKAGES_ROOM = 80_000, 40_000
_MOST_MARKS, _MOST_WORKERS, _MOST_GENERATIONS, _MOST_ENDS = 200, 1024, 200, 400
_MOST_GROUPS, _MOST_WAITS, _MOST_OPEN = 8, 32, 10
_SHOWN_PACKAGES = (
    "torch",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "transformers",
    "accelerate",
    "lightning",
    "deepspeed",
)
_LONGEST_CELL, _LONGEST_MARK = 1000, 300  # characters of a cell
_MOST_LOCATIONS = 100
_MOST_STACKS = 32  # nodes whose stacks are shown


def page(run: History, now: float, redactor: Redactor | None = None, *, shows_diff: bool = False) -> str:
    """Return the page of a run as it is at `now` (seconds since 1970).

    `redactor` has hidden secrets when the run was read, hides more here in logs and stacks, and counts all of them. If there are
    secrets in the changes of the code, the page has the changes only with `shows_diff`.
    """
    redactor, name = redactor or Redactor(), short(run.run_id)
    parts = _sections(run, redactor, shows_diff=shows_diff)
    sections = [(id, title, content) for id, title, content in parts if content]
    heading = f"{name}: {run.program}" if run.program else name
    links = [tag("li", tag("a", title, href=f"#{id}")) for id, title, _ in sections]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", heading),
        styles(_css()),
    )
    body = tag(
        "body",
        tag("a", "Skip to what happened", href="#main", class_="skip"),
        tag("header", tag("h1", heading), tag("nav", tag("ul", links), aria_label="Sections")),
        tag(
            "main",
            _verdict(run),
            _locations(run),
            tag("p", f"{count(redactor.hidden, 'value')} hidden.") if redactor.hidden else "",
            [tag("p", tag("strong", "Not all could be read. "), one) for one in run.problems],
            [tag("section", tag("h2", title, id=f"{id}-title"), content, id=id, aria_labelledby=f"{id}-title")
             for id, title, content in sections],
            id="main",
        ),
        tag("footer", tag("p", f"Made by `ddplaunch report` at {_date(now)} from {run.folder}")),
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _css() -> str:
    """Return the style sheet, which is a file beside this one."""
    with open(f"{os.path.dirname(__file__)}/page.css", encoding="utf-8") as file:
        return file.read()


def _sections(run: History, redactor: Redactor, *, shows_diff: bool) -> Iterator[tuple[str, str, Html | None]]:
    """Return the sections by their order: identifier, title and content, None where there is nothing to say."""
    yield "timeline", "Timeline", _timeline(run)
    yield "curves", "CPU, memory, GPU and steps", charts(run)
    yield "restarts", "Restarts", _restarts(run)
    yield "time", "Where the time went", _time_spent(run)
    yield "failure", "The first failure", _failure(run, redactor)
    yield "collectives", "Collectives, and who waited", _collectives(run)
    yield "events", "What happened", _events(run)
    yield "workers", "Workers", _workers(run)
    yield "logs", "The ends of the logs", _logs(run, redactor)
    yield "plan", "Plan", _plan(run)
    yield "environment", "Environment", _environment(run)
    yield "code", "Code", _code(run, redactor, shows_diff=shows_diff)
    yield "machine", "Versions and machines", _machine(run)


def _verdict(run: History) -> Html:
    """Return the first lines of the page: how the run ended, or that it goes on, with its size and beginning."""
    if run.goes_on:
        kind, text = "running", f"The run goes on. It began {duration(run.ended - run.began)} ago."
    elif run.status is None:
        kind, text = "failed", f"The run was killed after {duration(run.ended - run.began)}, or its record ends early."
    else:
        kind = "good" if run.status == 0 else "failed"
        text = f"{run.outcome[:_LONGEST_CELL]}. Exit status {run.status}."
    has, size = "has" if run.goes_on else "had", _size(run)
    where = f" It {has} {size}, and began at {_date(run.began)}."
    return tag("p", text, where, _whose_files(run), class_=f"verdict {kind}")


def _whose_files(run: History) -> str:
    """Say of which nodes this page tells, where the others have left their files on disks of their own; "" if it tells of all."""
    nodes = [node for node in run.nodes if node.plan.get("workers") != []]  # without the command that started all
    here = [node.host or "a node" for node in nodes]
    _, planned_nodes = run.planned_size
    missing = planned_nodes - len(here)
    if not here or missing <= 0:
        return ""
    others = "The other one has" if missing == 1 else f"The other {missing} have"
    name = short(run.run_id)
    return f" Only what {some(here)} recorded is here. {others} files on other disks: type `ddplaunch report {name}` there."


def _locations(run: History) -> Html | str:
    """Say where the workers were when the job failed or seemed to hang, as the command said; "" if it did not say it."""
    known = (node.summary.get("locations") for node in run.nodes)
    lines = next((found for found in known if isinstance(found, list) and found), [])
    items = [tag("li", str(one)[:_LONGEST_CELL]) for one in lines[:_MOST_LOCATIONS]]
    return tag("ul", items) if items else ""


def _size(run: History) -> str:
    """Say how many workers on how many nodes the newest generation had: as planned, or as was seen without a plan.

    Of nodes with disks of their own, no file here tells but the plan.
    """
    newest = max((life.generation for life in run.lives), default=0)
    lives = [life for life in run.lives if life.generation == newest]
    seen = (
        (len(lives), len({life.node for life in lives})) if lives else (0, 0 if run.is_of_command else len(run.nodes))
    )
    workers, nodes = map(max, seen, run.planned_size)
    return f"{count(workers, 'worker')} on {count(nodes, 'node')}"


def _timeline(run: History) -> Html:
    """Show the picture of all ranks with its key, and the same as a table."""
    key = [(tag("i", class_=kind), text) for kind, text in (("good", "ended with 0"), ("stopped", "stopped by ddplaunch"),
           ("failed", "failed (with a cross)"), ("running", "running, or its end is not known"))]  # fmt: skip
    rows = list(_ends_by_generation(run))
    return join(
        tag("p", key, ". Dashed lines are restarts", ". In pale bands nothing ran" if run.gaps else "", class_="key"),
        scrolling("Timeline", timeline(run)),
        tag("details", tag("summary", "The timeline as a table"),
            table("What became of the workers of each generation", ("generation", "ranks", "ended", "after"), rows)),
    )  # fmt: skip


def _ends_by_generation(run: History) -> Iterator[tuple[str, ...]]:
    """Yield a row for all ranks of a generation that ended equally: generation, ranks, how, and after how long."""
    alike: dict[tuple[int, str], list[Life]] = {}
    for life in run.lives:
        alike.setdefault((life.generation, life.how or "running"), []).append(life)
    for (generation, how), lives in sorted(alike.items(), key=lambda item: item[0])[:_MOST_ENDS]:
        took = [life.ended - life.began for life in lives if life.ended is not None]
        spans = dict.fromkeys((duration(min(took)), duration(max(took)))) if took else ()
        yield (
            str(generation),
            compress(life.rank for life in lives)[:_LONGEST_CELL],
            how[:_LONGEST_CELL],
            " to ".join(spans),
        )


def _restarts(run: History) -> Html | None:
    """Show for each generation that another followed how it ended, and when the next began; of many, the first and the last."""
    if len(run.generations) < 2:
        return None
    how = {(life.generation, life.rank): life.error or life.how for life in run.lives}
    rows = []
    for one, following in pairwise(run.generations):
        failed = one.number, one.failed_rank
        unknown = "a node left or joined, or the rank is not known"
        why = f"rank {one.failed_rank}: {how[failed]}" if failed in how else one.why or unknown
        rows.append(
            (str(one.number), duration(following.began - one.began), why[:_LONGEST_CELL], duration(one.wait or 0.0))
        )
    if len(rows) > _MOST_GENERATIONS:
        half = _MOST_GENERATIONS // 2
        rows[half:-half] = [("...", "", f"{len(rows) - 2 * half} more", "")]
    return table(
        f"{count(len(run.generations) - 1, 'restart')}",
        ("generation", "next start after", "first failure", "pause"),
        rows,
    )


def _time_spent(run: History) -> Html | None:
    """Show what the time went to, if the script said its steps."""
    spent = _summarized_time(run) or _time_by_events(run)
    if spent is None:
        return None
    queue = (("queue", spent.queue),) if spent.queue else ()
    parts = (*queue, ("start", spent.start), ("steps that were kept", spent.steps), ("steps done again", spent.again),
             ("from the last step to the first after a restart", spent.restarts), ("after the last step", spent.end))  # fmt: skip
    rows = [(name, duration(seconds), f"{seconds / (spent.total or 1):.1%}") for name, seconds in parts]
    return join(
        tag("p", f"Effective: {spent.effective:.1%} of {duration(spent.total)}."),
        table("Time", ("for", "time", "share"), rows),
    )


def _summarized_time(run: History) -> Spent | None:
    """Return what the last line of the job said; None if the job has no summary, or one that cannot be read."""
    for node in run.nodes:
        if "time_spent" in node.summary:
            with suppress(msgspec.ValidationError):
                return msgspec.convert(node.summary["time_spent"], Spent)
    return None


def _time_by_events(run: History) -> Spent | None:
    """Return where the time went as the events tell, for a job that runs or was killed; None if they tell of no steps."""
    # by generation: how far the worker with the most steps came, and when it ended
    farthest: dict[int, tuple[Reached, float]] = {}
    for life in run.lives:
        if life.reached is None or life.ended is None:
            continue
        known, _ = farthest.get(life.generation, (None, 0.0))
        if known is None or life.reached.step > known.step:
            farthest[life.generation] = life.reached, life.ended
    attempts = []
    for one in run.generations:
        if one.number in farthest:
            reached, ended = farthest[one.number]
            attempts.append(attempt(one.began, ended, worker_ended=ended, reached=reached))
    return time_spent(attempts, run.began, run.ended)


def _failure(run: History, redactor: Redactor) -> Html | None:
    """Show the first failure with its exception, and the stacks of all workers at that moment; None: nothing failed."""
    failures = (node.summary.get("first_failure") for node in run.nodes)
    failure = next((found for found in failures if isinstance(found, dict)), None)
    if failure is None:
        return None
    rank, local_rank = (
        number if isinstance(number := failure.get(name), int) else -1 for name in ("rank", "local_rank")
    )
    # the summary tells of the failure that ended the job, so of the last generation
    generation = max((life.generation for life in run.lives), default=0)
    texts = (log_reader.exception(node.folder, generation, rank, local_rank) for node in run.nodes)
    traceback = redactor.text(clean(next(filter(None, texts), "")))
    host = f" on {failure['host']}" if isinstance(failure.get("host"), str) else ""
    where = f", at {failure['where']}" if isinstance(failure.get("where"), str) else ""
    error = str(failure.get("error") or failure.get("how") or "")[:_LONGEST_CELL]
    what = f"Rank {rank}{host}: {error}{where[:_LONGEST_CELL]}"
    of_rank = [log for log in log_reader.logs_of(run.folder) if log.rank == rank]
    own_log = redactor.text(clean(dict(log_reader.ends_of(of_rank, _FAILED_LOG_ROOM)).get(rank, "")))
    # bytes for the stacks of a node
    room = max(_STACKS_ROOM // 10, min(_STACKS_ROOM, _ALL_STACKS_ROOM // max(len(run.nodes), 1)))
    stacks = []
    for node in run.nodes[:_MOST_STACKS]:
        if text := redactor.text(clean(log_reader.stacks(node.folder, generation, room))):
            host = f" on {node.host}" if len(run.nodes) > 1 else ""
            stacks.append(unfolding(f"Stacks of the workers{host}", text, room))
    return join(
        tag("p", what),
        unfolding("Exception", traceback, _STACKS_ROOM, open="") if traceback else "",
        unfolding(f"End of the log of rank {rank}", own_log, _FAILED_LOG_ROOM) if own_log else "",
        stacks,
    )


def _collectives(run: History) -> Html | None:
    """Show who kept the others waiting, and to which collectives not all came; None: no collectives were recorded."""
    tables = []
    for (group, members), ranks in list(waits(run.collectives).items())[:_MOST_GROUPS]:
        seen = max(each.came_to for each in ranks)  # by the rank that came to most of them
        rows = [
            (str(each.rank), f"{each.came_last} of {each.came_to}", duration(each.kept_waiting), duration(each.waited))
            for each in ranks[:_MOST_WAITS]
        ]
        more = f", {_MOST_WAITS} of {len(ranks)} ranks" if len(ranks) > _MOST_WAITS else ""
        of = f"Group {group}, ranks {members[:_LONGEST_CELL]}" if members else f"Group {group}"
        head = ("rank", "came last to", "kept the median rank waiting", "waited for the last rank")
        tables.append(table(f"{of}: {count(seen, 'collective')} that ddplaunch looked at{more}", head, rows))
    open_ones = [one for one in run.collectives if one.is_open]
    ends = [
        (str(one), str(one.generation), f"{max(one.came.values()) - run.began:+.3f} s",
         compress(one.came)[:_LONGEST_CELL], one.missing_text(_LONGEST_CELL))
        for one in open_ones[-_MOST_OPEN:]
    ]  # fmt: skip
    if ends:
        head_of_ends = ("collective", "generation", "last came at", "came", "not known to have come")
        tables.append(table("Where a generation ended", head_of_ends, ends))
    return join(tables) if tables else None


def _events(run: History) -> Html | None:
    """Show what happened in the run, by the time since its start; of many, the first and the last. None: there are none."""
    if not run.marks:
        return None
    nodes = [node.host or str(index) for index, node in enumerate(run.nodes)]
    rows = [(f"{mark.at - run.began:+.3f} s", mark.text[:_LONGEST_MARK], nodes[mark.node]) for mark in run.marks]
    if run.outcome:
        rows.append((f"{run.ended - run.began:+.3f} s", run.outcome[:_LONGEST_MARK], ""))
    if len(rows) > _MOST_MARKS:
        half = _MOST_MARKS // 2
        rows[half:-half] = [("...", f"{len(rows) - _MOST_MARKS} more are in events.jsonl", "")]
    return table("Signals, restarts and notices, by the time since the start", ("time", "what", "node"), rows)


def _workers(run: History) -> Html | None:
    """Show the last generation of each rank; None: there is no worker."""
    summarized = _workers_by_rank(node.summary for node in run.nodes)
    planned = _workers_by_rank(node.plan for node in run.nodes)
    last = {life.rank: life for life in run.lives}  # which are in the order of generations
    rows = []
    for rank, life in sorted(last.items())[:_MOST_WORKERS]:
        used, plan, reached = summarized.get(rank, {}), planned.get(rank, {}), life.reached
        step = ""
        if reached is not None:
            step = f"{reached.step} of {reached.total}" if reached.total else str(reached.step)
        rows.append((
            str(rank), run.nodes[life.node].host, str(plan.get("device", "")), str(life.pid or ""), life.how or "running",
            "" if life.ended is None else duration(life.ended - life.began), step,
            _bytes_in_words(used.get("peak_rss")), _seconds_in_words(used.get("cpu_seconds")),
        ))  # fmt: skip
    head = ("rank", "host", "device", "pid", "ended", "after", "step", "memory", "CPU time")
    more = f", the first {_MOST_WORKERS} of {len(last)}" if len(last) > _MOST_WORKERS else ""
    return table(f"Each rank in its last generation{more}", head, _with_short_cells(rows)) if rows else None


def _workers_by_rank(files: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return what plans or summaries of the nodes say of each worker."""
    workers = [worker for file in files for worker in mappings_in(file.get("workers"))]
    return {worker["rank"]: worker for worker in workers if isinstance(worker.get("rank"), int)}


def _first_with_workers(run: History) -> NodeHistory:
    """Return the first node that had workers: a command that has started all agents has a folder before theirs."""
    return next((node for node in run.nodes if node.plan.get("workers")), run.nodes[0])


def _logs(run: History, redactor: Redactor) -> Html | None:
    """Show the ends of all logs, rank by rank."""
    ranks = {life.rank for life in run.lives}
    room = min(_LOG_ROOM, _ALL_LOGS_ROOM // max(len(ranks), 1))  # bytes for each
    ends = islice(log_reader.ends_of(log_reader.logs_of(run.folder), room), _MOST_WORKERS)
    shown = [unfolding(f"rank {rank}", redactor.text(clean(text)), room) for rank, text in ends]
    return join(shown) if shown else None


def _plan(run: History) -> Html | None:
    """Show what the first node has decided, and why: values of the plan, reasons, origins of options; None without a plan."""
    plan = run.nodes[0].plan
    reasons, origins = mapping_or_empty(plan.get("reasons")), mapping_or_empty(plan.get("origins"))
    version_of_format = "v"
    values = {name: value for name, value in plan.items() if isinstance(value, str | int) and name != version_of_format}
    rows = [(name, str(value), str(reasons.get(name, ""))) for name, value in values.items()]
    rows += [(name, "", str(why)) for name, why in reasons.items() if name not in values]
    rows += [(name, "option", str(where)) for name, where in origins.items()]
    if not rows:
        return None
    worker = next(mappings_in(_first_with_workers(run).plan.get("workers")), {})
    argv = worker.get("argv")
    command = tag("p", "Command of a worker: ", tag("code", " ".join(map(str, argv)))) if isinstance(argv, list) else ""
    return join(command, table("What was decided, and why", ("what", "value", "why"), _with_short_cells(rows)))


def _environment(run: History) -> Html | None:
    """Show the variables that ddplaunch set for the first worker."""
    worker = next(mappings_in(_first_with_workers(run).plan.get("workers")), {})
    variables = worker.get("variables")
    if not isinstance(variables, dict) or not variables:
        return None
    rows = [(name, str(value)) for name, value in sorted(variables.items())]
    return table(
        f"Variables that ddplaunch set for rank {worker.get('rank', 0)}", ("name", "value"), _with_short_cells(rows)
    )


def _machine(run: History) -> Html:
    """Show the versions of packages on the first node, and the machines of all nodes."""
    first = _first_with_workers(run)
    packages = mapping_or_empty(first.about.get("packages"))
    rows = [("ddplaunch", run.version or "not known"), ("Python", str(first.about.get("python") or "not known"))]
    rows += [(name, str(packages[name])) for name in _SHOWN_PACKAGES if name in packages]
    machines = []
    with_workers = run.nodes[run.nodes.index(first) :]
    for node in with_workers[:_MOST_WORKERS]:
        ranks = compress(
            rank for one in mappings_in(node.plan.get("workers")) if isinstance(rank := one.get("rank"), int)
        )
        nothing = "none" if node.plan else "its plan is missing"
        machine = mapping_or_empty(node.about.get("machine"))
        devices = machine.get("devices")
        machines.append((
            node.host or "a node", ranks or nothing, f"{machine.get('cpus') or ''} {machine.get('cpu') or ''}",
            _bytes_in_words(machine.get("memory")), _grouped(map(str, devices if isinstance(devices, list) else ())),
            str(machine.get("driver") or ""), f"{machine.get('system') or ''} {machine.get('kernel') or ''}",
        ))  # fmt: skip
    all_packages = "\n".join(f"{name} {version}" for name, version in packages.items())
    return join(
        table("Versions", ("what", "version"), _with_short_cells(rows)),
        table(
            "Machines", ("host", "ranks", "CPUs", "memory", "devices", "driver", "system"), _with_short_cells(machines)
        ),
        unfolding("All packages", all_packages, _PACKAGES_ROOM) if packages else "",
    )


def _bytes_in_words(value: object) -> str:
    """Write a size that a JSON file has; "" for what is none, such as a number beyond all bounds."""
    with suppress(msgspec.ValidationError):
        return size(msgspec.convert(value, Size))
    return ""


def _seconds_in_words(value: object) -> str:
    """Write a time span that a JSON file has; "" for what is none."""
    with suppress(msgspec.ValidationError):
        return duration(msgspec.convert(value, Duration))
    return ""


def _grouped(names: Iterable[str]) -> str:
    """Name things, equal ones with their number: "8 x NVIDIA H100"."""
    return ", ".join(f"{number} x {name}" for name, number in Counter(names).items())


def _code(run: History, redactor: Redactor, *, shows_diff: bool) -> Html | None:
    """Show the commit of the code, and what was changed since; None: the run recorded no repository."""
    code = _first_with_workers(run).about.get("code")
    if not isinstance(code, dict):
        return None
    changed, files, state = code.get("changed"), "", "not known, because git took too long"
    if isinstance(changed, list):
        files = "\n".join(map(str, changed))
        state = count(len(changed), "changed file") if changed else "clean"
    rows = [
        ("folder", str(code.get("folder"))),
        ("commit", str(code.get("commit"))),
        ("branch", str(code.get("branch") or "")),
        ("state", state),
    ]
    changes, hidden = _changes(code, redactor)
    counted = f"{count(hidden, 'value')} hidden"
    shown: Html | str = ""
    if hidden and not shows_diff:
        how = (tag("code", "ddplaunch report --diff"), " shows all else of them.")
        shown = tag("p", f"{counted}: the changes since the commit are left out. ", how)
    elif changes:
        shown = unfolding(f"Changes since the commit{f', {counted}' if hidden else ''}", changes, _DIFF_ROOM)
    return join(
        table("The repository of the program when the run began", ("what", "value"), _with_short_cells(rows)),
        unfolding("Changed files", files, _PACKAGES_ROOM) if files else "",
        shown,
    )


def _changes(code: Mapping[str, Any], redactor: Redactor) -> tuple[str, int]:
    """Return the changes since the commit, and how many values are hidden in them, which `redactor` counts.

    about.json says how many the writer has hidden. A version that did not say it hid fewer: secrets are hidden here then.
    """
    changes, hidden = code.get("diff"), code.get("hidden")
    if not isinstance(changes, str):
        return "", 0
    if isinstance(hidden, int):
        redactor.hidden += hidden
        return changes, hidden
    hidden_before = redactor.hidden
    is_diff = changes.startswith("diff --git ")
    shown = diff(changes, redactor, len(changes)) if is_diff else redactor.text(changes)
    return shown, redactor.hidden - hidden_before


def _with_short_cells(rows: Iterable[Iterable[str]]) -> list[list[str]]:
    return [[cell[:_LONGEST_CELL] for cell in row] for row in rows]


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
