"""The simulated coordinator: the real decision of the job, and a model of what carries it out.

Stands for `coordinator/coordinator.py` (`feed`, `take`, `_carry_out`, `_begin`, `_end`, `is_over`), `incoming.py` (`_on_message`,
`_on_lost`, `_admit`, `_admit_waiting`) and `connections.py` (`_send_heartbeats`, `drop`, `expel`). `job.step` is the real one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.coordinator import messages
from ddplaunch.coordinator.orders import JobEnd, NodeEnd, Unfit
from ddplaunch.supervise import job, node
from ddplaunch.supervise.job import Member, Phase
from ddplaunch.supervise.job.rendezvous import why_refused
from ddplaunch.supervise.outcome import Why
from tests.simulator.agents import Begin
from tests.simulator.world import Closed, Connection, Violation, World
from tests.unit.supervise.phases import job_step

if TYPE_CHECKING:
    from tests.simulator.agents import Agent

QUIT_TIMEOUT = 2.0
BEAT = 1.0


class Coordinator:
    """The coordinator of the job, in the process of agent 0."""

    def __init__(self, world: World, own: Agent) -> None:
        """Listen, and join with the own agent."""
        self.world, self.own = world, own
        own.coordinator, own.is_member = self, True
        self.state, _ = job.begin(world.scenario.policy, own.clock())
        self.connections: dict[int, Connection] = {}
        self.agents: dict[int, Agent] = {0: own}
        self.at_end: frozenset[int] = frozenset()  # members when the job has ended
        self.spares: tuple[int, ...] = ()  # that were never needed, at the end
        self.reached: dict[int, JobEnd] = {}  # agents that were refused or released
        self._job_end: JobEnd | None = None
        self._has_decided = False
        self._over_at = 0.0
        self._unanswered: dict[int, int] = {}
        self._hellos: set[int] = set()
        self._waiting: dict[int, Member] = {}
        self._ranks: set[int] = set()  # agents that take part
        self._reports: dict[int, set[tuple[int, Any]]] = {}
        self._armed = 0
        self._last_id = 0
        world.at(world.now + world.dice.random(), self._beat)
        own.do(lambda: self.feed(job.Joined(self._member(0, own), own.clock())))

    def __str__(self) -> str:
        return "coordinator"

    def _member(self, id: int, agent: Agent) -> Member:
        rank = agent.number if self.world.scenario.ranked or id == 0 else None
        return Member(id=id, host=str(agent), workers=self.world.scenario.workers, requested_rank=rank)

    # --- connections

    def accept(self, agent: Agent, connection: Connection) -> None:
        """Take a new connection, on which the hello is under way; ping it."""
        self._last_id += 1
        id = self._last_id
        self.connections[id], self.agents[id] = connection, agent
        connection.sides[1] = lambda message: self.own.do(lambda: self._on_message(id, message))
        agent.connected(connection)
        self._unanswered[id] = 1
        connection.send(0, messages.Ping(0.0, 10.0))
        if self._job_end is not None:
            connection.send(0, self._job_end)
        connection.send(1, "hello")

    def close(self) -> None:
        """End with the process."""
        for connection in self.connections.values():
            connection.close(1)

    def _send(self, id: int, message: Any) -> None:
        self.own.act()
        if (connection := self.connections.get(id)) is not None and connection.sides[1] is not None:
            connection.send(0, message)

    def _drop(self, id: int) -> None:
        if (connection := self.connections.pop(id, None)) is not None:
            connection.close(1)

    def _beat(self) -> None:
        """Ping all; over a link that is up, between agents that run, that takes no time."""
        if not self.own.is_alive:
            return
        self.world.at(self.world.now + BEAT, self._beat)
        if self.own.is_paused:
            return
        for id, connection in list(self.connections.items()):
            agent = self.agents[id]
            if self._unanswered[id] >= self.world.scenario.heartbeat_timeout / BEAT:
                self.own.do(partial(self._expel, id))
            elif connection.is_cut or agent.is_paused or not agent.is_alive or None in connection.sides:
                self._unanswered[id] += 1
            else:
                agent.heard_at = agent.clock()
                if not self._waiting:  # it waits for the answers to pings that are under way
                    self._unanswered[id] = 0

    def _expel(self, id: int) -> None:
        self._drop(id)
        self._on_lost(id, f"silent for {self.world.scenario.heartbeat_timeout:g} s")

    # --- what comes in

    def _on_message(self, id: int, message: Any) -> None:
        if id not in self.connections:
            return
        if isinstance(message, Closed):
            del self.connections[id]
            self._on_lost(id, message.reason)
            return
        self._unanswered[id] = 0
        generation = self.state.generation
        match message:
            case messages.Pong():
                self._state_changed()
            case "hello":
                self._hellos.add(id)
                self._admit(self._member(id, self.agents[id]))
            case NodeEnd():
                if message.generation == generation and id in self._ranks:
                    self.take(id, message)
            case node.Escalate() if id not in self._ranks:
                pass
            case node.ReportIdle():
                self.take(id, message)
            case Unfit(reason):
                self.feed(job.AgentLost(id, f"its health check failed: {reason}", self.own.clock()))
            case _:
                made, reports = (generation, message), self._reports.setdefault(id, set())
                if made not in reports:
                    reports.add(made)
                    self.take(id, message)

    def _on_lost(self, id: int, reason: str) -> None:
        self._waiting.pop(id, None)
        self._ranks.discard(id)
        self._reports.pop(id, None)
        if self._job_end is None:
            self.feed(job.AgentLost(id, reason, self.own.clock()))

    def _admit(self, member: Member) -> None:
        if why_refused(self.state, member) is None:
            self.feed(job.Joined(member, self.own.clock()))
            return
        self._waiting[member.id] = member
        for id in self.connections:
            self._unanswered[id] += 1
            self._send(id, messages.Ping(0.0, 10.0))

    def _admit_waiting(self) -> None:
        all_answered = all(self._unanswered[id] == 0 for id in self.connections)
        is_clear = all_answered and not any(member.is_leaving for member in self.state.members.values())
        for id, member in list(self._waiting.items()):
            if why_refused(self.state, member) is None or is_clear:
                del self._waiting[id]
                self.feed(job.Joined(member, self.own.clock()))

    def _state_changed(self) -> None:
        if self._waiting:
            self.world.at(self.world.now, self.own.do, self._admit_waiting)

    def take(self, id: int, report: Any) -> None:
        """Take a report of an agent."""
        if id not in self.state.members:
            return
        now = self.own.clock()
        match report:
            case NodeEnd(generation):
                if generation == self.state.generation and not self.state.members[id].has_ended:
                    self.feed(job.NodeEnded(id, report.exits, report.start_failure, now, report.leftovers))
            case node.ReportStopping(why, signum, by_cluster):
                self.feed(job.NodeStopping(id, why, signum, now, by_cluster))
            case node.ReportNotice(signum):
                self.feed(job.NodeNoticed(id, signum))
            case node.Escalate(signum):
                self.feed(job.NodeEscalated(id, signum, now))
            case node.ReportIdle(seconds):
                self.feed(job.NodeIdle(id, now - seconds, now))

    # --- the decision

    def feed(self, event: job.Event) -> None:
        """Let the decision take an event, and carry out what follows."""
        self.world.note(self, event)
        self.state, actions = job_step(self.state, event)
        for id, agent in self.agents.items():
            agent.is_member = id in self.state.members
        self._check()
        self.arm()
        for action in actions:
            self.own.act()
            self._carry_out(action)
        self._state_changed()

    def arm(self) -> None:
        """Set the timer of the state's deadline."""
        self._armed += 1
        if (deadline := self.state.deadline) is not None:
            missed = self.world.now - self.own.clock()
            self.world.at(deadline + missed + 1e-6, self._on_deadline, self._armed)

    def _on_deadline(self, armed: int) -> None:
        if armed == self._armed and not self.own.is_paused:
            self.own.do(lambda: self.feed(job.DeadlineReached(self.own.clock())))

    def _check(self) -> None:
        """Raise Violation if nothing would ever happen any more."""
        state = self.state
        stands = {
            Phase.RENDEZVOUS: state.rdzv_deadline is None and state.phase_deadline is None,
            Phase.PAUSING: state.phase_deadline is None,
            Phase.RUNNING: not state.running,
            Phase.STOPPING: not state.running,
        }
        if stands.get(state.phase):
            raise Violation(f"nothing waits without a deadline: the job in {state.phase.name}")

    def _carry_out(self, action: job.Action) -> None:
        self.world.note(self, action)
        match action:
            case job.BeginGeneration(number, order):
                self._begin(number, order)
            case job.StopNodes(ids, signum, by_cluster, others_ended):
                up = self.state.why is Why.TIMED_OUT
                self._order(ids, node.StopOrdered(signum, self.own.clock(), up, by_cluster, others_ended=others_ended))
            case job.KillNodes(ids):
                self._order(ids, node.KillOrdered(self.own.clock()))
            case job.Refuse(id, reason, status):
                self._leaves(id, JobEnd(status, "refused", reason))
            case job.Release(id, signum):
                self._leaves(id, JobEnd(exitcodes.of_signal(signum), "left"))
            case job.Drop(id):
                self._drop(id)
            case job.EndJob(status, _, requeue):
                self._has_decided = True
                self.at_end = frozenset(id for id in self.state.members if id == 0 or id in self.connections)
                delay = self.world.dice.choice((0.0, 0.0, 1.0, 5.0))  # until it is known what is to be reported
                why = self.state.why.value if self.state.why is not None else "failed"
                end = JobEnd(status, why, requeue=requeue)
                self.world.at(self.world.now + delay, self.own.do, lambda: self._end(end))

    def _leaves(self, id: int, end: JobEnd) -> None:
        self.reached[self.agents[id].number] = end
        self._order((id,), end)

    def _begin(self, number: int, order: tuple[int, ...]) -> None:
        if self.world.now < self.world.port_taken_until and self.state.may_wait_for_port:
            self.feed(job.PortTaken(self.own.clock()))
            return
        policy, size = self.state.policy, self.world.scenario.workers
        if not policy.min_nodes <= len(order) <= policy.max_nodes - policy.spares:
            raise Violation(f"a generation has MIN to MAX nodes: {number} begins with {len(order)}")
        if order[0] != 0 or len(set(order)) < len(order) or any(self.state.members[id].is_leaving for id in order):
            raise Violation(f"node 0 is the coordinator's, and nobody is there twice or leaves: {number} has {order}")
        self._ranks = set(order)
        self.world.hangs = False
        begins = {
            id: Begin(number, frozenset(range(index * size, (index + 1) * size)), len(order) == 1)
            for index, id in enumerate(order)
        }
        for id in order[1:]:
            self._send(id, begins[id])
        self.own.link.take(begins[0])

    def _end(self, end: JobEnd) -> None:
        self._job_end, self._over_at = end, self.own.clock() + QUIT_TIMEOUT
        spares = self.spares = self.state.unneeded_spares
        for id in list(self.connections):
            self._send(id, replace(end, status=exitcodes.OK) if id in spares else end)
        self.own.link.take(end)
        self.world.at(self.world.now + QUIT_TIMEOUT + 1e-6, self.own.do, lambda: None)

    def _order(self, ids: tuple[int, ...], order: Any) -> None:
        for id in ids:
            if id != 0:
                self._send(id, order)
        if 0 in ids:
            self.own.link.take(order)

    @property
    def is_over(self) -> bool:
        """Whether all agents know of the end, or have had the time."""
        return self._job_end is not None and (not self.connections or self.own.clock() >= self._over_at)
