"""A scenario is run: its faults happen, and at the end it is judged how each process has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.job import connections, probe, remote_link, search
from ddplaunch.spec.outcome import Why, WorkerError
from ddplaunch.system import exitcodes
from ddplaunch.system.net.port import PortTaken
from tests.simulator.agents import Agent
from tests.simulator.arbiters import Arbiter
from tests.simulator.network import Dialer, Listener, Reservation, listen
from tests.simulator.scenario import COMMAND, FOREVER, LATE, Fault, Scenario, scenario
from tests.simulator.training import FOLLOWS, Violation
from tests.simulator.world import Machine, Process, World

PATIENCE = 400.0  # seconds from the last fault in which every job ends: several generations, and a rendezvous in vain
OWN_ERROR = WorkerError(type="ValueError", message="boom", traceback="")
# faults by which only the machines that they name lose the arbiter
OF_NODES = frozenset({"kill", "crash", "stop", "freeze", "sleep", "cut", "to arbiter", "from arbiter", "reset", "slow"})
HARMLESS = frozenset({"join", "port"})
LOST = (
    "error: the coordinator (node 0) was lost",
    "error: this node was",
    "error: node 0 (",
)  # how an agent says that it lost it


class Simulation:
    """A job under faults."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        self.scenario = scenario
        self.world = World(scenario, trace)
        self.agents: list[Agent] = []  # all that there have ever been
        self._joins = sum(fault.kind in ("join", "return") for fault in scenario.faults)
        self._happened = 0
        if scenario.where == "command":
            process = Process(self.world, self.world.machine(COMMAND))
            self.world.at(0.0, process.do, lambda: Arbiter(process))
        for fault in scenario.faults:
            self.world.at(fault.at, self._happen, fault)

    def run(self) -> None:
        """Let everything happen; raise Violation at the first invariant that does not hold."""
        with ExitStack() as patched:
            for module, name, stand_in in self._stand_ins():
                patched.enter_context(patch.object(module, name, stand_in))
            self._run()

    def _stand_ins(self) -> Iterable[tuple[Any, str, Any]]:
        """Return what stands for clock and sockets, and where."""
        for module in (connections, remote_link):
            yield module, "time", self.world
        for module in (connections, probe):
            yield module, "listen", listen
            yield module, "Listener", Listener
        yield search, "Dialer", Dialer
        yield probe, "reserve", self._reserve
        yield probe, "own_addresses", lambda: ()

    def _reserve(self, _port: int, _origin: str, *, again: bool) -> Reservation:
        if again and self.world.now < self.world.port_taken_until:
            raise PortTaken
        return Reservation()

    def _run(self) -> None:
        if not self.world.run(PATIENCE, self._is_over):
            left = [f"{one}: {one.state.phase.name}" for one in self.agents if one.process.is_alive]
            phase = self.world.arbiter.state.phase.name if self.world.arbiter is not None else ""
            raise Violation(f"nothing waits for ever: after {PATIENCE:g} s there are {left}, {phase}")
        self._judge()

    def _is_over(self) -> bool:
        is_all = self._happened == self._joins
        return is_all and not any(process.is_alive for process in self.world.processes)

    # --- faults

    def _happen(self, fault: Fault) -> None:
        world, kind = self.world, fault.kind
        machine = world.machine(fault.machine)
        world.note("fault", fault)
        if kind in ("join", "return"):
            self._happened += 1
            is_free = machine.process is None or not machine.process.is_alive
            if is_free and world.now >= machine.off_until and not machine.is_asleep and not machine.workers():
                self._start(machine)
            return
        world.quiet_from = max(world.quiet_from, world.now + min(fault.lasts, 100.0))
        process, arbiter = machine.process, self.world.arbiter
        there = arbiter.process.machine.number if arbiter is not None else 0
        if process is None or not process.is_alive:
            return
        agent = next((one for one in reversed(self.agents) if one.process is process), None)
        mine = machine.workers()
        match kind:
            case "kill":
                process.fuse = fault.after
                world.at(world.now + 5.0, process.kill)
                if not fault.after:
                    process.kill()
            case "crash":
                machine.off_until = world.now + fault.lasts
                process.kill(power_fails=True)
            case "stop" if not machine.is_asleep:
                process.pause(fault.lasts)
                if agent is not None:
                    agent.watch_lease()
            case "freeze":
                machine.freeze(fault.lasts)
            case "sleep":
                machine.sleep(fault.lasts)
            case "cut":
                self._cut_off({fault.machine}, fault.lasts)
            case "partition":
                self._cut_off(set(fault.group), fault.lasts)
            case "to arbiter":
                world.cut([(fault.machine, there)], fault.lasts)
            case "from arbiter":
                world.cut([(there, fault.machine)], fault.lasts)
            case "between" if fault.machine != fault.other:
                world.cut([(fault.machine, fault.other), (fault.other, fault.machine)], fault.lasts)
                if world.dice.random() < self.scenario.follows:
                    world.soon(10.0, self._fail_apart, fault)
            case "reset":
                for peer in [one for one in world.peers if fault.machine in (one.here, one.there)]:
                    peer.reset()
            case "slow":
                world.slow_until[frozenset((fault.machine, there))] = world.now + fault.lasts
            case "port":
                world.port_taken_until = world.now + fault.lasts
            case "withdraw":
                self._tell(lambda at: job.Withdrawn("a node", None, "no such program", "", at))
            case "stop job":
                self._tell(lambda at: job.StopRequested(Why.SIGNALLED, fault.signum, at))
            case "fail" if mine:
                mine[0].fail(7, replace(OWN_ERROR, at=world.now))
            case "follow" if mine:
                mine[0].end(1, None, FOLLOWS)
            case "killed" if mine:
                mine[-1].end(None, int(SIGKILL))
        if agent is None:
            return
        match kind:
            case "sigterm" | "signal":
                coordinator_is_here = agent.link.coordinator is not None
                agent.soon(lambda at: node.SignalReceived(fault.signum, at, coordinator_is_here=coordinator_is_here))
            case "front":
                agent.soon(node.FrontLost)
            case "start":
                agent.start_fails = True

    def _start(self, machine: Machine) -> None:
        """Start an agent; that of node 0 has the arbiter, unless the command has."""
        if (arbiter := self.world.arbiter) is not None:
            arbiter.met.discard(machine.number)
        process = Process(self.world, machine)
        agent = Agent(process)
        self.agents.append(agent)
        if machine.number == 0 and self.scenario.where != "command":
            process.do(lambda: Arbiter(process, agent))
        else:
            process.do(agent.connect)
        process.exits = lambda: agent.status
        if self.scenario.where == "command":
            process.ended = lambda: self._give_up(agent)

    def _give_up(self, agent: Agent) -> None:
        """Let the command know of an agent that has ended before it has joined."""
        if agent.follows is None:
            self.world.soon(3.0, self._tell, partial(job.NodeGivenUp, agent.number))

    def _fail_apart(self, fault: Fault) -> None:
        """Have a worker fail that cannot reach one on another node."""
        if self.world.is_cut(fault.machine, fault.other):
            for worker in self.world.workers:
                if worker.machine.number == fault.machine and fault.other in worker.run.nodes:
                    worker.end(1, None, FOLLOWS)
                    return

    def _tell(self, event: Callable[[float], job.Event]) -> None:
        if (arbiter := self.world.arbiter) is not None:
            arbiter.process.do(lambda: arbiter.feed(event(arbiter.process.now())))

    def _cut_off(self, numbers: set[int], lasts: float) -> None:
        """Cut these machines off from all others."""
        others = {COMMAND, *self.world.machines} - numbers
        pairs = [(one, other) for one in numbers for other in others]
        self.world.cut([*pairs, *((other, one) for one, other in pairs)], lasts)

    # --- the end

    def _judge(self) -> None:
        """Raise Violation if a process has ended with a wrong status, or a node that could go on has not."""
        for arbiter in self.world.arbiters:
            if arbiter.process.status is not None and arbiter.state.end.status is not None and not arbiter.has_left:
                self._judge_job(arbiter, arbiter.state.end.status)
        for agent in self.agents:
            if agent.process.status is not None:
                self._judge_agent(agent, agent.process.status)
        self._judge_progress()

    def _judge_agent(self, agent: Agent, status: int) -> None:
        """Raise Violation if an agent that was not killed has not ended with the status that it was told, or one of its own."""
        faults = [fault for fault in self.scenario.faults if fault.machine == agent.number]
        own = {exitcodes.of_signal(fault.signum) for fault in faults if fault.signum}
        own |= {exitcodes.of_signal(SIGTERM)} if any(fault.kind == "front" for fault in faults) else set()
        arbiter, text = agent.follows, agent.link.end.text if agent.link.end is not None else ""
        if "malformed" in text:
            raise Violation(f"nobody is misunderstood: {agent}: {text}")
        if arbiter is None:
            allowed: set[int | None] = {exitcodes.RENDEZVOUS, exitcodes.NODE_LOST}
        else:
            allowed = {arbiter.state.end.status} | arbiter.told.get(agent.number, set())
            if text.startswith(LOST):
                allowed = {exitcodes.NODE_LOST, *arbiter.ending}
                if not self._may_lose(agent, arbiter):
                    raise Violation(f"whoever can reach the arbiter goes on with it: {agent} has lost it")
            elif self.scenario.policy.spares:
                allowed |= {exitcodes.OK}
        if status not in allowed | own:
            raise Violation(f"every member ends with the right status: {agent} with {status}, not {allowed | own}")

    def _may_lose(self, agent: Agent, arbiter: Arbiter) -> bool:
        """Whether an agent may have lost this arbiter, the last one that it followed."""
        there = arbiter.process
        is_gone = there.status is None or arbiter.has_left or agent.number not in arbiter.met
        return is_gone or bool({agent.number, there.machine.number} & self._hurt)

    @property
    def _hurt(self) -> set[int]:
        """The machines that any fault may have parted from others."""
        faults = self.scenario.faults
        hurt = {fault.machine for fault in faults if fault.kind in OF_NODES or fault.kind in ("between", "front")}
        hurt |= {fault.other for fault in faults if fault.kind == "between"}
        hurt |= {one for fault in faults for one in fault.group}
        # who is cut off at the end of the job does not learn of it
        return hurt if not any(fault.kind == "partition" for fault in faults) else {COMMAND, *self.world.machines}

    def _judge_job(self, arbiter: Arbiter, status: int) -> None:
        """Raise Violation if a job has ended with a status that nothing explains."""
        state, faults, policy = arbiter.state, self.scenario.faults, self.scenario.policy
        last = arbiter.runs[-1].statuses if arbiter.runs else {}
        if status == exitcodes.OK and (any(last.values()) or len(last) < arbiter.runs[-1].size):
            raise Violation(f"a job has finished when all its workers have: {last}")
        kinds = {fault.kind for fault in faults}
        is_right = {
            exitcodes.OK: bool(arbiter.runs),
            exitcodes.RENDEZVOUS: state.generation.number < 0,
            exitcodes.TIMEOUT: policy.timeout is not None,
            1: self.scenario.follows > 0 or bool(kinds & {"follow", "between", "fail"}),
            7: "fail" in kinds,
            126: "start" in kinds,
            exitcodes.NODE_LOST: bool(kinds - {"join", "fail", "port", "hang"}) or self.scenario.stuck >= 0,
        }
        signals = {128 + signum for fault in faults if (signum := fault.signum)} | {128 + SIGKILL}
        signals |= {128 + SIGTERM} if "front" in kinds else set()
        if not is_right.get(status, status in signals):
            raise Violation(f"every member ends with the right status: the job with {status} ({state.why})")

    def _judge_progress(self) -> None:
        """Raise Violation if a job that lost few enough nodes, and no arbiter for good, has not finished."""
        found, policy = self.scenario, self.scenario.policy
        kinds = {fault.kind for fault in found.faults}
        is_bounded = policy.timeout or found.stuck >= 0
        if kinds - OF_NODES - HARMLESS or not policy.lease or is_bounded:
            return
        hurt = {fault.machine for fault in found.faults if fault.kind in OF_NODES}
        first = min((fault.at for fault in found.faults if fault.kind in OF_NODES), default=FOREVER)
        joins = [one for one in found.faults if one.kind == "join" and one.machine < min(LATE, policy.max_nodes)]
        started = {one.machine for one in joins if one.at + 3 * found.delay < first}
        started -= self.world.arbiters[-1].refused
        home = COMMAND if found.where == "command" else 0
        if home in hurt or len(started - hurt) < policy.min_nodes or len(started) > policy.max_nodes:
            return
        status = self.world.arbiters[-1].process.status
        # a process that the loss of others kills costs restarts, until the loss is known
        if status != exitcodes.OK and not (found.follows and status == 1):
            raise Violation(f"whoever can reach the arbiter goes on with it: {started - hurt} end with {status}")


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
            if (fault.kind, fault.machine) != ("join", 0) and failure_of(fewer).partition(":")[0] == broken:
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
