"""The loop of a job in a Slurm allocation: it speaks for the user to the agents of the step that srun starts.

It stands where the agent of a job of one node stands, behind the same front. Signals go to the coordinator, never to srun:
SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status comes from the coordinator too: srun's is the highest of
all tasks', and hidden when Slurm kills them. Agents write whole lines, which srun passes on whole.
"""

from __future__ import annotations

import os
import selectors
import signal
import time

from ddplaunch import exitcodes
from ddplaunch.agent.pipes import STDERR, FrontPipes, OutputQueue
from ddplaunch.agent.signals import SignalSource
from ddplaunch.control import messages
from ddplaunch.control.handshake import key
from ddplaunch.coordinator.link import ForwardToAll, Generation, JobEnd
from ddplaunch.coordinator.remote_link import RemoteLink
from ddplaunch.errors import LaunchError
from ddplaunch.process.start import Child, StartError, why_not_started
from ddplaunch.slurm import ending as slurmend
from ddplaunch.slurm.ending import CONTROLLER
from ddplaunch.slurm.srun import StepJob
from ddplaunch.supervise import node
from ddplaunch.supervise.outcome import Why

WELCOME = 2.0  # seconds from a signal to stop until a coordinator that was not reached yet counts as not there
FAREWELL = 5.0  # seconds from the end of the grace period until srun is told to end the step
LAST_WAIT = 2.0  # seconds from then until srun, which waits for a node that does not answer, is ended itself
FOREVER = float("inf")


class Watcher:
    """The loop's state."""

    def __init__(self, job: StepJob, pipes: FrontPipes) -> None:
        self._job = job
        self._queue = OutputQueue(pipes.output[1])
        self._selector = selectors.DefaultSelector()
        self._signals = SignalSource(
            self._selector,
            pipes,
            stops=job.stops,
            sent_again=job.sent_again,
            feed=self.feed,
            child_ended=_nothing,
            front_lost=self._queue.abandon,
        )
        self._link = RemoteLink(
            self,
            self._selector,
            key=key(job.token, job.name),
            hello=lambda _: messages.Watch(),
            source=None,
            heartbeat_timeout=job.silence,
            rdzv_timeout=FOREVER,  # the step may have to wait for others to end
            clock=time.monotonic,
        )
        self._srun = -1
        self._wait_status: int | None = None
        self._quit: JobEnd | None = None
        self._signum = 0  # the first signal to stop
        self._forwards: list[int] = []  # signals for the workers that the coordinator has not been told of
        self._untold = False  # whether the coordinator is yet to hear of that signal
        self._why = Why.SIGNALLED  # or FRONT_LOST: the command that the user typed has ended, and no signal explains it
        self._gone_by: float | None = None
        self._is_ending = False  # whether srun was told to end the step

    def run(self, srun: Child) -> int:
        """Run the loop until srun has ended; give the job's exit status."""
        self._signals.listen(self._job.signals)
        self._srun = srun.pid
        self._selector.register(srun.pidfd, selectors.EVENT_READ, self._ended)
        self._link.aim((self._job.host,), self._job.ports)
        while self._wait_status is None:
            self._wait()
        self._link.close()
        if (never := why_not_started(srun, "srun")) is not None:
            return self.fail(never, exitcodes.NOT_FOUND)
        if notice := self._notice():
            self._go_back(notice)
        return self._status()

    def _wait(self) -> None:
        deadlines = [at for at in (self._link.deadline, self._gone_by) if at not in (None, FOREVER)]
        soonest = min(deadlines, default=None)
        still = self._selector.get_map()
        patience = None if soonest is None else max(0.0, soonest - time.monotonic())
        for ready, _ in self._selector.select(patience):
            if still.get(ready.fd) is ready:
                ready.data()
        self._tell()
        now = time.monotonic()
        self._link.expire(now)
        if self._gone_by is not None and now >= self._gone_by:
            self._end_step()

    # --- what the agents' coordinator says: the ears of the link

    def feed(self, event: node.Event) -> None:
        """Take a signal of the user, or the end of the front; the coordinator sends us no other event."""
        match event:
            case node.SignalReceived(signum, _, escalates):
                self._signalled(signum, escalates)
            case node.FrontLost() if not self._signum:
                self._why = Why.FRONT_LOST
                self._stop(signal.SIGTERM)

    def say(self, text: str) -> None:
        """A step that waits for its nodes is Slurm's to tell of."""

    def begin(self, generation: Generation, address: str | None) -> None:
        """There are no workers here."""

    def listening(self, port: int) -> None:
        """The coordinator is elsewhere."""

    def end(self, end: JobEnd) -> None:
        """Take note of the job's status."""
        self._quit = end
        self._link.close()
        self._expect_the_end(FAREWELL)
        if end.why == "lost":
            self._say(end.words)
            self._expect_the_end(self._job.grace_period + FAREWELL)

    # --- signals

    def _signalled(self, signum: int, escalates: bool) -> None:
        if signum not in self._job.stops:
            self._forwards.append(signum)
            self._tell()
        elif not self._signum:
            self._stop(signum)
        elif escalates:
            self._kill()

    def _stop(self, signum: int) -> None:
        self._signum, self._untold = signum, True
        self._tell()
        # the step waits for its nodes; or its workers have just started, and may have something to save
        if self._untold:
            self._expect_the_end(WELCOME)

    def _tell(self) -> None:
        """Tell the coordinator of signals, as soon as it is reached."""
        if not self._link.is_reached:
            return
        for signum in self._forwards:
            self._link.send(ForwardToAll(signum))
        self._forwards.clear()
        if self._untold:
            self._untold, self._gone_by = False, None
            self._link.send(node.ReportStopping(self._why, self._signum))
            self._expect_the_end(self._job.grace_period + FAREWELL)

    def _kill(self) -> None:
        if self._untold:
            self._end_step()
        else:
            self._link.send(node.Escalate(self._signum))
            self._expect_the_end(FAREWELL)

    def _expect_the_end(self, within: float) -> None:
        by = time.monotonic() + within
        self._gone_by = by if self._gone_by is None else min(by, self._gone_by)

    def _end_step(self) -> None:
        """Have srun end the step; the second time srun itself is ended."""
        os.kill(self._srun, signal.SIGKILL if self._is_ending else signal.SIGTERM)
        self._is_ending = True
        self._gone_by = time.monotonic() + LAST_WAIT

    # --- the end

    def _ended(self) -> None:
        _, self._wait_status = os.waitpid(self._srun, 0)

    def _notice(self) -> int:
        """The notice after which the job should go back into the queue, 0 if it should not."""
        if self._why is Why.FRONT_LOST:
            return 0
        if self._quit is not None:
            return self._quit.requeue if self._quit.is_watched else 0
        never_began = not self._link.is_reached
        return self._signum if never_began and self._signum in self._job.notices else 0

    def _go_back(self, notice: int) -> None:
        intent = self._job.requeue.decide(notice)
        self._mention(intent.words)
        if intent.goes and (failed := self._job.requeue.submit()) is not None:
            self._mention(failed)

    def _mention(self, words: str) -> None:
        if not self._job.is_quiet:
            self._say(f"ddplaunch: {words}\n")

    def _status(self) -> int:
        if self._quit is not None:
            return self._quit.status
        if self._signum:
            return exitcodes.of_signal(self._signum)
        status = self._wait_status or 0
        if status == 0 and (lost := self._lost()) is not None:
            return lost
        return exitcodes.of_signal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _lost(self) -> int | None:
        """Give the status if Slurm has lost the nodes, for then srun may end with 0, before any agent has spoken."""
        ending = slurmend.why_ending(self._job.requeue.env, CONTROLLER)
        if ending.outcome is None:
            return None
        self._say(f"error: {ending.words}\n")
        return ending.outcome[0]

    def fail(self, reason: StartError, status: int) -> int:
        """Say that there is no step, and give the status."""
        hint = "in a container without srun let srun start the containers: `srun --ntasks-per-node 1 ... ddplaunch ...`"
        self._say(LaunchError(f"no step could be started: {reason}", hint=hint).render())
        return status

    def _say(self, words: str) -> None:
        self._queue.put(STDERR, words.encode(errors="replace"))
        while self._queue.size:
            self._queue.flush()


def _nothing() -> None:
    """srun's end is seen by its pidfd."""
