"""The loop of the command in a Slurm allocation: it coordinates the agents of the step that srun starts, and waits for srun.

It runs in place of a job's only agent, behind the same front, see `launcher/elsewhere/lead.py`. Signals go to the agents, never
to srun: SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status is the job's: srun's is the highest of all tasks', and
hidden when Slurm kills them. Agents write whole lines, which srun passes on whole: to our stdout and stderr, or to pipes of ours
where those are read, see `step_output`.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from typing import Any

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob
from ddplaunch.launcher.elsewhere.slurm.step_output import StepOutput, TaskEnd
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.slurm.job import CONTROLLER_TIMEOUT, why_ending
from ddplaunch.reach.slurm.srun import Srun, not_started
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import ClusterEnding
from ddplaunch.system import exitcodes
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError
from ddplaunch.system.words import signal_name

HELLO_TIMEOUT = 2.0  # seconds from a signal to stop until the step is ended if no agent has come yet
QUIT_TIMEOUT = 5.0  # seconds from the end of the job until srun gets SIGTERM, at which it ends the step
KILL_TIMEOUT = 2.0  # seconds from then until srun, which may wait for a lost node, gets SIGKILL


class Watcher(Lead):
    """The loop that coordinates the agents of a Slurm step, and has srun end the step."""

    def __init__(self, loop: Loop, lead: LeadJob, step: Srun, files: FileQueue, pipes: FrontPipes) -> None:
        """Prepare to meet the agents of the step that srun starts; `run` does."""
        super().__init__(loop, lead, files, pipes)
        self._srun = step
        self._why_not_started: StartError | None = None  # why srun could not be started
        self._wait_status: int | None = None  # of srun, as of waitpid(2); None: it has not ended
        self._end_by = loop.timer(None, self._end_step)
        self._end_requests = 0  # how often srun was made to end: by SIGTERM, then by SIGKILL, then with its parent
        self._output: StepOutput | None = None  # where it is read here

    def begin(self, opened: ExitStack) -> None:
        """Wait for the end of srun, and for what is read of its output."""
        self._loop.watch(self._srun.fd, self._on_srun_end)
        if self._srun.output:
            self._output = StepOutput(self._loop, self._context.queue, self._srun.output, self._on_task_end)

    @property
    def is_over(self) -> bool:
        """Whether srun has ended, and the job needs no agent any more."""
        return self._wait_status is not None and self._needs_no_agent

    def before_sleep(self) -> None:
        """Read the output of srun, as there is room for it."""
        if self._output is not None:
            self._output.update()
        super().before_sleep()

    def handle(self, event: Any) -> None:
        """Take one event of the loop, after what concerns the whole job; each that ends the job sets a limit for srun."""
        was_stopped = bool(self._signum)
        super().handle(event)
        match event:
            case node.SignalReceived(signum) if signum in self._spec.ending_signals:
                is_second_request = was_stopped and event.escalates
                self._end_step_after_grace(at_once=is_second_request)
            case node.FrontLost():
                # Slurm kills the front when the batch script has ended: from now on this process writes to the output itself
                self._context.writes_itself = True
                if self._output is not None:
                    self._output.writes_itself = True
                self._end_step_after_grace()
            case JobEnd():
                self._limit_srun(QUIT_TIMEOUT)

    def _end_step_after_grace(self, *, at_once: bool = False) -> None:
        """Have srun end the step once its workers have had the time to save, or, `at_once`, to be killed by their agents."""
        if self._has_begun:
            self._limit_srun(QUIT_TIMEOUT if at_once else self._spec.grace_period + QUIT_TIMEOUT)
        else:  # the step may still wait for its nodes, and no worker runs
            self._limit_srun(0.0 if at_once else HELLO_TIMEOUT)

    def _limit_srun(self, within: float) -> None:
        """Have srun end the step unless it has ended by itself in so many seconds."""
        self._end_by.set_by(self._loop.now() + within)

    def _end_step(self) -> None:
        """Have srun end the step; the second time kill srun, and then its parent, which passes these signals on, too."""
        if self._wait_status is not None:
            return
        self._end_requests += 1
        match self._end_requests:
            case 1:
                self._srun.signal(signal.SIGTERM)
            case 2:
                self._srun.signal(signal.SIGKILL)
            case _:  # somebody has stopped it
                self._srun.kill_parent()
        self._end_by.set(self._loop.now() + KILL_TIMEOUT)

    # --- the end

    def _on_task_end(self, end: TaskEnd) -> None:
        """Go on without the nodes on which a task has ended before its agent joined, or end the job. Called by the output.

        Only srun tells of a task that could not begin: nobody else knows its node. An agent that has joined, or has said why it
        does not, is heard by the coordinator.
        """
        ranks = {host.address: rank for rank, host in enumerate(self._context.inputs.allocation.start)}
        hint = f"Slurm says above why it ended. Each node needs {self._job.python}, and ddplaunch in it"
        for host in end.nodes:
            state, node_rank = self.coordinator.state, ranks.get(host)
            if self._has_begun or self._decided_status is not None:  # the node before this one may have ended the job
                return
            if node_rank is None or node_rank in state.rendezvous.given_up_ranks:
                continue
            has_joined = state.members.with_fixed_rank(node_rank) is not None
            if not has_joined:
                reason = f"its task ended before ddplaunch had joined there: {end.how}"
                name = f"node {node_rank} ({host})"
                self.coordinator.feed(job.Withdrawn(name, node_rank, reason, hint, self._loop.now()))

    def _on_srun_end(self) -> None:
        """Keep how srun has ended: all agents have, or never begin. Called by the loop."""
        self._loop.unwatch(self._srun.fd)
        self._wait_status, self._why_not_started = self._srun.end()
        if os.WIFSIGNALED(self._wait_status) and not self._end_requests:
            self._reporter.print(
                f"srun, which runs the step of this job, was killed by {signal_name(os.WTERMSIG(self._wait_status))}"
            )

    def status(self) -> int:
        """Return the exit status: the job's; before a job has begun, that of the signal that stopped it, or of srun."""
        if self._output is not None:
            self._output.drain()
        if self._why_not_started is not None:
            error = not_started(self._why_not_started)
            self.fail(error)
            return error.status
        if self._front_lost:  # by SIGKILL, and nobody reads a status any more
            return exitcodes.of_signal(signal.SIGKILL)
        if self._decided_status is not None:
            return self._decided_status
        if self._signum:
            return exitcodes.of_signal(self._signum)
        return self._status_of_srun()

    def _status_of_srun(self) -> int:
        """Return the status with which srun has ended before any agent has connected, or, where that is 0, what Slurm says.

        srun ends with 0 also if Slurm has lost nodes.
        """
        status = self._wait_status or 0
        if status == 0:
            question = partial(why_ending, self._context.inputs.env, CONTROLLER_TIMEOUT)
            ending = self._signals.wait_for(self._loop.ask(question, ClusterEnding()))
            if ending.outcome is not None:
                exit_status, *_ = ending.outcome
                self._reporter.stderr.write(f"error: {ending.text}\n")
                return exit_status
        return exitcodes.of_signal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
