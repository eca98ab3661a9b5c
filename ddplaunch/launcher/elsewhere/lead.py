"""What a command is that has started all agents of a job: the coordinator, with no workers of its own, behind the user's front.

It hears every agent itself, whatever carries their connections, and decides when each generation begins. What starts the agents
and shows their output is the loop's owner: `dispatcher` over ssh or simulated, `slurm/watcher` in an allocation of Slurm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from signal import SIGCONT, SIGINT, SIGTERM, SIGTSTP
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.local_link import LocalLink, job_policy
from ddplaunch.launcher.job.orders import Generation, JobEnd
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.context import AgentContext
from ddplaunch.launcher.node.job import JobInputs
from ddplaunch.launcher.node.run_socket import RunSocket
from ddplaunch.launcher.node.shutdown import Shutdown
from ddplaunch.launcher.node.signals import END_MARGIN, SignalOrigin, SignalSource
from ddplaunch.launcher.tell.closing import render_repeated
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.launcher.tell.story import Ended, row_of
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import plan_of_job
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.pipes import FrontPipes, OutputQueue
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token
from ddplaunch.spec.outcome import ClusterQuestions, Why
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.fork import is_followed
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:  # few jobs need it
    from ddplaunch.launcher.node.job import Requeue
    from ddplaunch.launcher.node.outward import Errands


class LeadJob(Struct, frozen=True, kw_only=True):
    """All that the command knows of the job before it starts the agents."""

    inputs: JobInputs
    key: Key  # by which agents and command know each other
    ports: Sequence[int] | None  # where agents connect; None: what starts them carries their connections, too
    python: str  # that runs the program on the hosts
    signals: frozenset[int]  # that the front passes on
    sent_again: frozenset[int] = frozenset()  # of which a second one does not escalate
    signals_all: bool = False  # whether the cluster may signal all processes of the job, see `SignalSource`
    replaceable: bool = False  # whether an agent that is lost may be started again
    requeue: Requeue | None = None


def inputs_of_lead(
    spec: JobSpec,
    env: Mapping[str, str],
    allocation: Allocation,
    *,
    run_id: str,
    python: str,
    reports_to_caller: bool = False,
    cluster: ClusterQuestions = ClusterQuestions(),  # noqa: B008 - it is frozen
) -> JobInputs:
    """Return what is known of a job where its agents are started; nothing there is inspected, for no worker runs there."""
    return JobInputs(
        spec=spec,
        env=token.public(env),
        allocation=allocation,
        node=Node(
            host=os.uname().nodename,
            hardware=Hardware(),
            devices=(),
            python=python,
            bootstrap="",
            env=token.public(env),
            is_followed=is_followed(),
        ),
        draft=plan_of_job(spec, allocation, run_id=run_id, python=python),
        screen=Screen.here(env, has_rows=spec.live),
        error_files=ErrorFiles(run_id, env.get("TMPDIR") or "/tmp"),
        leads=True,
        reports_to_caller=reports_to_caller,
        cluster=cluster,
    )


class Lead:
    """The coordinator of all agents, and what a command does for the whole job: signals, the record, the socket of the run."""

    def __init__(self, loop: Loop, lead: LeadJob, files: FileQueue, pipes: FrontPipes) -> None:
        self._loop = loop
        self._job = lead
        inputs, spec, allocation = lead.inputs, lead.inputs.spec, lead.inputs.allocation
        files.attach(loop)
        self.context = AgentContext(loop, inputs, files, OutputQueue(loop, pipes.output[1]))
        self.reporter = self.context.reporter
        self.signals = SignalSource(
            loop,
            pipes,
            stops=spec.ending_signals,
            sent_again=lead.sent_again,
            end_within=spec.grace_period + END_MARGIN,
            signals_all=lead.signals_all,
            from_caller=inputs.reports_to_caller,
            heartbeat_timeout=spec.heartbeat_timeout,
        )
        least, most = allocation.nnodes
        policy = job_policy(
            spec,
            least,
            most,
            dispatched=True,
            names=tuple(host.address for host in allocation.start),
            has_lease=allocation.is_elastic,
        )
        self.coordinator = Coordinator(
            loop, job.begin(policy, loop.now(), first_term(time.time())), inputs.draft, JobReporter(self.reporter)
        )
        terms = Terms(
            max_nodes=most,
            run_id=inputs.draft.run_id,
            # --local-addr is one of this host, which need not be that of any node
            address=spec.master_addr or (LOOPBACK if most == 1 or spec.simulate else None),
            key=lead.key,
            listen=None,
            ports=lead.ports,
            heartbeat_timeout=spec.heartbeat_timeout,
            may_shorten_silence=spec.may_shorten_silence,
        )
        self.incoming = Incoming(loop, terms, self.coordinator, self.reporter.print)
        self.link = LocalLink(loop, self.coordinator, has_workers=False)
        self.coordinator.lead(self.link.take, self.incoming.agents, is_one_host=spec.simulate is not None)
        self.shutdown = Shutdown(loop, self.context, self.signals, pipes, lead.requeue)
        self.reporter.tell_all = self.coordinator.say
        self._run_socket = RunSocket(loop, self.context, lambda: inputs.draft.run_id)
        self._outward: list[Errands] = []
        self._unreported: Generation | None = None  # that begins
        self.signum = 0  # the first signal to stop
        self.front_lost = False

    def open(self) -> None:
        """Take signals and questions from now on, and look for the stop file."""
        self.signals.listen(self._job.signals)
        self._run_socket.open(self.link)
        spec = self._job.inputs.spec
        if spec.notify or spec.metrics_file:
            from ddplaunch.launcher.node import outward  # few jobs need it

            self._outward = outward.begin(self._loop, self.context, self.coordinator)
        if spec.stop_file:
            from ddplaunch.launcher.node import notices  # few jobs need it

            clock = self.reporter.clock
            notices.watch_stop_file(self._loop, spec.stop_file, clock() - self.reporter.story.began)

    @property
    def has_begun(self) -> bool:
        """Whether workers were started."""
        return self.coordinator.state.generation.number >= 0

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, and all agents know or have had the time to; or has not begun, and cannot any more."""
        return self.link.is_over or not self.has_begun

    @property
    def status(self) -> int | None:
        """The exit status of the job; None while it goes on."""
        return self.link.end.status if self.link.end is not None else None

    def handle(self, event: Any) -> None:
        """Take an event of the loop that concerns the whole job."""
        match event:
            case node.SignalReceived() if not event.is_copy or event.signum in self._job.inputs.spec.ending_signals:
                self._on_signal(event)
            case node.FrontLost():
                self.front_lost = True
                self.context.queue.abandon()
                self._stop(Why.FRONT_LOST, 0)
            case events.FrontWaits():
                self.signals.let_front_stop(all_stopped=True)
            case events.NoticeSeen():
                self._on_stop_file(event)
            case events.ClientAsked(client, request):
                self._run_socket.answer(client, request)
            case events.StopAsked():
                # as Ctrl-C does; with another signal if that is ignored here, as after nohup
                self.reporter.print("asked to stop from another shell")
                self.coordinator.feed(job.Abandoned())
                stop = SIGINT if SIGINT in self._job.signals else SIGTERM
                self.signals.received(stop, SignalOrigin.FRONT, typed=Typed.YES)
            case events.ClientGone(client):
                self._run_socket.forget(client)
            case events.ClientsFailed(why):
                self._run_socket.fail(why)
            case Generation():
                self._on_generation(event)
            case JobEnd():
                self._on_end(event)

    # --- signals

    def _on_signal(self, event: node.SignalReceived) -> None:
        """Take a signal of the user: stop the job, kill its workers at a second signal to stop, or pass it on to all workers."""
        signum, now = event.signum, self._loop.now()
        if (row := row_of(event)) is not None:
            self.reporter.emit(row[0], **row[1])
        if signum not in self._job.inputs.spec.ending_signals:
            if signum in (SIGTSTP, SIGCONT):
                suspends = signum == SIGTSTP
                self.coordinator.feed(job.JobSuspended(now) if suspends else job.JobResumed(now))
            self.coordinator.forward(signum)
        elif not self.signum:
            self.signum = signum
            self._stop(Why.SIGNALLED, signum, by_cluster=event.by_cluster)
        elif event.escalates:
            self.reporter.print("killing the workers at once")
            self.coordinator.feed(job.NodeEscalated(job.NO_MEMBER, signum, now))
        elif event.taken_for:
            self.reporter.print(render_repeated(event, os.getppid()))

    def _stop(self, why: Why, signum: int, *, by_cluster: bool = False) -> None:
        self.coordinator.feed(job.StopRequested(why, signum, self._loop.now(), by_cluster))

    def _on_stop_file(self, notice: events.NoticeSeen) -> None:
        """Stop the job for good, where SIGTERM itself might requeue it; say if the file cannot be looked at."""
        if notice.problem:
            if self.status is None:
                self.reporter.warn(f"{notice.option}: {notice.problem}")
            return
        self.reporter.emit("notice", text=notice.option)
        self.reporter.print(f"{notice.option}: {signal_name(notice.signum)} to the workers")
        self.coordinator.feed(job.Abandoned())
        self.signals.received(notice.signum, SignalOrigin.PROCESS)  # no second request of a user

    # --- generations, and the end

    def _on_generation(self, generation: Generation) -> None:
        """Report that all agents begin a generation, and keep the record of the run from the first one on."""
        inputs, agreed = self._job.inputs, generation.agreed
        assert agreed is not None
        plan = plan_of_job(inputs.spec, inputs.allocation, run_id=agreed.run_id, python=self._job.python, agreed=agreed)
        if self.context.folder is None:
            self.context.make_folder(plan)
            assert self.context.folder is not None
        self._report_generation()
        self.reporter.use(plan, self.context.folder)
        self._unreported = generation

    def _report_generation(self) -> None:
        """Report the generation that has begun, unless that was done."""
        if (generation := self._unreported) is not None:
            self._unreported = None
            self.reporter.generation_started(generation.number, generation.term, generation.port)

    def _on_end(self, end: JobEnd) -> None:
        """Record how the job has ended, and tell those who wait for it."""
        self._report_generation()  # wherever the folder lies: what has ended has begun before
        if self.has_begun:
            self.shutdown.conclude(self._ended(end), self.link, time.monotonic())
        elif self.signum in self._job.inputs.spec.requeue_on and not end.requeue:
            self.link.end = replace(end, requeue=self.signum)  # the notice came before any worker had begun
        self._run_socket.ended(end)

    def _ended(self, end: JobEnd) -> Ended:
        generation = self.coordinator.state.generation
        return Ended(
            status=end.status,
            why=end.why,
            text=end.text,
            restarts=generation.number,
            exits=generation.exits,
            failure=generation.start_failure or generation.failure,
        )

    def fail(self, error: LaunchError) -> None:
        """Tell the user, or the caller of `launch()`, why the job could not begin."""
        if self.reporter.caller is not None:
            self.reporter.caller.closed(error.render())
        else:
            self.reporter.stderr.write(error.render())

    def before_sleep(self) -> None:
        """Say what there is to be said of generations, pauses and the folder, of which it is known later where it lies."""
        if self.context.folder is not None and self.context.folder.is_settled:
            self._report_generation()
        self.reporter.paused(self._loop.clock.pause)
        self.reporter.report_folder()

    def close(self) -> None:
        """Tell programs outside the job its end, queue the job again if that is due, and hand the last output over."""
        self._run_socket.close()
        self.shutdown.wait_for(self._outward)
        self.link.close()
        self.reporter.stderr.put(self.context.last_words)
        if self.link.end is not None:
            self.shutdown.leave(self._ended(self.link.end), self.link)
        else:
            self.shutdown.leave_early()
