"""The agents of the other nodes, as the coordinator reaches them: what they have in common, their reports, the orders to them.

Keeps which connections are those of agents, and which only watch. Decides nothing about the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from signal import SIGTERM
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.control.listener import MAX_REFUSALS
from ddplaunch.control.questions import Answered, Ask, NoAnswer, StacksAtEnd
from ddplaunch.control.streams import Chunk
from ddplaunch.coordinator import messages
from ddplaunch.coordinator.connections import Connections, Terms
from ddplaunch.coordinator.coordinator import Coordinator
from ddplaunch.coordinator.link import Forward, Generation, JobEnd, NodeEnd, SentReport, Warned
from ddplaunch.coordinator.messages import Hello, speaks_for_others, why_refused, why_too_much
from ddplaunch.errors import below
from ddplaunch.loop.loop import Loop
from ddplaunch.plan import Agreed, PlannedAgent, agent_runs
from ddplaunch.plan.ranks import ranks_of_all
from ddplaunch.supervise import job, node
from ddplaunch.supervise.job import SELF_ID, Member
from ddplaunch.supervise.job.rendezvous import why_refused as why_not_admitted
from ddplaunch.supervise.outcome import Why

if TYPE_CHECKING:
    from ddplaunch.coordinator.link import OrderToAll


_NO_MEMBER = -1  # no member's id
_HELLOS = 10  # of each node in one job, and at least _LEAST_HELLOS in all: each is logged
_LEAST_HELLOS = 10_000
_WARNINGS = 20  # of each connection


class Agents:
    """All that have connected to the coordinator, by the number of the connection."""

    def __init__(
        self,
        loop: Loop,
        terms: Terms,
        coordinator: Coordinator,
        print_line: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._terms = terms
        self._coordinator = coordinator
        self._print = print_line
        self._hellos: dict[int, messages.Hello] = {}
        self._watchers: set[int] = set()
        # Slurm's SIGTERM may at any moment end the command that has started the agents: the shell of its batch script ends at it,
        # and with that all that it has started. We do what it should do, if we can.
        self._requeues_after_sigterm = SIGTERM in coordinator.state.policy.notices and _has_scontrol()
        self._waiting: dict[int, Member] = {}  # their place is taken, perhaps by one that is lost
        self._retry = loop.timer(None, self._admit_waiting)
        self._ranks: dict[int, range] = {}  # of those that take part in this generation
        self._world_size = 0
        self._asked = self._asked_before = 0  # the last question, and the last one before this generation began
        self._reports: dict[int, set[SentReport]] = {}  # of this generation, by connection
        self._said_hello = 0  # agents, those that are gone included
        self._refusals: set[str] = set()  # that were printed
        self._warned: set[int] = set()  # of whom it was printed that something was dropped
        self._warnings: Counter[int] = Counter()  # what each has to do without
        self._end: JobEnd | None = None
        self.connections = Connections(
            loop,
            terms,
            received=self._received,
            lost=self._lost,
            dropped=self._dropped,
            refused=self._refused,
            answered=self.state_changed,
        )
        self.port = self.connections.port

    def join(self, hello: messages.Hello) -> Member:
        """Take the hello of the coordinator's own agent."""
        self._hellos[SELF_ID] = hello
        return member_of(SELF_ID, hello)

    # --- what comes in

    def _refused(self, address: str, reason: str) -> None:
        self._print(f"refused a connection from {address}: {reason}")

    def _dropped(self, id: int, reason: str) -> None:
        """Warn, once for each agent, that something was dropped of what it has sent."""
        if id in self._hellos and id not in self._warned:
            self._warned.add(id)
            host = self._hellos[id].host
            self._print(f"warning: what {host} has sent about its workers was dropped: {reason}")

    def _received(self, id: int, message: messages.ToCoordinator) -> None:
        match message:
            case _ if id in self._watchers:
                self._watcher_sent(message)
            case messages.Hello() if self._said_hello == max(_LEAST_HELLOS, _HELLOS * self._terms.max_nodes):
                self.connections.expel(id, "too many agents have come and gone")
            case messages.Hello() if id not in self._hellos:
                self._said_hello += 1
                self._hellos[id] = message
                self._admit(member_of(id, message))
            case messages.Watch() if not self._terms.has_front or self._watchers:
                self.connections.expel(id, "is no agent")
            case messages.Watch() if id not in self._hellos:
                self._watchers.add(id)
                if self._end is not None:
                    self.send((id,), self._end)
            case messages.Withdrawal(rank, host, reason, hint) if id not in self._hellos:
                self.connections.drop(id)
                who = host if rank is None else f"node {rank} ({host})"
                self._coordinator.feed(job.Withdrawn(below(who), below(reason), below(hint), self._loop.now()))
            case messages.Hello() | messages.Watch() | messages.Withdrawal():
                self.connections.expel(id, "sent hello twice")
            case _ if id not in self._hellos:
                self.connections.expel(id, "did not send hello first")
            case NodeEnd(generation) | StacksAtEnd(generation):
                if generation == self._coordinator.state.generation and id in self._ranks:
                    self._ended(id, message, self._ranks[id])
            case node.Escalate() | node.RequestStore() if id not in self._ranks:
                pass  # it has no part in what it wants killed, or served
            case Answered():
                self._answered(id, message)
            case node.HoldTimeout(True) if not (
                self._coordinator.state.policy.debugs or self._coordinator.attaches(id)
            ):
                self._dropped(id, "it holds a worker in a debugger, and nobody debugs this job")
            case Chunk():
                self._coordinator.take_chunk(id, message)
            case Warned():
                self._warnings[id] += 1
                if self._warnings[id] <= _WARNINGS:
                    self._coordinator.take(id, message)
            case node.ReportIdle() | node.HoldTimeout():
                self._coordinator.take(id, message)
            case node.ReportStopping() | node.ReportNotice() | node.Escalate() | node.RequestStore():
                self._reported(id, message)

    def _ended(self, id: int, report: NodeEnd | StacksAtEnd, own: range) -> None:
        """Take the end of a generation, or where workers were then, from the agent whose ranks these are, if it is about them."""
        if speaks_for_others(report, own):
            self.connections.expel(id, "sent a malformed message (the end of workers that are not its own)")
        elif isinstance(report, NodeEnd):
            host, offset = self._hellos[id].host, self.connections.offset(id)
            self._coordinator.take(id, messages.on_our_clock(report, host, offset))
        elif why := why_too_much(report.stacks, len(own), self._world_size):
            self._dropped(id, f"it {why}")
        else:
            self._coordinator.take(id, report)

    def _answered(self, id: int, report: Answered) -> None:
        """Take an answer if it is about the agent's own workers, and the reason why it is not taken if it is not."""
        # what was asked before this generation began may have been answered before its agent knew of it
        is_older = report.number <= self._asked_before
        own = range(0) if is_older else self._ranks.get(id, range(0))
        if why := why_refused(report.answer, own, self._hellos[id].workers, self._world_size):
            if not is_older:
                self._dropped(id, f"it {why}")
            report = Answered(report.number, NoAnswer("was to begin just then" if is_older else why))
        self._coordinator.take(id, report)

    def _reported(self, id: int, report: SentReport) -> None:
        """Take a report, unless it was made before in this generation: then it changes nothing, but would be logged."""
        reports = self._reports.setdefault(id, set())
        if report not in reports:
            reports.add(report)
            self._coordinator.take(id, report)

    def _admit(self, member: Member) -> None:
        """Take a member; where its place is taken only after all others have answered once more.

        A host may be back after a power cut, or a pod started anew, before its loss was noticed.
        """
        if why_not_admitted(self._coordinator.state, member) is None:
            self._coordinator.feed(job.Joined(member, self._loop.now()))
        else:
            self._waiting[member.id] = member
            self.connections.ping_all()

    def state_changed(self) -> None:
        """See whether one that waits for a place can have it now, once all that has come in is taken."""
        if self._waiting:
            self._retry.set(self._loop.now())

    def _admit_waiting(self) -> None:
        """Take, or refuse, those that wait for a place, as far as that is clear; who leaves will give one up."""
        members = self._coordinator.state.members.values()
        is_clear = self.connections.all_answered and not any(member.is_leaving for member in members)
        for id, member in list(self._waiting.items()):
            if why_not_admitted(self._coordinator.state, member) is None or is_clear:
                del self._waiting[id]
                self._coordinator.feed(job.Joined(member, self._loop.now()))

    def _watcher_sent(self, message: messages.ToCoordinator) -> None:
        """Pass on a request to stop, an escalation or a signal of the watcher: the command that started the agents."""
        now = self._loop.now()
        match message:
            case node.ReportStopping(why, signum, by_cluster):
                self._coordinator.feed(job.StopRequested(why, signum, now, by_cluster))
            case node.Escalate(signum):
                self._coordinator.feed(job.NodeEscalated(_NO_MEMBER, signum, now))
            case Forward(signum):
                self._coordinator.forward(signum)

    def _lost(self, id: int, reason: str) -> None:
        for known in (self._hellos, self._waiting, self._ranks, self._reports):
            known.pop(id, None)
        self._warned.discard(id)
        del self._warnings[id]
        if self._end is not None:
            return  # they close as ordered
        if id in self._watchers:
            self._watchers.discard(id)
            self._coordinator.feed(job.StopRequested(Why.FRONT_LOST, 0, self._loop.now()))
        else:
            self._coordinator.feed(job.Left(id, reason, self._loop.now()))

    # --- what goes out

    def agree(self, order: Sequence[int]) -> Agreed:
        """Return what these agents, by index, have in common in the generation that begins."""
        hellos = [self._hellos[id] for id in order]
        backend, reason = common_backend(hellos)
        agents = tuple(PlannedAgent(hello.host, hello.workers) for hello in hellos)
        self._ranks = dict(zip(order, ranks_of_all(agents), strict=True))
        self._world_size = sum(agent.workers for agent in agents)
        self._asked_before = self._asked
        self._reports.clear()
        for id in order:
            self.connections.admit(id)
        return Agreed(
            run_id=self._terms.run_id,
            index=0,
            agent_runs=agent_runs(agents),
            address=self._terms.address or reached_as(hellos[1:] or hellos),
            backend=backend,
            backend_reason=reason,
        )

    def begin(self, order: Sequence[int], generation: Generation) -> None:
        """Have these agents begin, each told its index in `order`."""
        message = messages.fitted(generation)
        assert message.agreed is not None
        for index, id in enumerate(order):
            self.connections.send(id, messages.encode(replace(message, agreed=replace(message.agreed, index=index))))

    def send(self, ids: Sequence[int], order: OrderToAll) -> None:
        """Send an order to these agents."""
        payload = messages.encode(messages.fitted(order))
        if isinstance(order, Ask):
            self._asked = order.number
        for id in ids:
            self.connections.send(id, payload)

    def refused(self, id: int, reason: str) -> None:
        """Report that an agent was refused, each reason once for each host, and at most MAX_REFUSALS of them."""
        text = f"{self._hellos[id].host}: {reason}"
        if text not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(text)
            self._print(f"refused {text}")

    def end(self, end: JobEnd) -> None:
        """Send the end of the job to all, also to those that connect too late to send a hello."""
        self._end = end
        self.send(list(self.connections.ids), end)

    # --- time and facts

    def offset(self, id: int) -> tuple[float, float]:
        """What has to be added to the times of this agent's host to get ours, in seconds, and how wrong that may be."""
        return self.connections.offset(id), self.connections.offset_error(id)

    def are_watched(self, requeue: int) -> bool:
        """Whether the command that has started the agents is connected, and requeues the job after this notice, if one came."""
        return bool(self._watchers) and not (requeue == SIGTERM and self._requeues_after_sigterm)


def _has_scontrol() -> bool:
    import shutil  # few jobs need it

    return shutil.which("scontrol") is not None


# --- what follows from the hellos of all agents


def member_of(id: int, hello: Hello) -> Member:
    """Return the member that has sent this, with what all have to agree on."""
    facts = hello.facts
    return Member(
        id=id,
        host=hello.host,
        workers=hello.workers,
        requested_rank=hello.requested_rank,
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )


def reached_as(hellos: Sequence[Hello]) -> str:
    """Return the address under which most have reached the coordinator."""
    return Counter(hello.reached for hello in hellos).most_common(1)[0][0]


def common_backend(hellos: Sequence[Hello]) -> tuple[str, str]:
    """Return the backend that all nodes can use, and why."""
    found: dict[str, str] = {}
    for hello in hellos:
        found.setdefault(hello.backend, hello.host)
    if len(found) == 1:
        return hellos[0].backend, hellos[0].backend_reason
    differing = ", ".join(f"{backend} on {host}" for backend, host in found.items())
    return "gloo", f"the nodes differ: {differing}"
