"""The other nodes' agents, as the coordinator sees them: what they have in common, and the orders to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.messages import Hello
from ddplaunch.launcher.job.orders import Generation, JobEnd, Lead, MeetAt
from ddplaunch.plan import Agreed, PlannedAgent, agent_runs
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.ranks import ranks_of_all
from ddplaunch.reach.channel.listener import MAX_REFUSALS
from ddplaunch.record.window.questions import Ask
from ddplaunch.system import exitcodes, fields
from ddplaunch.system.net.addresses import is_loopback

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import OrderToAll, SentReport


class Agent:
    """An agent that has said hello, until its connection ends."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.ranks: range | None = None  # of its workers in this generation; None: it takes no part
        self.reports: set[tuple[int, SentReport]] = set()  # with their generation: those that count once in it
        self.warnings = 0  # how many it has sent
        self.is_known_to_drop = False  # the user has read that something of what it sent was dropped


class _Incoming(Protocol):
    """What takes the messages of agents (`Incoming`), as far as the list of agents needs it."""

    def admit_waiting_soon(self) -> None: ...
    def print(self, text: str) -> None: ...


class Agents:
    """All agents that have said hello to the coordinator, by the number of the connection; SELF_ID is the coordinator's own."""

    def __init__(self, terms: Terms, connections: Connections, incoming: _Incoming) -> None:
        """Know no agent yet."""
        self._terms = terms
        self._incoming = incoming
        self._printed_refusals: set[str] = set()
        self._last_question = 0  # the number of the last question to agents
        self.connections = connections
        self.port = connections.port
        self._run_id = ""  # of the job, once a generation has begun
        self.by_id: dict[int, Agent] = {}
        self.waiting: dict[int, Member] = {}  # agents whose node rank another one has, which may be lost already
        self.world_size = 0  # of the generation that runs
        self.last_question_of_past = 0  # asked before this generation: answers up to it may be about earlier workers
        self.job_end: JobEnd | None = None  # as it was sent to all; None: the job goes on

    def leave(self, signum: int, why_unfit: str) -> None:
        """Have the agents wait until node 0 is started again, and know no agent any more."""
        payload = messages.encode(messages.LeftByNode0(signum, fields.line(why_unfit)))
        for id in self.connections.ids:
            self.connections.send(id, payload)
        self.close()

    def close(self) -> None:
        """Know no agent any more."""
        self.waiting.clear()
        self.connections.close()

    def add_own(self, hello: Hello) -> Member:
        """Take the hello of the coordinator's own agent."""
        self.by_id[SELF_ID] = Agent(hello)
        return member_of(SELF_ID, hello)

    def state_changed(self) -> None:
        """Have the agents that wait for a node rank admitted soon, if it is free now."""
        if self.waiting:
            self._incoming.admit_waiting_soon()

    def names_of(self, id: int) -> tuple[str, ...]:
        """Return where others are to look for an agent first: at the address that the user gave, and under its name."""
        names = (self._terms.address, self.by_id[id].hello.host)
        return tuple(name for name in names if name is not None)

    def ask(self, id: int, order: Lead | MeetAt) -> None:
        """Have an agent do its part before a generation begins."""
        self.connections.send(id, messages.encode(order))

    def agree(self, order: Sequence[int], address: str | None = None) -> Agreed:
        """Give the agents, by node rank, their ranks in the generation that begins, and return what they have in common there.

        `address` is where the others have reached the first node, if the coordinator is on another one; None: it is on the first.
        """
        hellos = [self.by_id[id].hello for id in order]
        planned = tuple(PlannedAgent(hello.host, hello.workers) for hello in hellos)
        for agent in self.by_id.values():
            agent.ranks = None
        for id, ranks in zip(order, ranks_of_all(planned), strict=True):
            self.by_id[id].ranks = ranks
            self.connections.admit(id)  # to long messages, as about the ends of its workers
        self.world_size = sum(agent.workers for agent in planned)
        self.last_question_of_past = self._last_question
        self._run_id = self._run_id or self._name_of_run()
        backend, backend_reason = _common_backend(hellos)
        return Agreed(
            run_id=self._run_id,
            index=0,  # `begin` tells each agent its own
            agent_runs=agent_runs(planned),  # how many agents in a row have how many workers
            address=self._terms.address or address or self._reached_at(order),
            backend=backend,
            backend_reason=backend_reason,
        )

    def _name_of_run(self) -> str:
        """Return the id of the run: that of the nodes which have waited for this node 0 to return, if any, since it goes on."""
        last = max((agent.hello for agent in self.by_id.values()), key=attrgetter("last_term"))
        return last.run_id or self._terms.run_id

    def _reached_at(self, order: Sequence[int]) -> str:
        """Return where most of these agents reach this node: that will be MASTER_ADDR.

        The workers of all nodes obey whatever listens there, so no agent may name a place freely: its word counts only for a name
        that this node knows for its own. Else this node's end of the connection counts.
        """
        own_names, reached = self._terms.names, []
        for id in order:
            own_end = "" if id == SELF_ID else self.connections.local_address(id)
            # at the loopback address are agents on this host, which reach its other addresses too; ssh's pipes have no address
            if own_end and not is_loopback(own_end):
                name = self.by_id[id].hello.reached
                reached.append(name if name in own_names else own_end)
        if not reached:  # all agents are on this host, or reach it by pipes
            return own_names[0] if own_names else LOOPBACK
        return Counter(reached).most_common(1)[0][0]

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
            self._last_question = order.number
        for id in ids:
            self.connections.send(id, payload)

    def announce_end(self, status: int) -> None:
        """Tell all agents that the job is being stopped for good: none of them is to wait should node 0 be lost meanwhile."""
        payload = messages.encode(messages.Ending(status))
        for id in self.connections.ids:
            self.connections.send(id, payload)

    def refused(self, id: int, reason: str) -> None:
        """Report that an agent was refused, each reason once for each host, and at most MAX_REFUSALS of them."""
        text = f"{self.by_id[id].hello.host}: {reason}"
        if text not in self._printed_refusals and len(self._printed_refusals) < MAX_REFUSALS:
            self._printed_refusals.add(text)
            self._incoming.print(f"refused {text}")

    def end_job(self, end: JobEnd, spares: Collection[int]) -> None:
        """Send the end of the job to all, also to those that connect too late to send a hello.

        Spares that nobody needed have done their part, however the job has ended: their status is 0.
        """
        self.job_end = end
        self.send([id for id in self.connections.ids if id not in spares], end)
        self.send(tuple(spares), replace(end, status=exitcodes.OK))


# --- what follows from hellos


def _common_backend(hellos: Sequence[Hello]) -> tuple[str, str]:
    """Return the backend of a generation of these agents, and why: the one that all would choose, else gloo."""
    first_hosts: dict[str, str] = {}  # the first host with each backend
    for hello in hellos:
        first_hosts.setdefault(hello.backend, hello.host)
    if len(first_hosts) == 1:
        return hellos[0].backend, hellos[0].backend_reason
    differing = ", ".join(f"{backend} on {host}" for backend, host in first_hosts.items())
    return "gloo", f"the nodes differ: {differing}"


def member_of(id: int, hello: Hello, address: str = "") -> Member:
    """Return the agent that has said this hello as a member of the job.

    `address` is where it connects from, "" for the coordinator's own agent. `agreed` are the facts that should be equal on all
    nodes: the user is warned where they differ.
    """
    facts = hello.facts
    return Member(
        id=id,
        host=hello.host,
        address=address,
        workers=hello.workers,
        requested_rank=hello.requested_rank,
        last_generation=hello.last_generation,  # that it has begun, under an earlier coordinator, and its term
        last_term=hello.last_term,
        was_left=hello.was_left,  # by a coordinator that it had reached
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )
