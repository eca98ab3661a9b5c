"""What decides for all nodes, by `launcher.decide.job`, and carries that out: in the agent of node 0, or in a command.

It knows the agent of node 0 if it is in that; all others are reached through `agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job.explainer import Explainer
from ddplaunch.launcher.job.orders import (
    CannotLead,
    Forward,
    Generation,
    GroupMade,
    JobEnd,
    Leads,
    NodeEnd,
    Reached,
    Unheard,
    Warned,
)
from ddplaunch.launcher.tell.job_reporter import Findings, JobReporter
from ddplaunch.plan import Plan
from ddplaunch.record.seen import Sample, Whereabouts
from ddplaunch.spec.outcome import StartFailure, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, expendable
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.port import PortTaken, Reservation, reserve
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:  # one node needs none of it, and only a job that is looked into the others
    from ddplaunch.launcher.job.agents import Agents
    from ddplaunch.launcher.job.meeting import Meetings
    from ddplaunch.launcher.job.orders import Order, OrderToAll, Report
    from ddplaunch.launcher.job.questions import NodeStreams, Questions
    from ddplaunch.launcher.job.straggler_check import StragglerCheck
    from ddplaunch.launcher.job.warnings import Warnings
    from ddplaunch.record.window.questions import Answer

QUIT_TIMEOUT = 2.0  # seconds that agents get to take note of the end
_NOT_MET_HINT = (
    "hint: is ddplaunch running there, with the same address and token? Type `--node-rank` on all nodes or on none. "
    "`--rdzv-timeout` sets how long to wait"
)


class Coordinator:
    """The job's state, and what its decisions come to."""

    def __init__(self, loop: Loop, state: job.State, draft: Plan, reporter: JobReporter) -> None:
        """Begin in this state. `draft` is the plan of this node, made as if all nodes were like this one, or without workers."""
        self._loop = loop
        self._draft = draft
        self._reporter = reporter
        self._explainer = Explainer(loop, reporter)
        self.state = state
        self._deadline = loop.timer(None, self._on_deadline)  # of the state
        # of the coordinator's own agent, or of the command that has started all
        self._take_order: Callable[[Order], None]
        self._agents: Agents | None = None  # of the other nodes
        self._reservation: Reservation | None = None
        self._is_one_host = False  # all nodes are simulated on this one
        self._meetings: Meetings | None = (
            None  # one before each generation, where the coordinator is on none of its nodes
        )
        self._begin_error = ""  # why a generation could not begin, with its hint
        self._has_ended = False
        self._over = loop.timer(None, lambda: None)  # then the others have had the time to take note of the end
        self._questions: Questions | None = None
        self._streams: NodeStreams | None = None
        self._warnings: Warnings | None = None
        self._said: set[Warned] = set()  # here, which agents need not say of themselves
        self.stragglers: StragglerCheck | None = None  # once a worker has a process group

    def add_own_agent(self, take_order: Callable[[Order], None], member: Member, agents: Agents | None = None) -> None:
        """Take the coordinator's own agent as a member, which gets its orders so; `agents` are those of the other nodes."""
        self._take_order, self._agents = take_order, agents
        self.feed(job.Joined(member, self._loop.now()))

    def lead(self, take_order: Callable[[Order], None], agents: Agents, *, is_one_host: bool) -> None:
        """Coordinate these agents from the command that has started them, which hears of each generation and of the end.

        Where they are all on this host, they hear each other if the command hears them.
        """
        self._take_order, self._agents, self._is_one_host = take_order, agents, is_one_host
        self._deadline.set(self.state.deadline)

    # --- what comes in

    def feed(self, event: job.Event) -> None:
        """Take an event of the job: decide on the next state, then carry out the actions that follow."""
        if isinstance(event, job.AgentLost) and self._meetings is not None:
            self._meetings.on_agent_lost(event.id, event.at)
        before = self.state
        if isinstance(event, job.NodeEscalated):
            self._explainer.report_now()
        self.state, actions = job.step(before, event)
        self._deadline.set(self.state.deadline)
        self._reporter.on_event(event, before, self.state)
        for action in actions:
            self._carry_out(action)
        if self._meetings is not None and self.state.phase is not job.Phase.RUNNING:
            self._meetings.cancel()
        if self.state.why is Why.FAILED and before.why is not Why.FAILED:
            # once the workers have been asked
            self._loop.timer(self._loop.now(), self._reporter.prepare)
        if self._agents is not None:
            if (ends_with := job.status_if_ending(before, self.state, self._loop.now())) is not None:
                self._agents.ending(ends_with)
            self._agents.state_changed()
        for asked in (self._questions, self._streams):
            if asked is not None and len(self.state.members) < len(before.members):
                asked.drop_departed(self.state.members)

    def _on_deadline(self) -> None:
        """Feed that the deadline of the state has come. Called by the loop."""
        is_first_silent = self._meetings is not None and self._meetings.is_first_silent
        self.feed(job.DeadlineReached(self._loop.now(), is_first_silent))

    def on_report(self, id: int, report: Report) -> None:
        """Take a report of an agent. Reports of agents that were refused, or are no members yet, are dropped."""
        if id not in self.state.members:
            return
        now = self._loop.now()
        match report:
            case node.RequestStore():
                first = [member.id for member in self.state.members.values() if member.node_rank == 0]
                self._order(first, node.StoreOrdered(now))
            case GroupMade() if self.state.members[id].node_rank == 0:
                expendable(
                    self.on_process_group, lambda why: self._say_once(f"stragglers are no longer looked for: {why}")
                )
            case NodeEnd(number) if number == self.state.generation.number and not self.state.members[id].has_ended:
                self._explainer.add_traces(report.exits, report.traces)
                self.feed(job.NodeEnded(id, report.exits, report.start_failure, now, report.leftovers))
            case Leads() | CannotLead() | Reached() | Unheard():
                if self._meetings is not None:  # else nobody was asked for that
                    self._meetings.on_report(id, report)
            case Forward(signum):
                self.forward(signum)
            case Warned():
                self._warn(self.state.members[id], report)
            case node.ReportStopping(why, signum, by_cluster):
                self.feed(job.NodeStopping(id, why, signum, now, by_cluster))
            case node.ReportNotice(signum):
                self.feed(job.NodeNoticed(id, signum))
            case node.Escalate(signum):
                self.feed(job.NodeEscalated(id, signum, now))
            case node.ReportIdle(seconds):
                self.feed(job.NodeIdle(id, now - seconds, now))
            case node.PauseLimits(paused):
                self.feed(job.LimitsPaused(id, paused))
            case node.Suspend():
                self.feed(job.JobSuspended(now))
            case node.Resume():
                self.feed(job.JobResumed(now))
            case _:
                self._on_workers_report(self.state.members[id], report)

    def _on_workers_report(self, member: Member, report: Report) -> None:
        """Take a report about the agent's workers: an answer, what one of them says to a client, or their stacks at the end."""
        from ddplaunch.reach.channel.streams import Chunk
        from ddplaunch.record.window.questions import Answered, StacksAtEnd  # only a job that is looked into has them

        match report:
            case Chunk() if self._streams is not None:
                self._streams.on_chunk(member.id, report)
            case Answered() if self._questions is not None:
                self._questions.on_answer(member.id, report)
            case StacksAtEnd(number) if number == self.state.generation.number and not member.has_ended:
                self._explainer.add_samples(member.id, report.stacks.samples(member.host))

    def say(self, text: str, is_warning: bool) -> None:
        """Say something of the command that has started all agents, which need not say the same of themselves."""
        self._said.add(Warned(line(text), is_warning))
        self._reporter.print(f"warning: {text}" if is_warning else text)

    def _say_once(self, warning: str) -> None:
        if Warned(line(warning), is_warning=True) not in self._said:
            self.say(warning, is_warning=True)

    def _warn(self, member: Member, warned: Warned) -> None:
        if warned in self._said:
            return
        if self._warnings is None:
            from ddplaunch.launcher.job.warnings import Warnings  # most jobs lack nothing

            self._warnings = Warnings(self._loop, self._reporter.print, self.state.members.values)
        self._warnings.add(member, warned)
        if self._has_ended:
            self._warnings.flush()

    @property
    def questions(self) -> Questions:
        """What is asked of the agents of all nodes."""
        if self._questions is None:
            from ddplaunch.launcher.job.questions import Questions

            self._questions = Questions(self._loop, lambda: self.state.members, self._order)
        return self._questions

    @property
    def streams(self) -> NodeStreams:
        """The clients that are connected to agents of other nodes, which may then hold a worker in a debugger."""
        if self._streams is None:
            from ddplaunch.launcher.job.questions import NodeStreams  # few jobs are debugged

            def ended(id: int) -> None:
                if id in self.state.limits.debugging and not self.state.policy.debugs:
                    self.feed(job.LimitsPaused(id, False))

            self._streams = NodeStreams(self._loop, self._order, ended)
        return self._streams

    def attaches(self, id: int) -> bool:
        """Whether a client of ours is connected to this agent, so that it may hold a worker in a debugger."""
        return self._streams is not None and id in self._streams

    def on_process_group(self) -> None:
        """Take note that a worker of this generation has a process group."""
        if self.stragglers is None:
            from ddplaunch.launcher.job.straggler_check import StragglerCheck  # many jobs have none

            self.stragglers = StragglerCheck(
                self._loop,
                self.state.policy.straggler_check,
                members=self._members_at_work,
                ask=self.questions.ask,
                offset=lambda id: (0.0, 0.0) if self._agents is None else self._agents.connections.offset(id),
                report=self._reporter.report_straggler,
                warn=self._reporter.print,
                keep=self._reporter.keep_collectives,
            )
        self.stragglers.begin()

    def _members_at_work(self) -> Mapping[int, Member] | None:
        """Return the members while their workers run; None: they are not to be asked now."""
        going = self.state.phase is job.Phase.RUNNING and self.state.limits.suspended_at is None
        return self.state.members if going else None

    def refuse(self, id: int, reason: str, status: int, hint: str = "") -> None:
        """Tell an agent that it cannot take part, with which its node ends; and the user."""
        who = "the command" if self.state.policy.dispatched else "node 0"
        text = LaunchError(f"{who} refused this node: {reason}", hint=hint).render()
        self._order((id,), JobEnd(status=status, why="refused", text=text))
        if self._agents is not None:
            self._agents.refused(id, reason)

    def release(self, id: int, signum: int) -> None:
        """Have an agent end by the signal that it received, while the others go on."""
        others = "go on if enough are left" if self.state.generation.number >= 0 else "wait for another one"
        further = "" if id == SELF_ID else f"; the others {others}"  # of node 0, it has been said for what they wait
        text = f"ddplaunch: this node has left the job ({signal_name(signum)}){further}\n"
        self._order((id,), JobEnd(status=exitcodes.of_signal(signum), why="left", text=text))

    def forward(self, signum: int) -> None:
        """Pass a signal on to the workers of all nodes."""
        self._order(list(self.state.members), Forward(signum))

    # --- what follows

    def _carry_out(self, action: job.Action) -> None:
        """Carry out one action of the decision (`launcher.decide.job`)."""
        match action:
            case job.BeginGeneration(order=order):
                self._begin(order)
            case job.LeaveJob(signum, unfit) if self._agents is not None:
                self._has_ended = self._has_ended or bool(unfit)
                self._agents.leave(signum, unfit)
            case job.StopNodes(ids, signum, by_cluster, others_ended):
                why = self.state.why or Why.COORDINATOR
                self._order(ids, node.StopOrdered(signum, self._loop.now(), why, by_cluster, others_ended=others_ended))
            case job.KillNodes(ids):
                self._order(ids, node.KillOrdered(self._loop.now()))
            case job.Refuse(id, reason, status, hint, unfit):
                self.refuse(id, reason, status, hint)
                if unfit is not None:
                    self._reporter.report_left_out(unfit, reason, self.state.policy.names)
            case job.Release(id, signum):
                self._has_ended = self._has_ended or id == SELF_ID
                self.release(id, signum)
            case job.LeaveBehind(id, text):
                self._order((id,), JobEnd(status=exitcodes.NODE_LOST, why="lost", text=f"error: {text}\n"))
            case job.Drop(id) if self._agents is not None:
                self._agents.connections.drop(id)
            case job.ReportFailure(wait):
                self._explainer.explain_end(self.state, lambda findings: self._reporter.report_failure(findings, wait))
            case job.Print(text):
                self._reporter.print(text)
            case job.PrintIdle(seconds):
                self._report_idle(seconds)
            case job.PrintProgress(seconds):
                self._reporter.report_progress(seconds)
            case job.EndJob(status, error, requeue, hint):
                advice = f"hint: {hint}" if hint else _NOT_MET_HINT
                if text := f"error: {error}\n\n{advice}\n" if error else self._begin_error:
                    self._end(status, requeue, Findings(state=self.state, error=text))
                else:
                    self._explainer.explain_end(self.state, partial(self._end, status, requeue))

    def _report_idle(self, seconds: float) -> None:
        """Report that no worker makes progress; with process groups, also which rank the other ranks wait for, and where."""
        if self.stragglers is None:
            self._reporter.report_idle(seconds, "")
            return
        from ddplaunch.launcher.job.questions import Asker
        from ddplaunch.launcher.job.straggler_check import ON_THE_WAY, WITHIN
        from ddplaunch.record.window.questions import AskStacks, NodeStacks

        samples: list[Sample] = []
        named_at = self.state.idleness.printed_at
        guard = partial(expendable, failed=lambda _why: self._reporter.report_idle(seconds, ""))

        def answered(member: Member, answer: Answer) -> None:
            if isinstance(answer, NodeStacks):
                guard(lambda: samples.extend(answer.samples(member.host)))

        def explained(found: Whereabouts) -> None:
            if self._members_at_work() and self.state.idleness.progress_at <= named_at:
                self._reporter.report_idle(seconds, found.what)

        def done() -> None:
            guard(lambda: self._explainer.explain_hang(samples, explained))

        question, asker = AskStacks(WITHIN, threads=False, native=False), Asker(answered=answered, done=done)
        guard(lambda: self.questions.ask(question, WITHIN + ON_THE_WAY, asker))

    def _begin(self, order: Sequence[int]) -> None:
        """Reserve MASTER_PORT and order these agents, by node rank, to begin; feed the failure if no port can be had.

        If the first of them is on another host, it has to reserve the port: then the nodes meet before they begin.
        """
        self._explainer.begin_generation()
        if self.stragglers is not None:
            self.stragglers.stop()
        if self._agents is not None and order[0] != SELF_ID and not self._is_one_host:
            self._hold_meeting(self._agents, order)
            return
        try:
            port = self._reserve()
        except PortTaken:
            self.feed(job.PortTaken(self._loop.now()))
        except LaunchError as error:
            host = self.state.members[order[0]].host
            self.fail_to_begin(StartFailure(0, host, error.message, error.status), error)
        else:
            self.order_to_begin(order, port)

    def _hold_meeting(self, agents: Agents, order: Sequence[int]) -> None:
        """Have these nodes meet, after which `order_to_begin` or `fail_to_begin` is called, or other nodes begin."""
        if self._meetings is None:
            from ddplaunch.launcher.job.meeting import Meetings  # most jobs have a coordinator on node 0

            self._meetings = Meetings(self._loop, agents, self)
        self._meetings.begin(order, self._draft.master_port or 0, line(self._draft.reasons["master_port"]))

    def order_to_begin(self, order: Sequence[int], port: int, address: str | None = None) -> None:
        """Order these agents to begin the generation of the state; `address` is MASTER_ADDR, unless the user gave another.

        None in place of the address: all nodes reach this one, and `Agents.agree` finds where.
        """
        agreed = self._agents.agree(order, address) if self._agents is not None else None
        generation = Generation(
            number=self.state.generation.number,
            term=self.state.generation.term,
            restarts=self.state.restarts.number,
            port=port,
            # an agent has KILLED_WITHIN to kill its workers after its lease, for which the policy waits too
            lease=max(0.0, self.state.policy.lease - job.KILLED_WITHIN),
            agreed=agreed,
            ranks_of_draft=tuple(self._draft.ranks) if agreed is None else (),
        )
        if self._agents is not None:
            self._agents.begin(order, generation)
        self._take_order(generation)  # last: the own agent is busy when it starts its workers

    def fail_to_begin(self, failure: StartFailure, shown: LaunchError) -> None:
        """Feed that the generation cannot begin, which ends the job; the user reads `shown` then."""
        self._begin_error = shown.render()
        self.feed(job.BeginFailed(failure, self._loop.now()))

    def _reserve(self) -> int:
        """Reserve MASTER_PORT, and return it.

        Raises:
            PortTaken: it may soon be free.
            LaunchError: no port can be had.
        """
        self._release()
        port, origin = self._draft.master_port or 0, self._draft.reasons["master_port"]
        if self._agents is None and 0 not in self._draft.ranks:
            return port  # nodes that do not communicate were given it
        self._reservation = reserve(port, origin, again=self.state.may_wait_for_port)
        return self._reservation.port

    def _end(self, status: int, requeue: int, findings: Findings) -> None:
        """Report how the job ended, and send that to all agents, which have QUIT_TIMEOUT seconds to take note."""
        if self._warnings is not None:
            self._warnings.flush()
        if self.stragglers is not None:
            self.stragglers.stop()
            if not findings.error:  # which explains the end better than the pace of the workers
                story, found = self._reporter.story, self.stragglers
                story.steps, story.pace, story.straggler = found.last_steps, found.last_pace, found.last_word
        text, outcome = self._reporter.report_end(findings)
        state = findings.state
        status, why = outcome or (status, state.why.value if state.why is not None else "failed")
        self._has_ended = True
        self._over.set(self._loop.now() + QUIT_TIMEOUT)
        end = JobEnd(status=status, why="left_after_notice" if requeue else why, requeue=requeue)
        if self._agents is not None:
            self._agents.end_job(replace(end, text=text), state.unneeded_spares)
        self._take_order(end)

    def _order(self, ids: Sequence[int], order: OrderToAll) -> None:
        others = [id for id in ids if id != SELF_ID]
        if self._agents is not None and others:
            self._agents.send(others, order)
        if len(others) < len(ids):
            self._take_order(order)

    def leave_unfit(self, reason: str) -> bool:
        """Leave the job to the other nodes, since this one has failed its health check; return whether they can go on."""
        self.feed(job.OwnUnfit(reason))
        return self.state.phase is job.Phase.ENDED

    # --- facts

    @property
    def is_over(self) -> bool:
        """Whether all agents know that the job has ended, or have had the time to learn it."""
        return self._has_ended and (self._agents is None or not self._agents.connections.ids or not self._over.is_set)

    @property
    def reached_at(self) -> str | None:
        """The address of this node that most of the others reach."""
        return self._agents.connections.reached_at if self._agents is not None else None

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def close(self) -> None:
        """Close all that is open."""
        self._release()
        self._deadline.cancel()
        if self._streams is not None:
            self._streams.close()
        if self._agents is not None:
            self._agents.close()
