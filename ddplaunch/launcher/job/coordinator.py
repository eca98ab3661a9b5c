"""What decides for all nodes, by `launcher.decide.job`, and carries that out: in the agent of node 0, or in a command.

The agent of node 0, if the coordinator is in it, is called its own agent here; all others are reached through `agents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job.explainer import Explainer, IdleReport
from ddplaunch.launcher.job.orders import (
    CannotLead,
    Forward,
    Generation,
    GroupMade,
    JobEnd,
    MeetAt,
    NodeEnd,
    Reached,
    Warned,
)
from ddplaunch.launcher.tell.job_reporter import Findings, JobReporter
from ddplaunch.plan import Plan
from ddplaunch.spec.outcome import StartFailure, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, call_or_report
from ddplaunch.system.fields import line
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.port import PortTaken, Reservation, reserve
from ddplaunch.system.words import signal_name

if TYPE_CHECKING:  # one node needs none of it, and only a job that is looked into the others
    from ddplaunch.launcher.job.agents import Agents
    from ddplaunch.launcher.job.meeting import Meeting
    from ddplaunch.launcher.job.orders import Order, OrderToAll, Report
    from ddplaunch.launcher.job.questions import NodeStreams, Questions
    from ddplaunch.launcher.job.straggler_check import StragglerCheck
    from ddplaunch.launcher.job.warnings import Warnings

QUIT_TIMEOUT = 2.0  # seconds that agents get to take note of the end
_HINT_ON_MISSING_NODES = (
    "hint: is ddplaunch running there, with the same address and token? Type `--node-rank` on all nodes or on none. "
    "`--rdzv-timeout` sets how long to wait"
)


class Coordinator:
    """Keeps the state of the job, feeds events to the decision, and carries out the actions that follow, as orders to agents."""

    def __init__(self, loop: Loop, state: job.State, draft: Plan, reporter: JobReporter) -> None:
        """Begin in this state; `add_own_agent` or `lead` follows.

        `draft` is the plan of this node, made as if all nodes were like this one, or without workers in a command.
        """
        self._loop = loop
        self._draft = draft
        self._reporter = reporter
        self._explainer = Explainer(loop, reporter)
        self.state = state
        self._deadline = loop.timer(None, self._on_deadline)  # of the state
        # takes the orders for the own agent; or, in a command that has started all agents, hears of generations and the end
        self._take_order: Callable[[Order], None]
        self._agents: Agents | None = None  # of all nodes; None: this one meets no other
        self._reservation: Reservation | None = None  # of MASTER_PORT
        self._is_one_host = False  # all nodes are simulated on this one
        self._meeting: Meeting | None = None  # the last one: of nodes that are to begin a generation elsewhere
        self._why_not_begun = ""  # why a generation could not begin, with its hint
        self._has_ended = False
        self._user_has_stopped_job = False  # the second time, all workers are killed
        self._agents_know_end_at = loop.timer(None, lambda: None)  # set while they may still take note; wakes the loop
        # each of these from when it is first needed: most jobs need few
        self._questions: Questions | None = None
        self._streams: NodeStreams | None = None
        self._warnings: Warnings | None = None
        self._said_of_this_process: set[Warned] = set()  # not repeated when agents say the same of themselves
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
        if isinstance(event, job.AgentLost) and self._meeting is not None:
            self._meeting.on_agent_lost(event.id, event.at)
        before = self.state
        if isinstance(event, job.NodeEscalated):  # the user does not want to wait
            self._explainer.report_now()
        self.state, actions = job.step(before, event)
        self._deadline.set(self.state.deadline)
        self._reporter.on_event(event, before, self.state)
        for action in actions:
            self._carry_out(action)
        if self._meeting is not None and self.state.phase is not job.Phase.RUNNING:
            self._meeting.cancel()  # of a generation that is to end before it has begun
        if self.state.why is Why.FAILED and before.why is not Why.FAILED:
            # the summary's imports take a while: in the next turn of the loop, agents have been ordered to stop their workers
            self._loop.timer(self._loop.now(), self._reporter.prepare)
        if self._agents is not None:
            status = job.status_if_ending(before, self.state, self._loop.now())
            if status is not None:  # the job is being stopped for good
                self._agents.announce_end(status)
            self._agents.state_changed()  # an agent may wait for a node rank that is free now
        if len(self.state.members) < len(before.members):
            for part in (self._questions, self._streams):
                if part is not None:
                    part.drop_departed(self.state.members)

    def _on_deadline(self) -> None:
        """Feed that the deadline of the state has come. Called by the loop."""
        is_first_silent = self._meeting is not None and self._meeting.is_first_silent
        self.feed(job.DeadlineReached(self._loop.now(), is_first_silent))

    def on_report(self, id: int, report: Report) -> None:
        """Take a report of an agent. Reports of agents that were refused, or are no members yet, are dropped."""
        if id not in self.state.members:
            return
        now, member = self._loop.now(), self.state.members[id]
        match report:
            case node.RequestStore():  # workers wait for torch's store, and none hosts it: the agent of node 0 does then
                first = [other.id for other in self.state.members.values() if other.node_rank == 0]
                self.order(first, node.StoreOrdered(now))
            case GroupMade():  # from now on ranks can be compared
                if member.node_rank == 0:  # each node reports its own, and one report is enough
                    call_or_report(self.look_for_stragglers, self._warn_that_check_has_failed)
            case NodeEnd(number):
                if number == self.state.generation.number and not member.has_ended:
                    self._explainer.add_traces(report.exits, report.traces)
                    self.feed(job.NodeEnded(id, report.exits, report.start_failure, now, report.leftovers))
            case MeetAt() | CannotLead() | Reached():
                if self._meeting is not None:  # else nobody was asked for that
                    self._meeting.on_report(id, report)
            case Forward(signum):
                self.forward(signum)
            case Warned():
                self._warn(member, report)
            case node.ReportStopping(why, signum, by_cluster):
                self.feed(job.NodeStopping(id, why, signum, now, by_cluster))
            case node.ReportNotice(signum):
                self.feed(job.NodeNoticed(id, signum))
            case node.Escalate(signum):
                self.feed(job.NodeEscalated(id, signum, now))
            case node.ReportStacksRead():
                self.feed(job.NodeStacksRead(id))
            case node.ReportIdle(seconds):
                self.feed(job.NodeIdle(id, now - seconds, now))
            case node.PauseLimits(paused):
                self.feed(job.LimitsPaused(id, paused))
            case node.Suspend():
                self.feed(job.JobSuspended(now))
            case node.Resume():
                self.feed(job.JobResumed(now))
            case _:
                self._on_workers_report(member, report)

    def _on_workers_report(self, member: Member, report: Report) -> None:
        """Take a report about the agent's workers: an answer, what one of them says to a client, or their stacks at the end."""
        from ddplaunch.reach.channel.streams import Chunk
        from ddplaunch.record.window.questions import Answered, StacksAtEnd  # only a job that is looked into has them

        match report:
            case Chunk() if self._streams is not None:  # else no client listens, and it is dropped
                self._streams.on_chunk(member.id, report)
            case Answered() if self._questions is not None:
                self._questions.on_answer(member.id, report)
            case StacksAtEnd(number) if number == self.state.generation.number and not member.has_ended:
                self._explainer.add_samples(member.id, report.stacks.samples(member.host))

    def print(self, text: str) -> None:
        """Print a line for the user."""
        self._reporter.print(text)

    def say(self, text: str, is_warning: bool) -> None:
        """Print what holds for this process, in place of all agents that say the same of themselves."""
        self._said_of_this_process.add(Warned.of(text, is_warning))
        self.print(f"warning: {text}" if is_warning else text)

    def _warn_that_check_has_failed(self, why: str) -> None:
        warning = f"stragglers are no longer looked for: {why}"
        if Warned.of(warning, is_warning=True) not in self._said_of_this_process:
            self.say(warning, is_warning=True)

    def _warn(self, member: Member, warned: Warned) -> None:
        """Print a warning of an agent a second later, with the names of all that have it; not if this process has said it."""
        if warned in self._said_of_this_process:
            return
        if self._warnings is None:
            from ddplaunch.launcher.job.warnings import Warnings  # most jobs lack nothing

            self._warnings = Warnings(self._loop, self)
        self._warnings.add(member, warned)
        if self._has_ended:  # there is no time to gather the names of others
            self._warnings.flush()

    @property
    def members(self) -> Mapping[int, Member]:
        """The agents that take part in the job, spares included, by id."""
        return self.state.members

    @property
    def questions(self) -> Questions:
        """What is asked of the agents of all nodes."""
        if self._questions is None:
            from ddplaunch.launcher.job.questions import Questions

            self._questions = Questions(self._loop, self)
        return self._questions

    @property
    def streams(self) -> NodeStreams:
        """The streams of clients, such as debuggers, that are connected to agents of other nodes."""
        if self._streams is None:
            from ddplaunch.launcher.job.questions import NodeStreams  # few jobs are debugged

            self._streams = NodeStreams(self._loop, self)
        return self._streams

    def on_last_stream_ended(self, id: int) -> None:
        """Let the time limits go on that waited since a client held a worker of this agent in a debugger."""
        if id in self.state.limits.debugging and not self.state.policy.debugs:
            self.feed(job.LimitsPaused(id, False))

    def attaches(self, id: int) -> bool:
        """Whether a client of ours is connected to this agent, so that it may hold a worker in a debugger."""
        return self._streams is not None and id in self._streams

    def look_for_stragglers(self) -> None:
        """Look for stragglers from now on: a worker of this generation has a process group."""
        if self.stragglers is None:
            from ddplaunch.launcher.job.straggler_check import StragglerCheck  # many jobs have no process group

            every = self.state.policy.straggler_check
            self.stragglers = StragglerCheck(self._loop, every, self, self._reporter)
        self.stragglers.begin()

    def members_at_work(self) -> Mapping[int, Member] | None:
        """Return the members while their workers run; None: they are not to be asked now."""
        going = self.state.phase is job.Phase.RUNNING and self.state.limits.suspended_at is None
        return self.state.members if going else None

    def clock_offset(self, id: int) -> tuple[float, float]:
        """Return what is to be added to an agent's times to get ours, in seconds, and how wrong that may be."""
        return (0.0, 0.0) if self._agents is None else self._agents.connections.offset(id)

    def refuse(self, id: int, reason: str, status: int, hint: str = "") -> None:
        """Tell an agent that it cannot take part, with which its node ends; and the user."""
        who = "the command" if self.state.policy.has_one_command else "node 0"
        text = LaunchError(f"{who} refused this node: {reason}", hint=hint).render()
        self.order((id,), JobEnd(status=status, why="refused", text=text))
        if self._agents is not None:
            self._agents.refused(id, reason)

    def release(self, id: int, signum: int) -> None:
        """Have an agent end by the signal that it received, while the others go on."""
        others = "go on if enough are left" if self.state.generation.number >= 0 else "wait for another one"
        further = "" if id == SELF_ID else f"; the others {others}"  # of node 0, it has been said for what they wait
        text = f"ddplaunch: this node has left the job ({signal_name(signum)}){further}\n"
        self.order((id,), JobEnd(status=exitcodes.of_signal(signum), why="left", text=text))

    def forward(self, signum: int) -> None:
        """Pass a signal on to the workers of all nodes."""
        self.order(list(self.state.members), Forward(signum))

    def abandon(self) -> None:
        """Have the job not queued again, whatever signal ends it: its user has stopped it for good."""
        self.feed(job.Abandoned())

    def stop_all_nodes(self, signum: int) -> None:
        """Stop the job on all nodes by this signal, as its user wants; asked a second time, kill all workers."""
        if self._user_has_stopped_job:
            self.feed(job.NodeEscalated(job.NO_MEMBER, signum, self._loop.now()))  # not one node asks, but the user
        else:
            self._user_has_stopped_job = True
            self.feed(job.StopRequested(Why.SIGNALLED, signum, self._loop.now()))

    # --- what follows

    def _carry_out(self, action: job.Action) -> None:
        """Carry out one action of the decision (`launcher.decide.job`)."""
        match action:
            case job.BeginGeneration(order=order):
                self._begin(order)
            case job.LeaveJob(signum, why_unfit):  # node 0 leaves: the others wait for another one
                if self._agents is not None:
                    self._agents.leave(signum, why_unfit)
                    # unfit: the own agent ends by itself; else its `Release` follows
                    self._has_ended = self._has_ended or bool(why_unfit)
            case job.StopNodes(ids, signum, by_cluster, another_node_ended, job_stands_still):
                why = self.state.why or Why.COORDINATOR  # a job that stops its nodes has one: `or` is for the type
                more = {"another_node_ended": another_node_ended, "job_stands_still": job_stands_still}
                self.order(ids, node.StopOrdered(signum, self._loop.now(), why, by_cluster, **more))
            case job.TellAllStacksRead(ids):
                self.order(ids, node.AllStacksRead(self._loop.now()))
            case job.KillNodes(ids):
                self.order(ids, node.KillOrdered(self._loop.now()))
            case job.Refuse(id, reason, status, hint, unfit):
                self.refuse(id, reason, status, hint)
                if unfit is not None:  # what it was as a member, before its machine seemed to be at fault
                    self._reporter.report_left_out(unfit, reason, self.state.policy.host_names)
            case job.Release(id, signum):
                self._has_ended = self._has_ended or id == SELF_ID
                self.release(id, signum)
            case job.LeaveBehind(id, text):  # it is in the smaller part of a partition
                self.order((id,), JobEnd(status=exitcodes.NODE_LOST, why="lost", text=f"error: {text}\n"))
            case job.Drop(id):
                if self._agents is not None:
                    self._agents.connections.drop(id)
            case job.ReportFailure(wait):  # seconds, until the next generation
                self._explainer.explain_end(self.state, lambda findings: self._reporter.report_failure(findings, wait))
            case job.Print(text):
                self._reporter.print(text)
            case job.PrintIdle(seconds):
                self._report_idle(seconds)
            case job.PrintProgress(seconds):
                self._reporter.report_progress(seconds)
            case job.EndJob(status, error, requeue, hint):  # an error without a hint is of missing nodes
                advice = f"hint: {hint}" if hint else _HINT_ON_MISSING_NODES
                text = f"error: {error}\n\n{advice}\n" if error else self._why_not_begun  # "": neither is so
                if text:
                    self._end(status, requeue, Findings(state=self.state, error=text))
                else:  # its workers have ended, or were stopped
                    self._explainer.explain_end(self.state, partial(self._end, status, requeue))

    def _report_idle(self, seconds: float) -> None:
        """Report that no worker makes progress; with process groups, also which rank the other ranks wait for, and where."""
        if self.stragglers is None:  # no process group is known
            self._reporter.report_idle(seconds, "")
            return
        IdleReport(self, self._explainer, self._reporter, seconds).ask_nodes()

    def _begin(self, order: Sequence[int]) -> None:
        """Reserve MASTER_PORT and order these agents, by node rank, to begin; feed the failure if no port can be had.

        If the first of them is on another host, it has to reserve the port: then the nodes meet before they begin.
        """
        self._explainer.begin_generation()
        if self.stragglers is not None:
            self.stragglers.stop()
        first_is_elsewhere = order[0] != SELF_ID and not self._is_one_host
        if self._agents is not None and first_is_elsewhere:
            self._hold_meeting(self._agents, order)
            return
        try:
            port = self._reserve()
        except PortTaken:  # it may soon be free: the decision tries again for a while
            self.feed(job.PortTaken(self._loop.now()))
        except LaunchError as error:
            host = self.state.members[order[0]].host
            self.fail_to_begin(StartFailure(rank=0, host=host, reason=error.message, status=error.status), error)
        else:
            self.order_to_begin(order, port)

    def _hold_meeting(self, agents: Agents, order: Sequence[int]) -> None:
        """Have these nodes meet, after which `order_to_begin` or `fail_to_begin` is called, or other nodes begin."""
        from ddplaunch.launcher.job.meeting import Meeting  # most jobs have a coordinator on node 0

        number = 1 if self._meeting is None else self._meeting.number + 1
        self._meeting = Meeting(self._loop, agents, self, number, order)
        port, origin = self._draft.master_port or 0, line(self._draft.reasons["master_port"])
        self._meeting.begin(port, origin, again=self.state.may_wait_for_port)

    def order_to_begin(self, order: Sequence[int], port: int, address: str | None = None) -> None:
        """Order these agents, by node rank, to begin the generation of the state.

        `address` is where they reach the first of them: MASTER_ADDR, unless the user gave another. None: the coordinator is in
        that one, and `Agents.agree` finds where the others reach it.
        """
        # None: this is the only node, and its draft is the plan
        agreed = self._agents.agree(order, address) if self._agents is not None else None
        generation = Generation(
            number=self.state.generation.number,
            term=self.state.generation.term,  # greater than that of any generation before, also of earlier runs
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
        self._why_not_begun = shown.render()
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
        """Report how the job ended, and send that to all agents, which have QUIT_TIMEOUT seconds to take note.

        `requeue` is the notice (a signal of --requeue-on) after which the job should go back into the queue, 0 for none.
        """
        if self._warnings is not None:
            self._warnings.flush()
        if self.stragglers is not None:
            self.stragglers.stop()
            if not findings.error:  # which explains the end better than the pace of the workers
                story, found = self._reporter.story, self.stragglers
                story.steps, story.pace, story.straggler = found.last_steps, found.last_pace, found.described_straggler
        state = findings.state
        why = state.why.value if state.why is not None else "failed"
        text, decided_by_cluster = self._reporter.report_end(findings)
        if decided_by_cluster is not None:  # the cluster has ended the job, as when its time was up
            status, why = decided_by_cluster
        self._has_ended = True
        self._agents_know_end_at.set(self._loop.now() + QUIT_TIMEOUT)
        end = JobEnd(status=status, why="left_after_notice" if requeue else why, requeue=requeue)
        if self._agents is not None:
            self._agents.end_job(replace(end, text=text), state.unneeded_spares)  # which end with 0 in any case
        self._take_order(end)  # without the text, which the user of this process has read

    def order(self, ids: Sequence[int], order: OrderToAll) -> None:
        """Give the agents of these members an order, the own agent last: it may be busy for some time then."""
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
        all_have_left = self._agents is None or not self._agents.connections.ids
        return self._has_ended and (all_have_left or not self._agents_know_end_at.is_set)

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
