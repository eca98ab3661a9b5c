"""A meeting, where the coordinator is on no node of a generation: before it begins, its nodes find out how they reach the first.

The first node, node 0 of the generation, reserves MASTER_PORT and says where it is reached; then the others reach it, by a
connection that they keep while the generation runs (`probe.py`). While they meet, no worker of the generation runs anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.job.orders import MAX_ADDRESSES, CannotLead, Lead, Leads, MeetingReport, Reach, Reached
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.spec.outcome import StartFailure
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import LaunchError, below
from ddplaunch.system.loop.loop import Loop

if TYPE_CHECKING:
    from ddplaunch.launcher.job.agents import Agents

_ANSWERS_AGAIN = 0.2  # seconds from one look whether the first node has answered a ping to the next


class Meeting:
    """One try to bring the nodes of a generation together: whom it asks for what, and what the nodes have answered so far."""

    def __init__(self, number: int, order: Sequence[int], agents: Agents) -> None:
        """Ask nobody yet. `number` tells this meeting from earlier ones; `order` are the ids of the agents by node rank."""
        self.number = number
        self.order = tuple(order)
        self._agents = agents
        self.tries_again = False  # the coordinator, with another meeting, if MASTER_PORT is taken
        self.leads: Leads | None = None  # the answer of the first node, once it is ready
        self.refusal: CannotLead | None = None  # the same if it cannot be the first node
        self._addresses: tuple[str, ...] = ()  # under which the others look for the first node, in this order
        self._missing = set[int]()  # ids of the others that were asked and have not answered
        self._reached: dict[int, str] = {}  # under which address each of the others has reached the first node, by id
        self.unreached: dict[int, str] = {}  # why each of the others has not, or hears it no longer, by id

    def lead(self, port: int, origin: str, *, again: bool) -> None:
        """Ask the first node to reserve MASTER_PORT; `again`: the coordinator tries again if that port is taken."""
        self.tries_again = again
        self._agents.ask(self.order[0], Lead(self.number, port, origin, again))

    def on_report(self, id: int, report: MeetingReport) -> None:
        """Note what a node answers; drop an answer to what this node was not asked for, since agents may send anything."""
        is_of_first = id == self.order[0] and self.leads is None
        match report:
            case CannotLead() if is_of_first:
                self.refusal = report
            case Leads() if is_of_first:
                self.leads = report
                names = self._agents.names_of(id)
                self._addresses = tuple(dict.fromkeys((*names, *report.addresses)))[:MAX_ADDRESSES]
                self._missing.update(self.order[1:])
                for other in self.order[1:]:  # heard_at is the port where the first node listens
                    self._agents.ask(other, Reach(self.number, self._addresses, report.heard_at))
            case Reached(address="", reason=reason) if id in self._missing or id in self._reached:
                self._missing.discard(id)
                self._reached.pop(id, None)
                self.unreached[id] = reason
            case Reached(address=address) if id in self._missing:
                self._missing.remove(id)
                if address in self._addresses:
                    self._reached[id] = address
                else:
                    self.unreached[id] = f"at {address}, which is none of its addresses"

    @property
    def is_over(self) -> bool:
        """Whether all nodes have answered, or the first one cannot make ready."""
        return self.refusal is not None or (self.leads is not None and not self._missing)

    @property
    def address(self) -> str:
        """The address under which most have reached the first node; of a node alone, that of its loopback interface."""
        return Counter(self._reached.values() or [LOOPBACK]).most_common(1)[0][0]


class _Coordinator(Protocol):
    """The coordinator, as far as its meetings need it."""

    state: job.State

    def feed(self, event: job.Event) -> None: ...
    def order_to_begin(self, order: Sequence[int], port: int, address: str | None = None) -> None: ...
    def fail_to_begin(self, failure: StartFailure, shown: LaunchError) -> None: ...


class Meetings:
    """The meetings that a coordinator holds, one before each generation, and what it decides on after each."""

    def __init__(self, loop: Loop, agents: Agents, coordinator: _Coordinator) -> None:
        """Hold no meeting yet."""
        self._loop = loop
        self._agents = agents
        self._coordinator = coordinator
        self.held = 0  # how many have begun: the number of the last one
        self._meeting: Meeting | None = (
            None  # that goes on; None: the generation for which the nodes met has begun, or failed
        )
        self._first: int | None = None  # id of the first node of the last meeting
        self._ask_again_at = loop.timer(None, self._part_if_first_has_answered)

    def begin(self, order: Sequence[int], port: int, origin: str) -> None:
        """Hold a meeting of these agents, by node rank, for MASTER_PORT `port`, 0 for any; `origin` says why this one."""
        self.held += 1
        self._first = order[0]
        self._meeting = Meeting(self.held, order, self._agents)
        self._meeting.lead(port, origin, again=self._coordinator.state.may_wait_for_port)

    def on_report(self, id: int, report: MeetingReport) -> None:
        """Take what a node says in the meeting or, once the generation runs, that it hears the first one no more."""
        if report.meeting != self.held:
            return  # of an earlier meeting
        if self._meeting is not None:
            self._meeting.on_report(id, report)
            if self._meeting.is_over:
                self._conclude(self._meeting)
        elif isinstance(report, Reached) and not report.address:
            self._agents.connections.ping_all()  # does the first node live? See `is_first_silent`
            self._coordinator.feed(job.Unheard(id, below(report.reason), self._loop.now()))

    @property
    def is_first_silent(self) -> bool:
        """Whether the first node has not answered since a node said that it does not hear it: it may be lost itself."""
        return self._first is not None and not self._agents.connections.has_answered(self._first)

    def on_agent_lost(self, id: int, at: float) -> None:
        """End the meeting if an agent of it is lost, before the loss is decided on: no worker runs, so no lease is waited for."""
        if self._meeting is not None and id in self._meeting.order:
            self._end()
            self._coordinator.feed(job.Unreached((), at))

    def cancel(self) -> None:
        """End the meeting, if one goes on, since its generation is to end: no worker was started for it on any node."""
        if self._meeting is not None:
            self._end()
            for id in self._coordinator.state.members.running:
                self._coordinator.feed(job.NodeEnded(id, (), None, self._loop.now()))

    def _conclude(self, meeting: Meeting) -> None:
        """Begin the generation if all nodes have met, else feed why it cannot begin.

        Where some do not reach the first node, it is pinged, and only its answer shows that they have lost each other: a first
        node that is lost does not answer, and its loss ends the meeting.
        """
        if meeting.unreached:
            self._agents.connections.ping_all()
            self._ask_again_at.set(self._loop.now() + _ANSWERS_AGAIN)
        elif meeting.refusal is not None:
            self._end()
            self._on_refusal(meeting.order[0], meeting.refusal, meeting.tries_again)
        elif meeting.leads is not None:
            self._end()
            self._coordinator.order_to_begin(meeting.order, meeting.leads.port, meeting.address)

    def _part_if_first_has_answered(self) -> None:
        """Feed which nodes do not reach the first one, if it lives; else look again soon. Called by the loop."""
        if self._meeting is None:
            return
        if self.is_first_silent:
            self._ask_again_at.set(self._loop.now() + _ANSWERS_AGAIN)
            return
        unreached = tuple((id, below(why)) for id, why in self._meeting.unreached.items())
        self._end()
        self._coordinator.feed(job.Unreached(unreached, self._loop.now()))

    def _on_refusal(self, id: int, refusal: CannotLead, tries_again: bool) -> None:
        """Feed that the generation cannot begin, since its first node, of this id, cannot make ready for it."""
        if refusal.is_taken and tries_again:
            self._coordinator.feed(job.PortTaken(self._loop.now()))
            return
        host, reason = self._coordinator.state.members[id].host, below(refusal.reason)
        hint, status = below(refusal.hint) or None, refusal.status or exitcodes.BUG  # 0 of an agent that lies
        shown = LaunchError(f"{host}: {reason}", hint=hint, status=status)
        self._coordinator.fail_to_begin(StartFailure(0, host, reason, status), shown)

    def _end(self) -> None:
        self._meeting = None
        self._ask_again_at.cancel()
