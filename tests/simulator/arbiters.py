"""A simulated arbiter: the real coordinator and its connections, on a simulated network; watched for what it must not do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import SELF_ID, Phase
from ddplaunch.launcher.job.connections import Terms
from ddplaunch.launcher.job.coordinator import Coordinator
from ddplaunch.launcher.job.incoming import Incoming
from ddplaunch.launcher.job.local_link import LocalLink
from ddplaunch.launcher.job.orders import SentReport
from ddplaunch.plan.variables import first_term
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.reach.silence import Keepalive
from ddplaunch.spec.outcome import CLOSED
from ddplaunch.system import exitcodes
from ddplaunch.system.net.port import PortTaken
from tests.simulator.training import Run, Violation
from tests.simulator.world import Process, address_of
from tests.unit.supervise.phases import checked

if TYPE_CHECKING:
    from tests.simulator.agents import Agent
    from tests.simulator.network import Peer

PORT = 29_500
KEY = Key(b"of the job")
_HOST = SimpleNamespace(host="a host")
_DRAFT: Any = SimpleNamespace(master_port=None, reasons={"master_port": ""}, ranks=(0,), workers=(_HOST,))


class Reporter:
    """Tells the user nothing, and an arbiter of each step that it takes."""

    cwd = ""

    def __init__(self, arbiter: Arbiter) -> None:
        self.on_event = arbiter.check

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None

    def report_end(self, _findings: Any) -> tuple[str, None]:
        return "", None


class Arbiter(Coordinator):
    """The coordinator of a job: in the process of an agent, its own one, or of the command that was typed."""

    def __init__(self, process: Process, own: Agent | None = None) -> None:
        self.process, self.world, self.own = process, process.world, own
        scenario, here = self.world.scenario, process.machine.number
        self.has_left = False  # so that the others wait for the next one
        # the statuses of those that were told to end while the others go on, by machine
        self.told: dict[int, set[int]] = {}
        self.ending: set[int] = set()  # those with which the job was being stopped, which all agents are told
        self.met: set[int] = set()  # machines whose agents have joined
        self.refused: set[int] = set()  # machines for which the job had no place
        self.runs: list[Run] = []
        self.began: dict[int, float] = {}  # when, by the number of the generation
        state = job.first_state(scenario.policy, process.now(), first_term(self.world.now))
        super().__init__(cast(Any, process), state, _DRAFT, cast(Any, Reporter(self)))
        terms = Terms(
            keepalive=Keepalive(max_nodes=scenario.policy.max_nodes, timeout=scenario.heartbeat_timeout),
            run_id="r",
            address=None,
            names=(address_of(here),),
            key=KEY,
            listen=None,
            ports=(PORT,),
        )
        self.incoming = Incoming(cast(Any, process), terms, self)
        self.link = LocalLink(cast(Any, process), self)
        self.world.arbiters.append(self)
        if own is None:
            process.exits = lambda: self.state.end.status if self.is_over else None
            self.lead(self.link.on_order, self.incoming.agents, is_one_host=False)
        else:
            own.link, own.follows = self.link, self
            self.add_own_agent(self.link.on_order, self.incoming.agents.add_own(own.hello()), self.incoming.agents)

    def __str__(self) -> str:
        return f"arbiter on {self.process.machine.number}"

    def _machine(self, id: int) -> int:
        """Return the number of the machine of a member, from its address."""
        return int(self.incoming.agents.by_id[id].hello.host.rpartition(".")[2]) - 1

    def _tell(self, id: int, status: int) -> None:
        self.told.setdefault(self._machine(id), set()).add(status)

    def on_agent_ended(self, peer: Peer) -> None:
        """Take an agent for ended once no worker is left there, which its host says then, over the pipe of the command."""
        if not peer.is_open:
            return
        if self.world.machine(peer.there).workers():
            self.world.at(self.world.now + 0.2, self.process.do, partial(self.on_agent_ended, peer))
            return
        connections: Any = self.incoming._connections
        (id,) = [id for id, connection in connections._connections.items() if connection.peer is peer]
        self.incoming.lose(id, CLOSED, has_ended=True)

    # --- what it decides

    def feed(self, event: job.Event) -> None:
        if not isinstance(event, job.DeadlineReached | job.NodeIdle):
            self.world.note(self, event)
        if isinstance(event, job.AgentLost) and "malformed" in event.reason:
            raise Violation(f"nobody is misunderstood: {event.id} {event.reason}")
        if isinstance(event, job.Joined):
            self.met.add(self._machine(event.member.id))
        super().feed(event)

    def check(self, _event: job.Event, before: job.State, after: job.State) -> None:
        """Raise Violation if nothing would ever happen any more."""
        checked(before, (after,))
        if (status := job.status_if_ending(before, after, self.process.now())) is not None:
            self.ending.add(status)
        stands = {
            Phase.RENDEZVOUS: after.rendezvous.deadline is None and after.phase_deadline is None,
            Phase.PAUSING: after.phase_deadline is None,
            Phase.RUNNING: not after.members.running,
            Phase.STOPPING: not after.members.running,
        }
        if stands.get(after.phase):
            raise Violation(f"nothing waits without a deadline: the job in {after.phase.name}")

    def print(self, text: str) -> None:
        self.world.note(self, text)

    def on_report(self, id: int, report: Any) -> None:
        if isinstance(report, SentReport):
            self.world.note(self, f"hears of {id}: {report}")
        super().on_report(id, report)

    def _carry_out(self, action: job.Action) -> None:
        self.process.act()
        self.world.note(self, action)
        match action:
            case job.BeginGeneration(number, order):
                self._check_begin(number, order)
            case job.LeaveJob():
                self.has_left = True
            case job.Refuse(id, _, status):
                self.refused.add(self._machine(id))
                self._tell(id, status)
            case job.Release(id, signum):
                self._tell(id, exitcodes.of_signal(signum))
            case job.LeaveBehind(id):
                self._tell(id, exitcodes.NODE_LOST)
        super()._carry_out(action)

    def release(self, id: int, signum: int) -> None:
        self._tell(id, exitcodes.of_signal(signum))
        super().release(id, signum)

    def _reserve(self) -> int:
        if self.world.now < self.world.port_taken_until and self.state.may_wait_for_port:
            raise PortTaken
        return 29_400

    def _check_begin(self, number: int, order: Sequence[int]) -> None:
        """Raise Violation if other nodes should take part in a generation, or none yet."""
        state, policy = self.state, self.state.policy
        at_most = min(policy.most_running, sum(not one.is_leaving for one in state.members.values()))
        if not policy.min_nodes <= len(order) == at_most:
            raise Violation(
                f"a generation has MIN to MAX nodes, and all that may: {number} begins with {len(order)} of {at_most}"
            )
        if len(set(order)) < len(order) or any(state.members[id].is_leaving for id in order):
            raise Violation(f"a generation has no node twice, and none that leaves: {number} has {order}")
        if self.own is not None and order[0] != SELF_ID:
            raise Violation(f"node 0 is the arbiter's own, if it has one: {number} has {order}")

    def order_to_begin(self, order: Sequence[int], port: int, address: str | None = None) -> None:
        world, number, term = self.world, self.state.generation.number, self.state.generation.term
        if term <= max(world.runs, default=-1):
            raise Violation(f"terms grow: {term} begins after {max(world.runs)}")
        size = world.scenario.workers * len(order)
        self.runs.append(Run(term, number, self, frozenset(map(self._machine, order)), size))
        world.runs[term], self.began[number] = self.runs[-1], world.now
        super().order_to_begin(order, port, address)
