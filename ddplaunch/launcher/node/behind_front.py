"""The process behind a front (the one that was typed and has the terminal): what an agent and a command that leads share.

A front shows what such a process says, passes signals on to it, and ends what it leaves. `Agent` supervises the workers of a
node; `Lead`, with `Dispatcher` and `Watcher`, has started the agents of all nodes and coordinates them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any, TypeVar

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import JobEnd
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.job import FrontedJob
from ddplaunch.launcher.node.run_socket import RunSocket
from ddplaunch.launcher.node.signals import END_MARGIN, SignalOrigin, SignalSource
from ddplaunch.launcher.tell.story import Ended
from ddplaunch.reach.pipes import UNREAD_TIMEOUT, FrontPipes, OutputQueue
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.record.folders import state_folder
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop, Pending
from ddplaunch.system.process.tree import look
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:
    from ddplaunch.launcher.job.coordinator import Coordinator
    from ddplaunch.launcher.node.job import Requeue
    from ddplaunch.launcher.node.outward import Errands

SLOW_REPLY = 5.0  # seconds without a reply of the cluster after which the user is told that it is waited for
DISK_WITHIN = 2.0  # seconds that the disk has for how far the job has come
OUTPUT_DELAY = 0.5  # seconds that the last output has to come through Slurm before the job is queued again

Reply = TypeVar("Reply")


class BehindFront(ABC):
    """Owns the parts that every such process has; a kind of it adds its own parts, and says what follows from which event."""

    _link: Link | None = None  # to the coordinator, which decides for all nodes; None until `connect`

    def __init__(self, loop: Loop, job: FrontedJob, files: FileQueue, pipes: FrontPipes) -> None:
        """Make the parts; `run` opens them. `files` goes to the process that writes them, `pipes` lead to the front.

        Which signals mean what, `SignalSource` says.
        """
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
            sent_again=job.sent_again,  # by a scheduler
            end_within=spec.grace_period + END_MARGIN,
            cluster_signals_all=job.cluster_signals_all,
            from_caller=inputs.reports_to_caller,
            heartbeat_timeout=spec.heartbeat_timeout,
        )
        self._requeue = job.requeue  # what can queue the job again; None: nothing from here
        self._run_socket = RunSocket(loop, self._context)
        self._errands: list[Errands] = []  # what tells programs outside of the job

    def run(self) -> int:
        """Run the loop until nothing more is expected of it, hand all output over, and return the exit status of the job."""
        self._signals.listen(self._signals_of_job)
        with ExitStack() as opened:  # its callbacks close what was opened, in reverse order
            try:
                self._link = link = self.connect()
            except LaunchError as error:
                # from here on no event is for the subclass, whose decision needs a link
                self._loop.handle = partial(BehindFront.handle, self)
                self.fail(error)
                self._finish_files_and_output()
                return error.status
            opened.callback(link.close)
            self._run_socket.open(link)
            opened.callback(self._run_socket.close)
            if self._context.inputs.reports_job and link.coordinator is not None:
                self._serve_whole_job(link.coordinator)
            self.begin(opened)
            opened.callback(self._loop.give_up_questions)  # to children, whose answers nobody needs at the end
            while not self.is_over:
                self.before_sleep()
                self._loop.run_once()
            status = self.status()
            self._wait_for_errands()  # as commands of --notify
        if self._context.closing_lines:
            self._context.write_line(self._context.closing_lines)
        if (requeue := self._requeue_to_use) is not None:  # this process is to have the job queued again
            self._queue_again(requeue)
        self._finish_files_and_output()
        return status

    # --- what a kind of such a process says

    @abstractmethod
    def connect(self) -> Link:
        """Return the link to the coordinator, which may be here. Raises LaunchError: this node can take no part in the job."""

    @abstractmethod
    def begin(self, opened: ExitStack) -> None:
        """Begin what is this kind's own, and leave what closes it with `opened`."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more is expected of this process."""

    @abstractmethod
    def status(self) -> int:
        """Return the exit status, after the loop, when all that it has opened is still open."""

    @abstractmethod
    def ended(self) -> Ended:
        """Return how the job has ended."""

    def before_sleep(self) -> None:
        """Say what there is to be said of pauses and of the run folder. Called before each turn of the loop."""
        self._reporter.report_pause(self._loop.clock.pause)
        self._reporter.report_folder()

    # --- what happens to each of them

    def handle(self, event: Any) -> None:
        """Carry out what follows from one event in every such process; a kind of it calls this first."""
        match event:
            case node.FrontLost():
                self._context.queue.abandon()  # nobody takes output any more
            case events.ClientAsked(client, request):
                self._run_socket.answer(client, request)
            case events.ClientGone(client):
                self._run_socket.forget(client)
            case events.ClientsFailed(why):
                self._run_socket.fail(why)
            case events.StopAsked():
                # a client of the socket counts as Ctrl-C typed at the front; by SIGTERM if SIGINT is ignored, as after nohup
                self._reporter.print("asked to stop from another shell")
                stop = SIGINT if SIGINT in self._signals_of_job else SIGTERM
                self.stop_for_good(stop, SignalOrigin.FRONT, typed=Typed.YES)
            case events.NoticeSeen() if event.problem:
                # the link has the end that the coordinator sent; what gives notices may go with the job, and is no problem then
                has_ended = self.is_over or (self._link is not None and self._link.end is not None)
                if not has_ended:
                    self._reporter.warn(f"{event.option}: {event.problem}")
            case events.NoticeSeen(stops_job=True):
                self._tell_notice(event)
                self.stop_for_good(event.signum, SignalOrigin.PROCESS)  # not FRONT: a second notice kills no workers

    def stop_for_good(self, signum: int, source: SignalOrigin, typed: Typed = Typed.NO) -> None:
        """Stop the job by this signal, and have it not queued again, although the signal may be one that asks for that."""
        if self._coordinator is not None:
            self._coordinator.abandon()
        self._signals.received(signum, source, typed=typed)

    def _tell_notice(self, notice: events.NoticeSeen, where: str = "") -> None:
        """Tell the user that workers get the signal of this notice; `where` ("on gpu07") these are, "" for all of the job."""
        self._reporter.emit("notice", text=notice.option)
        self._reporter.print(f"{notice.option}: {signal_name(notice.signum)} to the workers{where}")

    @property
    def _coordinator(self) -> Coordinator | None:
        """What decides for all nodes, if it is in this process."""
        return self._link.coordinator if self._link is not None else None

    def _serve_whole_job(self, coordinator: Coordinator) -> None:
        """Do from now on what one process does for the whole job: tell programs outside of it, and look for the stop file."""
        spec, reporter = self._context.inputs.spec, self._reporter
        if self._requeue_progress_file and self._requeue is not None and self._requeue.times_restarted:
            self._read_progress(coordinator)
        if spec.notify or spec.metrics_file:
            from ddplaunch.launcher.node import outward  # few jobs need it

            self._errands = outward.begin(self._loop, self._context, coordinator)
        if spec.stop_file:
            from ddplaunch.launcher.node import notices  # few jobs need it

            since_start = reporter.clock() - reporter.story.began
            # not one that has lain there since before the start
            notices.watch_stop_file(self._loop, spec.stop_file, changed_within=since_start)

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

    # --- the end

    def _report_end_of_job(self, end: JobEnd) -> None:
        """Report how the job ended, unless it is to be queued again from here, which is known later."""
        if end.requeue:
            self._reporter.story.note_left_after(end.requeue)
        if self._requeue_to_use is None:
            self._reporter.write_summary(self.ended(), time.monotonic())
            self._reporter.print_end(end.why, end.text)
            self._advise()

    def _advise(self) -> None:
        """Say which imports the next run could find warm."""
        preload = self._context.draft.preload
        if self._context.draft.keep_warm is not None and preload is not None:
            from ddplaunch.spec.error_file import advice_on_imports  # few jobs keep anything warm

            if text := advice_on_imports(self._context.error_files.slow_imports, preload):
                self._reporter.print(text)

    def _wait_for_errands(self) -> None:
        """Wait until all is told to programs outside, as long as there is time for that and the user waits."""
        before = self._signals.stops_by_user
        for one in self._errands:
            one.end_in_time()
        while any(one.is_busy for one in self._errands) and self._signals.stops_by_user == before:
            self._loop.run_once()

    @property
    def _requeue_to_use(self) -> Requeue | None:
        """What queues the job again, if that is for this process to do; None if not, or if no notice has asked for it.

        It is for the process where the coordinator is, or for the first node once the coordinator was lost after a notice.
        """
        end = self._link.end if self._link is not None else None
        if end is None or not end.requeue:
            return None
        return self._requeue if self._coordinator is not None or end.why == "lost" else None

    def _queue_again(self, requeue: Requeue) -> None:
        """Have the cluster queue the job again if it may be, which may end this process; report that and the end of the job.

        Where the user does not wait for the cluster, `undecided` says that the job is not queued again.
        """
        assert self._link is not None
        assert self._link.end is not None
        end = self._link.end
        notice = end.requeue  # the number of the signal that gave it
        self._reporter.print_end(end.why, end.text)
        decision = self._ask_cluster(requeue, partial(requeue.decide, notice), if_unanswered=requeue.undecided(notice))
        decided_at = time.monotonic()
        self._reporter.print(decision.text)
        why_failed = self._submit(requeue) if decision.requeues else None
        self._reporter.story.note_left_after(notice, decision, why_failed)  # why all workers left, for the summary
        self._reporter.write_summary(self.ended(), decided_at)

    def _submit(self, requeue: Requeue) -> str | None:
        """Hand over all output, then have the job queued again, which ends this process; return why that failed, or None.

        Where the user does not wait for the cluster, that is `unsent`.
        """
        self._keep_progress()
        self._hand_over_output()
        if not self._context.inputs.only_coordinates:  # this process is an agent
            # an agent's output is shown by srun, which drops what it has not read when its step ends; nothing tells when it has
            self._signals.wait(OUTPUT_DELAY)
        why_failed = self._ask_cluster(requeue, requeue.submit, if_unanswered=requeue.unsent)
        if why_failed is not None:
            self._reporter.print(why_failed)
        return why_failed

    def _read_progress(self, coordinator: Coordinator) -> None:
        """Tell the coordinator, once the disk has answered, how far the job had come when it was requeued."""
        from ddplaunch.launcher.decide import job  # imported with the coordinator
        from ddplaunch.reach.slurm.job import Requeued, read_requeued

        assert self._requeue is not None
        start = self._requeue.times_restarted  # by the cluster: the number of this start of the job

        def on_answer(known: Requeued | None) -> None:
            if known is not None:
                without_new_step = known.count_at(start)  # generations in a row that came no further, up to this start
                coordinator.feed(job.ProgressKnown(known.best_step, without_new_step))

        self._loop.ask(partial(read_requeued, self._requeue_progress_file), None, on_answer, within=DISK_WITHIN)

    def _keep_progress(self) -> None:
        """Keep for --max-no-progress, for the next start of the job, how far this one has come."""
        # no file: nobody wants to know; and a coordinator that was lost cannot say it
        if self._requeue_progress_file and self._coordinator is not None and self._requeue is not None:
            from ddplaunch.reach.slurm.job import Requeued, keep_requeued

            known = self._coordinator.state.restarts
            start = self._requeue.times_restarted  # the number of this start of the job
            now = Requeued(start=start, best_step=known.best_step, without_new_step=known.without_new_step)
            keep = partial(keep_requeued, self._requeue_progress_file, now)
            self._signals.wait_for(self._loop.ask(keep, None, within=DISK_WITHIN))

    @property
    def _requeue_progress_file(self) -> str:
        """Where to keep how far the job has come when it is requeued; "": nobody wants to know, or the user has no home."""
        spec, state = self._context.inputs.spec, state_folder(self._context.inputs.env)
        if spec.max_no_progress is None or self._requeue is None or state is None:
            return ""
        from ddplaunch.reach.slurm.job import requeued_file

        return requeued_file(state, self._requeue.job, "\0".join((spec.program.target, *spec.program.args)))

    def _ask_cluster(self, requeue: Requeue, question: Callable[[], Reply], if_unanswered: Reply) -> Reply:
        """Return the reply of the cluster, however long that takes, or `if_unanswered` if the user does not wait."""
        asked_why: Pending[str] | None = None

        def ask_why_it_is_slow() -> None:
            nonlocal asked_why
            asked_why = self._loop.ask(
                requeue.describe_wait, "", lambda text: self._reporter.print(text) if text else None
            )

        slow_timer = self._loop.timer(self._loop.now() + SLOW_REPLY, ask_why_it_is_slow)
        reply = self._signals.wait_for(self._loop.ask(question, if_unanswered))
        slow_timer.cancel()
        if asked_why is not None:
            asked_why.give_up()
        return reply

    def _finish_files_and_output(self) -> None:
        """Have all files of the run written, and hand over all output."""
        self._end_files()
        self._hand_over_output()
        self._signals.see_front_go_on()

    def _end_files(self) -> None:
        """Wait until all files of the run are written, unless their disk hangs, or is slow and the user does not wait."""
        files, before = self._context.files, self._signals.stops_by_user
        files.end()
        while files.is_busy and self._signals.stops_by_user == before:
            self._loop.run_once()
        if files.is_open and (writer := look(files.pid)) is not None:  # it still writes, and may do so without us
            self._pipes.spare(writer.pid, writer.started)
        self._reporter.report_folder(leaves_rest=True)

    def _hand_over_output(self) -> None:
        """Wait until the front has taken all output; once the user has asked for the end, only as long as it takes any.

        Then each time that it has taken something, it has UNREAD_TIMEOUT seconds to take more.
        """
        queue = self._context.queue
        limit = self._loop.timer(None, lambda: None)  # wakes the loop, and is not set any more once its time has come
        sent_before, is_limited = queue.sent, False
        while queue.size:
            has_progressed = queue.sent != sent_before
            if self._signals.was_asked_to_end and (has_progressed or not is_limited):
                sent_before, is_limited = queue.sent, True
                limit.set(self._loop.now() + UNREAD_TIMEOUT)
            elif is_limited and not limit.is_set:
                return
            self._loop.run_once()
