"""The agent, the process that supervises a node's workers: events go to the decision (`decide.node`), its actions to the parts.

No threads: without an event the process sleeps; where there is a deadline it wakes once a second, see `system/process/clock.py`.
"""

from __future__ import annotations

from contextlib import ExitStack
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import Phase
from ddplaunch.launcher.job import orders
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import JobEnd, NodeEnd, Warned
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.behind_front import BehindFront
from ddplaunch.launcher.node.generations import Generations
from ddplaunch.launcher.node.job import AgentJob
from ddplaunch.launcher.node.leftovers import Leftovers
from ddplaunch.launcher.node.run_socket import ClientOrders
from ddplaunch.launcher.node.signals import SignalOrigin
from ddplaunch.launcher.tell.story import Ended
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import Why, WorkerExit
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import Report
    from ddplaunch.launcher.node.health import HealthGate
    from ddplaunch.launcher.node.job import Connect


class Agent(BehindFront):
    """Owns the agent's parts, which know the loop and the context, and nothing of each other; `handle` says what they do when."""

    def __init__(self, loop: Loop, job: AgentJob, connect: Connect, files: FileQueue, pipes: FrontPipes) -> None:
        """Make the parts that every job needs. `connect` gives, later, the link to the coordinator, which may be made here."""
        super().__init__(loop, job, files, pipes)
        self._job = job
        self._connect = connect
        self._generations = Generations(loop, self._context)
        self._leftovers = Leftovers(loop, files, self._generations)
        self._client_orders = ClientOrders(loop, self._context, self._generations, self._run_socket)
        self._health: HealthGate | None = None  # once a restart has to wait for a health check
        self._state = node.State(policy=job.policy)
        self._deadline_timer = loop.timer(None, self._on_deadline)  # of `_state`, as is the next
        self._lax_deadline_timer = loop.timer(None, self._on_deadline, may_come_late=True)
        self._exits: list[WorkerExit] = []  # of the last generation that has ended

    def connect(self) -> Link:
        """Return the link to the coordinator, which is reached, or made in this process."""
        link = self._connect(self._loop, self._reporter)
        if self._job.inputs.allocation.has_one_screen:
            self._reporter.tell_all = self._tell_all
        return link

    def _tell_all(self, text: str, is_warning: bool) -> None:
        """Have the coordinator say once what holds for several nodes. Called by the reporter."""
        self._report(Warned.of(text, is_warning))

    def begin(self, opened: ExitStack) -> None:
        """Have what may announce the end of this node watched, and what forks workers made ready."""
        self._watch_for_notices()
        opened.callback(self._generations.close)
        if self._job.inputs.allocation.rendezvous is not None:
            # the fork server imports while the nodes meet, and in a spare (a node that is not needed yet) while that waits
            self._generations.starter.prepare(self._context.draft, self._job.inputs.env)

    @property
    def is_over(self) -> bool:
        """Whether this node has ended, and the other nodes need its coordinator no longer."""
        assert self._link is not None
        return self._state.phase is Phase.ENDED and self._link.is_over

    def status(self) -> int:
        """Return the exit status of the job, as the coordinator has sent it, or as this node has decided without it."""
        assert self._state.end.status is not None
        return self._state.end.status

    def _watch_for_notices(self) -> None:
        """Have the file and the command watched that may announce the end of the job, or of this node."""
        inputs, spec = self._context.inputs, self._context.inputs.spec
        if not (spec.notice_file or spec.notice_command):
            return
        from ddplaunch.launcher.node import notices  # few jobs need it

        notices.watch(self._loop, spec, inputs.env, leaves=inputs.allocation.nodes_leave)

    def before_sleep(self) -> None:
        """Adapt to how much output waits, and to whether there are workers to start."""
        self._generations.before_sleep()
        super().before_sleep()

    # --- what happens, and what follows

    def handle(self, event: Any) -> None:
        """Carry out what follows from one event of the loop: what a part has posted, or an order of the coordinator."""
        super().handle(event)
        generations, loop = self._generations, self._loop
        match event:
            # the processes of this node
            case events.WorkerEnded(rank):
                # once workers are being stopped, each end brings its own exception
                for found in generations.events_of_end(rank, names_causes=self._state.workers_go_on):
                    loop.post(found)
            case events.ChildEnded():
                self._leftovers.on_child_ended()
            case events.ReapDue():
                self._leftovers.reap()
                if self._state.phase is Phase.SWEEPING:
                    self._sweep()  # what it waits for may be gone
            case events.GroupJoined():
                if self._context.inputs.spec.straggler_check:  # for which the coordinator asks torch from then on
                    self._report(orders.GroupMade())
            case events.WorkersLinger(ranks):
                generations.name_lingering(ranks)
            # the front
            case events.FrontWaits():  # to stop (Ctrl-Z), until the workers have
                self._signals.let_front_stop(all_stopped=generations.has_stopped)
            # what the user has this node look for; other notices are for `super().handle`
            case events.NoticeSeen(problem="", stops_job=False):
                self._on_notice(event)
            case events.HealthChecked(number, why):
                # no generation waits any more if it had to begin before the check had ended
                if self._health is not None and (generation := self._health.release(number)) is not None:
                    self._on_health_checked(generation, why)
            # the coordinator, and the link to it
            case orders.LookingForCoordinator(text):
                self._reporter.print(text)
            case orders.Leased(left):
                self._pipes.note_lease(left)  # seconds that workers may live, else the front kills them
            case orders.Waits(text):  # this node does, as a spare or for a lost node 0
                self._reporter.report_waiting(text)
            case orders.Listening(port):
                self._context.tell_port(port)
            case orders.Generation():
                self._on_order_to_begin(event)
            case orders.Forward(signum):
                self._signals.received(signum, SignalOrigin.COORDINATOR)
            case orders.ClientOrder():
                self._on_client_order(event)
            case orders.JobEnd():
                self._step(node.JobEnded(event.status, loop.now()))
            # commands that ask the run
            case events.QuestionAnswered(report):
                self._report(report)
            case events.AttachAsked(number, asked):  # by a command that debugs or profiles a worker here
                self._run_socket.serve(number, lambda client: generations.debuggers.attach(asked, client))
            case events.ClientGone(client):
                if generations.made_debuggers is not None:
                    generations.made_debuggers.forget(client)
            # what the decision takes
            case _ if isinstance(event, node.Event):
                self._step(event)

    def _carry_out(self, action: node.Action) -> None:
        """Carry out one action of the decision (`launcher.decide.node`)."""
        match action:
            case node.StartWorkers():
                self._generations.begin()
            case node.Sweep(signum, sparing):
                self._sweep(signum, sparing=sparing)
            case node.ReportEnded():
                self._report_node_end()
            case node.Exit(status):
                self._exit(status)
            case node.Suspend() | node.Resume():
                self._report(action)
                self._generations.suspend(isinstance(action, node.Suspend))
            case _ if isinstance(action, node.Reports):  # an action which is what the coordinator is to read
                self._report(action)
            case _:  # an action on the workers
                self._generations.carry_out(action)

    def _on_client_order(self, order: orders.ClientOrder) -> None:
        """Carry out what the coordinator asks for a client of its socket, about the workers that it knows of.

        Those are the draft's as long as this node has begun no generation with that coordinator.
        """
        assert self._link is not None
        if self._link.has_begun:
            self._client_orders.carry_out(order, self._generations.plan, self._state.exits)
        else:
            self._client_orders.carry_out(order, self._context.draft, ())

    def _on_notice(self, notice: events.NoticeSeen) -> None:
        """Send the signal of a notice that is for this node to its workers, and tell the coordinator."""
        is_alone = self._generations.plan.nnodes == 1
        self._tell_notice(notice, "" if is_alone else f" on {self._context.host}")
        is_over = self._state.phase is Phase.ENDED or self._state.is_sweeping_after_success
        if notice.signum != SIGTERM and not is_over:
            self._report(node.ReportNotice(notice.signum))
        self._signals.received(notice.signum, SignalOrigin.PROCESS)

    def stop_for_good(self, signum: int, source: SignalOrigin, typed: Typed = Typed.NO) -> None:
        """Stop the job on all nodes, and have it not queued again; asked a second time, kill all workers.

        Where SIGTERM has a node leave a job that goes on, the signal is no way to do that: the coordinator stops all nodes.
        """
        coordinator = self._coordinator
        if signum != SIGTERM or coordinator is None or not self._context.inputs.allocation.nodes_leave:
            super().stop_for_good(signum, source, typed)
            return
        self._signals.was_asked_to_end = True
        coordinator.abandon()
        coordinator.stop_all_nodes(signum)

    # --- the begin of a generation

    def _on_order_to_begin(self, generation: orders.Generation) -> None:
        """Begin a generation; if it is a restart, once the node has passed its health check (the first one is behind it)."""
        inputs, end = self._context.inputs, self._state.end
        is_ending = end.stop_signal or end.front_lost  # the generation is to end as soon as it has begun
        if inputs.spec.health_check is None or generation.number == 0 or is_ending:
            self._begin(generation)
            return
        if self._health is None:
            from ddplaunch.launcher.node.health import HealthGate  # few jobs have one

            self._health = HealthGate(self._loop, inputs.spec.health_check, inputs)
        self._health.check(generation)

    def _on_health_checked(self, generation: orders.Generation, why_unfit: str) -> None:
        """Begin the generation that waited for the health check; or leave the job, if this node is not fit and others can go on.

        If this node coordinates a job that cannot go on without it, the generation begins, and fails at once.
        """
        assert self._link is not None
        assert self._health is not None
        if not why_unfit:
            self._begin(generation)
            return
        if self._coordinator is None:
            self._report(self._health.goodbye(why_unfit))  # to the coordinator elsewhere: this node leaves
        leaves = self._coordinator is None or self._coordinator.leave_unfit(why_unfit)  # False: the others cannot go on
        if leaves:
            self._link.on_order(self._health.end_of_node(why_unfit))  # the job's end for this node, as if ordered
            return
        self._begin(generation)
        self._step(node.StartFailed(self._health.start_failure(generation, why_unfit), self._loop.now()))

    def _begin_without_health_check(self) -> None:
        """Begin the generation that waits for the health check, if one does: what comes next cannot wait."""
        if self._health is not None and (generation := self._health.give_up()) is not None:
            self._begin(generation)

    def _begin(self, generation: orders.Generation) -> None:
        """Begin a generation, as the coordinator has ordered."""
        assert self._link is not None
        self._generations.take_order(generation, self._link.address)
        self._step(node.GenerationBegun(generation.number, generation.ranks, self._loop.now(), generation.alone))

    def _step(self, event: node.Event) -> None:
        """Let the decision take an event, and carry out the actions that follow."""
        if isinstance(event, (node.StopOrdered, node.KillOrdered, node.JobEnded)):
            self._begin_without_health_check()  # the order is about the generation that waits for the check
        if self._state.phase is Phase.ENDED:
            return  # two children may have ended at once; nothing is reported after the end
        event = self._with_facts_of_node(event)  # such as whether the coordinator is here
        # not by Ctrl-C's SIGINT: the output is told of that when the workers get it
        is_ordered_stop = isinstance(event, node.StopOrdered) and event.signum != SIGINT and self._state.workers_go_on
        if is_ordered_stop and self._generations.plan.nnodes > 1:
            self._generations.output.note_failed(elsewhere=True)  # tracebacks here follow from that, and are folded
        self._reporter.on_event(event, self._state)
        self._state, actions = node.step(self._state, event)
        self._deadline_timer.set(self._state.deadline)
        # of checks that may come late, so as to wake no machine
        self._lax_deadline_timer.set(self._state.lax_deadline)
        if not self._state.pending:  # no worker is to be started any more
            self._generations.start_no_more()
        for action in actions:
            self._reporter.on_action(action)
            self._carry_out(action)
        if self._state.end.stop_signal or self._state.end.front_lost:
            self._begin_without_health_check()  # a generation that waits for the check begins, and ends at once

    def _with_facts_of_node(self, event: node.Event) -> node.Event:
        """Return a signal or an order with what its maker cannot know: where the coordinator is, how long workers are silent."""
        if isinstance(event, node.SignalReceived):
            event = replace(event, coordinator_is_here=self._coordinator is not None)
        if isinstance(event, (node.SignalReceived, node.StopOrdered)) and event.signum == SIGINT:
            event = replace(event, silent_for=self._generations.silent_for)
        return event

    def _on_deadline(self) -> None:
        """Feed the decision that its deadline has come. Called by the loop."""
        self._step(node.DeadlineReached(self._loop.now()))

    # --- effects of several steps

    def _sweep(self, signum: int = 0, *, sparing: bool = False) -> None:
        """Look for processes that workers left behind, signal them if `signum` is not 0, and post which there are."""
        self._loop.post(node.Swept(self._leftovers.find(signum, sparing=sparing), self._loop.now()))

    def _report(self, report: Report) -> None:
        assert self._link is not None
        self._link.send(report)

    def _report_node_end(self) -> None:
        """Report to the coordinator how the workers of this node have ended, and where they were if they had to end.

        With that go the traces of the machine: kills for want of memory, room in /dev/shm, the folder of the logs.
        """
        state = self._state
        self._exits = self._generations.reap(state)
        recorded = dict(state.raised.errors)  # exceptions, by rank, which workers had recorded before they ended
        exits = tuple(replace(end, error=end.error or recorded.get(end.rank)) for end in self._exits)
        if (stacks := self._generations.stacks_at_end(state.generation)) is not None:
            self._report(stacks)  # they were looked into before they were stopped
        self._report(
            NodeEnd(state.generation, exits, state.start_failure, state.teardown.leftovers, self._reporter.traces)
        )

    def ended(self) -> Ended:
        """Return how the job has ended, as far as this node knows: of failures, only one of this node's workers."""
        assert self._link is not None
        state, end = self._state, self._link.end
        assert end is not None
        has_failed_here = state.why is Why.FAILED
        return Ended(
            status=self.status(),
            why=end.why,
            text=end.text,
            restarts=state.generation,  # the number of the last generation, counted from 0
            exits=self._exits,
            failure=(state.start_failure or state.failure) if has_failed_here else None,
        )

    def _is_left_in_charge(self) -> bool:
        """Whether this node is to queue the job again: a notice has come, its workers have left, and the command is lost.

        As a batch script has ended, Slurm kills what that has started, and gives the steps of the job time yet.
        """
        state = self._state
        if not (self._job.requeue and self._context.inputs.allocation.has_front) or state.end.abandoned:
            return False
        return state.all_have_obeyed_notice(self._exits)

    def _exit(self, status: int) -> None:
        """Conclude the job on this node, where nothing is left: find out how it ended, report that, and tell waiting clients."""
        assert self._link is not None
        self._reporter.tell_all = None  # what the coordinator printed once for all nodes is printed here: it has ended
        self._exits = self._generations.reap(self._state) or self._exits  # none here: those reaped before are it
        self._reporter.report_dropped_output(self._generations.output.dropped)
        if self._state.why is Why.SIGNALLED:
            self._signals.was_asked_to_end = True  # the signal may have come to another node
        if self._link.end is None:  # the coordinator did not answer, and the user does not wait for it
            self._link.give_up()  # no word of the coordinator is waited for any more
        end = self._link.end = self._end_as_known_here(status)  # that of the job
        self._report_end_of_job(end)
        self._run_socket.ended(end)

    def _end_as_known_here(self, status: int) -> JobEnd:
        """Return how the job has ended: as the coordinator has said, completed by what this node knows.

        Without its word, and where it says nothing for the user, the job was stopped by a signal, which this node names. If the
        coordinator was lost after a notice, this node may have to queue the job again.
        """
        assert self._link is not None
        end = self._link.end
        if end is None or (end.why == "signalled" and self._link.coordinator is None and not end.text):
            end = JobEnd(status, "signalled", self._reporter.stopped_line(self._state.end.stop_signal))
        if end.why == "lost" and self._is_left_in_charge():
            end = replace(end, requeue=self._state.notice)
        return end
