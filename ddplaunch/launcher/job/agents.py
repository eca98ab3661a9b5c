"""The agents of the other nodes, by connection: what they have in common, and the orders to them. Takes no reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide.electorate import Electorate, Vote
from ddplaunch.launcher.decide.job import SELF_ID, Announce, Member
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.ballots import Ballots, Seals
from ddplaunch.launcher.job.connections import Connections, Terms
from ddplaunch.launcher.job.messages import MAX_CANDIDATES, Candidate, Hello, Succession, Votes
from ddplaunch.launcher.job.orders import Generation, JobEnd
from ddplaunch.plan import Agreed, PlannedAgent, agent_runs
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.ranks import ranks_of_all
from ddplaunch.reach.channel.listener import MAX_REFUSALS
from ddplaunch.record.window.questions import Ask
from ddplaunch.system import exitcodes, fields
from ddplaunch.system.loop.loop import Loop, Timer
from ddplaunch.system.net.addresses import is_loopback

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import OrderToAll


class Agents:
    """All agents that have connected to the coordinator, by the number of the connection."""

    def __init__(
        self,
        loop: Loop,
        terms: Terms,
        connections: Connections,
        print_line: Callable[[str], None],
        *,
        requeues_after_sigterm: bool,
        retry: Timer,
        seals: Sequence[Seals] = (),
    ) -> None:
        """`retry` admits the agents in `waiting` whose node rank has become free; `seals` are of a coordinator that was lost."""
        self._loop = loop
        self._terms = terms
        self._print = print_line
        self.requeues_after_sigterm = requeues_after_sigterm
        self._retry = retry
        self.ballots = Ballots(seals)
        self._refusals: set[str] = set()  # that were printed
        self._asked = 0  # the number of the last question
        self.connections = connections
        self.port = connections.port
        self.hellos: dict[int, Hello] = {}
        self.watchers: set[int] = set()
        self.waiting: dict[int, Member] = {}  # another agent, perhaps a lost one, has their node rank
        # agents that have lost a coordinator, perhaps this one, and are not admitted yet
        self.returned: set[int] = set()
        self.ranks: dict[int, range] = {}  # of the agents that take part in this generation
        self.world_size = 0
        self.asked_before = 0  # the number of the last question before this generation
        self.job_end: JobEnd | None = None
        self.announced_terms: set[int] = set()
        self._announced: Succession | None = None  # the last time, for nodes that come later
        self._heirs: tuple[int, ...] = ()  # agents that may take over
        self._past: Generation | None = None  # of a coordinator from which this one takes over
        self._watcher_due = loop.timer(None, lambda: None)

    def continue_with(self, past: Generation | None) -> None:
        """Know the ranks of the generation that ends, as this node has begun it under another coordinator."""
        self._past = past
        if past is not None and past.agreed is not None:
            self.world_size = sum(run.agents * run.workers for run in past.agreed.agent_runs)

    def take_up(self, id: int, hello: Hello) -> None:
        """Take an agent that has lost the last coordinator, with its ranks in the generation that ends."""
        past, runs = self._past, hello.runs
        if past is None or runs is None or runs.generation != past.number or past.agreed is None:
            return
        if runs.node_rank < past.agreed.nnodes:
            ranks = replace(past.agreed, index=runs.node_rank).ranks
            if len(ranks) == hello.workers:
                self.ranks[id] = ranks

    def has_unknown_ranks(self, id: int) -> bool:
        """Whether this agent ends its part of a generation that this node has not begun, so that its ranks are not known."""
        return self.hellos[id].runs is not None and id not in self.ranks

    def announce(self, announced: Announce, members: Mapping[int, Member]) -> None:
        """Tell all what to go by if this coordinator is lost; the agents in its order are to acknowledge that."""
        first = announced.order[: MAX_CANDIDATES + 1]
        self._heirs = tuple(id for id in first if id != SELF_ID and self.hellos[id].listens)[:MAX_CANDIDATES]
        candidates = tuple(
            Candidate(
                votes=members[id].votes,
                host=self.hellos[id].host,
                address=fields.host(self.connections.address(id)),
                port=self.hellos[id].listens,
            )
            for id in self._heirs
        )
        self._announced = succession = Succession(
            run_id=self._terms.run_id,
            host=self.hellos[SELF_ID].host,
            coordinator=members[SELF_ID].votes,
            candidates=candidates,
            electorates=announced.electorates,
            history=announced.history,
        )
        terms, last = [one.term for one in announced.electorates], announced.electorates[-1]
        self.announced_terms.add(last.term)
        self.ballots.issue(last.term, last.size, terms[:-1])
        for id in announced.order:
            self.connections.admit(id)
        for id, member in members.items():
            if id != SELF_ID:
                self.connections.send(id, messages.encode(self._for(succession, member.votes)))
        for id in self.watchers:
            self.connections.send(id, messages.encode(succession))

    def _for(self, succession: Succession, votes: Votes) -> Succession:
        """Return what a node with these votes is told, with what shows that they are its own.

        A node that may take over gets what shows whose the votes of the others are.
        """
        is_heir = votes and any(one.votes == votes for one in succession.candidates)
        seals = self.ballots.seals_of(one.term for one in succession.electorates) if is_heir else ()
        return replace(succession, votes=votes, secrets=self.ballots.secrets_of(votes), seals=seals)

    def note_ended(self, before: Sequence[Electorate], now: Sequence[Electorate]) -> None:
        """Tell the nodes that may take over who has ended in the meantime: this coordinator alone may have seen it."""
        known = {Vote(one.term, rank) for one in before for rank in one.ended}
        votes = tuple(vote for one in now for rank in one.ended if (vote := Vote(one.term, rank)) not in known)
        if self._announced is None or not votes:
            return
        self._announced = self._announced.without(votes)
        for id in self._heirs:
            self.connections.send(id, messages.encode(messages.Ended(votes)))

    def introduce(self, id: int, votes: Votes = ()) -> None:
        """Tell a node that takes no part yet, but may have these votes, or the command, which nodes may take over."""
        if self._announced is not None:
            self.connections.send(id, messages.encode(self._for(self._announced, votes)))

    def watch(self, id: int) -> None:
        """Take the command that has started the agents; it may come late."""
        self.watchers.add(id)
        self.introduce(id)
        if self.job_end is not None:
            self.send((id,), self.job_end)

    def expect_watcher(self, within: float, missing: Callable[[], object]) -> None:
        """Call `missing` unless that command comes within so many seconds."""
        self._watcher_due = self._loop.timer(self._loop.now() + within, lambda: self.watchers or missing())

    @property
    def awaits_watcher(self) -> bool:
        """Whether that command is still to come: it notices later than the agents that the last coordinator was lost."""
        return self._watcher_due.is_set and not self.watchers

    def hand_over(self, signum: int, unfit: str) -> None:
        """Have another agent take over, and know no agent any more."""
        for id, member in self.waiting.items():
            self.introduce(id, member.votes)
        self._dismiss(messages.HandedOver(signum, fields.line(unfit)))

    def desert(self) -> None:
        """Have the agents look for another coordinator, which this node follows, and know no agent any more."""
        self._dismiss(messages.Deserted())

    def _dismiss(self, message: messages.HandedOver | messages.Deserted) -> None:
        payload = messages.encode(message)
        for id in self.connections.ids:
            self.connections.send(id, payload)
        self.close()

    def close(self) -> None:
        """Know no agent and no command any more."""
        self._watcher_due.cancel()
        self.waiting.clear()
        self.connections.close()

    def join(self, hello: Hello) -> Member:
        """Take the hello of the coordinator's own agent."""
        self.ballots.take(hello.votes, hello.secrets)
        self.hellos[SELF_ID] = hello
        return member_of(SELF_ID, hello)

    def state_changed(self) -> None:
        """Have the agents that wait for a node rank admitted if it is free, once all that has come in is taken."""
        if self.waiting:
            self._retry.set(self._loop.now())

    def agree(self, order: Sequence[int]) -> Agreed:
        """Return what these agents, by index, have in common in the generation that begins."""
        hellos = [self.hellos[id] for id in order]
        found: dict[str, str] = {}
        for hello in hellos:
            found.setdefault(hello.backend, hello.host)
        backend, reason = hellos[0].backend, hellos[0].backend_reason
        if len(found) > 1:
            differing = ", ".join(f"{backend} on {host}" for backend, host in found.items())
            backend, reason = "gloo", f"the nodes differ: {differing}"
        agents = tuple(PlannedAgent(hello.host, hello.workers) for hello in hellos)
        self.ranks = dict(zip(order, ranks_of_all(agents), strict=True))
        self.world_size = sum(agent.workers for agent in agents)
        self.asked_before = self._asked
        for id in order:
            self.connections.admit(id)
        return Agreed(
            run_id=self._terms.run_id,
            index=0,
            agent_runs=agent_runs(agents),
            address=self._terms.address or self._reached_at(order),
            backend=backend,
            backend_reason=reason,
        )

    def _reached_at(self, order: Sequence[int]) -> str:
        """Return where most of these agents reach this node: workers of all nodes connect there, and do as they are told there.

        So an agent only chooses among the names that this node knows for its own. Else the near end of its connection counts.
        """
        names, reached = self._terms.names, []
        for id in order:
            # at the loopback address are agents on this host, which reach its other addresses too
            if id != SELF_ID and not is_loopback(near := self.connections.local_address(id)):
                name = self.hellos[id].reached
                reached.append(name if name in names else near)
        return Counter(reached or [*names, LOOPBACK][:1]).most_common(1)[0][0]

    def begin(self, order: Sequence[int], generation: Generation) -> None:
        """Have these agents begin, each told its index in `order`."""
        message = messages.fitted(generation)
        assert message.agreed is not None
        if self._announced is not None:
            self._announced = self._announced.as_begun()
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
        text = f"{self.hellos[id].host}: {reason}"
        if text not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(text)
            self._print(f"refused {text}")

    def end(self, end: JobEnd, spares: Collection[int]) -> None:
        """Send the end of the job to all, also to those that connect too late to send a hello.

        Spares that nobody needed have done their part, however the job has ended: their status is 0.
        """
        self.job_end = end
        self.send([id for id in self.connections.ids if id not in spares], end)
        self.send(tuple(spares), replace(end, status=exitcodes.OK))


# --- what follows from the hellos of all agents


def member_of(id: int, hello: Hello, address: str = "", *, is_new: bool = False) -> Member:
    """Return the member that has sent this from an address, with what all have to agree on.

    `is_new`: its part in a generation is over.
    """
    facts = hello.facts
    return Member(
        id=id,
        host=hello.host,
        address=address,
        workers=hello.workers,
        requested_rank=hello.requested_rank,
        node_rank=None if is_new or hello.runs is None else hello.runs.node_rank,
        votes=hello.votes,
        is_known=hello.run_id is not None and not is_new,
        agreed=(
            ("ddplaunch", facts.ddplaunch),
            ("Python", facts.python),
            ("torch", facts.torch),
            ("the program", facts.script),
            ("--nnodes", facts.nnodes),
        ),
    )
