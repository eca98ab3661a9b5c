"""What the agent reports: every event to the readers, ddplaunch's own few lines to stderr, the summary to the run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch import __version__
from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import State
from ddplaunch.launcher.tell.closing import render_repeated, render_stopped, render_stopping
from ddplaunch.launcher.tell.paint import Paint, plain
from ddplaunch.launcher.tell.rows import left_after, of_action, of_event, summary
from ddplaunch.plan import Plan
from ddplaunch.plan.devices import sysfs
from ddplaunch.record.events import Event, Reader
from ddplaunch.record.folders import short
from ddplaunch.record.run_folder import COLLECTIVES, RunFolder
from ddplaunch.spec.outcome import ClusterQuestions, StartFailure, Traces, Why, WorkerExit
from ddplaunch.system.errors import below
from ddplaunch.system.process.clock import Pause
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import count, duration, tilde

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.record.time_spent import Spent
    from ddplaunch.spec.outcome import Intent, Progress

_LONGEST_PROGRAM = 1000  # characters in an event
_NAMES = ("run_id", "host", "master_addr", "name", "ranks")  # fields of events by which others find things: no secrets
_LONG = 5.0  # seconds of a pause that are worth a line; a process on a busy machine may be late by one or two
_OF_THIS_NODE = ("refused", "left", "not_reached", "lost")  # ends that no other node reports

_NO_TOKEN = (
    "without a token, any process that reaches node 0 can join the job; "
    "to keep others out, set the same DDPLAUNCH_TOKEN on all nodes"
)


class Reporter:
    """Turns events and actions of the agent into public events and lines for the user."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float],
        *,
        readers: Iterable[Reader] = (),
        verbosity: int,
        paint: Paint,
        cwd: str,
        home: str,
        origins: Mapping[str, str],
        program: str = "",
        reports_job: bool = True,
        reports_loss: bool = True,
        reply: Callable[[Mapping[str, Any]], None] | None = None,
        write_last: Callable[[str], None] | None = None,
        cluster: ClusterQuestions = ClusterQuestions(),  # noqa: B008 - it is frozen
        slurm_job: str = "",
        columns: int = 0,
        bad_nodes: str = "",
        known: Sequence[str] = (),
    ) -> None:
        """Prepare to report on a run of `program`.

        `reports_job` is whether this node reports the job as a whole, as the only or first one does.
        `reports_loss` is whether it says that node 0 was lost, as no command that has started the agents does.
        `reply`, if a Python caller has asked for the job, takes how it ended, in place of stderr.
        `write_last`, if a command that started the agents prints last, takes what closes the job.
        `slurm_job` is the id of the job in Slurm, "" outside of it.
        `columns` are those of the terminal; 0: there is none, or its size is not known.
        `bad_nodes` is the file that remembers them; "": nothing is remembered.
        `known` are secrets that are hidden wherever they stand, in whatever is written.
        """
        self._known = tuple(known)
        self._redactor = Redactor(self._known)
        self.write = self._hiding(write)
        self.clock = clock
        self.paint = paint
        self.cwd = cwd
        self.home = home
        self.bad_nodes = bad_nodes
        self.began = clock()
        self.plan: Plan | None = None  # of the generation that runs, or of the last one
        self._folder: RunFolder | None = None
        self._readers = tuple(readers)
        # of each generation: its start, and the end and progress of the worker of this node that came farthest
        self._generations: list[tuple[float, float, Progress | None]] = []
        self._early: list[Event] = []  # from before there was a folder
        self._verbosity = verbosity
        self._origins = origins
        self._program = program[:_LONGEST_PROGRAM]
        self.reports_job = reports_job
        self._reports_loss = reports_loss
        self._reply = reply
        self._write_last = self._hiding(write if write_last is None else write_last)
        self.cluster = cluster
        self.queued = 0.0  # seconds in the queue of the cluster, as far as known
        self.slurm_job = slurm_job
        self._columns = columns
        self._has_terminal = False
        self.job_failure: WorkerExit | StartFailure | None = None  # of several nodes, as the coordinator knows it
        self._left_after: dict[str, Any] | None = None  # what summary.json says of a notice
        self.came_last: Mapping[str, Any] | None = None  # what it says of a rank that the others waited for
        self.pace: float | None = None  # steps in a second, as the collectives show
        self.steps: int | None = None  # and about how many the last generation has made
        self._closing = ""  # what was printed of the end
        self._is_announced = False
        self.master_port: int | None = None  # of the last generation
        self._kept_plan: Plan | None = None  # the one that the folder shows
        self._has_warned = False
        # has node 0 say something about this node, if node 0 shows the output of all nodes, and whether it is a warning
        self.tell_all: Callable[[str, bool], None] | None = None
        self._untold: list[tuple[str, bool]] = []  # until it is known whether there are other nodes
        self._dropped = 0  # bytes reported
        self._pause: Pause | None = None  # reported
        self._oom_kills_before = sysfs.oom_kills("/")

    def on_succession(self, text: str) -> None:
        """Report that this node has lost the coordinator, or follows another one, or waits as a spare."""
        self.emit("notice", text=text)
        if self.reports_job:  # else the coordinator says so where all nodes are shown
            self.print(text)

    def took_over(self, text: str) -> None:
        """Report that this node has taken over from the coordinator, and the job as a whole from now on."""
        self.reports_job = True
        self.emit("took_over", text=text)
        self.print(text)

    @property
    def _to_caller(self) -> Callable[[Mapping[str, Any]], None] | None:
        """What takes how the job ended, if a Python caller has asked for the job and this node reports it."""
        return self._reply if self.reports_job else None

    def also_tell(self, reader: Reader) -> None:
        """Pass all events from now on to this reader, too."""
        self._readers = (*self._readers, reader)

    def use(self, plan: Plan, folder: RunFolder) -> None:
        """Take the plan that is carried out, and the folder that keeps its record."""
        self.plan = plan
        self._has_terminal = any(worker.terminal for worker in plan.workers)
        if self._folder is None:
            self._folder = folder
            self._readers = (folder, *self._readers)
            for event in self._early:
                folder(event)
            self._early.clear()

    @property
    def traces(self) -> Traces:
        """The facts of this node about the end of its workers."""
        killed = sysfs.oom_kills("/").since(self._oom_kills_before)
        return Traces(
            oom_kills=killed.number,
            oom_kills_of_machine=killed.of_machine,
            shm=sysfs.shm_size_and_room(),
            log_folder=self._folder.whole if self._folder is not None else None,
        )

    # --- events

    def on_event(self, event: node.Event, before: State) -> None:
        """Report an event of this node's decision: its public event, and a line where the user has to know at once."""
        if (fields := of_event(event)) is not None:
            self.emit(fields[0], **fields[1])
        match event:
            case node.SignalReceived() if event.taken_for and (before.end.signum or not before.is_going):
                self.print(render_repeated(event, os.getppid()))
            case node.SignalReceived(signum, _, escalates) if signum != signal.SIGWINCH:
                is_first = before.why is Why.COORDINATOR and not before.end.signum
                stops = escalates and not is_first and signum in before.policy.stop_signals
                # Ctrl-C under a debugger goes to its worker, and stops nothing
                stops = stops and not (signum == signal.SIGINT and before.debugger)
                if stops and before.phase is node.Phase.STOPPING:
                    self.print("killing the workers at once")
                elif stops and before.phase in (node.Phase.RUNNING, node.Phase.SETTLING) and self.reports_job:
                    assert self.plan is not None
                    running = self.plan.world_size - len(before.exits)
                    self.print(render_stopping(signum, before.policy.grace_period, running, self.plan.nnodes))
            case node.WorkerExited(exit, _) if exit.progress is not None and self._generations:
                began, _, farthest = self._generations[-1]
                if farthest is None or exit.progress.step > farthest.step:
                    self._generations[-1] = began, exit.at, exit.progress
            case node.Swept(left) if before.teardown.last_sweep is not None:
                self.emit("swept", signal=int(before.teardown.last_sweep.signum), left=list(left))

    def on_action(self, action: node.Action) -> None:
        """Report something that is being done."""
        if (fields := of_action(action)) is not None:
            self.emit(fields[0], **fields[1])
        if isinstance(action, node.Print):
            if self._has_terminal and self._verbosity >= 0:
                self.write("\n")  # the worker that has it may be asking something at the end of the line
            self.print(action.text)

    def generation_started(self, number: int, port: int) -> None:
        """Report that all workers are being started."""
        plan, folder = self.plan, self._folder
        self.master_port = port
        self._generations.append((self.clock(), 0.0, None))
        assert plan is not None
        assert folder is not None
        if plan is not self._kept_plan:  # the nodes may have agreed on another one
            self._kept_plan = plan
            here = {"agent_pid": os.getpid(), "slurm_job": self.slurm_job}
            folder.write("plan.json", {**plan.data(self._origins, self._known), **here})
        if not self._is_announced:
            self._is_announced = True
            self._announce(plan, folder)
        self.emit("generation_started", generation=number, master_addr=plan.master_addr, master_port=port)

    def _announce(self, plan: Plan, folder: RunFolder) -> None:
        """Report that the job starts: the event, the first lines on the terminal, and the messages that came before them."""
        self.emit(
            "job_started",
            run_id=plan.run_id,
            program=self._program,
            world_size=plan.world_size,
            host=plan.workers[0].host,
            backend=plan.backend,
            ddplaunch=__version__,
        )
        if self.reports_job:
            on = f" on {count(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
            open_to_all = "" if plan.authenticated else ", no token"
            backend = f"{plan.backend} ({plan.reasons['backend']})"
            # two lines, since one would not fit a terminal of 80 columns
            self.print(f"{short(plan.run_id)}: {count(plan.world_size, 'worker')}{on}{open_to_all}, {backend}")
            if logs := self._where_output_goes(plan, folder):
                self.print(logs)
            if not plan.authenticated and plan.workers[0].rank == 0:
                self.print(_NO_TOKEN)
        if folder.warning is not None:
            self.warn(folder.warning)
        for what, is_warning in self._untold:
            self.tell(what, is_warning=is_warning)
        self._untold.clear()

    def _where_output_goes(self, plan: Plan, folder: RunFolder) -> str:
        """Return "logs in FOLDER", or which rank has the terminal; "" if there is nothing to say."""
        # homes need not be shared, and the user may be on another host
        where = (
            ""
            if folder.path is None or not folder.is_made
            else f"{tilde(folder.path, self.home)}{self._on(plan.workers[0].rank)}"
        )
        text = f"logs in {where}" if where else ""
        if self._has_terminal and plan.world_size == 1:
            text = ""
        elif self._has_terminal:
            rank = next(worker.rank for worker in plan.workers if worker.terminal)
            text = f"rank {rank} has the terminal" + (f", the others print to {where}" if where else "")
        if where and 0 < self._columns < len(f"ddplaunch: {text}"):
            text = text.replace(f" {where}", f"\n{where}")  # a path that wraps cannot be copied
        return text

    def worker_started(self, rank: int, pid: int) -> None:
        """Report that a worker runs."""
        self.emit("worker_started", rank=rank, pid=pid)
        if self._verbosity > 0:
            self.print(f"rank {rank}{self._on(rank)} is pid {pid}")

    def to_be_typed(self, verb: str) -> str:
        """Return the line that looks into this run from where its user may be: in Slurm that is mostly on another host."""
        plan = self.plan
        name = short(plan.run_id) if plan is not None else ""
        if plan is None or not self.slurm_job:
            return f"ddplaunch {verb} {name}"
        from ddplaunch.reach import other_host  # few jobs need it

        return other_host.line(plan.workers[0].host, self.slurm_job, (verb, name))

    def _on(self, rank: int) -> str:
        """Name the host of a rank in a job of several nodes."""
        plan = self.plan
        hosts = [worker.host for worker in plan.workers if worker.rank == rank] if plan and plan.nnodes > 1 else []
        return f" on {hosts[0]}" if hosts else ""

    def output_dropped(self, size: int) -> None:
        """Report, if it is more than was reported before, that so many bytes of output in all were not shown."""
        new, self._dropped = size - self._dropped, size
        if new:
            self.emit("output_dropped", bytes=new)
            line = f"{new:,} bytes of output are not shown here, because nothing read them; they are in the logs"
            self.write(f"ddplaunch: {line}\n")

    def paused(self, pause: Pause | None) -> None:
        """Report, if it is another than before, that this node did not run for a while."""
        if pause is None or pause is self._pause:
            return
        self._pause = pause
        self.emit("paused", seconds=round(pause.seconds, 3))
        if self.reports_job and pause.seconds >= _LONG:
            self.print(f"paused for {duration(pause.seconds)}; no time limit ran meanwhile")

    # --- the end

    def left_after(self, notice: int, intent: Intent | None = None, failed: str | None = None) -> None:
        """Note that all workers left after a notice, and whether the job was requeued; None: another process does that."""
        self._left_after = left_after(notice, intent, failed)

    def write_summary(self, state: State, exits: list[WorkerExit], why: str, text: str, at: float) -> None:
        """Record how the job ended; `why` and `text` are the coordinator's."""
        if self._left_after is not None:
            self.emit("left_after_notice", **self._left_after)
        text = plain(text or self._closing).partition("\n")[0].removeprefix("ddplaunch: ").removeprefix("error: ")
        self.emit("job_ended", status=state.end.status, why=why, seconds=round(at - self.began, 3), text=text)
        ending = summary(state, exits, at - self.began, why, self.job_failure, self._left_after)
        if (to_caller := self._to_caller) is not None:
            to_caller({"type": "outcome", **ending, "workers": ()})
        if self._folder is not None:
            dropped = self._folder.files.dropped_lines
            steps: dict[str, Any] = {"steps": self.steps, "steps_per_second": self.pace, "straggler": self.came_last}
            spent = self.time_spent()
            steps["time_spent"] = spent.data() if spent is not None else None
            told = self._redactor.data({**ending, **steps, "dropped_log_lines": dropped})
            self._folder.write("summary.json", told)

    def keep_collectives(self, row: Mapping[str, Any]) -> int:
        """Record when ranks came to their collectives, and return the bytes of that."""
        return self._folder.keep_sample(COLLECTIVES, row) if self._folder is not None else 0

    def time_spent(self) -> Spent | None:
        """Return where the time of a job with restarts went; None without a restart, or if no worker said its steps."""
        if len(self._generations) < 2:
            return None
        try:
            from ddplaunch.record.time_spent import Attempt, attempt, time_spent  # most jobs have no restart
        except Exception:  # noqa: BLE001 - its files may be gone, or of another version: the job ends as ever
            return None
        now = self.clock()
        ends = [*(began for began, _, _ in self._generations[1:]), now]
        attempts = [
            attempt(began, end, at, reached) if reached is not None else Attempt(began, end)
            for (began, at, reached), end in zip(self._generations, ends, strict=True)
        ]
        return time_spent(attempts, self.began, now, self.queued)

    def print_end(self, why: str, text: str) -> None:
        """Print the coordinator's text about the end; on its own node it has printed more."""
        if why == "lost":
            if self._reports_loss:
                self._write_last(text)
        elif (self.reports_job or why in _OF_THIS_NODE) and (text.startswith("error:") or self._verbosity >= 0):
            self.write(text)

    def stopped(self, signum: int) -> str:
        """Return the line for a node that the user has stopped while no coordinator answered."""
        after = None if self.plan is None else self.clock() - self.began
        return f"ddplaunch: {render_stopped(signum, after, ())}\n"

    def report(self, text: str) -> None:
        """Print why the job failed."""
        self._closing = text
        if (to_caller := self._to_caller) is None:
            self._write_last(text)
        else:
            to_caller({"type": "failure_text", "text": text})

    def print_closing(self, text: str) -> None:
        """Print in one line how a job ended that did not fail by itself."""
        self._closing = text
        if (to_caller := self._to_caller) is not None:
            to_caller({"type": "failure_text", "text": text})
        if self._verbosity >= 0:
            self._write_last(f"ddplaunch: {text}\n")

    def warn(self, what: str) -> None:
        """Warn of what this node has to do without."""
        self.tell(what, is_warning=True)

    def tell(self, what: str, *, is_warning: bool = False) -> None:
        """Print what holds for this node; where node 0 shows the output of all nodes, it says so once for all of them."""
        if self.plan is None:
            self._untold.append((what, is_warning))
        elif self.plan.nnodes > 1 and self.tell_all is not None:
            self.tell_all(what, is_warning)
        else:
            self.print(f"warning: {what}" if is_warning else what)

    def report_folder(self, *, leaves: bool = False) -> None:
        """Report what there is to say of the run folder, and was not said yet; `leaves`: what could not be written in the end."""
        folder, plan = self._folder, self.plan
        if folder is None or plan is None:
            return
        if folder.problem and not self._has_warned:  # once for the whole job
            self._has_warned = True
            self.emit("notice", text=folder.problem)
            self.warn(folder.problem)
        while folder.notices:
            self.print(folder.notices.pop(0))
        on = self._on(plan.workers[0].rank)
        if (text := folder.leave(on) if leaves else folder.news(on)) is not None:
            if not leaves:
                self.emit("notice", text=text)
            self.print(text)

    # ---

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Pass an event to all readers."""
        named = {name: value for name, value in fields.items() if name in _NAMES}
        event = Event(kind, self.clock(), {**self._redactor.data(fields), **named})
        if self._folder is None:
            self._early.append(event)
        for reader in self._readers:
            reader(event)

    def _hiding(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Return what writes a text without secrets."""
        return lambda text: write(self._redactor.text(text))

    def print(self, text: str) -> None:
        """Print a line of ours, unless -q was given."""
        if self._verbosity >= 0:
            self.write(f"ddplaunch: {below(text)}\n")
