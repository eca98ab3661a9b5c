"""A meeting: before a generation (a start of all workers) without the coordinator's node, its nodes find a way to the first one.

The first node, node 0 of the generation, reserves MASTER_PORT and says where it is reached; then the others reach it, by a
connection that they keep while the generation runs (`probe.py`). While they meet, no worker of the generation runs anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.job.orders import MAX_ADDRESSES, CannotLead, Lead, MeetAt, MeetingReport, Reached
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.spec.outcome import StartFailure
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, indented
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.launcher.job.agents import Agents

_LOOK_AT_FIRST_NODE_EVERY = 0.2  # seconds from one look whether the first node has answered a ping to the next


class _Coordinator(Protocol):
    """The coordinator, as far as a meeting needs it."""

    state: job.State

    def feed(self, event: job.Event) -> None: ...
    def order_to_begin(self, order: Sequence[int], port: int, address: str | None = None) -> None: ...
    def fail_to_begin(self, failure: StartFailure, shown: LaunchError) -> None: ...


class Meeting:
    """One meeting: whom it asks for what, what the nodes have answered so far, and what the coordinator gets to hear then."""

    def __init__(
        self, loop: Loop, agents: Agents, coordinator: _Coordinator, number: int, order: Sequence[int]
    ) -> None:
        """Ask nobody yet. `number` tells this meeting from earlier ones; `order` are the ids of the agents by node rank."""
        self._loop = loop
        self._agents = agents
        self._coordinator = coordinator
        self.number = number
        self._order = tuple(order)
        self._is_over = False  # the generation has begun, or does not begin with these nodes
        self._coordinator_tries_again = False  # by another meeting, if MASTER_PORT is taken
        self._ready_first: MeetAt | None = None  # what the first node has answered once it was ready
        self._addresses: tuple[str, ...] = ()  # under which the others look for the first node, in this order
        self._not_answered = set[int]()  # ids of the others that were asked and have not answered
        self._reached: dict[int, str] = {}  # under which address each of the others has reached the first node, by id
        self._unreached: dict[int, str] = {}  # why each of the others has not, or hears it no longer, by id
        self._look_at_first_node_at = loop.timer(None, self._report_unreached_if_first_lives)

    def begin(self, port: int, origin: str, *, again: bool) -> None:
        """Ask the first node to reserve this port as MASTER_PORT, 0 for any; `origin` is the option, or the reason, for it.

        `again`: the coordinator tries again if the port is taken.
        """
        self._coordinator_tries_again = again
        self._agents.ask(self._order[0], Lead(self.number, port, origin, again))

    def on_report(self, id: int, report: MeetingReport) -> None:
        """Take what a node answers; drop an answer to what this node was not asked for, since agents may send anything.

        `Reached` without an address: the node does not reach the first one, or hears it no longer.
        """
        is_of_first = id == self._order[0] and self._ready_first is None
        match report:
            case _ if report.meeting != self.number:
                pass  # it answers an earlier meeting
            case Reached(address="", reason=reason) if self._is_over:
                # the generation runs (or does not begin: then the decision drops this)
                self._agents.connections.ping_all()  # does the first node live? The decision waits for its answer
                self._coordinator.feed(job.FirstNodeUnheard(id, indented(reason), self._loop.now()))
            case _ if self._is_over:
                pass
            case CannotLead() if is_of_first:
                self._on_refusal(report)
            case MeetAt() if is_of_first:
                self._on_first_ready(report)
            case Reached(address="", reason=reason) if id in self._not_answered or id in self._reached:
                self._reached.pop(id, None)
                self._note_unreached(id, reason)
            case Reached(address=address) if id in self._not_answered and address in self._addresses:
                self._reached[id] = address
                self._on_answer(id)
            case Reached(address=address) if id in self._not_answered:
                self._note_unreached(id, f"at {address}, which is none of its addresses")

    @property
    def is_first_silent(self) -> bool:
        """Whether the first node has not answered since a node said that it does not hear it: it may be lost itself."""
        return not self._agents.connections.has_answered_ping_all(self._order[0])

    def on_agent_lost(self, id: int, at: float) -> None:
        """End the meeting if an agent of it is lost, before the loss is decided on: no worker runs, so no lease is waited for."""
        if not self._is_over and id in self._order:
            self._end()
            self._coordinator.feed(job.FirstNodeUnreached((), at))

    def cancel(self) -> None:
        """End the meeting, if it goes on, since its generation is to end: no worker was started for it on any node."""
        if not self._is_over:
            self._end()
            for id in self._coordinator.state.members.running:
                self._coordinator.feed(job.NodeEnded(id, (), None, self._loop.now()))

    def _end(self) -> None:
        self._is_over = True
        self._look_at_first_node_at.cancel()

    def _on_refusal(self, refusal: CannotLead) -> None:
        """Let the coordinator know that the generation cannot begin, since its first node cannot make ready for it."""
        self._end()
        # is_taken: MASTER_PORT, which may soon be free
        if refusal.is_taken and self._coordinator_tries_again:
            self._coordinator.feed(job.PortTaken(self._loop.now()))
            return
        host, reason = self._coordinator.state.members[self._order[0]].host, indented(refusal.reason)
        status = refusal.status or exitcodes.BUG  # only an agent that lies fails with 0
        shown = LaunchError(f"{host}: {reason}", hint=indented(refusal.hint) or None, status=status)
        self._coordinator.fail_to_begin(StartFailure(rank=0, host=host, reason=reason, status=status), shown)

    def _on_first_ready(self, first: MeetAt) -> None:
        """Ask the others to reach the first node: under the names that the user gave, then at the addresses that it has."""
        self._ready_first = first
        names = self._agents.names_of(self._order[0])
        self._addresses = tuple(dict.fromkeys((*names, *first.addresses)))[:MAX_ADDRESSES]
        self._not_answered.update(self._order[1:])
        for id in self._order[1:]:
            self._agents.ask(id, replace(first, addresses=self._addresses))
        if not self._not_answered:  # the first node is alone
            self._begin_generation(first.master_port)

    def _note_unreached(self, id: int, why: str) -> None:
        self._unreached[id] = why
        self._on_answer(id)

    def _on_answer(self, id: int) -> None:
        """Begin the generation once all other nodes have answered that they reach the first one.

        If some do not, all nodes are pinged: if the first one answers, those have lost each other; else it is lost itself, which
        ends the meeting.
        """
        self._not_answered.discard(id)
        if self._not_answered or self._ready_first is None:
            return
        if self._unreached:
            self._agents.connections.ping_all()
            self._look_at_first_node_at.set(self._loop.now() + _LOOK_AT_FIRST_NODE_EVERY)
        else:
            self._begin_generation(self._ready_first.master_port)

    def _report_unreached_if_first_lives(self) -> None:
        """Feed which nodes do not reach the first one, if it has answered; else look again soon. Called by the loop."""
        if self.is_first_silent:
            self._look_at_first_node_at.set(self._loop.now() + _LOOK_AT_FIRST_NODE_EVERY)
            return
        self._end()
        unreached = tuple((id, indented(why)) for id, why in self._unreached.items())
        self._coordinator.feed(job.FirstNodeUnreached(unreached, self._loop.now()))

    def _begin_generation(self, port: int) -> None:
        """Have the generation begin, with the address under which most have reached the first node; alone it needs no network."""
        self._end()
        address, _ = Counter(self._reached.values() or [LOOPBACK]).most_common(1)[0]
        self._coordinator.order_to_begin(self._order, port, address)
