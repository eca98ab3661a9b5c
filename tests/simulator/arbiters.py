"""A simulated arbiter: the real decision about the job, behind a model of its connections; watched for what it must not do.

Stands for `Coordinator`, `Incoming` and `Connections` of `launcher/job/`.
"""

from __future__ import annotations

from functools import partial
from signal import SIGHUP, SIGTERM
from typing import Any

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.job import SELF_ID, Member, Phase
from ddplaunch.launcher.decide.job.rendezvous import why_refused
from ddplaunch.launcher.decide.job.step import REGROUP
from ddplaunch.spec.outcome import MAY_RESTART, Why
from ddplaunch.system import exitcodes
from tests.simulator.agents import Agent, Begin, Dropped, Hello, Left, NodeEnd, Ping, Pong, Quit
from tests.simulator.world import CLOSED, End, Process, Run, Violation
from tests.unit.supervise.phases import job_step

_QUIT_TIMEOUT = 2.0  # seconds that agents get to take note of the end
_BEAT = 1.0  # seconds


class Peer:
    """A connection with an agent."""

    def __init__(self, end: End, now: float) -> None:
        self.end, self.renewed_at = end, now
        self.unanswered = 0  # pings since the last message
        self.answered = 0.0  # when the last renewal that came was sent
        self.hello: Hello | None = None


class Arbiter:
    """The coordinator of a job: in the process of an agent, its own one, or of the command that was typed."""

    def __init__(self, process: Process, own: Agent | None) -> None:
        self.process, self.world, self.own = process, process.world, own
        self.began_at = process.world.now
        self.state = job.begin(self.world.scenario.policy, process.now(), 1)
        self.listens = True
        self.left_at: dict[int, float] = {}  # when nodes left the job, by machine
        self.runs: list[Run] = []
        self.began: dict[int, float] = {}  # when, by the number of the generation
        self.met: set[int] = set()  # machines whose agents have said hello
        self._peers: dict[int, Peer] = {}
        self._waiting: dict[int, Member] = {}  # another agent, perhaps a lost one, has their node rank
        self._last_id = 0
        self._last_term = -1
        self._beat_at = process.now() + _BEAT
        self._retry_at: float | None = None
        self._over_at: float | None = None  # then agents have had the time to learn of the end
        self._stopping: set[int] = set()  # ids of nodes that stop, or were ordered to
        self.world.arbiters.append(self)
        process.parts.append(self)

    def __str__(self) -> str:
        return f"arbiter on {self.process.machine.number}"

    @property
    def is_over(self) -> bool:
        over_at = self._over_at
        return over_at is not None and (not self._peers or self.process.now() >= over_at)

    def join(self, own: Agent) -> None:
        own.own = self
        self.feed(job.Joined(self._member(SELF_ID, own.number, 0), self.process.now()))

    def _member(self, id: int, machine: int, rank: int | None, **history: Any) -> Member:
        workers = self.world.scenario.workers
        return Member(id=id, host=f"n-{machine}", workers=workers, requested_rank=rank, **history)

    # --- time

    @property
    def deadline(self) -> float | None:
        due = (
            self.state.deadline,
            self._beat_at if self._peers else None,
            self._retry_at,
            self._over_at if self._peers else None,
        )
        return min((one for one in due if one is not None), default=None)

    def on_deadline(self) -> None:
        now = self.process.now()
        if self._peers and now >= self._beat_at:
            self._beat_at = now + _BEAT
            for id in list(self._peers):
                self._ping(id)
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._admit_waiting()
        if self._over_at is not None and now >= self._over_at:
            self._peers.clear()
        if self.state.deadline is not None and now >= self.state.deadline:
            self.feed(job.DeadlineReached(now))

    def _ping(self, id: int) -> None:
        """Ping a peer, or give it up when it has not answered for too long."""
        peer = self._peers.get(id)
        if peer is None:
            return
        if peer.unanswered * _BEAT >= self.world.scenario.heartbeat_timeout:
            peer.end.close()
            self._on_lost(id, "silent", has_ended=False)
        else:
            peer.unanswered += 1
            peer.end.send(Ping(peer.answered))

    # --- connections

    def opened(self, end: End) -> None:
        """Know a connection from now on."""
        self._last_id += 1
        self._peers[self._last_id] = Peer(end, self.process.now())

    def on_closed(self, end: End, reason: str) -> None:
        for id, peer in list(self._peers.items()):
            if peer.end is end:
                self._on_lost(id, reason, has_ended=reason == CLOSED)

    def _on_lost(self, id: int, reason: str, *, has_ended: bool) -> None:
        peer = self._peers.pop(id)
        self._waiting.pop(id, None)
        if self._over_at is None:
            self.feed(job.AgentLost(id, reason, self.process.now(), has_ended, peer.renewed_at))

    def on_message(self, end: End, message: object) -> None:
        id, peer = next(((id, peer) for id, peer in self._peers.items() if peer.end is end), (0, None))
        if peer is None:
            return
        peer.unanswered = 0
        match message:
            case Hello(machine, rank, last, was_left, at):
                peer.hello, peer.answered, peer.renewed_at = message, at, self.process.now()
                self.met.add(machine)
                self._admit(self._member(id, machine, rank, last_generation=last, was_left=was_left))
            case Pong(at):
                peer.answered, peer.renewed_at = at, self.process.now()
                self._retry_at = self.process.now() if self._waiting else None
            case Dropped():
                peer.end.close()
                self._on_lost(id, "has heard nothing from here for too long", has_ended=False)
            case node.ReportStopping(why, signum, by_cluster) if id in self._waiting:
                if self.state.policy.needs_all or self.state.policy.dispatched:
                    self.feed(job.StopRequested(why, signum, self.process.now(), by_cluster))
                elif why is not Why.FAILED:
                    del self._waiting[id]
                    self._tell(id, Quit(128 + signum if signum else exitcodes.NODE_LOST, "left"))
            case _:
                self.take(id, message)

    def _admit(self, member: Member) -> None:
        """Admit an agent, or have it wait until all have answered a ping, if its node rank is not free."""
        if self.state.phase is Phase.ENDED or why_refused(self.state.policy, self.state.members, member) is None:
            self.feed(job.Joined(member, self.process.now()))
        else:
            self._waiting[member.id] = member
            for id in list(self._peers):
                self._ping(id)

    def _admit_waiting(self) -> None:
        is_clear = not any(peer.unanswered for peer in self._peers.values())
        is_clear &= not any(member.is_leaving for member in self.state.members.values())
        for id, member in list(self._waiting.items()):
            if id in self._waiting and (is_clear or why_refused(self.state.policy, self.state.members, member) is None):
                del self._waiting[id]
                self.feed(job.Joined(member, self.process.now()))

    def take(self, id: int, report: Any) -> None:
        """Take a report of an agent; those of agents that are no members are dropped."""
        state, now = self.state, self.process.now()
        if id not in state.members:
            return
        match report:
            case NodeEnd(number, exits, failed, leftovers) if number == state.generation.number:
                self.feed(job.NodeEnded(id, exits, failed, now, leftovers))
            case node.ReportStopping(why, signum, by_cluster):
                self.feed(job.NodeStopping(id, why, signum, now, by_cluster))
            case node.ReportNotice(signum):
                self.feed(job.NodeNoticed(id, signum))
            case node.Escalate(signum) if state.members[id].node_rank is not None:
                self.feed(job.NodeEscalated(id, signum, now))
            case node.ReportIdle(seconds):
                self.feed(job.NodeIdle(id, now - seconds, now))

    def _tell(self, id: int, order: Any) -> None:
        if id == SELF_ID:
            assert self.own is not None
            self.process.do(partial(self.own.take, order))
        elif id in self._peers:
            self._peers[id].end.send(order)

    def _machine(self, id: int) -> int:
        if id == SELF_ID and self.own is not None:
            return self.own.number
        return self._peers[id].end.node if id in self._peers else -1

    # --- the decision

    def feed(self, event: job.Event) -> None:
        """Decide, and carry out what follows; raise Violation if nothing would ever happen any more."""
        if not isinstance(event, job.DeadlineReached | job.NodeIdle):
            self.world.note(self, event)
        if isinstance(event, job.NodeStopping):
            self._stopping.add(event.id)
        before = self.state
        self.state, actions = job_step(before, event)
        for action in actions:
            self.process.act()
            self._carry_out(action)
        if self._waiting:
            self._retry_at = self.process.now()
        state = self.state
        stands = {
            Phase.RENDEZVOUS: state.rendezvous.deadline is None and state.phase_deadline is None,
            Phase.PAUSING: state.phase_deadline is None,
            Phase.RUNNING: not state.members.running,
            Phase.STOPPING: not state.members.running,
        }
        if stands.get(state.phase):
            raise Violation(f"nothing waits without a deadline: the job in {state.phase.name}")
        if isinstance(event, job.NodeStopping) and event.id in before.members and before.phase is not Phase.ENDED:
            self._check_leave(before, event)

    def _carry_out(self, action: job.Action) -> None:
        self.world.note(self, action)
        now = self.process.now()
        match action:
            case job.BeginGeneration(number, order):
                self._begin(number, order)
            case job.LeaveJob():
                for peer in self._peers.values():
                    peer.end.send(Left())
                    peer.end.close()
                self._peers.clear()
                self._waiting.clear()
                self.listens = False
            case job.StopNodes(ids, signum, by_cluster, others_ended):
                self._stopping.update(ids)
                why = self.state.why or Why.COORDINATOR
                for id in ids:
                    self._tell(id, node.StopOrdered(signum, now, why, by_cluster, others_ended=others_ended))
            case job.KillNodes(ids):
                if not self._stopping.issuperset(ids):
                    raise Violation(f"a kill reaches nodes that stop, and ends them: {ids}, but {self._stopping} stop")
                for id in ids:
                    self._tell(id, node.KillOrdered(now))
            case job.Refuse(id, _, status):
                self._tell(id, Quit(status, "refused"))
            case job.Release(id, signum):
                self._tell(id, Quit(exitcodes.of_signal(signum), "left"))
                self._over_at = now if id == SELF_ID else self._over_at
            case job.Drop(id):
                self._peers.pop(id).end.close()
            case job.EndJob(status):
                self._over_at = now + _QUIT_TIMEOUT
                for id, peer in self._peers.items():
                    if peer.hello is not None:
                        self._tell(id, Quit(exitcodes.OK if id in self.state.unneeded_spares else status, "ended"))
                if self.own is not None:
                    self._tell(SELF_ID, Quit(status, "ended"))

    def _begin(self, number: int, order: tuple[int, ...]) -> None:
        """Begin a generation; raise Violation if other nodes should take part in it, or none yet."""
        world, state, policy, now = self.world, self.state, self.state.policy, self.process.now()
        if now < world.port_taken_until and state.may_wait_for_port:
            self.feed(job.PortTaken(now))
            return
        at_most = min(policy.most_running, sum(not one.is_leaving for one in state.members.values()))
        if not policy.min_nodes <= len(order) == at_most:
            raise Violation(
                f"a generation has MIN to MAX nodes, and all that may: {number} begins with {len(order)} of {at_most}"
            )
        if len(set(order)) < len(order) or any(state.members[id].is_leaving for id in order):
            raise Violation(f"a generation has no node twice, and none that leaves: {number} has {order}")
        if self.own is not None and order[0] != SELF_ID:
            raise Violation(f"node 0 is the arbiter's own, if it has one: {number} has {order}")
        if any(at + REGROUP > now + 1e-6 for at in self.left_at.values()):
            raise Violation(f"a node leaves only where it may: {number} begins at once after {self.left_at}")
        self._last_term = term = next_term(self._last_term, self.began_at)
        if term <= world.last_term:
            raise Violation(f"terms grow: {term} begins after {world.last_term}")
        world.last_term, world.hangs = term, False
        self._stopping.clear()
        each = world.scenario.workers
        nodes = frozenset(self._machine(id) for id in order)
        run = Run(term, number, self, nodes, each * len(order))
        self.runs.append(run)
        self.began[number] = world.now
        for index, id in reversed(list(enumerate(order))):
            self._tell(id, Begin(run, frozenset(range(index * each, (index + 1) * each))))

    def _check_leave(self, before: job.State, event: job.NodeStopping) -> None:
        """Raise Violation if this node has left although the job should end, or the job ends although the node should leave."""
        member, policy = before.members[event.id], before.policy
        after = self.state.members.get(event.id)
        if member.is_leaving:
            return
        has_left = after is None or after.is_leaving
        staying = sum(one.id != event.id and not one.is_leaving for one in before.members.values())
        is_ending = before.end.halted or (before.phase is Phase.STOPPING and before.why not in MAY_RESTART)
        may_leave = policy.may_leave and policy.is_elastic and SIGTERM not in policy.notices
        may_leave &= event.why is Why.SIGNALLED and event.signum in (SIGTERM, SIGHUP) and not event.by_cluster
        may_leave &= (policy.replaceable or staying >= policy.min_nodes) and not is_ending
        may_go = member.node_rank is None and not policy.needs_all and not policy.dispatched  # nobody could miss it
        may_go |= event.why is Why.FRONT_LOST  # which is a loss
        if event.id == SELF_ID:
            may_go, may_leave = False, may_leave and policy.replaceable and len(before.members) > 1
        if has_left is not (may_leave or may_go):
            raise Violation(f"a node leaves only where it may: {member.host}, after {event}")
        if has_left and may_leave and not may_go and event.id != SELF_ID:
            self.left_at[int(member.host.partition("-")[2])] = self.process.now()


def next_term(last: int, began_at: float) -> int:
    """Return the term of an arbiter's next generation: one more than the last, and no less than the milliseconds of its begin."""
    return max(last + 1, int(began_at * 1000))
