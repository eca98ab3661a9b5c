"""The loop of the command in a Slurm allocation: it coordinates the agents of the step that srun starts, reads and awaits srun.

It runs in place of a job's only agent, behind the same front, see `launcher/elsewhere/lead.py`. Signals go to the agents, never
to srun: SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status is the job's: srun's is the highest of all tasks', and
hidden when Slurm kills them. Agents write whole lines, which srun passes on whole: to our stdout and stderr, or to pipes of ours
where those are read: all of it with --live, its stderr if there are several nodes. srun adds lines of its own to its stderr,
which alone tell that a task could not begin:

    slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory
    srun: error: node[2-3]: tasks 1-2: Exited with exit code 2
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from msgspec import Struct

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.elsewhere.lead import Lead, LeadJob
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.pipes import FULL, MESSAGE, STDERR, STDOUT, FrontPipes, OutputQueue
from ddplaunch.reach.slurm.job import SlurmQuestions
from ddplaunch.reach.slurm.srun import Srun, not_started
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import ClusterEnding
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError
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
        self._why_srun_not_started: StartError | None = None  # why srun could not be started
        self._wait_status: int | None = None  # of srun, as of waitpid(2); None: it has not ended
        self._end_step_at = loop.timer(None, self._end_step)
        self._end_requests = 0  # how often srun was made to end: by SIGTERM, then by SIGKILL, then with its parent
        self._output: StepOutput | None = None  # where it is read here

    def begin(self, opened: ExitStack) -> None:
        """Wait for the end of srun, and for what is read of its output."""
        self._loop.watch(self._srun.fd, self._on_srun_end)
        if self._srun.output:
            self._output = StepOutput(self._loop, self._context.queue, self._srun.output, self)

    @property
    def is_over(self) -> bool:
        """Whether srun has ended, and the job needs no agent any more."""
        return self._wait_status is not None and self._needs_no_agent

    def before_sleep(self) -> None:
        """Read the output of srun, as there is room for it."""
        if self._output is not None:
            self._output.read_or_pause()
        super().before_sleep()

    def handle(self, event: Any) -> None:
        """Take one event of the loop, after what concerns the whole job; each that ends the job sets a limit for srun.

        A second request kills the workers. A repetition of the first is none, nor is Slurm's first signal.
        """
        was_stopped = bool(self._signum)
        super().handle(event)
        match event:
            case node.SignalReceived(signum) if signum in self._spec.ending_signals:
                is_second_request = was_stopped and event.is_request
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
        self._end_step_at.set_by(self._loop.now() + within)

    def _end_step(self) -> None:
        """Have srun end the step; the second time kill srun, and then our process that passes these signals on to srun."""
        if self._wait_status is not None:  # srun has ended
            return
        self._end_requests += 1
        match self._end_requests:
            case 1:
                self._srun.signal(signal.SIGTERM)
            case 2:
                self._srun.signal(signal.SIGKILL)
            case _:  # somebody has stopped that process, since srun has not ended
                self._srun.kill_parent()
        self._end_step_at.set(self._loop.now() + KILL_TIMEOUT)  # unless srun has ended by then: see above

    # --- the end

    def on_task_end(self, end: TaskEnd) -> None:
        """Go on without the nodes on which a task has ended before its agent joined, or end the job. Called by the output.

        Only srun tells of a task that could not begin: nobody else knows its node. An agent that has joined, or has said why it
        does not, is heard by the coordinator.
        """
        ranks = {host.address: rank for rank, host in enumerate(self._context.inputs.allocation.hosts_to_start_on)}
        hint = f"Slurm says above why it ended. Each node needs {self._job.python}, and ddplaunch in it"
        for host in end.nodes:
            state, node_rank = self.coordinator.state, ranks.get(host)
            if self._has_begun or self._status_of_job is not None:  # the node before this one may have ended the job
                return
            if node_rank is None or node_rank in state.rendezvous.given_up_ranks:
                continue
            has_joined = state.members.holder_of_rank(node_rank) is not None
            if not has_joined:
                reason = f"its task ended before ddplaunch had joined there: {end.how}"
                name = f"node {node_rank} ({host})"
                self.coordinator.feed(job.Withdrawn(name, node_rank, reason, hint, self._loop.now()))

    def _on_srun_end(self) -> None:
        """Keep how srun has ended: all agents have, or never begin. Called by the loop."""
        self._loop.unwatch(self._srun.fd)
        self._wait_status, self._why_srun_not_started = self._srun.end()
        if os.WIFSIGNALED(self._wait_status) and not self._end_requests:
            self._reporter.print(
                f"srun, which runs the step of this job, was killed by {signal_name(os.WTERMSIG(self._wait_status))}"
            )

    def status(self) -> int:
        """Return the exit status: the job's; before a job has begun, that of the signal that stopped it, or of srun."""
        if self._output is not None:
            self._output.drain()
        if self._why_srun_not_started is not None:
            error = not_started(self._why_srun_not_started)
            self.fail(error)
            return error.status
        if self._is_front_lost:  # by SIGKILL, and nobody reads a status any more
            return exitcodes.of_signal(signal.SIGKILL)
        if self._status_of_job is not None:
            return self._status_of_job
        if self._signum:
            return exitcodes.of_signal(self._signum)
        return self._status_of_srun()

    def _status_of_srun(self) -> int:
        """Return the status with which srun has ended before any agent has connected, or, where that is 0, what Slurm says.

        srun ends with 0 also if Slurm has lost nodes.
        """
        status = self._wait_status or 0
        if status == 0:
            question = SlurmQuestions(self._context.inputs.env).why_ending
            ending = self._signals.wait_for(self._loop.ask(question, ClusterEnding()))  # while signals are taken
            # of an empty ClusterEnding, as without an answer, `outcome` is None: srun's status counts
            if ending.outcome is not None:  # Slurm has ended the job
                exit_status, *_ = ending.outcome
                self._reporter.stderr.write(f"error: {ending.text}\n")
                return exit_status
        return exitcodes.of_signal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


_STREAMS = {1: STDOUT, 2: STDERR}
_LONGEST_LINE = 1 << 16  # bytes that are looked at: a host list of thousands of nodes, and no output of a program
_TASK_END = re.compile(rb"srun: error: (\S+): tasks? [\d,-]+: (.+)")


class StepOutput:
    """Passes what srun writes on to the front; while the front takes nothing, srun has to wait."""

    def __init__(self, loop: Loop, queue: OutputQueue, read_ends: Mapping[int, int], watcher: Watcher) -> None:
        """Read our ends of srun's pipes, by its descriptor: 1, 2 or both. `watcher` gets what srun tells of tasks."""
        self._loop = loop
        self._queue = queue
        self._streams = {fd: _STREAMS[its_descriptor] for its_descriptor, fd in read_ends.items()}
        self._task_ends = TaskEnds()
        self._watcher = watcher
        self._is_reading = False  # not while the queue is too full: srun has to wait then
        self.writes_itself = False  # the front is lost: what comes is written to our own stdout and stderr
        for fd in self._streams:
            os.set_blocking(fd, False)
        self.read_or_pause()

    def read_or_pause(self) -> None:
        """Begin to read if the queue to the front is less than half full, and stop once it is full: not at each message."""
        reads = not self._queue.full if self._is_reading else self._queue.size < FULL // 2
        if reads != self._is_reading:
            self._is_reading = reads
            for fd in self._streams:
                if reads:
                    self._loop.watch(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]  # fd is bound here
                else:
                    self._loop.unwatch(fd)

    def _read(self, fd: int) -> bool:
        """Pass a piece on; return whether there was one, for `drain`. Called by the loop, too."""
        try:
            data = os.read(fd, MESSAGE)
        except BlockingIOError:
            return False
        if data:
            stream = self._streams[fd]
            if self.writes_itself:
                with suppress(OSError):  # nobody reads it any more
                    os.write(1 if stream == STDOUT else 2, data)
            else:
                self._queue.put(stream, data)
            if stream == STDERR:
                for end in self._task_ends.feed(data):
                    self._watcher.on_task_end(end)
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


class TaskEnd(Struct, frozen=True):
    """The bad end of the tasks on some nodes."""

    nodes: tuple[str, ...]  # by their names in Slurm
    how: str  # "Exited with exit code 2", "Killed"


class TaskEnds:
    """Finds the ends of tasks in pieces of srun's stderr."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._line = b""  # the beginning of the last line, whose end has not come yet

    def feed(self, data: bytes) -> Iterator[TaskEnd]:
        """Yield the ends of tasks whose lines are complete with this piece."""
        first, *more = data.split(b"\n")
        self._line = (self._line + first)[:_LONGEST_LINE]
        for following in more:
            if (end := parse(self._line)) is not None:
                yield end
            self._line = following[:_LONGEST_LINE]


def parse(line: bytes) -> TaskEnd | None:
    """Return the end of which a line of srun tells; None if that is another line."""
    if (found := _TASK_END.fullmatch(line)) is None:
        return None
    try:
        nodes = hostlist.expand(found[1].decode(), "srun")
    except (LaunchError, UnicodeDecodeError):  # a program has written it
        return None
    return TaskEnd(tuple(nodes), found[2].decode(errors="replace"))
