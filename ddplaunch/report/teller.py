"""What the agent tells: every event to the readers, ddplaunch's own few words to stderr, the summary to the run folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddplaunch import __version__, exitcodes, supervise
from ddplaunch.outcome import WorkerExit
from ddplaunch.plan import Plan
from ddplaunch.process import node_facts
from ddplaunch.report.endings import render_finished, render_stopped, render_timeout
from ddplaunch.report.events import Event, Reader
from ddplaunch.report.plan_data import plan_data
from ddplaunch.report.ranks import compress
from ddplaunch.report.run_folder import RunFolder
from ddplaunch.report.summary import summary
from ddplaunch.report.words import count, signal_name
from ddplaunch.supervise import State, Why

_START_HINTS = {
    exitcodes.NOT_FOUND: "\nhint: give the program's path, or a name that is in PATH\n",
    exitcodes.NOT_EXECUTABLE: "\nhint: is it executable? Else the machine is at a limit: see `ulimit -u` and `ulimit -n`\n",
}


class Teller:
    """Turns what the agent heard and does into events and words."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        say: Callable[[str], None],
        clock: Callable[[], float],
        *,
        readers: Iterable[Reader] = (),
        verbosity: int,
        colour: bool,
        cwd: str,
        origins: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._write = say
        self._clock = clock
        self._readers: tuple[Reader, ...] = (folder, *readers)
        self._verbosity = verbosity
        self._colour = colour
        self._cwd = cwd
        self._origins = origins
        self._has_terminal = any(worker.terminal for worker in plan.local_workers)
        self._began = clock()
        self._problem_told = False
        self._dropped = 0  # bytes told of
        self._oom_kills = node_facts.oom_kills()

    # --- events

    def heard(self, event: supervise.Event, before: State) -> None:
        """Tell of something that happened."""
        match event:
            case supervise.WorkerRaised(rank, error, _):
                self._tell("worker_raised", rank=rank, type=error.type, message=error.message)
            case supervise.StartFailed(rank, reason, status, _):
                self._tell("worker_start_failed", rank=rank, reason=reason, status=status)
            case supervise.WorkerExited(exit, _):
                self._tell(
                    "worker_exited",
                    rank=exit.rank,
                    pid=exit.pid,
                    status=exit.status,
                    how=exit.how,
                    seconds=round(exit.seconds, 3),
                    stopped_with=exit.stopped_with,
                )
            case supervise.SignalReceived(signum, _, _) if signum != signal.SIGWINCH:
                self._tell("signal_received", signal=signum, name=signal_name(signum))
                if before.phase is supervise.Phase.STOPPING and signum in before.policy.stop_signals:
                    self._say("killing the workers at once")
            case supervise.FrontLost():
                self._tell("front_lost")
            case supervise.Swept(left, _):
                self._tell("swept", signal=before.swept_with, left=list(left))

    def doing(self, action: supervise.Action) -> None:
        """Tell of something that is being done."""
        match action:
            case supervise.Forward(signum, ranks) if signum != signal.SIGWINCH:
                self._tell("signal_forwarded", signal=signum, name=signal_name(signum), ranks=compress(ranks))
            case supervise.Stop(signum, ranks):
                self._tell("stop_sent", signal=signum, name=signal_name(signum), ranks=compress(ranks))
            case supervise.Kill(ranks):
                self._tell("kill_sent", ranks=compress(ranks))
            case supervise.Suspend():
                self._tell("job_suspended")
            case supervise.Resume():
                self._tell("job_resumed")
            case supervise.Say(text):
                self._tell("notice", text=text)
                if self._has_terminal and self._verbosity >= 0:
                    self._write("\n")  # the worker that has it may be asking something at the end of the line
                self._say(text)

    def generation(self, number: int, port: int) -> None:
        """Tell that all workers are being started."""
        plan = self._plan
        if number == 0:
            self._folder.write("plan.json", {**plan_data(plan, self._origins), "agent_pid": os.getpid()})
            self._tell(
                "job_started",
                run_id=plan.run_id,
                world_size=plan.world_size,
                host=plan.workers[0].host,
                backend=plan.backend,
                ddplaunch=__version__,
            )
            logged = self._folder.path is not None and not all(worker.terminal for worker in plan.local_workers)
            logs = f"; logs in {self._folder.path}" if logged else ""
            self._say(f"{count(plan.world_size, 'worker')}, {plan.backend} ({plan.reasons['backend']}){logs}")
            self.problem(self._folder.problem)
        self._tell("generation_started", generation=number, master_addr=plan.master_addr, master_port=port)

    def started(self, rank: int, pid: int) -> None:
        """Tell that a worker runs."""
        self._tell("worker_started", rank=rank, pid=pid)
        if self._verbosity > 0:
            self._say(f"rank {rank} is pid {pid}")

    def dropped(self, size: int) -> None:
        """Tell, if it is more than was told before, that so many bytes of output in all were not shown."""
        new, self._dropped = size - self._dropped, size
        if new:
            self._tell("output_dropped", bytes=new)
            self._write(f"ddplaunch: {new:,} bytes are not shown here, since nobody read them; the logs have them\n")

    # --- ends

    def failed(self, state: State, exits: list[WorkerExit], wait: float, at: float) -> None:
        """Tell that a generation failed and another follows."""
        first = state.failure
        self._tell("generation_failed", generation=state.generation, rank=first.rank if first else None, wait=wait)
        self._report(state, exits)
        pause = f" in {wait:g} s" if wait else ""
        self._say(f"starting all workers again{pause} (restart {state.generation + 1} of {state.policy.max_restarts})")

    def ended(self, state: State, exits: list[WorkerExit], at: float) -> None:
        """Tell how the job ended."""
        assert state.why is not None
        seconds = at - self._began
        self._tell("job_ended", status=state.status, why=state.why.name.lower(), seconds=round(seconds, 3))
        self._folder.write("summary.json", summary(state, exits, seconds))
        self.problem(self._folder.problem)
        match state.why:
            case Why.FAILED:
                self._report(state, exits)
            case Why.FINISHED:
                self._say(render_finished(self._plan.world_size, seconds, restarts=state.generation))
            case Why.SIGNALLED:
                stopped = (exit.stopped_at for exit in exits if exit.stopped_at is not None)
                self._say(render_stopped(state.signum, min(stopped, default=at) - self._began, exits))
            case Why.TIMED_OUT:
                self._say(render_timeout(state.policy.timeout or 0.0, exits))
        self._folder.close()

    def _report(self, state: State, exits: list[WorkerExit]) -> None:
        if state.start_failure is not None:
            failed = state.start_failure
            hint = _START_HINTS.get(failed.status, "")
            self._write(f"error: rank {failed.rank} could not be started: {failed.reason}\n{hint}")
            return
        # 5 ms of tables and patterns, and only a failure needs them
        from ddplaunch.report.verdict import verdict

        kills = node_facts.oom_kills() - self._oom_kills
        logs = self._folder.path
        text = verdict(self._plan, state, exits, cwd=self._cwd, oom_kills=kills, logs=logs, colour=self._colour)
        self._write(text)

    def problem(self, what: str | None) -> None:
        """Warn, once for the whole job, that something could not be written; None: nothing to warn of."""
        if what and not self._problem_told:
            self._problem_told = True
            self._tell("notice", text=what)
            self._say(f"warning: {what}")

    # ---

    def _tell(self, kind: str, /, **fields: Any) -> None:
        event = Event(kind, self._clock(), fields)
        for reader in self._readers:
            reader(event)

    def _say(self, text: str) -> None:
        if self._verbosity >= 0:
            self._write(f"ddplaunch: {text}\n")
