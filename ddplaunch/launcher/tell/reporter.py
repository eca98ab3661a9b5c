"""What the agent of a node reports: all events to the readers, its few lines to stderr, the summary to the run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from ddplaunch import __version__
from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import State
from ddplaunch.launcher.tell.closing import headline, render_repeated, render_stopped, render_stopping
from ddplaunch.launcher.tell.story import Ended, Story, row_of
from ddplaunch.plan import Plan
from ddplaunch.plan.devices import sysfs
from ddplaunch.reach.pipes import CONTROL, OutputQueue
from ddplaunch.record.events import Event, Reader
from ddplaunch.record.folders import short
from ddplaunch.record.run_folder import COLLECTIVES, RunFolder
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.outcome import ClusterQuestions, Traces, Why
from ddplaunch.system.console.paint import Paint
from ddplaunch.system.errors import indented, visible
from ddplaunch.system.process.clock import Pause
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import count, duration, tilde

_LONGEST_PROGRAM = 1000  # characters in an event
_NAMES = ("run_id", "host", "master_addr", "name", "ranks")  # fields of events by which others find things: no secrets
_LONGEST_CLOSING = 10_000  # characters, each of at most six bytes: less than a message holds
_LONG = 5.0  # seconds of a pause that are worth a line; a process on a busy machine may be late by one or two
_OF_THIS_NODE = ("refused", "left", "not_reached", "lost")  # ends that no other node reports

_NO_TOKEN = (
    "without a token, any process that reaches node 0 can join the job; "
    "to keep others out, set the same DDPLAUNCH_TOKEN on all nodes"
)


class LineWriter(Protocol):
    """What writes the lines of this node to where its user reads."""

    def write_line(self, text: str) -> None:
        """Write a text now."""

    def write_closing_line(self, text: str) -> None:
        """Write what closes the job: the command that started the agents does so behind their last output."""


class Stderr(Struct, frozen=True, kw_only=True):
    """Where this node writes its lines for people, and how they look there."""

    writer: LineWriter
    paint: Paint = Paint()
    redactor: Redactor = field(default_factory=Redactor)  # hides secrets in whatever is written

    def write(self, text: str) -> None:
        """Write a text, but for its secrets, its sentences as the terminal shows them."""
        self.writer.write_line(self.paint.report(self.redactor.text(text)))

    def write_last(self, text: str) -> None:
        """Write what closes the job, behind the last output of all nodes."""
        self.writer.write_closing_line(self.paint.report(self.redactor.text(text)))


class Surroundings(Struct, frozen=True, kw_only=True):
    """What is around a run on this node."""

    host: str = ""  # its name
    cwd: str = ""  # paths below it are shown relative to it
    home: str = ""  # the user's folder, for ~
    cluster: ClusterQuestions | None = None  # None: there is nobody to ask
    slurm_job: str = ""  # the id of the job in Slurm, "" outside of it
    srun_job: str = ""  # by which srun reaches this host, as `other_host.job_of_srun` has it; "" for none
    bad_nodes: str = ""  # the file that remembers the machines that failed; "": nothing is remembered
    has_front: bool = False  # a command has started all agents: where it is lost, nobody reads what they say


class CallerReporter:
    """Reports to the program that called `launch()` how the job ended, in place of the user."""

    def __init__(self, queue: OutputQueue) -> None:
        """Report by way of the front, to which `queue` leads."""
        self._queue = queue

    def closed(self, text: str) -> None:
        """Report why the job ended: the failure summary, or the line that closes a job which did not fail."""
        text = visible(text)
        if len(text) > _LONGEST_CLOSING:  # cut between lines: a colour or a link may not be left open
            text = text[:_LONGEST_CLOSING].rpartition("\n")[0]
        self._send({"type": "failure_text", "text": text})

    def ended(self, outcome: Mapping[str, Any]) -> None:
        """Report how the job ended, as `Story.outcome` returns it, but for the workers: one message may be too short for all."""
        self._send({"type": "outcome", **outcome, "workers": ()})

    def _send(self, what: Mapping[str, Any]) -> None:
        import json  # a job of a command needs none

        self._queue.put(CONTROL, json.dumps(what, ensure_ascii=False).encode(errors="replace"))


class Reporter:
    """Turns events and actions of a node's agent into public events (for its readers) and lines for the user."""

    def __init__(
        self,
        spec: JobSpec,
        stderr: Stderr,
        clock: Callable[[], float],
        *,
        around: Surroundings = Surroundings(),  # noqa: B008 - it is frozen
        reports_job: bool = True,
        caller: CallerReporter | None = None,
    ) -> None:
        """Prepare to report on a run of `spec`; `clock` gives CLOCK_MONOTONIC seconds.

        `around` is what is around the run on this node: host, folders, cluster. `reports_job`: this node reports the job as a
        whole, as the only or first one does. `caller`, if a program has called `launch()`, takes how the job ended, in place of
        stderr. Until plan and folder come (`use_plan`), reports wait in `_events_before_folder` and `_texts_before_plan`.
        """
        self.spec = spec
        self.stderr = stderr
        self.clock = clock
        self.around = around
        self.reports_job = reports_job
        self._caller = caller
        self.story = Story(began=clock())
        self._folder: RunFolder | None = None
        self._readers: tuple[Reader, ...] = ()
        self._events_before_folder: list[Event] = []  # they wait for it
        self._has_terminal = False  # a worker of this node writes to the terminal itself
        self._plan_in_folder: Plan | None = None  # the one that plan.json shows
        self._has_warned_of_folder = False
        # has the coordinator print a text about this node, where it shows the output of all; and whether the text is a warning
        self.tell_all: Callable[[str, bool], None] | None = None
        # texts, and whether they are warnings: the plan tells whether there are other nodes, to which the coordinator tells them
        self._texts_before_plan: list[tuple[str, bool]] = []
        self._reported_dropped = 0  # bytes of output, as last reported
        self._reported_pause: Pause | None = None  # the last one that was reported
        self._oom_kills_at_start = sysfs.oom_kills("/")  # processes that the kernel killed for memory before the run

    def report_waiting(self, text: str) -> None:
        """Report why this node waits: as a spare, or for node 0 to be started again."""
        self.emit("notice", text=text)
        if self.reports_job:  # else the coordinator says so where all nodes are shown
            self.print(text)

    @property
    def caller(self) -> CallerReporter | None:
        """What takes how the job ended, if a program has called `launch()` and this node reports the job."""
        return self._caller if self.reports_job else None

    def add_reader(self, reader: Reader) -> None:
        """Pass all events from now on to this reader too."""
        self._readers = (*self._readers, reader)

    def use_plan(self, plan: Plan, folder: RunFolder) -> None:
        """Use the plan that is carried out from now on, and the folder that keeps the run's record, always the same one."""
        self.story.plan = plan
        self._has_terminal = any(worker.terminal for worker in plan.workers)
        if self._folder is None:
            self._folder = folder
            self._readers = (folder, *self._readers)
            for event in self._events_before_folder:
                folder(event)  # as any reader
            self._events_before_folder.clear()

    @property
    def traces(self) -> Traces:
        """The facts of this node about the end of its workers."""
        killed = sysfs.oom_kills("/").since(self._oom_kills_at_start)
        return Traces(
            oom_kills=killed.number,
            oom_kills_of_machine=killed.of_machine,
            shm=sysfs.shm_size_and_room(),
            log_folder=self._folder.whole if self._folder is not None else None,
        )

    # --- events

    def on_event(self, event: node.Event, before: State) -> None:
        """Report an event of this node's decision: its public event, and a line where the user has to know at once.

        `before` is the state in which the event found the node.
        """
        self._emit_row(event)
        match event:
            case node.SignalReceived() if event.repeats_request_of and (before.end.stop_signal or before.is_ending):
                # that request has been obeyed already, and this signal kills nobody
                self.print(render_repeated(event, front=os.getppid()))  # the pid to signal: the front passes signals on
            case node.SignalReceived() if event.is_request and event.signum in before.policy.stop_signals:
                self._on_stop_signal(event, before)
            case node.WorkerExited(exit, _):
                self.story.note_exit(exit)
            case node.Swept(left) if before.teardown.last_sweep is not None:
                self.emit("swept", signal=int(before.teardown.last_sweep.signum), left=list(left))

    def _on_stop_signal(self, event: node.SignalReceived, before: State) -> None:
        """Say that the workers are stopped, or killed at once, by a signal that came to this node."""
        plan = self.story.plan
        # the coordinator has begun this stop for a signal that another node has reported: so this is no second one
        was_reported_elsewhere = before.why is Why.COORDINATOR and not before.end.stop_signal
        # Ctrl-C at a debugger's prompt goes to that worker, and stops nothing
        is_for_debugger = event.signum == signal.SIGINT and before.terminal_holder
        # workers that are stopped for another reason keep their grace period: nothing changes for them
        leaves_time_to_save = event.is_first_by_program and before.phase is node.Phase.STOPPING
        if was_reported_elsewhere or is_for_debugger or leaves_time_to_save:
            return
        if before.phase is node.Phase.STOPPING:
            self.print("killing the workers at once")
        elif before.workers_go_on and self.reports_job and plan is not None:
            running, kills = plan.world_size - len(before.exits), event.signum == signal.SIGINT and event.is_typed
            self.print(render_stopping(before.policy.grace_period, running, plan.nnodes, next_ctrl_c_kills=kills))

    def on_action(self, action: node.Action) -> None:
        """Report an action of this node's decision: its public event, and a line to be printed."""
        self._emit_row(action)
        if isinstance(action, node.Print):
            self.print(action.text)

    def generation_started(self, number: int, term: int | None, port: int) -> None:
        """Report that all workers are being started; the first time, announce the job.

        `term`: greater in each later start, also of a job that is run again; None: the nodes have none in common.
        """
        plan, folder = self.story.plan, self._folder
        self.story.begin_generation(self.clock(), term, port)
        assert plan is not None
        assert folder is not None
        if plan is not self._plan_in_folder:  # a later generation may have another
            is_first, self._plan_in_folder = self._plan_in_folder is None, plan
            around = self.around
            here = {"agent_pid": os.getpid(), "slurm_job": around.slurm_job, "srun_job": around.srun_job}
            folder.write("plan.json", {**plan.data(self.spec.origins, self.stderr.redactor.known), **here})
            if is_first:
                self._announce(plan, folder)
        where = {"master_addr": plan.master_addr, "master_port": port}
        self.emit("generation_started", generation=number, term=term, **where)

    def _announce(self, plan: Plan, folder: RunFolder) -> None:
        """Report that the job starts: the event, the first lines on the terminal, and the messages that came before them."""
        self.emit(
            "job_started",
            run_id=plan.run_id,
            program=self.spec.program.shown[0][:_LONGEST_PROGRAM],
            world_size=plan.world_size,
            host=plan.workers[0].host if plan.workers else self.around.host,  # of a simulated node, its name
            backend=plan.backend,
            ddplaunch=__version__,
        )
        if self.reports_job:
            on = f" on {count(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
            no_token = "" if plan.authenticated else ", no token"
            backend = f"{plan.backend} ({plan.reasons['backend']})"
            # two lines, since one would not fit a terminal of 80 columns
            self.print(f"{self._name_of_run(plan)}: {count(plan.world_size, 'worker')}{on}{no_token}, {backend}")
            if logs := self._where_output_goes(plan, folder):
                self.print(logs)
            if not plan.authenticated and 0 in plan.ranks:  # once for the job, where its users look
                self.print(_NO_TOKEN)
        if folder.warning is not None:
            self.warn(folder.warning)
        for what, is_warning in self._texts_before_plan:
            self.tell(what, is_warning=is_warning)
        self._texts_before_plan.clear()

    def _where_output_goes(self, plan: Plan, folder: RunFolder) -> str:
        """Return "logs in FOLDER", or which rank has the terminal; "" if there is nothing to say."""
        where = ""
        if folder.path is not None and folder.is_made:
            # with the host: homes need not be shared, and the user may be on another host
            where = f"{tilde(folder.path, self.around.home)}{self._on_this_host(plan)}"
        if self._has_terminal and plan.world_size == 1:
            return ""  # all that the worker writes is on the terminal
        text = f"logs in {where}" if where else ""
        if self._has_terminal:
            rank = next(worker.rank for worker in plan.workers if worker.terminal)
            text = f"rank {rank} has the terminal" + (f", the others print to {where}" if where else "")
        is_too_wide = 0 < self.stderr.paint.columns < len(f"ddplaunch: {text}")
        # a path that wraps cannot be copied
        return text.replace(f" {where}", f"\n{where}") if where and is_too_wide else text

    def worker_started(self, rank: int, pid: int) -> None:
        """Report that a worker runs."""
        self.emit("worker_started", rank=rank, pid=pid)
        if self.spec.verbosity > 0:
            self.print(f"rank {rank}{self._on_host_of(rank)} is pid {pid}")

    def to_be_typed(self, verb: str) -> str:
        """Return the command that looks into this run from the host of its user: in Slurm that is mostly another one."""
        plan = self.story.plan
        name = self._name_of_run(plan) if plan is not None else ""
        if plan is None or not self.around.srun_job:
            return f"ddplaunch {verb} {name}"
        from ddplaunch.reach import other_host  # few jobs need it

        return other_host.line(self.around.host, self.around.srun_job, (verb, name))

    def _name_of_run(self, plan: Plan) -> str:
        """Return the name by which `ps` shows this run: "a.1" for --run-id a, where an earlier run has the folder."""
        folder = self._folder
        if folder is not None and folder.path is not None and folder.is_made and not self.spec.log_dir:
            name = os.path.basename(folder.path)
            if name.startswith(f"{plan.run_id}."):
                return short(name)
        return short(plan.run_id)

    def _on_host_of(self, rank: int) -> str:
        """Return " on HOST" for a rank of a job of several nodes; "" for one node."""
        plan = self.story.plan
        hosts = [worker.host for worker in plan.workers if worker.rank == rank] if plan and plan.nnodes > 1 else []
        return f" on {hosts[0]}" if hosts else ""

    def _on_this_host(self, plan: Plan) -> str:
        """Return " on HOST" for this node of several; "" for one node, or a command that starts all: it was typed on its host."""
        return f" on {self.around.host}" if plan.nnodes > 1 and plan.workers else ""

    def report_dropped_output(self, size: int) -> None:
        """Report that so many bytes of output in all were not shown, if they are more than at the last report."""
        new, self._reported_dropped = size - self._reported_dropped, size
        if new:
            self.emit("output_dropped", bytes=new)
            line = f"{new:,} bytes of output are not shown here, because nothing read them; they are in the logs"
            self.stderr.write(f"ddplaunch: {line}\n")

    def report_pause(self, pause: Pause | None) -> None:
        """Report that this node did not run for a while, as where its machine was suspended, unless that was reported before."""
        if pause is None or pause is self._reported_pause:
            return
        self._reported_pause = pause
        self.emit("paused", seconds=round(pause.seconds, 3))
        if self.reports_job and pause.seconds >= _LONG:
            least, most = self.spec.nnodes
            may_lose_nodes = least < most + self.spec.spares and self.spec.simulate is None
            but = ", except --heartbeat-timeout: nodes may have been lost" if may_lose_nodes else ""
            self.print(f"paused for {duration(pause.seconds)}; no time limit ran meanwhile{but}")

    # --- the end

    def write_summary(self, ended: Ended, at: float) -> None:
        """Write how the job ended to the run folder, and report it to the readers and the caller."""
        story = self.story
        if story.left_after_notice is not None:  # all workers left after a signal that announces the end of the job
            self.emit("left_after_notice", **story.left_after_notice)
        text = headline(ended.text or story.closing)
        self.emit("job_ended", status=ended.status, why=ended.why, seconds=round(at - story.began, 3), text=text)
        outcome = story.outcome(ended, at)
        if (caller := self.caller) is not None:
            caller.ended(outcome)
        if self._folder is not None:
            dropped = {"dropped_log_lines": self._folder.files.dropped_lines}
            whole = {**outcome, **story.training(self.clock()), **dropped}
            self._folder.write("summary.json", self.stderr.redactor.data(whole))

    def keep_collectives(self, row: Mapping[str, Any]) -> int:
        """Write when ranks came to their collectives to the run folder; return how many bytes that took."""
        return self._folder.keep_sample(COLLECTIVES, row) if self._folder is not None else 0

    def print_end(self, why: str, text: str) -> None:
        """Print the coordinator's text about the end, unless the coordinator has printed more of it for this node's user."""
        if why == "lost":
            if not self.around.has_front:
                self.stderr.write_last(text)
        elif (self.reports_job or why in _OF_THIS_NODE) and (text.startswith("error:") or self.spec.verbosity >= 0):
            self.stderr.write(text)

    def stopped_line(self, signum: int) -> str:
        """Return the line for a node that the user has stopped while no coordinator answered."""
        after = None if self.story.plan is None else self.clock() - self.story.began
        return f"ddplaunch: {render_stopped(signum, after, ())}\n"

    def warn(self, what: str) -> None:
        """Warn of what this node has to do without."""
        self.tell(what, is_warning=True)

    def tell(self, what: str, *, is_warning: bool = False) -> None:
        """Print what holds for this node; where one screen shows the output of all, the coordinator says so once for all."""
        if self.story.plan is None:
            self._texts_before_plan.append((what, is_warning))
        elif self.story.plan.nnodes > 1 and self.tell_all is not None:
            self.tell_all(what, is_warning)
        else:
            self.print(f"warning: {what}" if is_warning else what)

    def report_folder(self, *, leaves_rest: bool = False) -> None:
        """Report news of the run folder that were not reported yet, such as a disk that hangs.

        `leaves_rest`: this process ends, and leaves what is not written yet to the process that writes files.
        """
        folder, plan = self._folder, self.story.plan
        if folder is None or plan is None:
            return
        if folder.problem and not self._has_warned_of_folder:  # once for the whole job
            self._has_warned_of_folder = True
            self.emit("notice", text=folder.problem)
            self.warn(folder.problem)
        while folder.notices:
            self.print(folder.notices.pop(0))
        on_host = self._on_this_host(plan)
        # that the disk hangs, or answers again
        news = folder.leave(on_host) if leaves_rest else folder.news(on_host)
        if news is None:
            return
        if not leaves_rest:  # else no event is written any more
            self.emit("notice", text=news)
        self.print(news)

    # ---

    def _emit_row(self, happening: node.Event | node.Action) -> None:
        """Emit the public event for an event or an action of the decision, if it has one."""
        row = row_of(happening)
        if row is not None:
            name, fields = row
            self.emit(name, **fields)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Pass an event to all readers."""
        named = {name: value for name, value in fields.items() if name in _NAMES}
        event = Event(kind, self.clock(), {**self.stderr.redactor.data(fields), **named})
        if self._folder is None:
            self._events_before_folder.append(event)
        for reader in self._readers:
            reader(event)

    def print(self, text: str) -> None:
        """Print a line of ours, unless -q was given."""
        if self.spec.verbosity >= 0:
            self.stderr.write(f"ddplaunch: {indented(text)}\n")
