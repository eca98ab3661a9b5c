"""What the agent tells: every event to the readers, ddplaunch's own few words to stderr, the summary to the run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddplaunch import __version__
from ddplaunch.plan import Plan
from ddplaunch.process import memory
from ddplaunch.report.closing import closing, ended_with, render_start_failure, starting_again
from ddplaunch.report.events import Event, Reader, doing, heard
from ddplaunch.report.plan_data import plan_data
from ddplaunch.report.run_folder import RunFolder
from ddplaunch.report.summary import left_after, summary
from ddplaunch.report.words import count
from ddplaunch.supervise import node
from ddplaunch.supervise.first_failure import first_failure
from ddplaunch.supervise.node import State, Why
from ddplaunch.supervise.outcome import ClusterEnding, Traces, WorkerExit

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.control.messages import Quit
    from ddplaunch.supervise import job
    from ddplaunch.supervise.outcome import Intent

_OF_THIS_NODE = ("refused", "not_reached", "lost")  # ends that nobody else tells of


class Reporter:
    """Turns what the agent heard and does into events and words."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float],
        *,
        readers: Iterable[Reader] = (),
        verbosity: int,
        colour: bool,
        cwd: str,
        origins: Mapping[str, str],
        reports: bool = True,
        answer: Callable[[Mapping[str, Any]], None] | None = None,
        last: Callable[[str], None] | None = None,
        what_ends: Callable[[], ClusterEnding] | None = None,
    ) -> None:
        """Prepare to tell; `reports` is whether this node speaks for the job, as the only or the first one does.

        `answer`, if somebody has called for the job, takes how it ended, in place of stderr.
        `last`, if somebody else has the last word, takes what closes the job.
        `what_ends` finds out why the cluster is ending the job, if it is; this may take seconds.
        """
        self.write = write
        self.clock = clock
        self.colour = colour
        self.cwd = cwd
        self.began = clock()
        self._plan: Plan | None = None
        self._folder: RunFolder | None = None
        self._readers = tuple(readers)
        self._untold: list[Event] = []  # from before there was a folder
        self._verbosity = verbosity
        self._origins = origins
        self._reports = reports
        self._answer = answer
        self._last = last
        self._what_ends = what_ends
        self._ending = ClusterEnding()
        self._has_terminal = False
        self.job_failure: WorkerExit | None = None  # of a job of several nodes, as the coordinator knows it
        self._left_after: dict[str, Any] | None = None  # what summary.json says of a notice
        self._is_announced = False
        self._problem_told = False
        self._dropped = 0  # bytes told of
        self._oom_kills_before = memory.oom_kills()

    def settle(self, plan: Plan, folder: RunFolder) -> None:
        """Learn what is carried out, and where its traces go."""
        self._plan = plan
        self._has_terminal = any(worker.terminal for worker in plan.workers)
        if self._folder is None:
            self._folder = folder
            self._readers = (folder, *self._readers)
            for event in self._untold:
                folder(event)
            self._untold.clear()

    @property
    def plan(self) -> Plan | None:
        """The plan of the generation that runs, or of the last one; None before the first."""
        return self._plan

    @property
    def traces(self) -> Traces:
        """What this node can say about the end of its workers."""
        return Traces(
            oom_kills=memory.oom_kills() - self._oom_kills_before,
            shm=memory.shm_size_and_room(),
            log_folder=self._folder.path if self._folder is not None else None,
        )

    # --- events

    def heard(self, event: node.Event, before: State) -> None:
        """Tell of something that happened."""
        if (told := heard(event)) is not None:
            self.tell(told[0], **told[1])
        match event:
            case node.SignalReceived(signum, _, escalates) if signum != signal.SIGWINCH:
                is_first = before.why is Why.TOLD and not before.signum
                stops = escalates and not is_first and signum in before.policy.stop_signals
                if stops and before.phase is node.Phase.STOPPING:
                    self.say("killing the workers at once")
            case node.Swept(left, _):
                self.tell("swept", signal=before.swept_with, left=list(left))

    def doing(self, action: node.Action) -> None:
        """Tell of something that is being done."""
        if (told := doing(action)) is not None:
            self.tell(told[0], **told[1])
        if isinstance(action, node.Say):
            if self._has_terminal and self._verbosity >= 0:
                self.write("\n")  # the worker that has it may be asking something at the end of the line
            self.say(action.text)

    def generation(self, number: int, port: int) -> None:
        """Tell that all workers are being started."""
        plan, folder = self._plan, self._folder
        assert plan is not None
        assert folder is not None
        if not self._is_announced or plan.nnodes > 1:
            folder.write("plan.json", {**plan_data(plan, self._origins), "agent_pid": os.getpid()})
        if not self._is_announced:
            self._is_announced = True
            self.tell(
                "job_started",
                run_id=plan.run_id,
                world_size=plan.world_size,
                host=plan.workers[0].host,
                backend=plan.backend,
                ddplaunch=__version__,
            )
            # homes need not be shared, and who reads this may be on another host
            where = f"{folder.path}{self._on(plan.workers[0].rank)}"
            logs = f"; logs in {where}" if folder.path is not None and not self._has_terminal else ""
            if self._reports:
                on = f" on {count(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
                backend = f"{plan.backend} ({plan.reasons['backend']})"
                self.say(f"{count(plan.world_size, 'worker')}{on}, {backend}{logs}")
            self.problem(folder.problem)
        self.tell("generation_started", generation=number, master_addr=plan.master_addr, master_port=port)

    def started(self, rank: int, pid: int) -> None:
        """Tell that a worker runs."""
        self.tell("worker_started", rank=rank, pid=pid)
        if self._verbosity > 0:
            self.say(f"rank {rank}{self._on(rank)} is pid {pid}")

    def _on(self, rank: int) -> str:
        """Name the host of a rank in a job of several nodes; of one, nobody asks."""
        plan = self._plan
        hosts = [worker.host for worker in plan.workers if worker.rank == rank] if plan and plan.nnodes > 1 else []
        return f" on {hosts[0]}" if hosts else ""

    def dropped(self, size: int) -> None:
        """Tell, if it is more than was told before, that so many bytes of output in all were not shown."""
        new, self._dropped = size - self._dropped, size
        if new:
            self.tell("output_dropped", bytes=new)
            self.write(f"ddplaunch: {new:,} bytes are not shown here, since nobody read them; the logs have them\n")

    # --- ends

    def failed(self, state: State, exits: list[WorkerExit], wait: float) -> None:
        """Tell that a generation failed and another follows."""
        first = state.failure
        self.tell("generation_failed", generation=state.generation, rank=first.rank if first else None, wait=wait)
        self.write(self._report(state, exits, self.what_ended(state)))
        self.say(starting_again(wait, state.generation + 1, state.policy.max_restarts))

    def left_after(self, notice: int, intent: Intent | None = None, failed: str | None = None) -> None:
        """Note that all workers left after a notice, and what became of the job; None: another process sees to that."""
        self._left_after = left_after(notice, intent, failed)

    def learn_the_end(self, state: State) -> int | None:
        """Find out whether the cluster has ended a job of one node, which is told later; give the status of the job."""
        self._ending = ending = self.what_ended(state)
        return ending.outcome[0] if ending.outcome else state.status

    def seal(self, state: State, exits: list[WorkerExit], word: Quit | None, at: float) -> None:
        """Put down how the job ended; `word` is what the coordinator said, if there is one."""
        assert word is not None or state.why is not None
        own = self._ending.outcome[1] if self._ending.outcome else state.why.name.lower() if state.why else ""
        why = word.why if word is not None else own
        if self._left_after is not None:
            self.tell("left_after_notice", **self._left_after)
        self.tell("job_ended", status=state.status, why=why, seconds=round(at - self.began, 3))
        ending = summary(state, exits, at - self.began, why, self.job_failure, self._left_after)
        if self._answer is not None:
            self._answer({"type": "outcome", **ending, "workers": ()})
        if self._folder is not None:
            self._folder.write("summary.json", ending)
            self.problem(self._folder.problem)
            self._folder.close()

    def last_words(self, state: State, exits: list[WorkerExit], word: Quit | None, at: float) -> None:
        """Tell the user how the job, or this node's part in it, ended; of several nodes in the coordinator's words."""
        if word is not None:
            if word.why == "lost":
                self._write_last(word.words)
            elif (self._reports or word.why in _OF_THIS_NODE) and (
                word.words.startswith("error:") or self._verbosity >= 0
            ):
                self.write(word.words)
            return
        line = closing(state, exits, at - self.began, at, self._ending.words)
        if line is not None and state.status == 0:
            self._say_last(line)
        elif line is not None:
            self.close(line)
        elif state.why is Why.FAILED:
            self.report(self._report(state, exits, self._ending))

    def report(self, text: str) -> None:
        """Tell why the job failed."""
        if self._answer is None:
            self._write_last(text)
        else:
            self._answer({"type": "said", "text": text})

    def close(self, text: str) -> None:
        """Tell in one line how a job ended that did not fail by itself."""
        if self._answer is not None:
            self._answer({"type": "said", "text": text})
        self._say_last(text)

    def what_ended(self, state: State | job.State) -> ClusterEnding:
        """Find out why the cluster is ending the job, if the signal that ended it or a worker may have come from there."""
        if self._what_ends is None or ended_with(state) not in (signal.SIGTERM, signal.SIGKILL):
            return ClusterEnding()
        ending = self._what_ends()
        # after a notice the status speaks of that
        return ClusterEnding(ending.words) if state.requeue else ending

    def _report(self, state: State, exits: list[WorkerExit], ending: ClusterEnding) -> str:
        """Write the failure report."""
        if state.start_failure is not None:
            failed = state.start_failure
            return render_start_failure(f"rank {failed.rank}", failed.reason, failed.status)
        # 5 ms of tables and patterns, and only a failure needs them
        from ddplaunch.report.failure import verdict

        first = first_failure(exits, dict(state.raised))
        assert first is not None
        assert self._plan is not None
        return verdict(
            first,
            exits,
            self.traces,
            interpreter=self._plan.interpreter,
            debugging=state.policy.debug_rank is not None,
            cwd=self.cwd,
            restarts=state.generation,
            max_restarts=state.policy.max_restarts,
            colour=self.colour,
            ended_by=ending.words,
        )

    def problem(self, what: str | None) -> None:
        """Warn, once for the whole job, that something could not be written; None: nothing to warn of."""
        if what and not self._problem_told:
            self._problem_told = True
            self.tell("notice", text=what)
            self.say(f"warning: {what}")

    # ---

    def _write_last(self, text: str) -> None:
        (self.write if self._last is None else self._last)(text)

    def _say_last(self, text: str) -> None:
        if self._verbosity >= 0:
            self._write_last(f"ddplaunch: {text}\n")

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Tell the readers of an event."""
        event = Event(kind, self.clock(), fields)
        if self._folder is None:
            self._untold.append(event)
        for reader in self._readers:
            reader(event)

    def say(self, text: str) -> None:
        """Tell the user, unless nothing is to be told."""
        if self._verbosity >= 0:
            self.write(f"ddplaunch: {text}\n")
