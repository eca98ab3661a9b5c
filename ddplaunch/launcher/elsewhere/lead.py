"""The part of a command that has started all agents of a job: it coordinates them, behind the user's front, and has no workers.

It hears every agent itself, whatever carries their connections, and decides when each generation (start of all workers) begins.
Its kinds start the agents and show their output: `dispatcher` over ssh or simulated, `slurm/watcher` in an allocation of Slurm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from signal import SIGCONT, SIGTSTP
from typing import Any

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.local_link import LocalLink, job_policy
from ddplaunch.launcher.job.orders import Generation, JobEnd
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.behind_front import BehindFront
from ddplaunch.launcher.node.job import FrontedJob, JobInputs
from ddplaunch.launcher.tell.closing import render_repeated
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.launcher.tell.story import Ended, row_of
from ddplaunch.plan.cluster import AllocatedJob
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.devices import Hardware
from ddplaunch.plan.devices.node import Node
from ddplaunch.plan.make import plan_of_job
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.silence import Keepalive
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.spec.outcome import ClusterQuestions, Why
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.fork import debugger_follows_children


class LeadJob(FrontedJob, frozen=True, kw_only=True):
    """All that the command knows of the job before it starts the agents."""

    key: Key  # by which agents and command know each other
    ports: Sequence[int] | None  # where agents connect; None: what starts them carries their connections, too
    python: str  # that runs the program on the hosts


def inputs_of_lead(
    allocated: AllocatedJob,
    *,
    run_id: str,
    python: str,
    reports_to_caller: bool = False,
    cluster: ClusterQuestions | None = None,
) -> JobInputs:
    """Return what is known of a job where its agents are started, with `python` of the hosts; no worker runs here.

    So this node is not inspected: it stands there without hardware and devices. `draft` is a plan as if all nodes were like it.
    `reports_to_caller`: how the job ends is for a caller in Python; `cluster` None: there is nobody to ask.
    """
    spec, env = allocated.spec, allocated.public_env
    return JobInputs(
        spec=spec,
        env=env,
        allocation=allocated.allocation,
        node=Node(
            host=os.uname().nodename,
            hardware=Hardware(),
            devices=(),
            python=python,
            bootstrap="",
            env=env,
            debugger_follows_children=debugger_follows_children(),
        ),
        draft=plan_of_job(spec, allocated.allocation, run_id=run_id, python=python),
        screen=Screen.here(env, has_rows=spec.live),
        error_files=ErrorFiles(run_id, env.get("TMPDIR") or "/tmp"),
        only_coordinates=True,
        reports_to_caller=reports_to_caller,
        cluster=cluster,
    )


class Lead(BehindFront):
    """The coordinator of all agents, and what a command does for the whole job; its kinds start the agents."""

    _link: LocalLink

    def __init__(self, loop: Loop, lead: LeadJob, files: FileQueue, pipes: FrontPipes) -> None:
        """Prepare to coordinate; no agent is started yet. `pipes` lead to the front, `files` to what writes the run folder."""
        super().__init__(loop, lead, files, pipes)
        self._job = lead
        self._spec = spec = lead.inputs.spec
        inputs, allocation = lead.inputs, lead.inputs.allocation
        least, most = allocation.nnodes
        policy = job_policy(
            spec,
            least,
            most,
            has_one_command=True,
            names=tuple(host.address for host in allocation.hosts_to_start_on),
            has_lease=allocation.is_elastic,  # where the job goes on without a node, that node's workers end by a lease
        )
        term = first_term(time.time())  # of the first generation: terms grow with each one, and from run to run
        state = job.first_state(policy, loop.now(), term)
        self.coordinator = Coordinator(loop, state, inputs.draft, JobReporter(self._reporter))
        terms = Terms(  # what the coordinator sets for all agents
            keepalive=Keepalive.of(spec, most),
            run_id=inputs.draft.run_id,
            # of rank 0; not --local-addr, which is one of this host, where no worker needs to be. None: agents agree on one
            address=spec.master_addr or (LOOPBACK if most == 1 or spec.simulate else None),
            key=lead.key,
            listen=None,  # on all addresses, if there are ports
            ports=lead.ports,
        )
        self.incoming = Incoming(loop, terms, self.coordinator)
        # by which this loop hears of each generation and of the end
        self._link = LocalLink(loop, self.coordinator, has_workers=False)
        self.coordinator.lead(self._link.on_order, self.incoming.agents, is_one_host=spec.simulate is not None)
        # what the reporter says of this process stands for all agents that say the same
        self._reporter.tell_all = self.coordinator.say
        self._unreported: Generation | None = None  # one that has begun, until it is settled where its folder lies
        self._signum = 0  # the first signal to stop; 0: none has come
        self._is_front_lost = False

    def connect(self) -> Link:
        """Return the link to the coordinator, which is here."""
        return self._link

    @property
    def _has_begun(self) -> bool:
        """Whether workers were started."""
        return self.coordinator.state.generation.number >= 0

    @property
    def _needs_no_agent(self) -> bool:
        """Whether the job has ended, and all agents know or have had the time to; or it has not begun."""
        return self._link.is_over or not self._has_begun

    @property
    def _status_of_job(self) -> int | None:
        """The exit status of the job; None while the job goes on, or if the job has not begun."""
        return self._link.end.status if self._link.end is not None else None

    def handle(self, event: Any) -> None:
        """Take an event of the loop that concerns the whole job; the kinds of `Lead` take others."""
        super().handle(event)
        match event:
            # of a signal that several of our processes get, all but the first are copies: workers are to get it once; a copy of
            # one to stop passes, since a line tells the user that both count as one request
            case node.SignalReceived() if not event.is_copy or event.signum in self._spec.ending_signals:
                self._on_signal(event)
            case node.FrontLost():
                self._is_front_lost = True
                self._stop(Why.FRONT_LOST, 0)
            case events.FrontWaits():  # after Ctrl-Z, until all workers here are stopped: there are none
                self._signals.let_front_stop(all_stopped=True)
            case Generation():
                self._on_generation(event)
            case JobEnd():
                self._on_end(event)

    # --- signals

    def _on_signal(self, event: node.SignalReceived) -> None:
        """Take a signal of the user: stop the job, kill its workers at a second request to stop, or pass it on to all workers.

        A repetition of the first is no request, nor is a scheduler's first signal.
        """
        signum, now = event.signum, self._loop.now()
        if (row := row_of(event)) is not None:  # of events.jsonl; None: it has none for this signal
            kind, fields = row
            self._reporter.emit(kind, **fields)
        if signum not in self._spec.ending_signals:
            if signum in (SIGTSTP, SIGCONT):
                suspends = signum == SIGTSTP
                self.coordinator.feed(job.JobSuspended(now) if suspends else job.JobResumed(now))
            self.coordinator.forward(signum)
        elif not self._signum:
            self._signum = signum
            self._stop(Why.SIGNALLED, signum, by_cluster=event.by_cluster)
        elif event.is_request:
            self._reporter.print("killing the workers at once")
            self.coordinator.feed(job.NodeEscalated(job.NO_MEMBER, signum, now))  # no node, but this command says so
        elif event.repeats_request_of:  # the user learns that both signals count as one request
            self._reporter.print(render_repeated(event, os.getppid()))

    def _stop(self, why: Why, signum: int, *, by_cluster: bool = False) -> None:
        self.coordinator.feed(job.StopRequested(why, signum, self._loop.now(), by_cluster))

    # --- generations, and the end

    def _on_generation(self, generation: Generation) -> None:
        """Keep a generation that all agents begin, to be reported before the next sleep; make the run folder for the first one.

        Where the folder lies is in the report, and is known only once the process that writes files has made it.
        """
        inputs, agreed = self._job.inputs, generation.agreed
        assert agreed is not None  # by the agents: so always where a command has started them
        plan = plan_of_job(inputs.spec, inputs.allocation, run_id=agreed.run_id, python=self._job.python, agreed=agreed)
        if self._context.folder is None:
            self._context.make_folder(plan)
            assert self._context.folder is not None
        self._report_pending()  # the generation before, while the reporter still has its plan
        self._reporter.use_plan(plan, self._context.folder)
        self._unreported = generation

    def _report_pending(self) -> None:
        """Report that the kept generation has begun, if there is one."""
        if (generation := self._unreported) is not None:
            self._unreported = None
            self._reporter.generation_started(generation.number, generation.term, generation.port)

    def _on_end(self, end: JobEnd) -> None:
        """Record how the job has ended, and tell those who wait for it."""
        self._report_pending()  # wherever the folder lies: what has ended has begun before
        if self._has_begun:
            self._report_end_of_job(end)
        elif self._signum in self._spec.requeue_on and not end.requeue:
            self._link.end = replace(end, requeue=self._signum)  # the notice came before any worker had begun
        self._run_socket.ended(end)

    def ended(self) -> Ended:
        """Return how the job has ended."""
        generation, end = self.coordinator.state.generation, self._link.end
        assert end is not None
        return Ended(
            status=end.status,
            why=end.why,
            text=end.text,
            restarts=generation.number,  # the first one has 0
            exits=generation.exits,
            failure=generation.start_failure or generation.failure,
        )

    def before_sleep(self) -> None:
        """Say that a generation has begun once it is known where its folder lies, besides what each loop says."""
        if self._context.folder is not None and self._context.folder.is_settled:
            self._report_pending()
        super().before_sleep()
