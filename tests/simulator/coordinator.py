"""A simulated coordinator: the real `Coordinator`, watched for what they must not do."""

from __future__ import annotations

from collections.abc import Iterable
from signal import SIGHUP, SIGTERM
from typing import Any

from ddplaunch.launcher.job.succession_link import SuccessionLink

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Phase
from ddplaunch.launcher.decide.job.ending import MAY_RESTART
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.tell.job_reporter import JobReporter
from ddplaunch.plan import Plan
from ddplaunch.spec.outcome import Why
from tests.simulator.world import Process, Run, Violation
from tests.unit.supervise.phases import checked

REGROUP = 2.0  # seconds from SIGTERM to a node that leaves to the next generation, at the least


class SimulatedCoordinator(Coordinator):
    """A coordinator of the job, in the process of an agent."""

    def __init__(self, loop: Process, state: job.State, draft: Plan, reporter: JobReporter) -> None:
        self.world, self.own = loop.world, loop.agent
        self.refused: dict[int, int] = {}  # the statuses of agents that were refused or released
        self.left_at: dict[int, float] = {}  # when agents left the job
        self.at_end: frozenset[int] = frozenset()  # agents that were members when the job ended, and connected
        self.spares: frozenset[int] = frozenset()  # agents that were never needed
        self.members: frozenset[int] = frozenset()  # agents on its list
        self.has_handed_over = False
        self._stopping: set[int] = set()  # ids of nodes that stop, or were ordered to
        self._acknowledged: set[tuple[int, int]] = set()  # ids of nodes, and terms
        self._bound: frozenset[int] = (
            frozenset()
        )  # ids of nodes that let it go on, or take part in what it has announced
        self.world.coordinators.append(self)
        if state.succession.took_over:
            self.world.fire()
        super().__init__(loop, state, draft, reporter)

    def __str__(self) -> str:
        return f"coordinator-{self.own.number}"

    @property
    def is_here(self) -> bool:
        """Whether it decides for the job, or has until it ended."""
        return self.own.process.is_alive and self.own.link.coordinator is self

    # --- the decision

    @property
    def state(self) -> job.State:
        return self._checked_state

    @state.setter
    def state(self, state: job.State) -> None:
        """Take the state after a step; raise Violation if nothing would ever happen any more, or the wrong node leaves."""
        before: job.State = getattr(self, "_checked_state", state)
        checked(before, (state, ()))
        self._checked_state = state
        self.members = frozenset(_number(member.host) for member in state.members.values())
        stands = {
            Phase.RENDEZVOUS: state.rendezvous.deadline is None and state.phase_deadline is None,
            Phase.PAUSING: state.phase_deadline is None,
            Phase.RUNNING: not state.members.running,
            Phase.STOPPING: not state.members.running and state.succession.gather_until is None,
            Phase.ANNOUNCING: not state.succession.unacknowledged,
        }
        if stands.get(state.phase):
            raise Violation(f"nothing waits without a deadline: the job in {state.phase.name}")

    def feed(self, event: job.Event) -> None:
        self.world.note(self, event)
        if isinstance(event, job.NodeStopping):
            self._stopping.add(event.id)
        if isinstance(event, job.Joined) and event.member.runs:
            self._stopping.add(event.member.id)  # as all do that have lost a coordinator
        if isinstance(event, job.Acknowledged):
            self._acknowledged.add((event.id, event.term))
        before = self.state
        super().feed(event)
        if isinstance(event, job.NodeStopping) and event.id in before.members and before.phase is not Phase.ENDED:
            self._check_leave(before, event)

    def _carry_out(self, action: job.Action) -> None:
        """Carry out an action, unless the agent is killed before; raise Violation if it breaks an invariant."""
        self.world.note(self, action)
        self.own.act()
        match action:
            case job.BeginGeneration(number, order):
                self._check_begin(number, order)
            case job.Announce(order):
                self._check_announce(order)
                self._bound = frozenset(id for id, one in self.state.members.items() if one.votes and id != SELF_ID)
                self.world.announced.append(self._numbers(order))
                self.world.fire()
            case job.HandOver():
                self.has_handed_over = True
            case job.StopNodes(ids):
                self._stopping.update(ids)
            case job.KillNodes(ids) if not self._stopping.issuperset(ids):
                raise Violation(f"a kill reaches nodes that stop, and ends them: {ids}, but {self._stopping} stop")
            case job.EndJob():
                self._check_end()
        super()._carry_out(action)
        if (
            isinstance(action, job.BeginGeneration) and self.state.generation.number == action.generation
        ):  # its port was free
            members = [self.state.members[id] for id in action.order]
            size = sum(member.workers for member in members)
            self.world.runs[action.generation] = Run(action.generation, self, self._numbers(action.order), size)

    def refuse(self, id: int, reason: str, status: int, hint: str = "") -> None:
        assert self._agents is not None
        self.refused[_number(self._agents.hellos[id].host)] = status
        super().refuse(id, reason, status, hint)

    def release(self, id: int, signum: int) -> None:
        assert self._agents is not None
        self.refused[_number(self._agents.hellos[id].host)] = 128 + signum
        super().release(id, signum)

    def _numbers(self, ids: Iterable[int]) -> frozenset[int]:
        return frozenset(_number(self.state.members[id].host) for id in ids)

    def _check_announce(self, ids: Iterable[int]) -> None:
        """Raise Violation if a node that is to take part knows that the job was to end."""
        assert self._agents is not None
        for id in set(ids) - {SELF_ID}:
            agent = self.world.agents[_number(self.state.members[id].host)]
            order = agent.link.stop_ordered if isinstance(agent.link, SuccessionLink) else None
            peer: Any = self._agents.connections._connections[id].peer
            is_told = peer.other is getattr(agent.link, "_peer", None)  # the hello of a later connection is under way
            if order is not None and order.why is Why.SIGNALLED and is_told:
                raise Violation(f"a job that is stopped is not started again: {agent} knows of {order}")

    def _check_begin(self, number: int, order: tuple[int, ...]) -> None:
        """Raise Violation if other nodes should take part in this generation, or none yet."""
        state, policy, now = self.state, self.state.policy, self._loop.now()
        self._stopping.clear()
        self.world.hangs = False
        if not policy.min_nodes <= len(order) <= policy.max_nodes - policy.spares:
            raise Violation(f"a generation has MIN to MAX nodes: {number} begins with {len(order)}")
        if order[0] != SELF_ID or len(set(order)) < len(order) or any(state.members[id].is_leaving for id in order):
            raise Violation(f"node 0 is the coordinator's, and nobody is there twice or leaves: {number} has {order}")
        if policy.has_successors and not self._acknowledged >= {(id, state.succession.term) for id in self._bound}:
            raise Violation(f"a generation begins once all that decide know of it: {number} begins with {order}")
        here = [one for one in self.world.coordinators if one.state.end.status == 0 and one.own.status == 0]
        finished = [one for one in here if not one.has_handed_over]
        if any(one.at_end.isdisjoint(self._numbers(order)) for one in finished):  # others may have missed that it has
            raise Violation(f"a job that has finished is not started again: {number} begins")
        before = self.world.runs.get(number)
        if before is not None and any(self.world.agents[one].process.is_alive for one in before.nodes):
            raise Violation(f"generations train in their order: {number} begins twice")
        self.world.forget(number)
        if any(at + REGROUP > now + 1e-6 for at in self.left_at.values()):
            raise Violation(f"a node leaves only where it may: {number} begins at once after {self.left_at}")

    def _check_leave(self, before: job.State, event: job.NodeStopping) -> None:
        """Raise Violation if this node has left although the job should end, or the job ends although the node should leave."""
        member, policy = before.members[event.id], before.policy
        after = self.state.members.get(event.id)
        has_left = after is None or (after.is_leaving and not member.is_leaving)
        staying = sum(one.id != event.id and not one.is_leaving for one in before.members.values())
        is_ending = before.end.halted or (before.phase is Phase.STOPPING and before.why not in MAY_RESTART)
        may_leave = policy.may_leave and policy.min_nodes < policy.max_nodes and SIGTERM not in policy.notices
        may_leave &= event.why is Why.SIGNALLED and event.signum in (SIGTERM, SIGHUP) and not event.by_cluster
        may_leave &= (policy.replaceable or staying >= policy.min_nodes) and not is_ending
        may_go = (
            member.node_rank is None and not before.policy.needs_all and not policy.dispatched
        )  # nobody could miss it
        may_go |= event.why is Why.FRONT_LOST  # which is a loss
        if event.id == SELF_ID:
            others = {one for one in before.members.values() if not one.is_leaving and one.id != SELF_ID}
            stay = {(vote.term, vote.rank) for one in others for vote in one.votes}
            leave = {(vote.term, vote.rank) for one in before.members.values() for vote in one.votes} - stay
            for last in before.succession.electorates if before.succession.gather_until is None else ():
                ranks = {(last.term, rank) for rank in range(last.size)}
                gone = leave | {(last.term, rank) for rank in last.ended}
                may_leave &= 2 * len(ranks & stay) > len(ranks - gone)
            is_waited_for = policy.replaceable and bool(others) and not before.succession.electorates
            may_go, may_leave = False, may_leave and (is_waited_for or bool(before.succession.electorates and stay))
        if has_left is not (may_leave or may_go):
            raise Violation(f"a node leaves only where it may: {member.host}, after {event}")
        if has_left and may_leave and not may_go:
            self.left_at[_number(member.host)] = self._loop.now()

    def _check_end(self) -> None:
        """Raise Violation if the job ends because a node has left or joined; note who has a part in the end."""
        state, agents = self.state, self._agents
        assert agents is not None
        if state.why in (Why.NODE_LEFT, Why.NODE_JOINED) and not state.end.halted:
            raise Violation(f"a node leaves only where it may: the job ends, {state.why}")
        connected = {SELF_ID, *agents.connections.ids}
        self.at_end = frozenset(_number(one.host) for one in state.members.values() if one.id in connected)
        self.spares = frozenset(_number(state.members[id].host) for id in state.unneeded_spares)


def _number(host: str) -> int:
    return int(host.rpartition("-")[2])
