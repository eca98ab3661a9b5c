"""What is told to programs outside of the job: events to the command of `--notify`, figures to the file of `--metrics-file`.

Children run the command and write the file, one after another and each with a time limit: neither can hold the job up or end it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.record.events import VERSION, Event
from ddplaunch.record.folders import short
from ddplaunch.spec.outcome import Progress, progress_of_job
from ddplaunch.system.fields import bounded_size, line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.command import run_in_shell
from ddplaunch.system.process.files import replaced

if TYPE_CHECKING:
    from ddplaunch.launcher.decide.job import Member
    from ddplaunch.launcher.job.coordinator import Coordinator
    from ddplaunch.launcher.node.context import AgentContext
    from ddplaunch.launcher.tell.reporter import Reporter
    from ddplaunch.record.window.questions import Answer
    from ddplaunch.system.loop.loop import Pending

LIMIT = 10.0  # seconds that a command has, or a disk
END_WITHIN = 12.0  # seconds that all that is left to do has, once the job has ended
MOST_WAITING = 32  # events that wait for a slow command; what comes then is dropped, but for the end of the job
_ANSWER_WITHIN = 2.0  # seconds that the nodes have to say how their workers are
EVERY = 15.0  # seconds from one writing of the figures to the next
_MARGIN = 2.0  # seconds for the child itself
_WHY_STUCK = "did not end in time, and is not tried again"  # a disk that hangs keeps each child that writes to it
_EVENTS_TOLD = ("job_started", "generation_failed", "notice", "node_joined", "node_left", "job_ended")

Errand = Callable[[], str]  # returns why it failed, "" if it did not


def begin(loop: Loop, context: AgentContext, coordinator: Coordinator) -> list[Errands]:
    """Start what tells programs outside the job about it, as its options ask; return errands that may be undone at the end."""
    spec, reporter, errands = context.inputs.spec, context.reporter, []
    if spec.notify:
        notifier = Notifier(loop, reporter, spec.notify, context.inputs.env)
        reporter.add_reader(notifier)  # which gets all events from now on
        errands.append(notifier.errands)
    if spec.metrics_file:
        progress = JobProgress(loop, context, coordinator)
        file = MetricsFile(loop, reporter, os.path.abspath(spec.metrics_file), progress)
        reporter.add_reader(file)
        errands.append(file.errands)
    return errands


class Errands:
    """Has children do one thing after another, and warns once of the first that fails."""

    def __init__(self, loop: Loop, reporter: Reporter, option: str) -> None:
        """Do errands for an option of the user ("--notify tell"), which the warning names."""
        self._loop = loop
        self._reporter = reporter
        self._option = option
        self._waiting: deque[Errand] = deque()
        self._pending: Pending[str] | None = None  # the errand that is being done, or was last
        self.is_busy = False  # an errand is being done
        self._has_warned = False
        self._is_stuck = False  # one could not be ended, as on a disk that hangs: no other is done
        # set once the job has ended, for half of the time that errands have then, and for all of it
        self._half_time_timer = loop.timer(None, self._drop_all_but_last)
        self._give_up_timer = loop.timer(None, self._give_up)

    def add(self, errand: Errand, *, most: int) -> None:
        """Do this after those that wait; of more than `most` that wait, the oldest are dropped."""
        if self._is_stuck:
            return
        self._waiting.append(errand)
        while len(self._waiting) > most:
            self._waiting.popleft()
        if not self.is_busy:
            self._next()

    def end_in_time(self) -> None:
        """Take END_WITHIN for all that is left; the last of it, which tells of the end of the job, has at least half of that."""
        self._half_time_timer.set(self._loop.now() + END_WITHIN / 2)
        self._give_up_timer.set(self._loop.now() + END_WITHIN)

    def _drop_all_but_last(self) -> None:
        """Do the last that waits now, and nothing before it: half of the time at the end is over. Called by the loop."""
        if self._waiting and self._pending is not None:
            last = self._waiting.pop()
            self._give_up()
            self._is_stuck = False
            self.add(last, most=1)

    def _give_up(self) -> None:
        """Do nothing more, as if what is being done could not be ended. Called by the loop."""
        if self._pending is not None:
            self._pending.give_up()

    def _next(self) -> None:
        self.is_busy = bool(self._waiting)
        if self.is_busy:
            self._pending = self._loop.ask(self._waiting.popleft(), _WHY_STUCK, self._done, within=LIMIT + _MARGIN)

    def _done(self, why: str) -> None:
        if why and not self._has_warned:
            self._has_warned = True
            self._reporter.warn(f"{self._option}: {why}")
        if why == _WHY_STUCK:
            self._is_stuck = True
            self._waiting.clear()
        self._next()


# --- --notify


class Notifier:
    """A reader of events, which hands the important ones to a command of the user."""

    def __init__(self, loop: Loop, reporter: Reporter, command: str, env: Mapping[str, str]) -> None:
        """`env` is the environment of the command."""
        self.errands = Errands(loop, reporter, f"--notify {command}")
        self._command = command
        self._env = dict(env)
        self._run: dict[str, Any] = {}  # which every event that is told names; nothing is told before

    def __call__(self, event: Event) -> None:
        """Hand an event to the command."""
        if event.name == "job_started":
            run_id = event.fields["run_id"]
            self._run = {"run_id": run_id, "name": short(run_id), "program": event.fields["program"]}
        if event.name in _EVENTS_TOLD and self._run:
            said = {"v": VERSION, "event": event.name, "at": time.time(), **self._run, **event.fields}
            self.errands.add(partial(run_command, self._command, self._env, said), most=MOST_WAITING)


def run_command(command: str, env: Mapping[str, str], said: Mapping[str, Any]) -> str:
    """Run a shell's command with an event as JSON on its stdin; return why it failed, "" if it did not."""
    import json

    code, _ = run_in_shell(command, env, LIMIT, json.dumps(said).encode() + b"\n")
    if code is None:
        return f"killed, for it had not ended after {LIMIT:g} s"
    return "" if code == 0 else f"killed by signal {-code}" if code < 0 else f"exit status {code}"


# --- --metrics-file


class Figures(Struct, frozen=True):
    """What is known of a job at one moment; times in seconds since the epoch."""

    run_id: str
    program: str
    world_size: int
    nnodes: int
    restarts: int
    started_at: float
    progressed_at: float
    progress: Progress | None = None
    status: int | None = None  # exit status; None: the job runs


class JobProgress:
    """How far the job is: asks all nodes, by way of the coordinator in this process, and remembers what they said last."""

    def __init__(self, loop: Loop, context: AgentContext, coordinator: Coordinator) -> None:
        self._loop = loop
        self._context = context
        self._coordinator = coordinator
        self._progress: Progress | None = None  # None: no worker has said how far it is
        self._progress_seen_at = 0.0  # when a worker last made a step or wrote a line, by the clock of the epoch

    def ask(self, done: Callable[[], None]) -> None:
        """Ask all nodes how their workers are; call `done` once all have answered, or the time for that is over."""
        from ddplaunch.record.window.questions import AskStatus

        self._coordinator.questions.ask(AskStatus(), _ANSWER_WITHIN, _StatusQuestion(self, done))

    def note(self, progress_of_rank: Mapping[int, Progress], ages: list[float]) -> None:
        """Note how far these workers are; `ages` are how many seconds ago each of them moved, besides what its progress says."""
        if (found := progress_of_job(progress_of_rank)) is not None:
            self._progress = found
            ages = [*ages, found.age]
        if ages:
            self._progress_seen_at = max(self._progress_seen_at, time.time() - min(ages))

    def figures(self) -> Figures | None:
        """Return the figures for the file of --metrics-file, of what is known now; None before the workers are started."""
        reporter, state = self._context.reporter, self._coordinator.state
        plan = reporter.story.plan
        if plan is None:
            return None
        if state.end.status is not None:  # nobody can be asked any more, but each end says how far its worker came
            # `progress` as the script has said, else as the last progress bar shows; `quiet`: seconds without output
            ends = state.generation.exits
            reached = {end.rank: progress for end in ends if (progress := end.progress or end.bar) is not None}
            self.note(reached, [end.quiet for end in ends if end.quiet is not None])
        # times of other clocks become times since the epoch
        started_at = time.time() - (reporter.clock() - reporter.story.began)
        last_busy = max(state.idleness.progress_at, state.generation.began_at)  # as the checks of --hang-timeout saw it
        busy_at = time.time() - (self._loop.now() - last_busy)
        return Figures(
            run_id=plan.run_id,
            program=self._context.inputs.spec.program.shown[0],
            world_size=plan.world_size,
            nnodes=plan.nnodes,
            restarts=state.generation.number,
            started_at=started_at,
            progressed_at=max(self._progress_seen_at, busy_at),
            progress=self._progress or self._progress_by_collectives(),  # of a script that says no steps
            status=state.end.status,
        )

    def _progress_by_collectives(self) -> Progress | None:
        """Return about how far the job is, as its collectives show; None without such a sign."""
        stragglers = self._coordinator.stragglers
        steps = stragglers.last_steps if stragglers is not None else None
        return Progress(step=bounded_size(steps), total=None, source="collectives") if steps is not None else None


class _StatusQuestion:
    """The question to all nodes how their workers are, and what they have answered so far."""

    def __init__(self, job_progress: JobProgress, done: Callable[[], None]) -> None:
        """`done` is called once the job's progress is noted."""
        self._job_progress = job_progress
        self._done = done
        self._progress_of_rank: dict[int, Progress] = {}
        self._ages: list[float] = []  # seconds since each worker has written something, or was started

    def on_answer(self, _member: Member, answer: Answer) -> None:
        """Take what a node says of its workers. Called by the questions of the coordinator."""
        from ddplaunch.record.window.questions import NodeStatus

        for worker in answer.workers if isinstance(answer, NodeStatus) else ():
            if worker.progress is not None:
                self._progress_of_rank[worker.rank] = worker.progress
            self._ages.append(worker.seconds if worker.quiet is None else min(worker.seconds, worker.quiet))

    def on_all_answered(self) -> None:
        """Note what was answered. Called by the questions of the coordinator."""
        self._job_progress.note(self._progress_of_rank, self._ages)
        self._done()


class MetricsFile:
    """A reader of events, which writes the figures of a job in Prometheus' text format, every 15 s and once it has ended."""

    def __init__(self, loop: Loop, reporter: Reporter, path: str, progress: JobProgress) -> None:
        """Write the figures of `progress`, from now on."""
        self.errands = Errands(loop, reporter, f"--metrics-file {path}")
        self._loop = loop
        self._path = path
        self._progress = progress
        self._has_ended = False
        self._due = loop.timer(loop.now(), lambda: progress.ask(self._write), may_come_late=True)

    def _write(self) -> None:
        if self._has_ended:
            return
        if (figures := self._progress.figures()) is not None:
            self.errands.add(partial(write_whole, self._path, render(figures)), most=1)
        self._due.set(self._loop.now() + (EVERY if figures is not None else 1.0))

    def __call__(self, event: Event) -> None:
        """Write how the job has ended, and nothing after that."""
        if event.name == "job_ended":
            self._write()
            self._has_ended = True
            self._due.cancel()


def write_whole(path: str, text: str) -> str:
    """Replace a file as a whole; return why that failed, "" if it did not."""
    try:
        with replaced(path) as file:  # node_exporter, which reads *.prom, never finds a half of it
            file.write(text.encode(errors="replace"))
    except OSError as error:
        return f"could not be written: {error.strerror}"
    return ""


def render(figures: Figures) -> str:
    """Return the figures in Prometheus' text format, version 0.0.4."""
    label_of_run = f'run="{_escaped(figures.run_id)}"'
    lines: list[str] = []

    def add(name: str, kind: str, text: str, value: object, more_labels: str = "") -> None:
        full = f"ddplaunch_{name}"
        if f"# TYPE {full} {kind}" not in lines:  # of several with one name only the first has these
            lines.extend([f"# HELP {full} {text}", f"# TYPE {full} {kind}"])
        lines.append(f"{full}{{{label_of_run}{more_labels}}} {value}")

    of_job = f',program="{_escaped(figures.program)}",version="{__version__}"'
    add("info", "gauge", "The job.", 1, of_job)
    add("running", "gauge", "Whether the job runs: 1 or 0.", int(figures.status is None))
    if figures.status is not None:
        add("exit_status", "gauge", "The exit status of ddplaunch.", figures.status)
    add("workers", "gauge", "The world size.", figures.world_size)
    add("nodes", "gauge", "How many nodes take part.", figures.nnodes)
    add("restarts_total", "counter", "How often all workers were started again.", figures.restarts)
    add("start_timestamp_seconds", "gauge", "When the job started.", round(figures.started_at, 3))
    since = "When a worker last made a step, wrote a line or was seen to compute."
    add("last_progress_timestamp_seconds", "gauge", since, round(figures.progressed_at, 3))
    if (progress := figures.progress) is not None:
        source = f',source="{_escaped(progress.source)}"'
        add("step", "gauge", "The step that the job has reached.", progress.step, source)
        if progress.total is not None:
            add("steps", "gauge", "How many steps the job is to make.", progress.total)
        for name, number in progress.metrics:
            value = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(number, number)
            add("metric", "gauge", "A metric that the script reports.", value, f',name="{_escaped(name)}"')
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return line(label).replace("\\", r"\\").replace('"', r"\"")
