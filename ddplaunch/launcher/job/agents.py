"""The agents of the other nodes, by connection: what they have in common, and the orders to them. Takes no reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import SELF_ID, Member
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.messages import Hello
from ddplaunch.launcher.job.orders import Generation, JobEnd, Lead, Reach
from ddplaunch.plan import Agreed, PlannedAgent, agent_runs
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.ranks import ranks_of_all
from ddplaunch.reach.channel.listener import MAX_REFUSALS
from ddplaunch.record.window.questions import Ask
from ddplaunch.system import exitcodes, fields
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.net.addresses import is_loopback

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import OrderToAll, SentReport


class Agent:
    """An agent that has said hello, until its connection ends."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.ranks: range | None = None  # of its workers in this generation; None: it takes no part
        self.reports: set[tuple[int, SentReport]] = set()  # with their generation: those that count once in it
        self.warnings = 0  # that it has sent
        self.is_known_to_drop = False  # the user knows that something of what it sends was dropped


class Agents:
    """All agents that have said hello to the coordinator, by the number of the connection."""

    def __init__(
        self,
        loop: Loop,
        terms: Terms,
        connections: Connections,
        print_line: Callable[[str], None],
        *,
        retry: Timer,
    ) -> None:
        """`retry` admits the agents that wait, if their node rank has become free."""
        self._loop = loop
        self._terms = terms
        self._print = print_line
        self._retry = retry
        self._refusals: set[str] = set()  # that were printed
        self._asked = 0  # the number of the last question
        self.connections = connections
        self.port = connections.port
        self._run_id = ""  # once a generation has begun
        self.by_id: dict[int, Agent] = {}
        self.waiting: dict[int, Member] = {}  # those of them whose node rank another one has, perhaps a lost one
        self.world_size = 0
        self.asked_before = 0  # the number of the last question before this generation
        self.job_end: JobEnd | None = None

    def leave(self, signum: int, unfit: str) -> None:
        """Have the agents wait until node 0 is started again, and know no agent any more."""
        payload = messages.encode(messages.LeftByNode0(signum, fields.line(unfit)))
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
        """Have the agents that wait for a node rank admitted if it is free, once all that has come in is taken."""
        if self.waiting:
            self._retry.set(self._loop.now())

    def names_of(self, id: int) -> tuple[str, ...]:
        """Return where others are to look for an agent first: at the address that the user gave, and under its name."""
        names = (self._terms.address, self.by_id[id].hello.host)
        return tuple(name for name in names if name is not None)

    def ask(self, id: int, order: Lead | Reach) -> None:
        """Have an agent do its part before a generation begins."""
        self.connections.send(id, messages.encode(order))

    def agree(self, order: Sequence[int], address: str | None = None) -> Agreed:
        """Return what these agents, by index, have in common in the generation that begins.

        `address` is the one under which the others have reached the first node, if they do not know that from here.
        """
        hellos = [self.by_id[id].hello for id in order]
        found: dict[str, str] = {}
        for hello in hellos:
            found.setdefault(hello.backend, hello.host)
        backend, reason = hellos[0].backend, hellos[0].backend_reason
        if len(found) > 1:
            differing = ", ".join(f"{backend} on {host}" for backend, host in found.items())
            backend, reason = "gloo", f"the nodes differ: {differing}"
        planned = tuple(PlannedAgent(hello.host, hello.workers) for hello in hellos)
        for agent in self.by_id.values():
            agent.ranks = None
        for id, ranks in zip(order, ranks_of_all(planned), strict=True):
            self.by_id[id].ranks = ranks
            self.connections.admit(id)
        self.world_size = sum(agent.workers for agent in planned)
        self.asked_before = self._asked
        if not self._run_id:  # that of the nodes which have waited for this one, if any have: their records are of that
            last = max((agent.hello for agent in self.by_id.values()), key=attrgetter("last_term"))
            self._run_id = last.run_id or self._terms.run_id
        return Agreed(
            run_id=self._run_id,
            index=0,
            agent_runs=agent_runs(planned),
            address=self._terms.address or address or self._reached_at(order),
            backend=backend,
            backend_reason=reason,
        )

    def _reached_at(self, order: Sequence[int]) -> str:
        """Return where most of these agents reach this node: that will be MASTER_ADDR.

        The workers of all nodes obey whatever listens there, so no agent may name a place freely: its word counts only for a name
        that this node knows for its own. Else this node's end of the connection counts.
        """
        names, reached = self._terms.names, []
        for id in order:
            # at the loopback address are agents on this host, which reach its other addresses too; ssh's pipes have no address
            near = "" if id == SELF_ID else self.connections.local_address(id)
            if near and not is_loopback(near):
                name = self.by_id[id].hello.reached
                reached.append(name if name in names else near)
        return Counter(reached or [*names, LOOPBACK][:1]).most_common(1)[0][0]

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

    def ending(self, status: int) -> None:
        """Tell all agents that the job is being stopped for good: none of them is to wait should node 0 be lost meanwhile."""
        payload = messages.encode(messages.Ending(status))
        for id in self.connections.ids:
            self.connections.send(id, payload)

    def refused(self, id: int, reason: str) -> None:
        """Report that an agent was refused, each reason once for each host, and at most MAX_REFUSALS of them."""
        text = f"{self.by_id[id].hello.host}: {reason}"
        if text not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(text)
            self._print(f"refused {text}")

    def end_job(self, end: JobEnd, spares: Collection[int]) -> None:
        """Send the end of the job to all, also to those that connect too late to send a hello.

        Spares that nobody needed have done their part, however the job has ended: their status is 0.
        """
        self.job_end = end
        self.send([id for id in self.connections.ids if id not in spares], end)
        self.send(tuple(spares), replace(end, status=exitcodes.OK))


# --- what follows from the hellos of all agents


def member_of(id: int, hello: Hello, address: str = "") -> Member:
    """Return the member that has sent this from an address, with what all have to agree on."""
    facts = hello.facts
    return Member(
        id=id,
        host=hello.host,
        address=address,
        workers=hello.workers,
        requested_rank=hello.requested_rank,
        last_generation=hello.last_generation,
        last_term=hello.last_term,
        was_left=hello.was_left,
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )
