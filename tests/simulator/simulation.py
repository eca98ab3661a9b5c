"""One run of a scenario: its faults happen, the invariants are checked, and the end is judged."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM
from typing import Any

from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.supervise import job, node
from ddplaunch.supervise.outcome import Why, WorkerError
from tests.simulator.agents import ENDS_OF_JOB, Agent
from tests.simulator.coordinator import Coordinator
from tests.simulator.scenario import Fault, Scenario, scenario
from tests.simulator.world import Connection, Violation, World

PATIENCE = 400.0  # seconds from the last fault in which every job ends: several generations, and a rendezvous in vain
OWN_ERROR = WorkerError(type="ValueError", message="boom", traceback="")


class Simulation:
    """A job under faults."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        """Prepare the job; nothing has started yet."""
        self.scenario = scenario
        self.world = World(scenario, trace)
        self.coordinator: Coordinator | None = None
        self._cut: dict[int, float] = {}  # until when agents are cut off
        self._starts = sum(fault.kind == "join" for fault in scenario.faults)
        self._happened = 0
        for fault in scenario.faults:
            self.world.at(fault.at, self._happen, fault)
        self.world.at(self.world.dice.random(), self._tick)

    def run(self) -> None:
        """Let everything happen; raise Violation at the first invariant that does not hold."""
        if not self.world.run(self.scenario.quiet_from + PATIENCE, self._is_over):
            left = {str(agent): agent.state.phase.name for agent in self.world.agents.values() if agent.is_alive}
            phase = self.coordinator.state.phase.name if self.coordinator is not None else ""
            raise Violation(f"a job without faults goes on or ends: after {PATIENCE:g} s there are {left}, {phase}")
        self._judge()

    def _is_over(self) -> bool:
        agents = self.world.agents.values()
        return self._happened == self._starts and not any(agent.is_alive for agent in agents)

    def _tick(self) -> None:
        self.world.at(self.world.now + 1.0, self._tick)
        for agent in list(self.world.agents.values()):
            if agent.is_alive:
                agent.check_stop()
                if not agent.is_paused:
                    agent.do(agent.check_silence)

    # --- faults

    def _happen(self, fault: Fault) -> None:
        world = self.world
        world.note("fault", fault)
        if fault.kind == "join":
            self._join(fault.agent)
            return
        agent = world.agents.get(fault.agent)
        if agent is None or not agent.is_alive:
            return
        self._disturb(fault, agent)
        link, mine = agent.connection, [worker for worker in world.workers if worker.agent is agent]
        match fault.kind:
            case "kill":
                agent.fuse = fault.after
                world.at(world.now + 5.0, agent.kill)
                if not fault.after:
                    agent.kill()
            case "crash":
                if agent.coordinator is not None:
                    for connection in agent.coordinator.connections.values():
                        connection.vanish(1)
                agent.crash()
            case "reset" if link is not None:
                link.reset()
            case "cut":
                self._cut_off([agent], fault.lasts)
            case "partition":
                self._cut_off([other for number, other in world.agents.items() if number >= fault.agent], fault.lasts)
            case "slow" if link is not None:
                link.delay = 6.0
                world.at(world.now + fault.lasts, setattr, link, "delay", self.scenario.delay)
            case "pause":
                agent.pause(fault.lasts)
            case "sigterm" | "signal" | "notice":
                self._signal(agent, fault.signum)
            case "twice":
                self._signal(agent, fault.signum)
                world.soon(2.0, self._signal, agent, fault.signum, True)
            case "front":
                agent.do(lambda: agent.step(node.FrontLost(agent.clock())))
            case "fail" if mine:
                mine[0].end(7, None, replace(OWN_ERROR, at=world.now))
            case "killed" if mine:
                mine[-1].end(None, int(SIGKILL))
            case "raise" if mine:
                mine[0].has_raised = True
                agent.do(lambda: agent.step(node.ErrorRecorded(agent.clock())))
            case "start":
                agent.start_fails = agent.is_unfit = True
            case "port":
                world.port_taken_until = world.now + fault.lasts
            case "hang":
                world.hangs = True
            case "withdraw":
                self._tell(lambda at: job.Withdrawn("a node", "no such program", "", at))
            case "stop":
                self._tell(lambda at: job.StopRequested(Why.SIGNALLED, fault.signum, at))

    def _signal(self, agent: Agent, signum: int, escalates: bool = False) -> None:
        agent.do(lambda: agent.step(node.SignalReceived(signum, agent.clock(), escalates=escalates)))

    def _tell(self, event: Any) -> None:
        own = self.coordinator
        if own is not None:
            own.own.do(lambda: own.feed(event(own.own.clock())))

    def _disturb(self, fault: Fault, agent: Agent) -> None:
        """Note which agents may lose the coordinator by this."""
        if fault.kind in ("kill", "crash", "reset", "cut", "pause", "partition", "slow"):
            agent.is_disturbed = True
            for number, other in self.world.agents.items():
                other.is_disturbed |= agent.number == 0 or (fault.kind == "partition" and number >= agent.number)

    def _cut_off(self, agents: list[Agent], lasts: float) -> None:
        until = self.world.now + lasts
        for agent in agents:
            self._cut[agent.number] = max(until, self._cut.get(agent.number, 0.0))
            if agent.connection is not None:
                agent.connection.is_cut = True
            self.world.at(until, self._heal, agent)

    def _heal(self, agent: Agent) -> None:
        if agent.connection is None or self.world.now < self._cut[agent.number] or not agent.is_alive:
            return
        agent.connection.heal()
        if agent.connection.sides[0] is not None and not agent.is_paused:
            agent.connection.send(1, "pong")

    # --- starts

    def _join(self, number: int) -> None:
        self._happened += 1
        agent = self.world.agents[number] = Agent(self.world, number)
        agent.heard_at = agent.clock()
        if number == 0:
            self.coordinator = Coordinator(self.world, agent)
            return
        own = self.coordinator
        agent.is_disturbed = own is None or own.own.is_disturbed
        self._dial(agent)

    def _dial(self, agent: Agent) -> None:
        """Look for the coordinator, each second, as the dialer does."""
        own = self.coordinator
        if not agent.is_alive or agent.link.end is not None:
            return
        is_cut = self.world.now < self._cut.get(agent.number, 0.0)
        if own is None or not own.own.is_alive or own.own.is_paused or agent.is_paused or is_cut:
            self.world.at(self.world.now + 1.0, self._dial, agent)
            return
        own.accept(agent, Connection(self.world, self.scenario.delay))

    # --- the end

    def _judge(self) -> None:
        """Raise Violation if a node has ended with a wrong status."""
        own = self.coordinator
        assert own is not None
        status = own.state.status
        if status is not None:
            self._judge_job(own, status)
        for agent in self.world.agents.values():
            if agent.status is None:
                continue  # killed
            end, number = agent.link.end, agent.number
            assert end is not None
            id = next((id for id, other in own.agents.items() if other is agent), None)  # None: it was never connected
            if end.why in ("left", "refused"):
                is_right = agent.status == own.reached[number].status
            elif end.why == "lost":
                is_right = agent.status == exitcodes.NODE_LOST and agent.is_disturbed | (
                    not own.own.is_alive and id not in own.at_end
                )
            elif end.why == "impatient" or (end.why in ENDS_OF_JOB and id is None):
                is_right = (
                    agent.status > 128 or agent.status == exitcodes.NODE_LOST
                )  # stopped here, without the coordinator
            elif end.why in ENDS_OF_JOB:
                is_right = agent.status == (exitcodes.OK if id in own.spares else status)
            else:
                is_right = agent.status == end.status
            if not is_right:
                raise Violation(f"every node ends with the right status: {agent} with {agent.status} ({end})")

    def _judge_job(self, own: Coordinator, status: int) -> None:
        state, policy = own.state, self.scenario.policy
        sent = {fault.signum for fault in self.scenario.faults}
        kinds = {fault.kind for fault in self.scenario.faults}
        last = [found for (generation, _), found in self.world.statuses.items() if generation == state.generation]
        is_right = {
            exitcodes.OK: bool(last) and not any(last),
            exitcodes.NO_PROGRESS: policy.max_no_progress is not None,
            exitcodes.RENDEZVOUS: state.generation < 0,
            exitcodes.HANG: policy.hang_timeout is not None,
            exitcodes.TIMEOUT: policy.timeout is not None,
            1: self.scenario.follows > 0 or "raise" in kinds,
            7: "fail" in kinds,
            126: "start" in kinds,
            exitcodes.NODE_LOST: bool(kinds - {"join", "fail", "port", "hang"}) or self.scenario.stuck >= 0,
        }
        signals = {128 + signum for signum in sent} | {128 + SIGKILL, 128 + SIGTERM}
        if not is_right.get(status, status in signals):
            raise Violation(f"every node ends with the right status: the job with {status} ({state.why}, {last})")


def failure_of(found: Scenario, trace: list[str] | None = None) -> str:
    """Return which invariant does not hold in a scenario, and where; "" if all hold."""
    try:
        Simulation(found, trace).run()
    except AssertionError as error:  # of a change of phase that is not in its table, too
        return str(error).partition("\n")[0] or "a phase changes as its table says"
    return ""


def shrunk(found: Scenario) -> Scenario:
    """Return the scenario with as few faults as the same invariant needs to break."""
    broken = failure_of(found).partition(":")[0]
    dropped = True
    while dropped:
        dropped = False
        for fault in found.faults:
            fewer = replace(found, faults=tuple(other for other in found.faults if other is not fault))
            if (fault.kind, fault.agent) != ("join", 0) and failure_of(fewer).partition(":")[0] == broken:
                found, dropped = fewer, True
                break
    return found


def report(seed: int) -> str:
    """Return the shortest history found for a seed that fails, as text; "" if the seed holds."""
    if not failure_of(scenario(seed)):
        return ""
    found, trace = shrunk(scenario(seed)), list[str]()
    broken = failure_of(found, trace)
    facts = {name: getattr(found, name) for name in found.__struct_fields__ if name not in ("policy", "faults", "seed")}
    policy = {name: value for name in found.policy.__struct_fields__ if (value := getattr(found.policy, name))}
    faults = "\n".join(f"  {fault}" for fault in found.faults)
    history = "\n".join(f"  {line}" for line in trace)
    return f"seed {seed}: {broken}\n\njob: {policy}\nwith: {facts}\nfaults:\n{faults}\nhistory:\n{history}\n"
