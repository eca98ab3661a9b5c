"""Reads the folder of a run into values: what each rank did in each generation, on one clock. Changes nothing in the folder.

A file may be damaged, missing, huge, or from another version. What can be read is read, and `Run.problems` says what is wrong.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ddplaunch.record.events import VERSION
from ddplaunch.record.folders import goes_on, parts_of
from ddplaunch.record.run_folder import COLLECTIVES, SAMPLES
from ddplaunch.system.fields import Duration, Number, Seconds, Size, Status
from ddplaunch.system.process.files import open_regular, read_json
from ddplaunch.system.redaction import HIDDEN, Redactor
from ddplaunch.system.words import count, duration
from ddplaunch.tools.page.collectives import Collective, collectives
from ddplaunch.tools.page.last_sign import last_sign
from ddplaunch.tools.page.samples import Curve, curves

_LONGEST_EVENTS = 64 << 20  # bytes of events.jsonl that are read
_NOTED = ("notice", "node_joined", "node_stopping", "node_left", "signal_received", "left_after_notice", "front_lost")

_TEXTS = ("program", "how", "reason", "message", "why", "text")  # of an event, which others have written

Moment = Annotated[float, Meta(ge=0, le=1e11)]  # seconds since 1970


class Reached(Struct, frozen=True):
    """How far a worker was, as it said last."""

    step: Size
    total: Size | None = None
    first_step: Size = 0  # of this generation
    seconds: Duration = 0.0  # from the first call to the last
    age: Duration = 0.0  # seconds from the last call to its end


class Life(Struct, frozen=True, kw_only=True):
    """One worker in one generation."""

    rank: int
    generation: int
    node: int  # index in Run.nodes
    pid: int | None
    began: float
    ended: float | None = None  # None: it runs, or its end is not known
    status: int | None = None
    how: str = ""
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

    at: float
    node: int
    name: str  # of the event
    text: str
    ranks: str = ""


class Gap(Struct, frozen=True):
    """A time in which the workers of a node did not run: the job was suspended, or its machine slept."""

    began: float
    ended: float
    node: int


class Generation(Struct, frozen=True):
    """All workers from one start to the next."""

    number: int
    began: float
    failed_rank: int | None = None
    wait: float | None = None  # seconds before the next; None: none followed


class Node(Struct, frozen=True):
    """The folder of one node."""

    folder: str
    host: str
    plan: dict[str, Any]
    summary: dict[str, Any]
    about: dict[str, Any]


class Run(Struct, frozen=True, kw_only=True):
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
    nodes: tuple[Node, ...]
    generations: tuple[Generation, ...]
    lives: tuple[Life, ...]  # by rank, then by generation
    marks: tuple[Mark, ...]
    gaps: tuple[Gap, ...]
    curves: tuple[Curve, ...]
    collectives: tuple[Collective, ...] = ()
    problems: tuple[str, ...]  # sentences about what could not be read


class _Row(Struct):
    """A line of events.jsonl, with the fields that are used here."""

    event: str
    at: Moment
    mono: Seconds
    v: int = 1
    run_id: str = ""
    program: str = ""
    host: str = ""
    ddplaunch: str = ""
    generation: Number | None = None
    rank: Number | None = None
    pid: Number | None = None
    status: Status | None = None
    how: str = ""
    reason: str = ""
    seconds: Duration | None = None
    stopped_with: Number | None = None
    progress: Reached | None = None
    signal: int | str | None = None
    name: str = ""
    ranks: str = ""
    type: str = ""
    message: str = ""
    why: str = ""
    text: str | None = None
    wait: Duration | None = None


class _Node:
    """What the events of one node tell, gathered line by line."""

    def __init__(self, index: int, offset: float) -> None:
        """`offset` is added to CLOCK_MONOTONIC of this node to give seconds since 1970."""
        self._index = index
        self.offset = offset
        self.first: _Row | None = None  # job_started
        self.last: _Row | None = None  # job_ended
        self.generations: dict[int, Generation] = {}
        self.lives: dict[tuple[int, int], Life] = {}  # by rank and generation
        self.marks: list[Mark] = []
        self.gaps: list[Gap] = []
        self._generation = 0
        self._suspended: float | None = None
        self.end = 0.0

    def take(self, row: _Row) -> None:
        """Take the next event."""
        at = row.mono + self.offset
        self.end = max(self.end, at)
        match row.event:
            case "job_started":
                self.first = row
            case "job_ended":
                self.last = row
            case "generation_started" if row.generation is not None:
                self._generation = row.generation
                self.generations[row.generation] = Generation(row.generation, at)
            case "generation_failed" if row.generation in self.generations:
                known = self.generations[row.generation]
                self.generations[row.generation] = replace(known, failed_rank=row.rank, wait=row.wait)
            case "worker_started" | "worker_start_failed" | "worker_exited" if row.rank is not None:
                self._on_worker(row, row.rank, at)
            case "job_suspended":
                self._suspended = at
            case "job_resumed" if self._suspended is not None:
                self.gaps.append(Gap(self._suspended, at, self._index))
                self._suspended = None
            case "paused" if row.seconds is not None:
                self.gaps.append(Gap(at - row.seconds, at, self._index))
        if text := _said(row):
            ranks = row.ranks if row.rank is None else str(row.rank)
            self.marks.append(Mark(at=at, node=self._index, name=row.event, text=text, ranks=ranks))

    def _on_worker(self, row: _Row, rank: int, at: float) -> None:
        """Begin the life of a worker, or end it; a worker whose start is not in the events began `seconds` before its end."""
        key = rank, self._generation
        if row.event == "worker_started":
            self.lives[key] = Life(rank=rank, generation=self._generation, node=self._index, pid=row.pid, began=at)
            return
        began = at - (row.seconds or 0.0)
        life = self.lives.get(key) or Life(
            rank=rank, generation=self._generation, node=self._index, pid=row.pid, began=began
        )
        how = row.how or f"could not be started: {row.reason}"
        self.lives[key] = replace(
            life, ended=at, status=row.status, how=how, stopped_with=row.stopped_with, reached=row.progress
        )


def _said(row: _Row) -> str:
    """Return the words for an event in the list "What happened"; "" if the list leaves it out."""
    match row.event:
        case "stop_sent" | "kill_sent":
            return f"{row.name or 'SIGKILL'} to rank{'' if row.ranks.isdigit() else 's'} {row.ranks}"
        case "took_over":
            return row.text or ""
        case "worker_raised":
            return f"rank {row.rank} raised {row.type}: {row.message}"
        case "job_suspended":
            return "the job was suspended"
        case "job_resumed":
            return "the job continues"
        case "paused":
            return f"this node did not run for {duration(row.seconds or 0.0)}"
        case "generation_failed":
            what = "ended" if row.rank is None else "failed"
            later = f" in {duration(row.wait)}" if row.wait else ""
            return f"generation {row.generation} {what}: all workers start again{later}"
        case name if name in _NOTED:
            words = (row.host, row.text or row.reason or row.why or row.name or (row.signal and str(row.signal)) or "")
            return f"{name.replace('_', ' ')}: {' '.join(filter(None, words))}".removeprefix("notice: ").rstrip(": ")
    return ""


def read(folder: str, points: int = 300, redactor: Redactor | None = None) -> Run | None:
    """Return the run in this folder, its curves with so many points; None if the folder holds neither events nor a plan.

    A run may be one of an older version, which hid less: no secret that its files hold is among what is returned, and `redactor`
    counts what is hidden.
    """
    redactor = redactor or Redactor()
    going = goes_on(folder)  # looked at first: a run that ends meanwhile has written its end
    problems: list[str] = []
    nodes, found = [], []
    for index, part in enumerate(sorted(parts_of(folder), key=_by_number)):
        rows = [_shown(row, redactor) for row in _rows(part, problems, going)]
        plan, summary, about = (_object(f"{part}/{name}.json", problems) for name in ("plan", "summary", "about"))
        plan, summary = _shown_plan(plan, redactor), redactor.data(summary)
        offset = statistics.median([row.at - row.mono for row in rows]) if rows else 0.0
        node = _Node(index, offset)
        for row in rows:
            node.take(row)
        found.append(node)
        nodes.append(Node(part, _host(node, plan), plan, summary, about))
    if not any(node.end for node in found) and not any(node.plan for node in nodes):
        return None
    return _joined(folder, nodes, found, problems, going=going, points=points)


def _joined(
    folder: str, nodes: list[Node], found: list[_Node], problems: list[str], *, going: bool, points: int
) -> Run:
    """Put together what the nodes tell; of the job as a whole, the first node of the last generation tells."""
    generations: dict[int, Generation] = {}
    for node in found:
        for number, one in node.generations.items():
            known = generations.get(number, one)
            failed, wait = (known.failed_rank, known.wait) if known.wait is not None else (one.failed_rank, one.wait)
            generations[number] = Generation(number, min(known.began, one.began), failed, wait)
    firsts = [node.first for node in found if node.first is not None]
    newest = max(found, key=lambda node: (max(node.generations, default=-1), node.last is not None))
    last = newest.last
    lives = sorted(
        (life for node in found for life in node.lives.values()), key=lambda life: (life.rank, life.generation)
    )
    moments = [life.began for life in lives] + [one.began for one in generations.values()]
    ended = max((node.end for node in found), default=0.0)
    began = min(moments, default=ended)
    if last is None and not going:
        problems.append("The run has no end: ddplaunch itself was killed, or its machine was lost.")
    if going:
        ended = max(time.time(), ended)
    elif last is None:
        signs = [(node.folder, known.offset, known.end) for node, known in zip(nodes, found, strict=True)]
        ended = max(ended, min(last_sign(folder, signs), time.time()))
    clocks = [(node.folder, known.offset) for node, known in zip(nodes, found, strict=True)]
    drawn, damaged = curves([(f"{part}/{SAMPLES}", offset) for part, offset in clocks], began, ended, points)
    starts = sorted((one.began, one.number) for one in generations.values())
    called, unread = collectives([(f"{part}/{COLLECTIVES}", offset) for part, offset in clocks], starts)
    for name, number in ((SAMPLES, damaged), (COLLECTIVES, unread)):
        if number:
            problems.append(f"{count(number, 'line')} of {name} cannot be read.")
    plan = nodes[0].plan.get("run_id")
    return Run(
        folder=folder,
        run_id=(firsts[0].run_id if firsts else "") or (plan if isinstance(plan, str) else os.path.basename(folder)),
        program=firsts[0].program if firsts else "",
        version=firsts[0].ddplaunch if firsts else "",
        began=began,
        ended=ended,
        goes_on=going,
        outcome="" if going or last is None else last.text or last.why,
        status=None if going or last is None else last.status,
        nodes=tuple(nodes),
        generations=tuple(generations[number] for number in sorted(generations)),
        lives=tuple(lives),
        marks=tuple(sorted((mark for node in found for mark in node.marks), key=lambda mark: mark.at)),
        gaps=tuple(gap for node in found for gap in node.gaps),
        curves=tuple(drawn),
        collectives=tuple(called),
        problems=tuple(problems),
    )


def _by_number(part: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d{1,9}", os.path.basename(part))], part


def _host(node: _Node, plan: dict[str, Any]) -> str:
    """Return the name of a node's host; "" if that is not known."""
    if node.first is not None and node.first.host:
        return node.first.host
    workers = plan.get("workers")
    host = workers[0].get("host") if isinstance(workers, list) and workers and isinstance(workers[0], dict) else None
    return host if isinstance(host, str) else ""


def _object(path: str, problems: list[str]) -> dict[str, Any]:
    """Return an object from a JSON file; an empty one if there is none."""
    found = read_json(path)
    if isinstance(found, dict):
        if found.get("v") != VERSION:
            problems.append(f"{path} was written by another version of ddplaunch.")
        return found
    if os.path.lexists(path):
        problems.append(f"{path} is damaged.")
    return {}


def _shown(row: _Row, redactor: Redactor) -> _Row:
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
        shown["workers"] = [_shown_worker(one, others if at else redactor) for at, one in enumerate(workers)]
        redactor.hidden += sum(map(_hidden_before, workers[:1]))
    return shown


def _hidden_before(worker: Any) -> int:
    """Return how many values of a worker are hidden in the file of its plan."""
    argv, variables = (worker.get("argv"), worker.get("variables")) if isinstance(worker, dict) else (None, None)
    words = argv if isinstance(argv, list) else []
    values = [*words, *(variables.values() if isinstance(variables, dict) else ())]
    return sum(isinstance(one, str) and one.rpartition("=")[2] == HIDDEN for one in values)


def _shown_worker(worker: Any, redactor: Redactor) -> Any:
    """Return a worker of a plan without secrets; whatever has not its form passes as it is."""
    if not isinstance(worker, dict):
        return worker
    worker = dict(worker)
    if isinstance(argv := worker.get("argv"), list):
        worker["argv"] = redactor.argv(argv)
    if isinstance(variables := worker.get("variables"), dict):
        worker["variables"] = redactor.variables(variables)
    return worker


def _rows(part: str, problems: list[str], going: bool) -> Iterator[_Row]:
    """Yield the events of a node; say in `problems` how many lines are none."""
    path = f"{part}/events.jsonl"
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST_EVENTS + 1)
    except OSError:
        problems.append(f"{path} cannot be read.")
        return
    *lines, rest = content[:_LONGEST_EVENTS].split(b"\n")
    lines += [rest] if rest and not going else []  # while the run goes on, a line may be half written
    decode = msgspec.json.Decoder(_Row).decode
    damaged = foreign = 0
    for text in lines:
        try:
            row = decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            damaged += 1
            continue
        foreign += row.v != VERSION
        yield row
    if damaged:
        problems.append(f"{path} is damaged: {count(damaged, 'line')} of {len(lines)} cannot be read.")
    if foreign:
        problems.append(f"{path} was written by another version of ddplaunch: some of its events may be missing here.")
    if len(content) > _LONGEST_EVENTS:
        problems.append(f"{path} is longer than {_LONGEST_EVENTS >> 20} MiB: its end is missing here.")
