"""Takes the messages of the other nodes: admits agents, checks what each of them may say, and passes that on to the coordinator.

Decides nothing about the job. Knows which connections are those of agents, and which belong to a command that only watches.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from signal import SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import Member, Phase
from ddplaunch.launcher.decide.job.rendezvous import why_refused as why_refused_by_job
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.agents import Agents, member_of
from ddplaunch.launcher.job.ballots import Seals
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.messages import speaks_for_others, why_refused, why_too_much
from ddplaunch.launcher.job.orders import Forward, Moved, NodeEnd, SentReport, Unfit, Warned
from ddplaunch.reach.channel.streams import Chunk
from ddplaunch.record.window.questions import Answered, NoAnswer, StacksAtEnd
from ddplaunch.spec.outcome import Why
from ddplaunch.system import exitcodes, fields
from ddplaunch.system.errors import below
from ddplaunch.system.loop.loop import Loop

_HELLOS = 10  # of each node in one job, and at least _LEAST_HELLOS in all: each is logged
_LEAST_HELLOS = 10_000
_WARNINGS = 20  # of each connection


class Incoming:
    """Reads the connections of the other nodes, for a coordinator and its list of agents."""

    def __init__(
        self,
        loop: Loop,
        terms: Terms,
        coordinator: Coordinator,
        print_line: Callable[[str], None],
        seals: Sequence[Seals] = (),
    ) -> None:
        """Listen for the other nodes on one of the ports of `terms`; `seals` are of a coordinator that was lost.

        Raises LaunchError if all ports are taken.
        """
        self._loop = loop
        self._terms = terms
        self._coordinator = coordinator
        self._print = print_line
        self._reports: dict[int, set[tuple[int, SentReport]]] = {}  # with their generation, by connection
        self._said_hello = 0  # agents, the departed included
        self._warned: set[int] = set()  # agents of which the user knows that something was dropped
        self._warnings: Counter[int] = Counter()  # how many each agent has sent
        self._late: set[int] = set()  # agents of another coordinator, for which this one waits no longer
        self._has_warned = False  # of another coordinator of this job
        self._moved: Moved | None = None  # where the job goes on, if this coordinator was started for nothing
        self._connections = Connections(
            loop,
            terms,
            received=self._on_message,
            lost=self._on_lost,
            dropped=self._on_dropped,
            refused=lambda address, reason: print_line(f"refused a connection from {address}: {reason}"),
            # an agent may wait until all others have answered
            answered=lambda: self.agents.state_changed(),  # noqa: PLW0108 - which are made next
            counts=lambda id: coordinator.state.succession.counts(coordinator.state.members, id),
        )
        self.agents = Agents(
            loop,
            terms,
            self._connections,
            print_line,
            # Slurm's SIGTERM may at any moment end the command that has started the agents: the shell of its batch script ends
            # at it, and with that all that it has started. We do what it should do, if we can.
            requeues_after_sigterm=SIGTERM in coordinator.state.policy.notices and shutil.which("scontrol") is not None,
            retry=loop.timer(None, self._admit_waiting),
            seals=seals,
        )

    # --- called by Connections

    def _on_dropped(self, id: int, reason: str) -> None:
        """Warn, once for each agent, that a part of its messages was dropped."""
        if id in self.agents.hellos and id not in self._warned:
            self._warned.add(id)
            host = self.agents.hellos[id].host
            self._print(f"warning: what {host} has sent about its workers was dropped: {reason}")

    def _on_message(self, id: int, message: messages.ToCoordinator) -> None:
        """Do what a message asks for, if this peer may send it; expel a peer that breaks the order of messages."""
        match message:
            # the job goes on elsewhere
            case messages.GoesOn() if id not in self.agents.hellos and self._coordinator.state.policy.has_successors:
                self._on_goes_on(id, message)
            case _ if self._moved is not None:
                self._connections.send(id, messages.encode(self._moved))
                self._connections.drop(id)
            case _ if id in self.agents.watchers:
                self._on_watcher(message)
            # an agent
            case messages.Hello() if id not in self.agents.hellos:
                self._on_hello(id, message)
            case messages.Watch() if not self._terms.has_front or self.agents.watchers:
                self._connections.expel(id, "is no agent")
            case messages.Watch() if id not in self.agents.hellos:
                self.agents.watch(id)
            case messages.Withdrawal(rank, host, reason, hint) if id not in self.agents.hellos:
                self._connections.drop(id)
                who = host if rank is None else f"node {rank} ({host})"
                self._coordinator.feed(job.Withdrawn(below(who), below(reason), below(hint), self._loop.now()))
            case messages.Hello() | messages.Watch() | messages.Withdrawal():
                self._connections.expel(id, "sent hello twice")
            case _ if id not in self.agents.hellos:
                self._connections.expel(id, "did not send hello first")
            case messages.Acknowledged(term):
                self._coordinator.feed(job.Acknowledged(id, term, self._loop.now()))
            case messages.Deserted():
                answered_at = self._connections.answered_at(id)
                self._connections.drop(id)
                self._on_lost(
                    id, "has heard nothing from node 0 for too long", has_ended=False, answered_at=answered_at
                )
            case NodeEnd(leftovers=leftovers) if id in self._late:
                self._late.discard(id)
                if leftovers:
                    reason = f"what is left of its workers would run beside others: {leftovers[0]}"
                    self._coordinator.refuse(id, reason, exitcodes.NODE_LOST)
                    return
                self._admit(self._member(id, is_new=True))
            case NodeEnd(leftovers=leftovers) if self.agents.has_unknown_ranks(id):
                self._coordinator.feed(job.NodeEnded(id, (), None, self._loop.now(), leftovers))
            case NodeEnd(generation) | StacksAtEnd(generation):
                if generation == self._coordinator.state.generation.number and id in self.agents.ranks:
                    self._pass_end(id, message, self.agents.ranks[id])
            case node.Escalate() | node.RequestStore() if id not in self.agents.ranks:
                pass  # it has no part in what it wants killed, or served
            case Answered():
                self._pass_answer(id, message)
            case node.PauseLimits(True) if not (
                self._coordinator.state.policy.debugs or self._coordinator.attaches(id)
            ):
                self._on_dropped(id, "it holds a worker in a debugger, and nobody debugs this job")
            case Warned():
                self._warnings[id] += 1
                if self._warnings[id] <= _WARNINGS:
                    self._coordinator.take(id, message)
            case node.ReportIdle() | node.PauseLimits() | Chunk():
                self._coordinator.take(id, message)
            case Unfit(reason):
                lost = below(f"its health check failed: {reason}")
                self._coordinator.feed(job.AgentLost(id, lost, self._loop.now(), has_ended=True))
            case node.ReportStopping() if id in self.agents.waiting or id in self._late:
                if message.why is not Why.FAILED:
                    self._on_stop_of_waiting(id, message)
            case node.ReportStopping() | node.ReportNotice() | node.Escalate() | node.RequestStore():
                # the same report in the same generation would be logged again
                made = (self._coordinator.state.generation.number, message)
                reports = self._reports.setdefault(id, set())
                if made not in reports:
                    reports.add(made)
                    self._coordinator.take(id, message)

    def _on_lost(self, id: int, reason: str, has_ended: bool, answered_at: float) -> None:
        """Forget a peer whose connection has ended; the job learns of it, except after its own end."""
        for known in (self.agents.hellos, self.agents.waiting, self.agents.ranks, self._reports):
            known.pop(id, None)
        self._warned.discard(id)
        self._late.discard(id)
        self.agents.returned.discard(id)
        del self._warnings[id]
        if self.agents.job_end is not None or self._moved is not None:
            return  # peers close as ordered
        if id in self.agents.watchers:
            self.agents.watchers.discard(id)
            self._coordinator.feed(job.StopRequested(Why.FRONT_LOST, 0, self._loop.now()))
        else:
            lost = job.AgentLost(id, reason, self._loop.now(), has_ended, answered_at, self._number_of_silent(id))
            self._coordinator.feed(lost)

    def _number_of_silent(self, lost: int) -> int:
        """Return how many members are silent besides one that is lost: the network of this node may be out."""
        state = self._coordinator.state
        if state.phase is not Phase.RUNNING or lost not in state.members:
            return 0
        others = [id for id in self._connections.ids if id in state.members]
        return sum(map(self._connections.is_silent, others))

    # --- one kind of message each

    def _on_watcher(self, message: messages.ToCoordinator) -> None:
        """Do what the command asks for that has started the agents, and looks on."""
        now = self._loop.now()
        match message:
            case node.ReportStopping(why, signum, by_cluster):
                self._coordinator.feed(job.StopRequested(why, signum, now, by_cluster))
            case node.Escalate(signum):
                self._coordinator.feed(job.NodeEscalated(job.NO_MEMBER, signum, now))
            case Forward(signum):
                self._coordinator.forward(signum)
            case Chunk():
                self._coordinator.take_of_watcher(message)

    def _on_hello(self, id: int, hello: messages.Hello) -> None:
        """Know an agent from now on, unless it is to look for the job elsewhere, or comes after the end."""
        if self._said_hello == max(_LEAST_HELLOS, _HELLOS * self._terms.max_nodes):
            self._connections.expel(id, "too many agents have come and gone")
        elif hello.workers * self._terms.max_nodes > fields.MAX_RANKS:
            self._connections.expel(id, "has more workers than a job of so many nodes may have")
        elif not self.agents.ballots.take(hello.votes, hello.secrets):
            self._connections.expel(id, "claims a vote that it does not show to be its own")
        elif hello.votes and self._coordinator.state.end.is_cut_off:
            self._connections.drop(id)  # the job may go on with others, for which it looks then
        elif hello.run_id is not None and self.agents.job_end is not None:
            self.agents.send((id,), self.agents.job_end)  # it has lost another coordinator, and comes late
        elif hello.run_id is not None and self._is_anew(hello.run_id):
            self._connections.send(id, messages.encode(messages.Anew()))
            self._connections.drop(id)
        else:
            self._said_hello += 1
            self.agents.hellos[id] = hello
            self._take_back_or_admit(id, hello)

    def _take_back_or_admit(self, id: int, hello: messages.Hello) -> None:
        """Admit an agent that is new, or that has lost a coordinator, once it takes part in no generation of that one."""
        if hello.runs is not None:
            self._connections.admit(id)  # the end of its part of that generation may be long
        state, member = self._coordinator.state, self._member(id)
        if state.succession.gather_until is not None and self._is_admitted(member):
            self.agents.take_up(id, hello)
            self._join(member)
            self._coordinator.take_up(hello.stop)
            return
        self._coordinator.take_up(hello.stop)
        if hello.votes:
            self.agents.returned.add(id)
        if hello.runs is not None:
            self._late.add(id)  # there is no place for it in what ends of that generation: it first has to end its part
        else:
            self._admit(self._member(id, is_new=True))

    def _member(self, id: int, *, is_new: bool = False) -> Member:
        """Return the agent as a member; see `member_of`."""
        return member_of(id, self.agents.hellos[id], self._connections.far_address(id), is_new=is_new)

    def _on_stop_of_waiting(self, id: int, report: node.ReportStopping) -> None:
        """Let a node go that is not admitted yet, and is to stop; where no other can take its place, the job ends."""
        state = self._coordinator.state
        if state.policy.needs_all or state.policy.dispatched:
            stop = job.StopRequested(report.why, report.signum, self._loop.now(), report.by_cluster)
            self._coordinator.feed(stop)
            return
        self.agents.waiting.pop(id, None)
        self.agents.returned.discard(id)
        self._late.discard(id)
        if report.signum:
            self._coordinator.release(id, report.signum)
        else:
            self._connections.drop(id)

    def _is_anew(self, run_id: str) -> bool:
        """Whether this coordinator was started after that of a node which has lost its own: it has announced nothing yet."""
        return run_id != self._terms.run_id or self._coordinator.state.succession.term == 0

    def _on_goes_on(self, id: int, found: messages.GoesOn) -> None:
        """Leave the job to the coordinator that has taken over, if this one has begun nothing; send all agents there.

        Its connection is kept, so that it need not look for this one again.
        """
        state = self._coordinator.state
        if state.generation.number >= 0 or state.phase is job.Phase.ENDED:
            if state.phase is job.Phase.RUNNING and not self._has_warned:
                self._has_warned = True
                who = f"{found.host} ({self._connections.address(id)}, port {found.port})"
                self._print(f"warning: {who} goes on with this job too: stop the workers of one of both")
                self._connections.send(id, messages.encode(messages.Anew()))
            self._connections.drop(id)
            return
        was_moved, self._moved = self._moved, Moved(fields.host(self._connections.address(id)), found.port)
        for agent in self.agents.hellos:
            self._connections.send(agent, messages.encode(self._moved))
            self._connections.drop(agent)
        self.agents.hellos.clear()
        self.agents.waiting.clear()
        if was_moved is None:
            self._print(f"the job goes on: {found.host} has taken over. Joining it")
            self._coordinator.retire(self._moved)

    def _pass_end(self, id: int, report: NodeEnd | StacksAtEnd, own: range) -> None:
        """Pass on the end of a generation, or where workers were then, if the report is about the agent's `own` ranks."""
        if speaks_for_others(report, own):
            self._connections.expel(id, "sent a malformed message (the end of workers that are not its own)")
        elif isinstance(report, NodeEnd):
            host, (offset, _) = self.agents.hellos[id].host, self._connections.offset(id)
            self._coordinator.take(id, messages.on_our_clock(report, host, offset))
        elif why := why_too_much(report.stacks, len(own), self.agents.world_size):
            self._on_dropped(id, f"it {why}")
        else:
            self._coordinator.take(id, report)

    def _pass_answer(self, id: int, report: Answered) -> None:
        """Pass on an answer about the agent's own workers; in place of any other answer, the reason why it was refused."""
        # what was asked before this generation began may have been answered before its agent knew of it
        is_older = report.number <= self.agents.asked_before
        own = range(0) if is_older else self.agents.ranks.get(id, range(0))
        if why := why_refused(report.answer, own, self.agents.hellos[id].workers, self.agents.world_size):
            if not is_older:
                self._on_dropped(id, f"it {why}")
            report = Answered(report.number, NoAnswer("was to begin just then" if is_older else why))
        self._coordinator.take(id, report)

    def _admit(self, member: Member) -> None:
        """Admit a new agent as a member, or have it wait until all others have answered a ping.

        It waits if its node rank is not free: a host may be back after a power cut, or a pod may have started again, before
        the coordinator has noticed the loss. And if it has lost this coordinator: the others may have, too, and go on elsewhere.
        """
        if member.id not in self.agents.returned and self._is_admitted(member):
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
                return  # the one before has ended the job, or had it handed over
            if id in self.agents.returned and (not answered or state.phase is Phase.ENDED):
                continue
            if self._is_admitted(member) or is_clear:
                del self.agents.waiting[id]
                self._join(member)

    def _join(self, member: Member) -> None:
        state = self._coordinator.state
        if state.succession.gather_until is None and member.votes:
            member = replace(member, votes=self._still_counting(member.votes))
        self.agents.returned.discard(member.id)
        self.agents.introduce(member.id, member.votes)
        self._coordinator.feed(job.Joined(member, self._loop.now()))
        if member.votes:
            self._connections.confirm(member.id)  # this coordinator may be lost before the next ping

    def _still_counting(self, votes: messages.Votes) -> messages.Votes:
        """Return the votes that count here of a node that comes back; none if another coordinator may have begun with it."""
        known = {one.term for one in self._coordinator.state.succession.electorates}
        is_ours = votes[-1].term in known | self.agents.announced_terms  # the last that it has acknowledged
        return tuple(vote for vote in votes if vote.term in known) if is_ours else ()
