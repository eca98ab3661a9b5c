"""Takes the messages of the other nodes: admits agents, checks what each of them may say, and passes that on to the coordinator.

Decides nothing about the job. Knows which connections are those of agents, and which belong to a command that only watches.
"""

from __future__ import annotations

import time

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import Member, Phase
from ddplaunch.launcher.decide.job.rendezvous import why_refused as why_refused_by_job
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agent, Agents, member_of
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.messages import speaks_for_others, why_refused, why_too_much
from ddplaunch.launcher.job.orders import CannotLead, Goodbye, GroupMade, MeetAt, NodeEnd, Reached, Warned
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.record.window.questions import Answered, NoAnswer, StacksAtEnd
from ddplaunch.spec.outcome import Why
from ddplaunch.system import fields
from ddplaunch.system.errors import indented
from ddplaunch.system.loop.loop import Loop

# first messages of agents that one job takes: so many for each node, but 10,000 if it has few; each is logged
_HELLOS_PER_NODE = 10
_HELLOS_OF_SMALL_JOB = 10_000
_MOST_WARNINGS = 20  # that are taken from each connection
_MOST_GENERATIONS = 1_000_000  # that a node may have begun before: the next has a number beyond those of all nodes
# seconds by which the wall clock of an earlier node 0 may have been ahead: terms begin with it
_LARGEST_CLOCK_ERROR = 366 * 24 * 3600.0


class Incoming:
    """Reads the connections of the other nodes, for a coordinator and its list of agents, `agents`."""

    def __init__(self, loop: Loop, terms: Terms, coordinator: Coordinator) -> None:
        """Listen for the other nodes on one of the ports of `terms`. Raises LaunchError: all ports are taken."""
        self._loop = loop
        self._terms = terms
        self._coordinator = coordinator
        self._hellos = 0  # how many agents have, the departed included
        self._admit_at = loop.timer(None, self._admit_waiting)
        self._connections = Connections(loop, terms, self)
        self.agents = Agents(terms, self._connections, self)

    def lose(self, id: int, reason: str, *, has_ended: bool) -> None:
        """Take an agent for lost whose connection was carried by something that has ended; take its last words first."""
        self._connections.receive_rest(id)
        self._drop(id, reason, has_ended=has_ended)

    def _drop(self, id: int, reason: str, *, has_ended: bool) -> None:
        """Close the connection of an agent that has left; the job learns of it."""
        if id in self._connections.ids:
            renewed_at = self._connections.renewed_at(id)  # its workers may live for a lease from then
            self._connections.drop(id)
            self.on_lost(id, reason, renewed_at, has_ended=has_ended)

    # --- called by Agents

    def print(self, text: str) -> None:
        """Print a line for the user."""
        self._coordinator.print(text)

    def admit_waiting_soon(self) -> None:
        """Admit the agents that wait, if their node rank has become free, once all that has come in is taken."""
        self._admit_at.set(self._loop.now())

    # --- called by Connections

    def on_pong(self) -> None:
        """Look again whether an agent may be admitted that waits until all others have answered a ping."""
        self.agents.state_changed()

    def on_refused(self, address: str, reason: str) -> None:
        """Print that a connection was refused."""
        self.print(f"refused a connection from {address}: {reason}")

    def on_part_dropped(self, id: int, reason: str) -> None:
        """Warn, once for each agent, that a part of its messages was dropped."""
        agent = self.agents.by_id.get(id)
        if agent is not None and not agent.is_known_to_drop:
            agent.is_known_to_drop = True
            self.print(f"warning: what {agent.hello.host} has sent about its workers was dropped: {reason}")

    def on_lost(self, id: int, reason: str, renewed_at: float, *, has_ended: bool = False) -> None:
        """Forget a peer whose connection has ended; the job learns of it, except after its own end.

        `has_ended`: nothing of a generation is left there. That a connection was closed does not say so.
        """
        self.agents.by_id.pop(id, None)
        self.agents.waiting.pop(id, None)
        if self.agents.job_end is None:  # else peers close as ordered
            lost = job.AgentLost(id, reason, self._loop.now(), has_ended, renewed_at, self._number_of_silent(id))
            self._coordinator.feed(lost)

    def on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """Do what a message asks for, if this peer may send it; expel a peer that breaks the order of messages.

        That order is: a hello (or in its place a withdrawal, which ends the connection), then reports.
        """
        agent = self.agents.by_id.get(id)  # None: it has not said hello
        match message:
            case messages.Hello() if agent is None:
                self._on_hello(id, message)
            case messages.Withdrawal() if agent is None:
                self._on_withdrawal(id, message)
            case messages.Hello() | messages.Withdrawal():
                self._connections.expel(id, "sent hello twice")
            case _ if agent is None:
                self._connections.expel(id, "did not send hello first")
            case Goodbye(reason, has_ended):  # has_ended: no worker is left there
                self._drop(id, indented(reason), has_ended=has_ended)
            case node.ReportStopping(why) if id in self.agents.waiting:
                if why is not Why.FAILED:  # it waits for a node rank, so it has no workers that could fail
                    self._on_stop_of_waiting(id, message)
            case _:
                self._on_report(id, agent, message)

    def _on_report(self, id: int, agent: Agent, report: messages.ToCoordinator) -> None:
        """Pass a report on to the coordinator, and drop a report of what this agent may not report."""
        number = self._coordinator.state.generation.number
        takes_part = agent.ranks is not None
        match report:
            case NodeEnd(generation) | StacksAtEnd(generation):  # one of an earlier generation says nothing new
                if generation > number:
                    what = f"the end of generation {generation}, which has not begun"
                    self._connections.expel(id, f"sent a malformed message ({what})")
                elif generation == number and agent.ranks is not None:
                    self._pass_end(id, agent, report, agent.ranks)
            case Answered():
                self._pass_answer(id, agent, report)
            case node.PauseLimits(True) if not self._may_hold_workers(id):
                self.on_part_dropped(id, "it holds a worker in a debugger, and nobody debugs this job")
            case Warned():
                agent.warnings += 1
                if agent.warnings <= _MOST_WARNINGS:
                    self._coordinator.on_report(id, report)
            case node.Escalate() | node.ReportStacksRead() | node.RequestStore() if not takes_part:
                pass  # it may not have workers killed, or a store served, of a generation in which it has no part
            case (
                node.ReportStacksRead()
                | node.ReportStopping()
                | node.ReportNotice()
                | node.Escalate()
                | node.RequestStore()
            ):
                if (number, report) not in agent.reports:  # else each repetition would be logged
                    agent.reports.add((number, report))
                    self._coordinator.on_report(id, report)
            case node.ReportIdle() | node.PauseLimits() | GroupMade() | Chunk() | MeetAt() | CannotLead() | Reached():
                self._coordinator.on_report(id, report)

    def _may_hold_workers(self, id: int) -> bool:
        """Whether an agent may hold a worker in a debugger, for which the time limits of the job wait."""
        return self._coordinator.state.policy.debugs or self._coordinator.attaches(id)

    def _number_of_silent(self, lost: int) -> int:
        """Return how many members are silent besides one that is lost: the network of this node may be out."""
        state = self._coordinator.state
        if state.phase is not Phase.RUNNING or lost not in state.members:
            return 0
        others = [id for id in self._connections.ids if id in state.members]
        return sum(map(self._connections.is_silent, others))

    # --- one kind of message each

    def _on_hello(self, id: int, hello: messages.Hello) -> None:
        """Know an agent from now on and admit it, unless it claims what no agent of this job can, or comes after the end."""
        if why := self._why_expelled(hello):
            self._connections.expel(id, why)
            return
        self._hellos += 1
        self.agents.by_id[id] = Agent(hello)
        if self.agents.job_end is not None and self._coordinator.state.policy.has_one_command:
            # the command started it with the others, so it ends as they do, and is not refused
            self.agents.send((id,), self.agents.job_end)
        else:
            self._admit(member_of(id, hello, self._connections.far_address(id)))

    def _why_expelled(self, hello: messages.Hello) -> str:
        """Return why an agent with this hello is expelled, as a predicate; "" if it is not."""
        max_nodes = self._terms.keepalive.max_nodes
        if self._hellos == max(_HELLOS_OF_SMALL_JOB, _HELLOS_PER_NODE * max_nodes):
            return "too many agents have come and gone"
        if hello.last_generation > _MOST_GENERATIONS:
            return f"claims to have begun generation {hello.last_generation}"
        # terms, which grow with each generation, begin with the wall clock of a node 0
        if hello.last_term > first_term(time.time() + _LARGEST_CLOCK_ERROR):
            return f"claims to have begun a generation of term {hello.last_term}, far ahead of the clock here"
        if hello.workers * max_nodes > fields.MAX_RANKS:
            return "has more workers than a job of so many nodes may have"
        return ""

    def _on_withdrawal(self, id: int, withdrawal: messages.Withdrawal) -> None:
        """Let a node go that cannot take part, and says why."""
        self._connections.drop(id)
        rank, host = withdrawal.requested_rank, withdrawal.host
        who = host if rank is None else f"node {rank} ({host})"
        reason, hint = indented(withdrawal.reason), indented(withdrawal.hint)
        self._coordinator.feed(job.Withdrawn(indented(who), rank, reason, hint, self._loop.now()))

    def _on_stop_of_waiting(self, id: int, report: node.ReportStopping) -> None:
        """Let a node go that is not admitted yet, and is to stop; a job that needs each of its nodes ends with it."""
        policy = self._coordinator.state.policy
        if policy.needs_all or policy.has_one_command:  # has_one_command: a signal to one agent is for the job
            stop = job.StopRequested(report.why, report.signum, self._loop.now(), report.by_cluster)
            self._coordinator.feed(stop)
            return
        self.agents.waiting.pop(id, None)
        if report.signum:
            self._coordinator.release(id, report.signum)  # with the status of that signal
        else:
            self._connections.drop(id)  # which ends it: it has said that it stops

    def _pass_end(self, id: int, agent: Agent, report: NodeEnd | StacksAtEnd, own: range) -> None:
        """Pass on the end of a generation, or where workers were then, if the report is about the agent's `own` ranks."""
        if speaks_for_others(report, own):
            self._connections.expel(id, "sent a malformed message (the end of workers that are not its own)")
        elif isinstance(report, NodeEnd):
            offset, _error = self._connections.offset(id)
            self._coordinator.on_report(id, messages.on_our_clock(report, agent.hello.host, offset))
        elif why := why_too_much(report.stacks, len(own), self.agents.world_size):
            self.on_part_dropped(id, f"it {why}")  # which warns the user, once for each agent
        else:
            self._coordinator.on_report(id, report)

    def _pass_answer(self, id: int, agent: Agent, report: Answered) -> None:
        """Pass on an answer about the agent's own workers; in place of any other answer, the reason why it was refused."""
        # what was asked before this generation began may have been answered before its agent knew of it
        is_older = report.number <= self.agents.last_question_of_past
        own = range(0) if is_older or agent.ranks is None else agent.ranks
        if why := why_refused(report.answer, own, agent.hello.workers, self.agents.world_size):
            if not is_older:
                self.on_part_dropped(id, f"it {why}")
            report = Answered(report.number, NoAnswer("was to begin just then" if is_older else why))
        self._coordinator.on_report(id, report)

    # --- agents that are not admitted yet

    def _admit(self, member: Member) -> None:
        """Have a new agent join the job, or wait until all others have answered a ping.

        It waits if its node rank is not free: a host may be back after a power cut, or a pod may have started again, before
        the coordinator has noticed the loss.
        """
        if self._has_place_for(member):
            self._join(member)
        else:
            self.agents.waiting[member.id] = member
            self._connections.ping_all()

    def _has_place_for(self, member: Member) -> bool:
        """Whether the job would not refuse this agent now."""
        return why_refused_by_job(self._coordinator.state.policy, self._coordinator.state.members, member) is None

    def _admit_waiting(self) -> None:
        """Have waiting agents join whose node rank is free; if no rank becomes free, have all join: the job refuses the rest."""
        members = self._coordinator.state.members
        a_rank_becomes_free = any(member.is_leaving for member in members.values())
        # each was pinged when an agent had to wait, and has answered since: no rank is that of a node that is lost
        all_members_live = self._connections.all_answered_ping_all
        for id, member in list(self.agents.waiting.items()):
            if id not in self.agents.waiting:
                return  # as the agent before joined, the job has ended
            if self._has_place_for(member) or (all_members_live and not a_rank_becomes_free):
                del self.agents.waiting[id]
                self._join(member)

    def _join(self, member: Member) -> None:
        self._coordinator.feed(job.Joined(member, self._loop.now()))
