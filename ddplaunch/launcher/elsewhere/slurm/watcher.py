"""The loop of a job in a Slurm allocation: it forwards the user's signals to the coordinator of the step that srun starts.

It runs in place of a job's only agent, behind the same front. Signals go to the coordinator, never to srun:
SIGTERM or SIGHUP have srun SIGKILL its tasks at once. The status comes from the coordinator too: srun's is the highest of
all tasks', and hidden when Slurm kills them. Agents write whole lines, which srun passes on whole, to our stdout and stderr or,
with --live, to pipes of ours.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.elsewhere.slurm.watch_link import WatchLink
from ddplaunch.launcher.job.orders import ClientOrder, CoordinatorLost, Forward, JobEnd
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import END_MARGIN, SignalSource
from ddplaunch.launcher.tell.closing import render_repeated
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.reach.pipes import STDERR, UNREAD_TIMEOUT, FrontPipes, OutputQueue
from ddplaunch.reach.slurm.job import CONTROLLER_TIMEOUT, why_ending
from ddplaunch.reach.slurm.srun import Srun, StepJob, not_started
from ddplaunch.spec.outcome import ClusterEnding, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import below, visible
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError

if TYPE_CHECKING:
    from ddplaunch.launcher.elsewhere.slurm.live import StepOutput, StepSocket

HELLO_TIMEOUT = 2.0  # seconds from a signal to stop until the step is ended if no coordinator was reached yet
QUIT_TIMEOUT = 5.0  # seconds from the end of the grace period until srun gets SIGTERM, at which it ends the step
KILL_TIMEOUT = 2.0  # seconds from then until srun, which may wait for a lost node, gets SIGKILL


class Watcher:
    """The loop's state."""

    def __init__(self, loop: Loop, job: StepJob, pipes: FrontPipes) -> None:
        """Prepare to start the step and to reach its coordinator; `run` does both."""
        self._job = job
        self._loop = loop
        loop.handle = self._on_event
        self._queue = OutputQueue(loop, pipes.output[1])
        self._signals = SignalSource(
            loop,
            pipes,
            stops=job.stops,
            sent_again=job.sent_again,
            end_within=job.grace_period + END_MARGIN,
            signals_all=True,
            heartbeat_timeout=job.heartbeat_timeout,
        )
        self._link = WatchLink(
            loop,
            key=key(job.token, job.name),
            heartbeat_timeout=job.heartbeat_timeout,
            may_shorten_silence=job.may_shorten_silence,
        )
        self._srun: Srun | None = None
        self._never: StartError | None = None  # why srun could not be started
        self._wait_status: int | None = None
        self._quit: JobEnd | None = None
        self._signum = 0  # the first signal to stop
        self._by_cluster = False  # whether the cluster sends it to all processes of the job, the workers among them
        self._forwards: list[int] = []  # signals for the workers that were not sent to the coordinator yet
        self._stop_pending = False  # whether that signal was not sent to the coordinator yet
        self._why = Why.SIGNALLED  # or FRONT_LOST: the command that the user typed has ended, without a signal
        self._end_by = loop.timer(None, self._end_step)
        self._is_ending = False  # whether srun has got SIGTERM
        self._output: StepOutput | None = None  # with --live
        self._socket: StepSocket | None = None  # with --live, once the coordinator is reached

    def run(self, srun: Srun) -> int:
        """Run the loop until srun has ended; give the job's exit status."""
        self._signals.listen(self._job.signals)
        self._srun = srun
        self._loop.watch(srun.fd, self._on_srun_end)
        if srun.output is not None:
            from ddplaunch.launcher.elsewhere.slurm.live import StepOutput  # few jobs need it

            self._output = StepOutput(self._loop, self._queue, srun.output)
        self._link.aim((self._job.host,), self._job.ports)
        while self._wait_status is None:
            self._loop.run_once()
            self._send_pending()
            if self._output is not None:
                self._output.update()
        self._link.close()
        if self._socket is not None:
            self._socket.close()
        if self._output is not None:
            self._output.drain()
        if self._never is not None:
            error = not_started(self._never)
            self._write(error.render())
            status = error.status
        else:
            if notice := self._notice():
                self._requeue(notice)
            status = self._status()
        self._hand_over()
        return status

    def _hand_over(self) -> None:
        """Wait until the front has taken all that was written; after a signal to stop, only as long as it takes any."""
        sent, read_by = self._queue.sent, self._loop.timer(None, lambda: None)
        if self._signum:
            read_by.set(self._loop.now() + UNREAD_TIMEOUT)
        while self._queue.size and (read_by.is_set or not self._signum):
            self._loop.run_once()
            if self._signum and self._queue.sent != sent:
                sent = self._queue.sent
                read_by.set(self._loop.now() + UNREAD_TIMEOUT)

    def _on_event(self, event: object) -> None:
        """Take a signal of the user, the loss of the front, or the end of the job; no workers are started here."""
        match event:
            case node.SignalReceived() if not event.is_copy or event.signum in self._job.stops:
                self._on_signal(event)
            case node.FrontLost():
                self._queue.abandon()
                if not self._signum:
                    self._why = Why.FRONT_LOST
                    self._stop(signal.SIGTERM)
            case FrontWaits():
                self._signals.let_front_stop(all_stopped=True)
            case CoordinatorLost():
                self._on_coordinator_lost()
            case JobEnd():
                self._on_job_end(event)
            case ClientOrder(order) if self._socket is not None and isinstance(order, Chunk):
                self._socket.take(order)

    def _on_coordinator_lost(self) -> None:
        """Have all that was sent to the last coordinator, and may have been lost with it, sent to the next one."""
        if self._socket is not None:
            self._socket.drop()
        self._stop_pending = bool(self._signum)

    def _on_job_end(self, end: JobEnd) -> None:
        """Record the job's status."""
        self._quit = end
        self._link.close()
        self._end_within(QUIT_TIMEOUT)
        if end.why == "lost":
            self._write(end.text)
            self._end_within(self._job.grace_period + QUIT_TIMEOUT)

    # --- signals

    def _on_signal(self, event: node.SignalReceived) -> None:
        """Take a signal of the user: stop the job, kill its workers at a second signal to stop, or forward the signal."""
        signum = event.signum
        if signum not in self._job.stops:
            self._forwards.append(signum)
            self._send_pending()
        elif not self._signum:
            self._by_cluster = event.by_cluster
            self._stop(signum)
        elif event.escalates:
            self._kill()
        elif event.taken_for:
            self._notify(render_repeated(event, os.getppid()))

    def _stop(self, signum: int) -> None:
        self._signum, self._stop_pending = signum, True
        self._send_pending()
        if self._stop_pending and self._link.is_looking:  # workers save, since all nodes have lost the coordinator
            self._end_within(self._job.grace_period + QUIT_TIMEOUT)
        # the step waits for its nodes; or its workers have just started, and may have something to save
        elif self._stop_pending:
            self._end_within(HELLO_TIMEOUT)

    def _send_pending(self) -> None:
        """Send pending signals to the coordinator, as soon as the coordinator is reached."""
        if not self._link.is_reached:
            return
        if self._output is not None and self._socket is None:
            from ddplaunch.launcher.elsewhere.slurm.live import StepSocket

            self._socket = StepSocket(self._loop, self._queue, self._link.send)
        for signum in self._forwards:
            self._link.send(Forward(signum))
        self._forwards.clear()
        if self._stop_pending:
            self._stop_pending = False
            self._end_by.cancel()
            self._link.send(node.ReportStopping(self._why, self._signum, self._by_cluster))
            self._end_within(self._job.grace_period + QUIT_TIMEOUT)

    def _kill(self) -> None:
        if self._stop_pending:
            self._end_step()
        else:
            self._link.send(node.Escalate(self._signum))
            self._end_within(QUIT_TIMEOUT)

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
        """Keep how srun has ended. Called by the loop."""
        assert self._srun is not None
        self._loop.unwatch(self._srun.fd)
        self._wait_status, self._never = self._srun.end()
        self._link.give_up()

    def _notice(self) -> int:
        """The notice after which the job should be requeued, 0 if it should not."""
        if self._why is Why.FRONT_LOST:
            return 0
        if self._quit is not None:
            return self._quit.requeue if self._quit.is_watched and self._quit.requeue in self._job.notices else 0
        never_began = not self._link.is_reached
        return self._signum if never_began and self._signum in self._job.notices else 0

    def _requeue(self, notice: int) -> None:
        """Decide whether Slurm is to requeue the job after this notice, print that, and requeue the job."""
        requeue = self._job.requeue
        intent = self._signals.wait_for(self._loop.ask(partial(requeue.decide, notice), requeue.undecided(notice)))
        self._notify(intent.text)
        self._hand_over()
        if (
            intent.requeues
            and (failed := self._signals.wait_for(self._loop.ask(requeue.submit, requeue.unsent))) is not None
        ):
            self._notify(failed)

    def _notify(self, text: str) -> None:
        if not self._job.is_quiet:
            self._write(f"ddplaunch: {below(text)}\n")

    def _status(self) -> int:
        """Return the exit status: the job's if node 0 sent it, else that of the signal, of a lost node, or of srun."""
        if self._quit is not None:
            return self._quit.status
        if self._signum:
            return exitcodes.of_signal(self._signum)
        status = self._wait_status or 0
        if status == 0:  # srun ends so if Slurm has lost nodes before any agent has connected, too
            question = partial(why_ending, self._job.requeue.env, CONTROLLER_TIMEOUT)
            ending = self._signals.wait_for(self._loop.ask(question, ClusterEnding()))
            if ending.outcome is not None:
                self._write(f"error: {ending.text}\n")
                return ending.outcome[0]
        return exitcodes.of_signal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _write(self, text: str) -> None:
        self._queue.put(STDERR, visible(text).encode(errors="replace"))
