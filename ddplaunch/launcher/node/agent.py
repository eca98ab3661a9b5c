"""The agent of a node: what happens becomes events, `launcher.decide.node` decides, actions become calls of the agent's parts.

No threads: without an event the process sleeps; where there is a deadline it wakes once a second, see `system/process/clock.py`.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from signal import SIGINT, SIGKILL, SIGTERM, SIGWINCH
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.node import Phase
from ddplaunch.launcher.job import orders
from ddplaunch.launcher.job.link import Link
from ddplaunch.launcher.job.orders import JobEnd, NodeEnd, SentReport, Unfit, Warned
from ddplaunch.launcher.node import events
from ddplaunch.launcher.node.behind_front import BehindFront
from ddplaunch.launcher.node.generations import Generations
from ddplaunch.launcher.node.job import AgentJob
from ddplaunch.launcher.node.leftovers import Leftovers
from ddplaunch.launcher.node.signals import SignalOrigin
from ddplaunch.launcher.tell.closing import render_still_running, render_stuck
from ddplaunch.launcher.tell.story import Ended
from ddplaunch.reach.pipes import CONTROL, Backpressure, FrontPipes
from ddplaunch.reach.repeated_stop import Typed
from ddplaunch.record.file_queue import FileQueue
from ddplaunch.spec.outcome import StartFailure, Why, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import expendable
from ddplaunch.system.fields import line, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.linux import keep_freed_memory

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import Report
    from ddplaunch.launcher.node.health import HealthGate
    from ddplaunch.launcher.node.job import Connect
    from ddplaunch.launcher.node.questions import Questions
    from ddplaunch.launcher.node.workers import Workers
    from ddplaunch.reach.channel.streams import Chunk
    from ddplaunch.record.window.questions import Ask, Forget

_AT_WORK = (Phase.RUNNING, Phase.SETTLING)


def run(job: AgentJob, connect: Connect, files: FileQueue, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status; `files` goes to the process that writes them."""
    # the start went without a garbage collector; a job of weeks needs one, for what it makes itself
    gc.freeze()
    gc.enable()
    keep_freed_memory()
    return Agent(Loop(), job, connect, files, pipes).run()


class Agent(BehindFront):
    """Owns the parts, which know the loop and the context, and nothing of each other; `handle` says what they do when."""

    def __init__(self, loop: Loop, job: AgentJob, connect: Connect, files: FileQueue, pipes: FrontPipes) -> None:
        """Make all parts of the agent. The coordinator is not known yet: `connect` gives the link to it."""
        super().__init__(loop, job, files, pipes)
        self._job = job
        self._connect = connect
        self._backpressure = Backpressure(loop, self._context.queue)
        self._generations = Generations(loop, self._context)
        self._leftovers = Leftovers(loop, files, self._generations)
        self._questions: Questions | None = None  # once a question has come
        self._health: HealthGate | None = None  # once a restart has to wait for a health check
        self._stop_asked = False  # of all nodes, where a signal would mean this one alone
        self._state = node.State(policy=job.policy)
        self._deadline = loop.timer(None, self._on_deadline)
        self._rest = loop.timer(None, self._on_deadline, may_rest=True)
        self._exits: list[WorkerExit] = []  # of the last generation that has ended

    def connect(self) -> Link:
        """Reach the coordinator, or be it."""
        link = self._connect(self._loop, self._reporter)
        if self._job.inputs.allocation.has_one_screen:
            self._reporter.tell_all = lambda text, is_warning: self._report(Warned(line(text), is_warning))
        return link

    def begin(self, opened: ExitStack) -> None:
        """Have what may announce the end of this node watched, and what forks workers made ready."""
        self._watch_for_notices()
        opened.callback(self._generations.close)
        if self._job.inputs.allocation.rendezvous is not None:
            # what forks workers imports while the nodes meet, and in a spare while it waits
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

    @property
    def run_id(self) -> str:
        """The name that all nodes know the run by; "" before they have met."""
        return self._generations.run_id

    def _watch_for_notices(self) -> None:
        """Have the file and the command watched that may announce the end of the job, or of this node."""
        inputs, spec = self._context.inputs, self._context.inputs.spec
        if not (spec.notice_file or spec.notice_command):
            return
        from ddplaunch.launcher.node import notices  # few jobs need it

        notices.watch(self._loop, spec, inputs.env, leaves=inputs.allocation.nodes_leave)

    def before_sleep(self) -> None:
        """Adapt to how much output waits, and to whether there is more to start."""
        output, backpressure = self._generations.output, self._backpressure
        backpressure.update(logged=output.logs_have_all)
        if self._workers is not None:
            self._workers.pause_output(backpressure.holds or self._context.files.holds)
        output.muted = backpressure.mutes
        if not output.muted:
            self._reporter.report_dropped_output(output.dropped)
        self._generations.before_sleep()
        super().before_sleep()

    @property
    def _workers(self) -> Workers | None:
        """The workers of the generation that there is; None between two."""
        return self._generations.workers

    # --- what happens, and what follows

    def handle(self, event: Any) -> None:
        """Carry out what follows from one event of the loop, or from one action of the decision (`launcher.decide.node`)."""
        super().handle(event)
        context, generations, loop = self._context, self._generations, self._loop
        match event:
            # the processes of this node
            case events.WorkerEnded(rank):
                for found in generations.end_of(rank, tells_why=self._state.phase in _AT_WORK):
                    loop.post(found)
            case events.ChildEnded():
                self._leftovers.child_ended()
            case events.ReapDue():
                self._leftovers.reap()
                if self._state.phase is Phase.SWEEPING:
                    self._sweep()
            case events.GroupJoined():
                if context.inputs.spec.straggler_check:
                    self._report(orders.GroupMade())
            case events.WorkersLinger(ranks):
                generations.name_lingering(ranks)
            # the front
            case events.FrontWaits():
                self._signals.let_front_stop(all_stopped=self._workers is None or self._workers.has_stopped)
            # what the user has this node look for
            case events.NoticeSeen(problem="", stops_job=False):
                self._on_notice(event)
            case events.HealthChecked(number, why):
                if self._health is not None and (generation := self._health.release(number)) is not None:
                    self._on_health(generation, why)
            # the coordinator
            case orders.LookingForCoordinator(text):
                self._reporter.print(text)
            case orders.Leased(left):
                self._pipes.note_lease(left)
            case orders.Waits(text):
                self._reporter.report_waiting(text)
            case orders.Listening(port):
                context.queue.put(CONTROL, b'{"type":"listening","port":%d}' % port)
            case orders.Generation():
                self._on_order_to_begin(event)
            case orders.Forward(signum):
                self._signals.received(signum, SignalOrigin.COORDINATOR)
            case orders.ClientOrder(order):
                self._on_client_order(order)
            case orders.JobEnd():
                self._step(node.JobEnded(event.status, loop.now()))
            # commands that ask the run
            case events.QuestionAnswered(report):
                self._report(report)
            case events.AttachAsked(client, asked):
                if (visitor := self._run_socket.client(client)) is not None:
                    expendable(lambda: generations.debuggers.attach(asked, visitor), self._run_socket.fail)
            case events.ClientGone(client):
                if generations.debugged is not None:
                    generations.debugged.forget(client)
            # actions of the decision that concern more than the workers
            case node.StartWorkers():
                generations.begin()
            case node.Sweep(signum, sparing):
                self._sweep(signum, sparing=sparing)
            case node.ReportEnded():
                self._report_end()
            case node.Exit(status):
                self._exit(status)
            case node.Suspend() | node.Resume():
                self._report(event)
                if self._workers is not None:
                    self._workers.suspend(isinstance(event, node.Suspend))
                # when the job goes on, the shell has written to the screen
                generations.output.show_bars_again(loop.now())
            case _ if isinstance(event, SentReport):
                self._report(event)
            case _ if isinstance(event, node.Event):
                self._step(event)
            case _ if self._workers is not None:
                self._act_on(self._workers, event)

    def _on_client_order(self, order: Ask | Forget | Chunk) -> None:
        """Answer a question of a client, forget one, or pass on what a client says to a worker."""
        from ddplaunch.record.window.questions import Ask, Forget  # only a job that is looked into needs it

        match order:
            case Ask(number):
                expendable(lambda: self._answer(order), lambda why: self._report_no_answer(number, why))
            case Forget(number):
                if self._questions is not None:
                    self._questions.forget(number)
            case chunk:
                self._run_socket.take(chunk)

    def _answer(self, ask: Ask) -> None:
        """Answer a question about the workers: before this node has begun with the coordinator that asks, about the draft."""
        from ddplaunch.launcher.node.questions import Questions  # few are asked

        assert self._link is not None
        if self._questions is None:
            self._questions = Questions(self._loop, self._context, self._generations)
        if self._link.has_begun:
            self._questions.answer(ask, self._generations.plan, self._state.exits)
        else:
            self._questions.answer(ask, self._context.draft, ())

    def _act_on(self, workers: Workers, action: node.Action) -> None:
        """Carry out an action that concerns the workers there are."""
        generations, output, loop = self._generations, self._generations.output, self._loop
        match action:
            case node.ForwardSignal(signum, ranks):
                workers.forward(signum, ranks)
                if signum == SIGWINCH:
                    output.show_bars_again(loop.now())
            case node.StopWorkers(signum, ranks, by_cluster):
                generations.start_notice.end()
                if generations.debugged is not None:
                    generations.debugged.detach_all()
                workers.end(signum, ranks, time.monotonic(), by_cluster=by_cluster)
            case node.KillWorkers(ranks):
                workers.end(SIGKILL, ranks, time.monotonic())
            case node.CaptureStacks(within, if_in_group, ras, silently):
                may_wait = workers.may_have_joined or not if_in_group
                if not may_wait or not generations.guard(
                    "stacks are missing",
                    lambda: generations.inspection.capture_before_stop(within, ras=ras, silently=silently),
                ):
                    loop.post(node.StacksCaptured(loop.now()))  # else they would be stopped late
            case node.FindStuck(ranks):
                without = "workers that hang get the whole grace period"
                generations.guard(without, lambda: generations.inspection.find_stuck(ranks))
            case node.CheckProgress(asks):
                without = "a job in which nothing moves is no longer noticed"
                generations.guard(
                    without, lambda: generations.inspection.check_progress(workers.has_written, asks=asks)
                )
            case node.NameRunning(ranks, seconds):
                self._reporter.print(render_still_running(workers.written_since_stop(ranks), seconds))
            case node.NameStuck(ranks, seconds):
                self._reporter.print(render_stuck(sorted(ranks), seconds))
            case node.FindRaised():
                for rank, error in workers.lingering():
                    loop.post(node.WorkerRaised(rank, error, loop.now(), lingers=True))
            case node.HostStore():
                generations.guard("a store that is looked for at MASTER_PORT is not hosted", workers.host_store)
            case node.LendTerminal(rank):
                workers.drain(rank)
                output.hide(True)
                generations.debuggers.lend_terminal(rank)
            case node.RefuseTerminal(rank):
                generations.debuggers.refuse_terminal(rank)
            case node.ShowOutput():
                output.hide(False)

    def _on_notice(self, notice: events.NoticeSeen) -> None:
        """Send the signal of a notice that is for this node to its workers, and tell the coordinator."""
        is_alone = self._generations.plan.nnodes == 1
        self._tell_notice(notice, "" if is_alone else f" on {self._context.draft.workers[0].host}")
        is_over = self._state.phase is Phase.ENDED or self._state.is_sweeping_after_success
        if notice.signum != SIGTERM and not is_over:
            self._report(node.ReportNotice(notice.signum))
        self._signals.received(notice.signum, SignalOrigin.PROCESS)

    def stop_for_good(self, signum: int, source: SignalOrigin, typed: Typed = Typed.NO) -> None:
        """Stop the job for good, where SIGTERM itself might have this node leave it; asked again, kill all workers."""
        coordinator = self._coordinator
        if signum != SIGTERM or coordinator is None or not self._context.inputs.allocation.nodes_leave:
            super().stop_for_good(signum, source, typed)
            return
        from ddplaunch.launcher.decide import job  # imported with the coordinator

        coordinator.feed(job.Abandoned())
        now, was_asked = self._loop.now(), self._stop_asked
        self._stop_asked = self._signals.end_asked = True
        again = job.NodeEscalated(job.NO_MEMBER, signum, now)
        coordinator.feed(again if was_asked else job.StopRequested(Why.SIGNALLED, signum, now))

    # --- the begin of a generation

    def _on_order_to_begin(self, generation: orders.Generation) -> None:
        """Begin a generation; if it is a restart, once the node has passed its health check."""
        is_ending = self._state.end.stop_signal or self._state.end.front_lost
        if self._context.inputs.spec.health_check is None or generation.number == 0 or is_ending:
            self._begin(generation)
            return
        if self._health is None:
            from ddplaunch.launcher.node.health import HealthGate  # few jobs have one

            self._health = HealthGate(self._loop, self._context.inputs.spec.health_check, self._context.inputs.env)
        self._health.check(generation)

    def _on_health(self, generation: orders.Generation, why: str) -> None:
        """Begin the generation that waited for the health check; or leave the job, which ends if no other node can go on."""
        assert self._link is not None
        coordinator, inputs = self._coordinator, self._context.inputs
        if why and coordinator is None:
            self._report(Unfit(piece(why)))
        if why and (coordinator is None or coordinator.leave_unfit(why)):
            asked = inputs.spec.typed("health_check", inputs.spec.health_check)
            text = f"error: {inputs.node.host} is not fit for the job: {asked}: {why}\n"
            self._link.on_order(JobEnd(exitcodes.NODE_LOST, "unfit", text))
            return
        self._begin(generation)
        if why:
            host = inputs.node.host
            failure = StartFailure(min(generation.ranks), host, f"its health check failed: {why}", exitcodes.NODE_LOST)
            self._step(node.StartFailed(failure, self._loop.now()))

    def _begin_unchecked(self) -> None:
        """Begin the generation that waits for the health check, if one does: what comes next cannot wait."""
        if self._health is not None and (generation := self._health.give_up()) is not None:
            self._begin(generation)

    def _begin(self, generation: orders.Generation) -> None:
        """Begin a generation, as the coordinator has ordered."""
        assert self._link is not None
        self._generations.prepare(generation, self._link.address)
        self._step(node.GenerationBegun(generation.number, generation.ranks, self._loop.now(), generation.alone))

    def _step(self, event: node.Event) -> None:
        """Let the decision take an event, and carry out what follows."""
        if isinstance(event, (node.StopOrdered, node.KillOrdered, node.JobEnded)):
            self._begin_unchecked()
        if self._state.phase is Phase.ENDED:
            return  # two children may have ended at once; nothing is reported after the end
        if isinstance(event, node.SignalReceived):
            event = replace(event, coordinator_is_here=self._coordinator is not None)
        if isinstance(event, (node.SignalReceived, node.StopOrdered)) and event.signum == SIGINT:
            event = replace(event, silent=self._generations.silent)
        elif isinstance(event, node.StopOrdered) and self._generations.plan.nnodes > 1:
            self._generations.output.note_failed(elsewhere=True)
        self._reporter.on_event(event, self._state)
        self._state, actions = node.step(self._state, event)
        self._deadline.set(self._state.deadline)
        self._rest.set(self._state.quiet_deadline)
        if not self._state.pending:
            self._generations.start_no_more()
        for action in actions:
            self._reporter.on_action(action)
            self.handle(action)
        if self._state.end.stop_signal or self._state.end.front_lost:
            self._begin_unchecked()  # and that generation ends at once

    def _on_deadline(self) -> None:
        """Feed the decision that its deadline has come. Called by the loop."""
        self._step(node.DeadlineReached(self._loop.now()))

    # --- effects of several steps

    def _sweep(self, signum: int = 0, *, sparing: bool = False) -> None:
        """Look for what workers left behind, signal it if `signum` is one, and say what there is."""
        self._loop.post(node.Swept(self._leftovers.find(signum, sparing=sparing), self._loop.now()))

    def _report_no_answer(self, number: int, why: str) -> None:
        """Say, and tell who asked, that a question could not be answered."""
        from ddplaunch.record.window.questions import Answered, NoAnswer  # few jobs are asked, and who is asked has it

        self._reporter.print(f"warning: a question could not be answered: {why}")
        self._report(Answered(number, NoAnswer(line(f"could not answer: {why}"))))

    def _report(self, report: Report) -> None:
        assert self._link is not None
        self._link.send(report)

    def _report_end(self) -> None:
        """Report to the coordinator how the workers of this node have ended."""
        state = self._state
        self._exits = self._generations.reap(state)
        raised = dict(state.raised.errors)
        exits = tuple(replace(end, error=end.error or raised.get(end.rank)) for end in self._exits)
        if (inspected := self._generations.inspected) is not None and inspected.samples:
            from ddplaunch.launcher.look.answers import stacks_at_end  # most jobs do not fail

            if (seen := stacks_at_end(state.generation, inspected.samples)) is not None:
                self._report(seen)
        self._report(
            NodeEnd(state.generation, exits, state.start_failure, state.teardown.leftovers, self._reporter.traces)
        )

    def ended(self) -> Ended:
        """Return how the job has ended, as far as this node knows."""
        assert self._link is not None
        state, end = self._state, self._link.end
        assert end is not None
        failure = state.start_failure or state.failure if state.why is Why.FAILED else None
        return Ended(
            status=self.status(),
            why=end.why,
            text=end.text,
            restarts=state.generation,
            exits=self._exits,
            failure=failure,
        )

    def _is_left_in_charge(self) -> bool:
        """Whether this node is to queue the job again: a notice has come, its workers have left, and the command is lost.

        As a batch script has ended, Slurm kills what that has started, and gives the steps of the job time yet.
        """
        state = self._state
        if not (self._job.requeue and self._context.inputs.allocation.has_front) or state.end.abandoned:
            return False
        from ddplaunch.launcher.decide.job.ending import all_exited_after  # few jobs come here

        return bool(state.notice) and all_exited_after(self._exits, state.notice, state.end.stop_signal)

    def _exit(self, status: int) -> None:
        """Conclude: nothing is left, and this node ends with this status."""
        assert self._link is not None
        self._reporter.tell_all = None  # the coordinator says nothing more
        self._exits = self._generations.reap(self._state) or self._exits
        self._reporter.report_dropped_output(self._generations.output.dropped)
        if self._state.why is Why.SIGNALLED:
            self._signals.end_asked = True  # elsewhere, it may be
        end = self._link.end
        if end is None:  # the coordinator did not answer, and the user does not wait for it
            self._link.leave()
        if end is None or (end.why == "signalled" and self._link.coordinator is None and not end.text):
            end = self._link.end = JobEnd(status, "signalled", self._reporter.stopped_line(self._state.end.stop_signal))
        if end.why == "lost" and self._is_left_in_charge():
            end = self._link.end = replace(end, requeue=self._state.notice)
        self._conclude(end)
        self._run_socket.ended(end)
