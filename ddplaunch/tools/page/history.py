"""Reads the folder of a run into values: what each rank did in each generation, on one clock. Changes nothing in the folder.

A file may be damaged, missing, huge, or from another version. What can be read is read; `History.problems` says what is wrong.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.record import run as record
from ddplaunch.record.events import VERSION
from ddplaunch.record.folders import goes_on
from ddplaunch.record.log_reader import logs_of
from ddplaunch.record.run import LONGEST, EventRow, Reached, T, lines_of
from ddplaunch.record.run_folder import COLLECTIVES, SAMPLES
from ddplaunch.system.process.files import content, tail
from ddplaunch.system.redaction import HIDDEN, Redactor
from ddplaunch.system.words import count, duration
from ddplaunch.tools.page.collectives import CallsRow, Collective, collectives
from ddplaunch.tools.page.samples import Curve, SampleRow, curves

_WITHIN = 60.0  # seconds that an event may wait until it is written
_TAIL = 1 << 20  # bytes of samples in which the last one is looked for
_NOTED_EVENTS = ("notice", "node_joined", "node_stopping", "node_left", "signal_received", "left_after_notice")

_TEXTS = (
    "program",
    "how",
    "reason",
    "message",
    "why",
    "text",
    "error",
    "where",
)  # of an event, which others have written


class Life(Struct, frozen=True, kw_only=True):
    """One worker in one generation."""

    rank: int
    generation: int
    node: int  # index in History.nodes
    pid: int | None
    began: float
    ended: float | None = None  # None: it runs, or its end is not known
    status: int | None = None
    how: str = ""
    error: str = ""  # the exception that it recorded, with where it raised that; "": none is known
    stopped_with: int | None = None  # the signal by which ddplaunch ended it
    reached: Reached | None = None

    @property
    def kind(self) -> str:
        """What became of it: running, good, stopped or failed."""
        if self.status is None:
            return "running"
        return "good" if self.status == 0 else "stopped" if self.stopped_with is not None else "failed"


class Mark(Struct, frozen=True, kw_only=True):
    """Something that happened at a moment; `ranks` as 0-3,7, "" for the job."""

    at: float  # seconds since 1970, as all times of these values
    node: int  # index in History.nodes
    name: str  # of the event
    text: str
    ranks: str = ""


class Gap(Struct, frozen=True):
    """A time in which the workers of a node did not run: the job was suspended, or its machine slept."""

    began: float
    ended: float
    node: int  # index in History.nodes


class Generation(Struct, frozen=True):
    """All workers from one start to the next."""

    number: int
    began: float
    failed_rank: int | None = None  # the first to fail; None: not known, or nobody failed
    why: str = ""  # it failed, as in a sentence; "": not known, or it did not
    wait: float | None = None  # seconds of pause before the next; None: none followed


class History(Struct, frozen=True, kw_only=True):
    """A run, as its folder tells."""

    folder: str
    run_id: str
    program: str = ""
    version: str = ""  # of ddplaunch
    began: float  # seconds since 1970
    ended: float  # of a run that goes on: now; of one that was killed: its last sign of life
    goes_on: bool
    outcome: str = ""  # in a sentence; "": it goes on, or was killed
    status: int | None = None
    nodes: tuple[NodeHistory, ...]
    generations: tuple[Generation, ...]
    lives: tuple[Life, ...]  # by rank, then by generation
    marks: tuple[Mark, ...]
    gaps: tuple[Gap, ...]
    curves: tuple[Curve, ...]
    collectives: tuple[Collective, ...] = ()
    problems: tuple[str, ...]  # sentences about what could not be read

    @property
    def is_of_command(self) -> bool:
        """Whether a command has started all nodes, and what they have left is on other hosts."""
        return len(self.nodes) == 1 and self.nodes[0].plan.get("workers") == []

    @property
    def planned_size(self) -> tuple[int, int]:
        """How many workers and nodes the newest generation was to have, as its plan says; zeros where no plan can be read."""
        newest = max(self.nodes, key=lambda node: (max(node.generations, default=-1), bool(node.plan)))
        workers, nodes = (
            number if isinstance(number := newest.plan.get(name), int) else 0 for name in ("world_size", "nnodes")
        )
        return workers, nodes


class NodeHistory:
    """What one node has left: its files without secrets, and what its events tell, gathered line by line."""

    def __init__(self, index: int, left: record.Node, redactor: Redactor, problems: list[str]) -> None:
        """Read the files that a node has `left`; add to `problems` what is wrong with them. `index` is that in History.nodes."""
        self.folder = left.folder
        rows = [_shown(row, redactor) for row in _rows(f"{left.folder}/events.jsonl", problems)]
        plan, summary, self.about = (_file_of(left, name, problems) for name in ("plan", "summary", "about"))
        self.plan, self.summary = _shown_plan(plan, redactor), redactor.data(summary)
        # what is added to CLOCK_MONOTONIC of this node to give seconds since 1970
        self.offset = statistics.median([row.at - row.mono for row in rows]) if rows else 0.0
        self.job_started: EventRow | None = None  # None: the events have none
        self.job_ended: EventRow | None = None
        self.generations: dict[int, Generation] = {}
        self.lives: dict[tuple[int, int], Life] = {}  # by rank and generation
        self.marks: list[Mark] = []
        self.gaps: list[Gap] = []
        self.last_event_at = 0.0  # seconds since 1970; 0: there is no event
        self._index = index
        self._generation = 0  # the latest one that the events so far have begun
        self._raised: set[tuple[int | None, int]] = set()  # ranks, with generations, that an event says to have raised
        self._suspended_at: float | None = None  # since when the job has been suspended; None: it is not
        for row in rows:
            self._on_event(row)
        host = self.job_started.host if self.job_started is not None else ""
        self.host = host or _planned_host(self.plan)  # "": not known

    def _on_event(self, row: EventRow) -> None:
        """Gather what the next event tells."""
        at = row.mono + self.offset
        self.last_event_at = max(self.last_event_at, at)
        match row.event:
            case "job_started":
                self.job_started = row
            case "job_ended":
                self.job_ended = row
            case "generation_started" if row.generation is not None:
                self._generation = row.generation
                self.generations[row.generation] = Generation(row.generation, at)
            case "generation_failed" if row.generation in self.generations:
                known = self.generations[row.generation]
                self.generations[row.generation] = replace(
                    known, failed_rank=row.rank, why=row.text or "", wait=row.wait
                )
            case "worker_started" | "worker_start_failed" | "worker_exited" if row.rank is not None:
                self._on_worker(row, row.rank, at)
            case "job_suspended":
                self._suspended_at = at
            case "job_resumed" if self._suspended_at is not None:
                self.gaps.append(Gap(self._suspended_at, at, self._index))
                self._suspended_at = None
            case "paused" if row.seconds is not None:  # written when the machine runs again
                self.gaps.append(Gap(at - row.seconds, at, self._index))
        self._add_mark(row, at)

    def _add_mark(self, row: EventRow, at: float) -> None:
        """Add the event to what the page lists as having happened, if it belongs there and no event before has told the same.

        The mark of an exception tells of the worker's end, too, unless a signal ended the worker: then its program may have
        handled the exception, and gone on for long.
        """
        worker = row.rank, self._generation
        if row.event == "worker_raised":
            self._raised.add(worker)
        is_by_signal = row.how.startswith("killed by")
        is_told_by_exception = row.event == "worker_exited" and worker in self._raised and not is_by_signal
        if not is_told_by_exception and (text := _in_words(row)):
            ranks = row.ranks if row.rank is None else str(row.rank)
            self.marks.append(
                Mark(at=self._happened_at(row, at), node=self._index, name=row.event, text=text, ranks=ranks)
            )

    def _happened_at(self, row: EventRow, at: float) -> float:
        """Return when that happened of which an event tells that was written `at`: an exception may have been raised before.

        The end of a worker is seen late, and others that only lost contact with it may have been seen to fail before.
        """
        life = self.lives.get((row.rank, self._generation)) if row.rank is not None else None
        raised_at = row.raised_at + self.offset if row.raised_at is not None else at
        return raised_at if life is not None and life.began <= raised_at <= at else at

    def _on_worker(self, row: EventRow, rank: int, at: float) -> None:
        """Begin the life of a worker, or end it; a worker whose start is not in the events began `seconds` before its end."""
        key = rank, self._generation
        if row.event == "worker_started" or key not in self.lives:
            began = at - (row.seconds or 0.0)
            self.lives[key] = Life(rank=rank, generation=self._generation, node=self._index, pid=row.pid, began=began)
        if row.event != "worker_started":
            life, how = self.lives[key], row.how or f"could not be started: {row.reason}"
            error = _with_where(row.error or "", row)
            end = {"ended": at, "status": row.status, "how": how, "error": error, "stopped_with": row.stopped_with}
            self.lives[key] = replace(life, **end, reached=row.progress)


def _planned_host(plan: dict[str, Any]) -> str:
    """Return the host of the first worker in a node's plan; "" where it names none."""
    host = next(mappings_in(plan.get("workers")), {}).get("host")
    return host if isinstance(host, str) else ""


def _in_words(row: EventRow) -> str:
    """Return the words for an event in the list "What happened"; "" if the list leaves it out."""
    match row.event:
        case "stop_sent" | "kill_sent":
            return f"{row.name or 'SIGKILL'} to rank{'' if row.ranks.isdigit() else 's'} {row.ranks}"
        case "worker_raised":
            return _failed_in_words(row, "raised", f"{row.type}: {row.message}")
        case "worker_exited" if row.status and row.stopped_with is None:
            return _failed_in_words(row, "failed:", row.error or row.how)
        case "worker_start_failed":
            return f"rank {row.rank} could not be started: {row.reason}"
        case "job_suspended":
            return "the job was suspended"
        case "front_lost":
            return "the ddplaunch that had started the job was killed"
        case "job_resumed":
            return "the job continues"
        case "paused":
            return f"this node did not run for {duration(row.seconds or 0.0)}"
        case "generation_failed":
            what = "ended" if row.rank is None else "failed"
            later = f" in {duration(row.wait)}" if row.wait else ""
            why = f"{row.text}; " if row.text else ""
            return f"generation {row.generation} {what}: {why}all workers start again{later}"
        case name if name in _NOTED_EVENTS:
            words = (row.host, row.text or row.reason or row.why or row.name or (row.signal and str(row.signal)) or "")
            return f"{name.replace('_', ' ')}: {' '.join(filter(None, words))}".removeprefix("notice: ").rstrip(": ")
    return ""


def _failed_in_words(row: EventRow, verb: str, what: str) -> str:
    """Say that a worker failed, or only lost contact with another one."""
    if row.follows:
        verb = "lost contact with another worker:"
    return f"rank {row.rank} {verb} {_with_where(what, row)}"


def _with_where(what: str, row: EventRow) -> str:
    return f"{what}, at {row.where}" if what and row.where else what


def read(folder: str, points: int = 300, redactor: Redactor | None = None) -> History | None:
    """Return the run in this folder, its curves with so many points; None if the folder holds neither events nor a plan.

    A run may be one of an older version, which hid less: no secret that its files hold is among what is returned, and `redactor`
    counts what is hidden.
    """
    redactor = redactor or Redactor()
    is_going_on = goes_on(folder)  # looked at first: a run that ends meanwhile has written its end
    problems: list[str] = []
    nodes = [NodeHistory(index, each, redactor, problems) for index, each in enumerate(record.Run(folder).nodes)]
    if not any(node.last_event_at or node.plan for node in nodes):
        return None
    generations = _generations(nodes)
    lives = [life for node in nodes for life in node.lives.values()]
    # of the job as a whole, a node of the last generation tells: the first one that saw the job end, or else the first one
    seen_most = max(nodes, key=lambda node: (max(node.generations, default=-1), node.job_ended is not None))
    job_ended = None if is_going_on else seen_most.job_ended
    last_event = max(node.last_event_at for node in nodes)
    began = min([*(life.began for life in lives), *(one.began for one in generations)], default=last_event)
    ended = last_event
    if is_going_on:
        ended = max(time.time(), last_event)
    elif job_ended is None:
        problems.append("The run has no end: ddplaunch itself was killed, its machine was lost, or its disk was full.")
        ended = max(last_event, min(_last_sign_of_life(folder, nodes), time.time()))
    damaged = Counter[str]()  # by file: lines, counted while they are read
    offsets = [node.offset for node in nodes]
    samples = (_lines(f"{node.folder}/{SAMPLES}", SampleRow, damaged) for node in nodes)
    curves_of_run = curves(zip(samples, offsets, strict=True), began, ended, points)
    calls = (_lines(f"{node.folder}/{COLLECTIVES}", CallsRow, damaged) for node in nodes)
    generation_starts = sorted((one.began, one.number) for one in generations)
    collectives_of_run = collectives(zip(calls, offsets, strict=True), generation_starts)
    problems += [f"{count(number, 'line')} of {name} cannot be read." for name, number in damaged.items()]
    job_started = next((node.job_started for node in nodes if node.job_started is not None), None)
    planned = nodes[0].plan.get("run_id")
    named = planned if isinstance(planned, str) else os.path.basename(folder)
    return History(
        folder=folder,
        run_id=(job_started.run_id if job_started else "") or named,
        program=job_started.program if job_started else "",
        version=job_started.ddplaunch if job_started else "",
        began=began,
        ended=ended,
        goes_on=is_going_on,
        outcome=job_ended.text or job_ended.why if job_ended else "",
        status=job_ended.status if job_ended else None,
        nodes=tuple(nodes),
        generations=generations,
        lives=tuple(sorted(lives, key=lambda life: (life.rank, life.generation))),
        marks=tuple(sorted((mark for node in nodes for mark in node.marks), key=lambda mark: mark.at)),
        gaps=tuple(gap for node in nodes for gap in node.gaps),
        curves=tuple(curves_of_run),
        collectives=tuple(collectives_of_run),
        problems=tuple(problems),
    )


def _generations(nodes: Sequence[NodeHistory]) -> tuple[Generation, ...]:
    """Return the generations of all nodes by number: each began on the first of its nodes."""
    joined: dict[int, Generation] = {}
    for node in nodes:
        for number, one in node.generations.items():
            known = joined.get(number, one)
            # only a node that was told of the failure has the event with the rank and the pause
            tells = known if known.wait is not None else one
            joined[number] = replace(tells, began=min(known.began, one.began))
    return tuple(joined[number] for number in sorted(joined))


def _last_sign_of_life(folder: str, nodes: Sequence[NodeHistory]) -> float:
    """Return when any worker of a run that was killed was last seen to live: by its samples, and by the times of its logs.

    That is in seconds since 1970; 0 if it is not known. A node without events has no clock that is known.
    """
    with_events = [node for node in nodes if node.last_event_at]
    signs = [at + node.offset for node in with_events if (at := _last_sample(f"{node.folder}/{SAMPLES}")) is not None]
    # a copy of the folder has another time than that of the last event, and tells nothing
    if all(abs(_modified(f"{node.folder}/events.jsonl") - node.last_event_at) < _WITHIN for node in with_events):
        signs += (_modified(path) for log in logs_of(folder) for path in log.paths)
    return max(signs, default=0.0)


def _last_sample(path: str) -> float | None:
    """Return the CLOCK_MONOTONIC time of the last sample of a node; None if no sample can be read."""
    rows = [row for row in lines_of(tail(path, _TAIL), SampleRow) if row is not None]
    return rows[-1].mono if rows else None


def _modified(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def mapping_or_empty(found: object) -> Mapping[str, Any]:
    """Return an object of a JSON file; {} for anything else."""
    return found if isinstance(found, dict) else {}


def mappings_in(found: object) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in a list of a JSON file; none of anything else."""
    return (one for one in found if isinstance(one, dict)) if isinstance(found, list) else iter(())


def _file_of(left: record.Node, name: str, problems: list[str]) -> dict[str, Any]:
    """Return what a node has left in one of its JSON files; say in `problems` what is wrong with the file."""
    found, path = left.object(name), f"{left.folder}/{name}.json"
    if found and found.get("v") != VERSION:
        problems.append(f"{path} was written by another version of ddplaunch.")
    elif not found and os.path.lexists(path):
        problems.append(f"{path} is damaged.")
    return found


def _shown(row: EventRow, redactor: Redactor) -> EventRow:
    """Return an event without secrets in its texts."""
    for name in _TEXTS:
        if text := getattr(row, name):
            setattr(row, name, redactor.text(text))
    return row


def _shown_plan(plan: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """Return a plan without secrets; those of its first worker count, as the others mostly have the same ones.

    What is hidden in the file counts, too.
    """
    shown: dict[str, Any] = redactor.data({name: value for name, value in plan.items() if name != "workers"})
    workers = plan.get("workers")
    if isinstance(workers, list):
        others = Redactor(redactor.known)
        shown["workers"] = [_shown_worker(one, others if index else redactor) for index, one in enumerate(workers)]
        redactor.hidden += sum(map(_hidden_before, workers[:1]))
    return shown


def _hidden_before(worker: Any) -> int:
    """Return how many values of a worker are hidden in the file of its plan."""
    argv, variables = (worker.get("argv"), worker.get("variables")) if isinstance(worker, dict) else (None, None)
    words = argv if isinstance(argv, list) else []
    values = [*words, *(variables.values() if isinstance(variables, dict) else ())]
    return sum(isinstance(one, str) and one.rpartition("=")[2] == HIDDEN for one in values)


def _shown_worker(worker: Any, redactor: Redactor) -> Any:
    """Return a worker of a plan without secrets; what has not the form of a worker, or of its parts, is returned as it is."""
    if not isinstance(worker, dict):
        return worker
    worker = dict(worker)
    if isinstance(argv := worker.get("argv"), list):
        worker["argv"] = redactor.argv(argv)
    if isinstance(variables := worker.get("variables"), dict):
        worker["variables"] = redactor.variables(variables)
    return worker


def _lines(path: str, kind: type[T], unread: Counter[str]) -> Iterator[T]:
    """Yield the lines of a file; count those that are none of this kind by the name of the file."""
    for row in lines_of(content(path, LONGEST), kind):
        if row is None:
            unread[os.path.basename(path)] += 1
        else:
            yield row


def _rows(path: str, problems: list[str]) -> list[EventRow]:
    """Return the events of a node in this file; say in `problems` what of the file cannot be read."""
    if (data := content(path, LONGEST)) is None:
        problems.append(f"{path} cannot be read.")
    lines = list(lines_of(data, EventRow))
    rows = [row for row in lines if row is not None and row.is_complete]
    if damaged := len(lines) - len(rows):
        problems.append(f"{path} is damaged: {count(damaged, 'line')} of {len(lines)} cannot be read.")
    if any(row.v != VERSION for row in rows):
        problems.append(f"{path} was written by another version of ddplaunch: some of its events may be missing here.")
    if data is not None and len(data) >= LONGEST:
        problems.append(f"{path} is longer than {LONGEST >> 20} MiB: its end is missing here.")
    return rows
