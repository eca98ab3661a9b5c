"""The loop of the command in a Slurm allocation: it coordinates the agents of the step that srun starts, and waits for srun.

It runs in place of a job's only agent, behind the same front, see `launcher/elsewhere/lead.py`. Signals go to the agents, never
to srun: SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status is the job's: srun's is the highest of all tasks', and
hidden when Slurm kills them. Agents write whole lines, which srun passes on whole, to our stdout and stderr or, with --live, to
pipes of ours.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from typing import Any

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.reach.pipes import FULL, MESSAGE, STDERR, STDOUT, FrontPipes, OutputQueue
from ddplaunch.reach.slurm.job import CONTROLLER_TIMEOUT, why_ending
from ddplaunch.reach.slurm.srun import Srun, not_started
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import ClusterEnding
from ddplaunch.system import exitcodes
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError

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
        self._is_ending = False  # whether srun has got SIGTERM
        self._output: StepOutput | None = None  # with --live

    def begin(self, opened: ExitStack) -> None:
        """Wait for the end of srun, and with --live for its output."""
        self._loop.watch(self._srun.fd, self._on_srun_end)
        if self._srun.output is not None:
            self._output = StepOutput(self._loop, self._context.queue, self._srun.output)

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
                is_second = was_stopped and event.escalates
                self._end_step_in_time(at_once=is_second)
            case node.FrontLost():
                self._context.writes_itself = True  # Slurm kills the front when the batch script has ended
                self._end_step_in_time()
            case JobEnd():
                self._end_within(QUIT_TIMEOUT)

    def _end_step_in_time(self, *, at_once: bool = False) -> None:
        """Have srun end the step after its workers have had the time to save, or, `at_once`, to be killed by their agents."""
        if self._has_begun:
            self._end_within(QUIT_TIMEOUT if at_once else self._spec.grace_period + QUIT_TIMEOUT)
        else:  # the step may still wait for its nodes, and no worker runs
            self._end_within(0.0 if at_once else HELLO_TIMEOUT)

    def _end_within(self, within: float) -> None:
        self._end_by.set_by(self._loop.now() + within)

    def _end_step(self) -> None:
        """Have srun end the step; the second time kill srun."""
        if self._wait_status is not None:
            return
        self._srun.signal(signal.SIGKILL if self._is_ending else signal.SIGTERM)
        self._is_ending = True
        self._end_by.set(self._loop.now() + KILL_TIMEOUT)

    # --- the end

    def _on_srun_end(self) -> None:
        """Keep how srun has ended: all agents have, or never begin. Called by the loop."""
        self._loop.unwatch(self._srun.fd)
        self._wait_status, self._why_not_started = self._srun.end()

    def status(self) -> int:
        """Return the exit status: the job's; before a job has begun, that of the signal that stopped it, or of srun."""
        if self._output is not None:
            self._output.drain()
        if self._why_not_started is not None:
            error = not_started(self._why_not_started)
            self.fail(error)
            return error.status
        if self._front_lost:
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


class StepOutput:
    """With --live passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(self, loop: Loop, queue: OutputQueue, fds: tuple[int, int]) -> None:
        """Read these descriptors, which are srun's stdout and stderr."""
        self._loop = loop
        self._queue = queue
        self._streams = dict(zip(fds, (STDOUT, STDERR), strict=True))
        self._reads = False
        for fd in fds:
            os.set_blocking(fd, False)
        self.update()

    def update(self) -> None:
        """Begin to read if the queue to the front is less than half full, and stop once it is full: not at each message."""
        reads = not self._queue.full if self._reads else self._queue.size < FULL // 2
        if reads != self._reads:
            self._reads = reads
            for fd in self._streams:
                if reads:
                    self._loop.watch(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]  # fd is bound here
                else:
                    self._loop.unwatch(fd)

    def _read(self, fd: int) -> bool:
        """Pass a piece on; return whether there was one. Called by the loop."""
        try:
            data = os.read(fd, MESSAGE)
        except BlockingIOError:
            return False
        if data:
            self._queue.put(self._streams[fd], data)
        else:
            self._loop.unwatch(fd)
            del self._streams[fd]
            os.close(fd)
        return bool(data)

    def drain(self) -> None:
        """Pass on what is left, once srun has ended."""
        for fd in list(self._streams):
            while self._read(fd):
                pass
