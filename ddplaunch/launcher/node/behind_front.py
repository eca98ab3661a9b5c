"""The loop behind a front, from its first signal to its last words: all that an agent has in common with a command that leads.

A front shows what such a loop says, passes signals on to it, and ends what it leaves. `Agent` supervises the workers of a node;
`Lead`, with `Dispatcher` and `Watcher`, has started the agents of all nodes and coordinates them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.job import FrontedJob
from ddplaunch.launcher.node.run_socket import RunSocket
from ddplaunch.launcher.node.shutdown import Shutdown
from ddplaunch.launcher.node.signals import END_MARGIN, SignalOrigin, SignalSource
from ddplaunch.launcher.tell.story import Ended
from ddplaunch.reach.pipes import FrontPipes, OutputQueue
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:
    from ddplaunch.launcher.job.coordinator import Coordinator
    from ddplaunch.launcher.node.outward import Errands


class BehindFront(ABC):
    """Owns the parts that every such loop has; a kind of loop adds its own parts, and says what follows from which event."""

    _link: Link | None = None  # until the coordinator is known

    def __init__(self, loop: Loop, job: FrontedJob, files: FileQueue, pipes: FrontPipes) -> None:
        """Make the parts; `run` opens them. `files` goes to the process that writes them, `pipes` lead to the front."""
        inputs, spec = job.inputs, job.inputs.spec
        self._loop = loop
        loop.handle = self.handle
        loop.question_failed = self._question_failed
        files.attach(loop)
        self._signals_of_job = job.signals
        self._pipes = pipes
        self._context = AgentContext(loop, inputs, files, OutputQueue(loop, pipes.output[1]))
        self._reporter = self._context.reporter
        self._signals = SignalSource(
            loop,
            pipes,
            stops=spec.ending_signals,
            sent_again=job.sent_again,
            end_within=spec.grace_period + END_MARGIN,
            signals_all=job.signals_all,
            from_caller=inputs.reports_to_caller,
            heartbeat_timeout=spec.heartbeat_timeout,
        )
        self._shutdown = Shutdown(loop, self._context, self._signals, pipes, job.requeue)
        self._run_socket = RunSocket(loop, self._context, lambda: self.run_id)
        self._outward: list[Errands] = []

    def run(self) -> int:
        """Run the loop until nothing more is expected of it, hand all output over, and return the exit status of the job."""
        self._signals.listen(self._signals_of_job)
        with ExitStack() as opened:  # what is opened is closed here, in reverse order
            try:
                self._link = link = self.connect()
            except LaunchError as error:
                self._loop.handle = partial(
                    BehindFront.handle, self
                )  # this node takes no part, and has nothing to decide
                self.fail(error)
                self._shutdown.leave_early()
                return error.status
            opened.callback(link.close)
            self._run_socket.open(link)
            opened.callback(self._run_socket.close)
            if self._context.inputs.reports_job and link.coordinator is not None:
                self._report_job(link.coordinator)
            self.begin(opened)
            opened.callback(self._loop.give_up_questions)
            while not self.is_over:
                self.before_sleep()
                self._loop.run_once()
            status = self.status()
            self._shutdown.wait_for(self._outward)
        if self._context.last_words:
            self._reporter.stderr.put(self._context.last_words)
        if link.end is not None:
            self._shutdown.leave(self.ended(), link)
        else:
            self._shutdown.leave_early()
        return status

    # --- what a kind of loop says

    @abstractmethod
    def connect(self) -> Link:
        """Return the link to the coordinator, which may be here. Raises LaunchError: this node can take no part in the job."""

    @abstractmethod
    def begin(self, opened: ExitStack) -> None:
        """Begin what is this loop's own, and leave what closes it with `opened`."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more is expected of this loop."""

    @abstractmethod
    def status(self) -> int:
        """Return the exit status, after the loop, when all that it has opened is still open."""

    @abstractmethod
    def ended(self) -> Ended:
        """Return how the job has ended."""

    @property
    def run_id(self) -> str:
        """The name that all nodes know the run by; "" before they have met."""
        return self._context.draft.run_id

    def before_sleep(self) -> None:
        """Say what there is to be said of pauses and of the run folder. Called before each turn of the loop."""
        self._reporter.paused(self._loop.clock.pause)
        self._reporter.report_folder()

    # --- what happens to each of them

    def handle(self, event: Any) -> None:
        """Carry out what follows from one event in every such loop."""
        match event:
            case node.FrontLost():
                self._context.queue.abandon()
            case events.ClientAsked(client, request):
                self._run_socket.answer(client, request)
            case events.ClientGone(client):
                self._run_socket.forget(client)
            case events.ClientsFailed(why):
                self._run_socket.fail(why)
            case events.StopAsked():
                # as Ctrl-C does; with another signal if that is ignored here, as after nohup
                self._reporter.print("asked to stop from another shell")
                stop = SIGINT if SIGINT in self._signals_of_job else SIGTERM
                self.stop_for_good(stop, SignalOrigin.FRONT, typed=Typed.YES)
            case events.NoticeSeen() if event.problem:
                if not self.is_over:  # with the job, what looked for it was given up
                    self._reporter.warn(f"{event.option}: {event.problem}")
            case events.NoticeSeen(stops_job=True):
                self._tell_notice(event)
                self.stop_for_good(event.signum, SignalOrigin.PROCESS)

    def stop_for_good(self, signum: int, source: SignalOrigin, typed: Typed = Typed.NO) -> None:
        """Stop the job, and have it not queued again where this signal would mean that."""
        if self._coordinator is not None:
            from ddplaunch.launcher.decide import job  # imported with the coordinator

            self._coordinator.feed(job.Abandoned())
        self._signals.received(signum, source, typed=typed)

    def _tell_notice(self, notice: events.NoticeSeen, where: str = "") -> None:
        """Tell that workers get the signal of this notice; `where` are those, if not all of the job."""
        self._reporter.emit("notice", text=notice.option)
        self._reporter.print(f"{notice.option}: {signal_name(notice.signum)} to the workers{where}")

    @property
    def _coordinator(self) -> Coordinator | None:
        """What decides for all nodes, if it is in this process."""
        return self._link.coordinator if self._link is not None else None

    def _report_job(self, coordinator: Coordinator) -> None:
        """Do from now on what one node does for the whole job: tell programs outside of it, and look for the stop file."""
        spec, reporter = self._context.inputs.spec, self._reporter
        if spec.notify or spec.metrics_file:
            from ddplaunch.launcher.node import outward  # few jobs need it

            self._outward = outward.begin(self._loop, self._context, coordinator)
        if spec.stop_file:
            from ddplaunch.launcher.node import notices  # few jobs need it

            notices.watch_stop_file(self._loop, spec.stop_file, reporter.clock() - reporter.story.began)

    def _question_failed(self, error: Exception) -> None:
        """Say that a child has met a bug of ours: the job goes on without its answer."""
        self._reporter.warn(
            f"a part of ddplaunch failed, and the job goes on without it: {type(error).__name__}: {error}"
        )

    def fail(self, error: LaunchError) -> None:
        """Tell the user, or the caller of `launch()`, why the job could not begin."""
        if self._reporter.caller is not None:
            self._reporter.caller.closed(error.render())
        else:
            self._reporter.stderr.write(error.render())
