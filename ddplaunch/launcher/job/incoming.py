"""Takes the messages of the other nodes: admits agents, checks what each of them may say, and passes that on to the coordinator.

Decides nothing about the job. Knows which connections are those of agents, and which belong to a command that only watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import Member, Phase
from ddplaunch.launcher.decide.job.rendezvous import why_refused as why_refused_by_job
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agent, Agents, member_of
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.messages import speaks_for_others, why_refused, why_too_much
from ddplaunch.launcher.job.orders import (
    CannotLead,
    GroupMade,
    Leads,
    NodeEnd,
    Reached,
    Unfit,
    Unheard,
    Warned,
)
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.record.window.questions import Answered, NoAnswer, StacksAtEnd
from ddplaunch.spec.outcome import Why
from ddplaunch.system import fields
from ddplaunch.system.errors import below
from ddplaunch.system.loop.loop import Loop

_HELLOS = 10  # of each node in one job, and at least _LEAST_HELLOS in all: each is logged
_LEAST_HELLOS = 10_000
_WARNINGS = 20  # of each connection
_MOST_GENERATIONS = 1_000_000  # that a node may have begun before: the next has a number beyond those of all nodes
# seconds by which the wall clock of an earlier node 0 may have been ahead: terms begin with it
_MOST_AHEAD = 366 * 24 * 3600.0


class Incoming:
    """Reads the connections of the other nodes, for a coordinator and its list of agents."""

    def __init__(
        self,
        loop: Loop,
        terms: Terms,
        coordinator: Coordinator,
        print_line: Callable[[str], None],
    ) -> None:
        """Listen for the other nodes on one of the ports of `terms`.

        Raises LaunchError if all ports are taken.
        """
        self._loop = loop
        self._terms = terms
        self._coordinator = coordinator
        self._print = print_line
        self._said_hello = 0  # agents, the departed included
        self._connections = Connections(
            loop,
            terms,
            received=self._on_message,
            lost=self._on_lost,
            dropped=self._on_dropped,
            refused=lambda address, reason: print_line(f"refused a connection from {address}: {reason}"),
            # an agent may wait until all others have answered
            answered=lambda: self.agents.state_changed(),  # noqa: PLW0108 - which are made next
        )
        self.agents = Agents(
            loop,
            terms,
            self._connections,
            print_line,
            retry=loop.timer(None, self._admit_waiting),
        )

    def lose(self, id: int, reason: str, *, has_ended: bool) -> None:
        """Take an agent for lost whose connection was carried by something that has ended; take its last words first."""
        self._connections.receive_rest(id)
        if id in self._connections.ids:
            renewed_at = self._connections.renewed_at(id)
            self._connections.drop(id)
            self._on_lost(id, reason, renewed_at, has_ended=has_ended)

    # --- called by Connections

    def _on_dropped(self, id: int, reason: str) -> None:
        """Warn, once for each agent, that a part of its messages was dropped."""
        agent = self.agents.by_id.get(id)
        if agent is not None and not agent.is_known_to_drop:
            agent.is_known_to_drop = True
            self._print(f"warning: what {agent.hello.host} has sent about its workers was dropped: {reason}")

    def _on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """Do what a message asks for, if this peer may send it; expel a peer that breaks the order of messages."""
        agent = self.agents.by_id.get(id)
        match message:
            case messages.Hello() if agent is None:
                self._on_hello(id, message)
            case messages.Withdrawal(rank, host, reason, hint) if agent is None:
                self._connections.drop(id)
                who = host if rank is None else f"node {rank} ({host})"
                self._coordinator.feed(job.Withdrawn(below(who), rank, below(reason), below(hint), self._loop.now()))
            case messages.Hello() | messages.Withdrawal():
                self._connections.expel(id, "sent hello twice")
            case _ if agent is None:
                self._connections.expel(id, "did not send hello first")
            case messages.Dropped():
                renewed_at = self._connections.renewed_at(id)
                self._connections.drop(id)
                self._on_lost(id, "has heard nothing from here for too long", renewed_at)
            case node.ReportStopping() if id in self.agents.waiting:
                if message.why is not Why.FAILED:
                    self._on_stop_of_waiting(id, message)
            case _:
                self._on_report(id, agent, message)

    def _on_report(self, id: int, agent: Agent, report: messages.ToCoordinator) -> None:
        """Pass a report on to the coordinator, and drop a report of what this agent may not report."""
        number = self._coordinator.state.generation.number
        match report:
            case NodeEnd(generation) | StacksAtEnd(generation):
                if generation > number:
                    what = f"the end of generation {generation}, which has not begun"
                    self._connections.expel(id, f"sent a malformed message ({what})")
                elif generation == number and agent.ranks is not None:
                    self._pass_end(id, agent, report, agent.ranks)
            case Answered():
                self._pass_answer(id, agent, report)
            case Unfit(reason):
                lost = below(f"its health check failed: {reason}")
                self._coordinator.feed(job.AgentLost(id, lost, self._loop.now(), has_ended=True))
            case node.PauseLimits(True) if not (
                self._coordinator.state.policy.debugs or self._coordinator.attaches(id)
            ):
                self._on_dropped(id, "it holds a worker in a debugger, and nobody debugs this job")
            case Warned():
                agent.warnings += 1
                if agent.warnings <= _WARNINGS:
                    self._coordinator.on_report(id, report)
            case node.Escalate() | node.RequestStore() if agent.ranks is None:
                pass  # it has no part in what it wants killed, or served
            case node.ReportStopping() | node.ReportNotice() | node.Escalate() | node.RequestStore():
                if (number, report) not in agent.reports:  # else it would be logged again
                    agent.reports.add((number, report))
                    self._coordinator.on_report(id, report)
            case (
                Leads()
                | CannotLead()
                | Reached()
                | Unheard()
                | node.ReportIdle()
                | node.PauseLimits()
                | GroupMade()
                | Chunk()
            ):
                self._coordinator.on_report(id, report)

    def _on_lost(self, id: int, reason: str, renewed_at: float, *, has_ended: bool = False) -> None:
        """Forget a peer whose connection has ended; the job learns of it, except after its own end.

        `has_ended`: nothing of it is left. That a connection was closed does not say so.
        """
        self.agents.by_id.pop(id, None)
        self.agents.waiting.pop(id, None)
        if self.agents.job_end is None:  # else peers close as ordered
            lost = job.AgentLost(id, reason, self._loop.now(), has_ended, renewed_at, self._number_of_silent(id))
            self._coordinator.feed(lost)

    def _number_of_silent(self, lost: int) -> int:
        """Return how many members are silent besides one that is lost: the network of this node may be out."""
        state = self._coordinator.state
        if state.phase is not Phase.RUNNING or lost not in state.members:
            return 0
        others = [id for id in self._connections.ids if id in state.members]
        return sum(map(self._connections.is_silent, others))

    # --- one kind of message each

    def _on_hello(self, id: int, hello: messages.Hello) -> None:
        """Know an agent from now on, unless it is to look for the job elsewhere, or comes after the end."""
        if self._said_hello == max(_LEAST_HELLOS, _HELLOS * self._terms.keepalive.max_nodes):
            self._connections.expel(id, "too many agents have come and gone")
        elif hello.last_generation > _MOST_GENERATIONS:
            self._connections.expel(id, f"claims to have begun generation {hello.last_generation}")
        elif hello.last_term > first_term(time.time() + _MOST_AHEAD):
            self._connections.expel(
                id, f"claims to have begun a generation of term {hello.last_term}, far ahead of the clock here"
            )
        elif hello.workers * self._terms.keepalive.max_nodes > fields.MAX_RANKS:
            self._connections.expel(id, "has more workers than a job of so many nodes may have")
        else:
            self._said_hello += 1
            self.agents.by_id[id] = Agent(hello)
            if self.agents.job_end is not None and self._coordinator.state.policy.dispatched:
                self.agents.send((id,), self.agents.job_end)  # it was started with the others
            else:
                self._admit(member_of(id, hello, self._connections.far_address(id)))

    def _on_stop_of_waiting(self, id: int, report: node.ReportStopping) -> None:
        """Let a node go that is not admitted yet, and is to stop; where no other can take its place, the job ends."""
        state = self._coordinator.state
        if state.policy.needs_all or state.policy.dispatched:
            stop = job.StopRequested(report.why, report.signum, self._loop.now(), report.by_cluster)
            self._coordinator.feed(stop)
            return
        self.agents.waiting.pop(id, None)
        if report.signum:
            self._coordinator.release(id, report.signum)
        else:
            self._connections.drop(id)

    def _pass_end(self, id: int, agent: Agent, report: NodeEnd | StacksAtEnd, own: range) -> None:
        """Pass on the end of a generation, or where workers were then, if the report is about the agent's `own` ranks."""
        if speaks_for_others(report, own):
            self._connections.expel(id, "sent a malformed message (the end of workers that are not its own)")
        elif isinstance(report, NodeEnd):
            offset, _ = self._connections.offset(id)
            self._coordinator.on_report(id, messages.on_our_clock(report, agent.hello.host, offset))
        elif why := why_too_much(report.stacks, len(own), self.agents.world_size):
            self._on_dropped(id, f"it {why}")
        else:
            self._coordinator.on_report(id, report)

    def _pass_answer(self, id: int, agent: Agent, report: Answered) -> None:
        """Pass on an answer about the agent's own workers; in place of any other answer, the reason why it was refused."""
        # what was asked before this generation began may have been answered before its agent knew of it
        is_older = report.number <= self.agents.asked_before
        own = range(0) if is_older or agent.ranks is None else agent.ranks
        if why := why_refused(report.answer, own, agent.hello.workers, self.agents.world_size):
            if not is_older:
                self._on_dropped(id, f"it {why}")
            report = Answered(report.number, NoAnswer("was to begin just then" if is_older else why))
        self._coordinator.on_report(id, report)

    def _admit(self, member: Member) -> None:
        """Admit a new agent as a member, or have it wait until all others have answered a ping.

        It waits if its node rank is not free: a host may be back after a power cut, or a pod may have started again, before
        the coordinator has noticed the loss.
        """
        if self._is_admitted(member):
            self._join(member)
        else:
            self.agents.waiting[member.id] = member
            self._connections.ping_all()

    def _is_admitted(self, member: Member) -> bool:
        """Whether the job has a place for this agent."""
        return why_refused_by_job(self._coordinator.state.policy, self._coordinator.state.members, member) is None

    def _admit_waiting(self) -> None:
        """Admit waiting agents whose node rank is free; once no rank can become free any more, have the job refuse the rest."""
        state, answered = self._coordinator.state, self._connections.all_answered
        is_clear = answered and not any(member.is_leaving for member in state.members.values())
        for id, member in list(self.agents.waiting.items()):
            if id not in self.agents.waiting:
                return  # the one before has ended the job
            if self._is_admitted(member) or is_clear:
                del self.agents.waiting[id]
                self._join(member)

    def _join(self, member: Member) -> None:
        self._coordinator.feed(job.Joined(member, self._loop.now()))
