"""The loop of a job in a Slurm allocation: it coordinates the agents of the step that srun starts, and waits for srun's end.

It runs in place of a job's only agent, behind the same front, see `launcher/elsewhere/lead.py`. Signals go to the agents, never
to srun: SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status is the job's: srun's is the highest of all tasks', and
hidden when Slurm kills them. Agents write whole lines, which srun passes on whole, to our stdout and stderr or, with --live, to
pipes of ours.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.slurm.job import CONTROLLER_TIMEOUT, why_ending
from ddplaunch.reach.slurm.srun import Srun, StepJob, not_started
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import ClusterEnding
from ddplaunch.system import exitcodes
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError

if TYPE_CHECKING:
    from ddplaunch.launcher.elsewhere.slurm.live import StepOutput

HELLO_TIMEOUT = 2.0  # seconds from a signal to stop until the step is ended if no agent has come yet
QUIT_TIMEOUT = 5.0  # seconds from the end of the job until srun gets SIGTERM, at which it ends the step
KILL_TIMEOUT = 2.0  # seconds from then until srun, which may wait for a lost node, gets SIGKILL


class Watcher:
    """The loop's state."""

    def __init__(self, loop: Loop, lead: LeadJob, step: StepJob, files: FileQueue, pipes: FrontPipes) -> None:
        """Prepare to meet the agents of the step; `run` does."""
        self._step = step
        self._spec = lead.inputs.spec
        self._loop = loop
        loop.handle = self._on_event
        self._lead = Lead(loop, lead, files, pipes)
        self._srun: Srun | None = None
        self._never: StartError | None = None  # why srun could not be started
        self._wait_status: int | None = None
        self._end_by = loop.timer(None, self._end_step)
        self._is_ending = False  # whether srun has got SIGTERM
        self._output: StepOutput | None = None  # with --live

    def run(self, srun: Srun) -> int:
        """Run the loop until srun has ended; give the job's exit status."""
        self._lead.open()
        self._srun = srun
        self._loop.watch(srun.fd, self._on_srun_end)
        if srun.output is not None:
            from ddplaunch.launcher.elsewhere.slurm.live import StepOutput  # few jobs need it

            self._output = StepOutput(self._loop, self._lead.context.queue, srun.output)
        while self._wait_status is None or not self._lead.is_over:
            self._lead.before_sleep()
            self._loop.run_once()
            if self._output is not None:
                self._output.update()
        if self._output is not None:
            self._output.drain()
        status = self._status()
        self._lead.close()
        return status

    def _on_event(self, event: object) -> None:
        """Take one event of the loop; no workers are started here."""
        was_stopped = bool(self._lead.signum)
        self._lead.handle(event)
        match event:
            case node.SignalReceived(signum) if signum in self._spec.ending_signals:
                self._limit_step(at_once=was_stopped and event.escalates)
            case node.FrontLost():
                self._lead.context.writes_itself = True  # Slurm kills the front when the batch script has ended
                self._limit_step()
            case JobEnd():
                self._end_within(QUIT_TIMEOUT)

    def _limit_step(self, *, at_once: bool = False) -> None:
        """Have the step end once its workers have had the time to save, or, `at_once`, to be killed."""
        if self._lead.has_begun:
            self._end_within(QUIT_TIMEOUT if at_once else self._spec.grace_period + QUIT_TIMEOUT)
        else:  # it may still wait for its nodes
            self._end_within(0.0 if at_once else HELLO_TIMEOUT)

    def _end_within(self, within: float) -> None:
        self._end_by.set_by(self._loop.now() + within)

    def _end_step(self) -> None:
        """Have srun end the step; the second time kill srun."""
        if self._srun is None or self._wait_status is not None:
            return
        self._srun.signal(signal.SIGKILL if self._is_ending else signal.SIGTERM)
        self._is_ending = True
        self._end_by.set(self._loop.now() + KILL_TIMEOUT)

    # --- the end

    def _on_srun_end(self) -> None:
        """Keep how srun has ended: all agents have, or never begin. Called by the loop."""
        assert self._srun is not None
        self._loop.unwatch(self._srun.fd)
        self._wait_status, self._never = self._srun.end()

    def _status(self) -> int:
        """Return the exit status: the job's, else that of the signal, of a lost node, or of srun."""
        if self._never is not None:
            error = not_started(self._never)
            self._lead.fail(error)
            return error.status
        if self._lead.front_lost:
            return exitcodes.of_signal(signal.SIGKILL)
        if self._lead.status is not None:
            return self._lead.status
        if self._lead.signum:
            return exitcodes.of_signal(self._lead.signum)
        status = self._wait_status or 0
        if status == 0:  # srun ends so if Slurm has lost nodes before any agent has connected, too
            question = partial(why_ending, self._lead.context.inputs.env, CONTROLLER_TIMEOUT)
            ending = self._lead.signals.wait_for(self._loop.ask(question, ClusterEnding()))
            if ending.outcome is not None:
                self._lead.reporter.stderr.write(f"error: {ending.text}\n")
                return ending.outcome[0]
        return exitcodes.of_signal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
