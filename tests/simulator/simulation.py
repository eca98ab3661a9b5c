"""One run of a scenario: its faults happen, the invariants are checked, and the end is judged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide import job, node
from ddplaunch.launcher.decide.node import Phase
from ddplaunch.launcher.job import connections, coordinator, join, listen, succession_link
from ddplaunch.launcher.job.remote_link import RemoteLink
from ddplaunch.launcher.node import health
from ddplaunch.reach.channel import dialer
from ddplaunch.spec.outcome import ClusterEnding, Why, WorkerError
from ddplaunch.system import exitcodes
from tests.simulator.agents import SimulatedAgent
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.scenario import COORDINATOR, Fault, Scenario, scenario
from tests.simulator.world import Attempt, Listener, Silent, Socket, Violation, World

PATIENCE = 400.0  # seconds from the last fault in which every job ends: several generations, and a rendezvous in vain
OWN_ERROR = WorkerError(type="ValueError", message="boom", traceback="")
ENDS_OF_JOB = frozenset({"left_after_notice", *(why.value for why in Why)})


class Simulation:
    """A job under faults."""

    def __init__(self, scenario: Scenario, trace: list[str] | None = None) -> None:
        self.scenario = scenario
        self.world = World(scenario, trace)
        self.silent: set[int] = set()  # nodes that others may not have heard
        self.partly_silent: set[int] = set()  # the same, but one of both ends of a broken link
        self._numbers = [fault.agent for fault in scenario.faults if fault.kind == "join"]
        for fault in scenario.faults:
            self.world.at(fault.at, self._happen, fault)
        self.world.at(self.world.dice.random(), self._tick)

    @property
    def coordinator(self) -> SimulatedCoordinator | None:
        """The coordinator that came last, of those whose agents live."""
        return next((one for one in reversed(self.world.coordinators) if one.is_here), None)

    def run(self) -> None:
        """Let everything happen; raise Violation at the first invariant that does not hold."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "Listener", Listener)
            patch.setattr(dialer, "_Attempt", Attempt)
            patch.setattr(dialer.Dialer, "_connect", lambda *_: None)
            patch.setattr(succession_link, "listen", lambda *_: Socket(self.world.current, 2))
            patch.setattr(coordinator, "reserve", self.world.reserve)
            patch.setattr(join, "host_of", lambda allocation, _: allocation.name)
            patch.setattr(listen, "os", Silent(urandom=self.world.dice.randbytes))
            patch.setattr(listen, "time", Silent(time=lambda: self.world.now))
            patch.setattr(listen, "_policy", lambda _: self.scenario.policy)
            patch.setattr(listen, "Coordinator", SimulatedCoordinator)
            # sometimes it has to be found out first why the cluster ends the job
            asked = {"question": lambda _: self.world.dice.choice((None, ClusterEnding))}
            patch.setattr(listen, "JobReporter", lambda *_: Silent(**asked, ended=lambda *_: ("", None)))
            patch.setattr(health, "why_unfit", lambda _command, agent: agent.why_unfit)
            is_over = self.world.run(PATIENCE, self._is_over)
        if not is_over:
            left = {str(one): one.state.phase.name for one in self.world.agents.values() if one.process.is_alive}
            phase = self.coordinator.state.phase.name if self.coordinator is not None else ""
            raise Violation(f"a job without faults goes on or ends: after {PATIENCE:g} s there are {left}, {phase}")
        self._judge()

    def _is_over(self) -> bool:
        agents = self.world.agents.values()
        return len(agents) == len(self._numbers) and not any(agent.process.is_alive for agent in agents)

    def _tick(self) -> None:
        self.world.at(self.world.now + 1.0, self._tick)
        for agent in self.world.agents.values():
            agent.check_stop()

    # --- faults

    def _happen(self, fault: Fault) -> None:
        world = self.world
        world.note("fault", fault)
        if fault.kind == "join":
            agent = world.agents[fault.agent] = SimulatedAgent(world, fault.agent)
            agent.is_disturbed = fault.agent > 0 and (0 not in world.agents or world.agents[0].is_disturbed)
            agent.process.do(agent.join)
            return
        if fault.awaits:
            world.armed.append(lambda: self._happen(replace(fault, awaits=False)))
            return
        world.quiet_from = max(world.quiet_from, world.now + fault.lasts)
        own = self.coordinator if fault.agent == COORDINATOR else None
        found = own.own if own is not None else world.agents.get(fault.agent)
        if found is None or not found.process.is_alive:
            return
        agent = found
        self._disturb(fault, agent)
        pair, mine = frozenset((agent.number, fault.other)), [one for one in world.workers if one.agent is agent]
        match fault.kind:
            case "kill":
                agent.fuse = fault.after
                world.at(world.now + 5.0, agent.kill)
                if not fault.after:
                    agent.kill()
            case "crash":
                world.off_until[agent.number] = world.now + fault.lasts
                agent.kill(power_fails=True)
                world.at(world.now + fault.lasts, self._boot, agent)
            case "reset":
                for peer in world.peers_of(pair):
                    peer.reset()
            case "slow":
                world.slow_until[pair] = max(world.slow_until.get(pair, 0.0), world.now + fault.lasts)
            case "sever":
                self._cut([(agent.number, fault.other)], fault.lasts)
            case "deaf":
                world.cut([(fault.other, agent.number)], fault.lasts)
            case "cut":
                self._cut_off({agent.number}, fault.lasts)
            case "partition":
                self._cut_off(set(fault.group), fault.lasts)
            case "pause":
                agent.process.pause(fault.lasts)
            case "sigterm" | "signal" | "notice":
                self._signal(agent, fault.signum)
            case "twice":
                self._signal(agent, fault.signum)
                world.soon(2.0, self._signal_again, agent, int(world.dice.choice((SIGINT, SIGTERM))))
            case "front":
                self._post(agent, node.FrontLost)
            case "fail" if mine:
                mine[0].end(7, None, replace(OWN_ERROR, at=world.now))
            case "killed" if mine:
                mine[-1].end(None, int(SIGKILL))
            case "raise" if mine:
                mine[0].has_raised = True
                self._post(agent, node.ErrorRecorded)
            case "start":
                agent.start_fails, agent.why_unfit = True, "unfit"
            case "port":
                world.port_taken_until = world.now + fault.lasts
            case "hang":
                world.hangs = True
            case "withdraw":
                self._tell(lambda at: job.Withdrawn("a node", "no such program", "", at))
            case "stop":
                self._tell(lambda at: job.StopRequested(Why.SIGNALLED, fault.signum, at))

    def _post(self, agent: SimulatedAgent, event: Callable[[float], node.Event]) -> None:
        agent.process.do(lambda: agent.process.post(event(agent.process.now())))

    def _signal(self, agent: SimulatedAgent, signum: int, *, escalates: bool = False) -> None:
        self._post(agent, lambda at: node.SignalReceived(signum, at, escalates=escalates))

    def _signal_again(self, agent: SimulatedAgent, signum: int) -> None:
        """Send a second signal, after which no worker may live for long."""
        is_second = agent.state.end.signum and agent.state.phase in (Phase.STOPPING, Phase.KILLING)
        if agent.process.is_alive and not agent.process.is_paused and is_second:
            self.world.at(self.world.now + 2 * self.scenario.delay + 1.5, self._check_killed, agent, signum)
        self._signal(agent, signum, escalates=True)

    def _check_killed(self, agent: SimulatedAgent, signum: int) -> None:
        """Raise Violation if workers of this node live after a second signal there; or any, unless the node leaves by it."""
        own = agent.followed()
        has_handed_over = own is not None and own.own is agent  # so that the others do not hear of it
        leaves = own is not None and agent.number in own.left_at and (signum == SIGTERM or has_handed_over)
        is_alone = agent.is_disturbed or own is None or own.own.is_disturbed or leaves
        for worker in self.world.workers:
            other = worker.agent
            was_reached = other is agent or not (is_alone or other.is_disturbed or other.state.why is Why.FRONT_LOST)
            if was_reached and not other.is_stuck and not other.process.is_paused:
                raise Violation(f"a second signal kills at once: {worker} lives after one to {agent}")

    def _tell(self, event: Callable[[float], job.Event]) -> None:
        def tell(own: SimulatedCoordinator) -> None:
            if own.is_here:  # it may have been paused, and have found another one then
                own.feed(event(own.own.process.now()))

        if (own := self.coordinator) is not None:
            own.own.process.do(partial(tell, own))

    def _boot(self, agent: SimulatedAgent) -> None:
        """Have a node that had no power answer again: it knows of no connection."""
        for peer in self.world.peers:
            if peer.other.process is agent.process:
                peer.reset()

    def _disturb(self, fault: Fault, agent: SimulatedAgent) -> None:
        """Note which agents may lose the coordinator by this, and which may be silent for others."""
        agents, kind = self.world.agents, fault.kind
        if kind == "partition":
            touched = {*fault.group}
        elif kind in ("reset", "sever", "deaf", "slow"):
            touched = {agent.number, fault.other}
        elif kind in ("kill", "crash", "cut", "pause"):
            touched = {agent.number}
        else:
            return
        if kind == "kill":
            agent.was_killed = True
        else:
            self.silent |= touched
            self.partly_silent |= {fault.other} if kind in ("reset", "sever", "deaf", "slow") else touched
        hosts = {one.own.number for one in self.world.coordinators if one.is_here}
        for number in agents if hosts & touched or kind == "partition" else touched & agents.keys():
            agents[number].is_disturbed = True

    def _cut_off(self, numbers: set[int], lasts: float) -> None:
        """Cut these nodes off from all others."""
        others = set(self._numbers) - numbers
        self._cut([(one, other) for one in numbers for other in others], lasts)

    def _cut(self, pairs: list[tuple[int, int]], lasts: float) -> None:
        self.world.cut([*pairs, *((other, one) for one, other in pairs)], lasts)

    # --- the end

    def _judge(self) -> None:
        """Raise Violation if a node has ended with a wrong status."""
        for one in self.world.coordinators:
            if one.state.end.status is not None:
                self._judge_job(one, one.state.end.status)
        for number, agent in self.world.agents.items():
            if agent.status is None:
                continue  # killed
            link, end, own = agent.link, agent.link.end, agent.follows
            assert end is not None
            was_reached = not isinstance(link, RemoteLink) or link.coordinator is not None or link.is_reached
            if end.why in ("left", "refused"):
                is_right = own is not None and agent.status == own.refused[number]
            elif end.why == "lost":
                is_gone = own is None or (not own.own.process.is_alive and number not in own.at_end)
                is_right = agent.status == exitcodes.NODE_LOST and (agent.is_disturbed or is_gone)
            elif agent.was_impatient or (end.why in ENDS_OF_JOB and not was_reached):  # stopped here alone
                is_right = agent.status > 128 or agent.status == exitcodes.NODE_LOST
            elif end.why in ENDS_OF_JOB:
                assert own is not None
                is_right = agent.status == (exitcodes.OK if number in own.spares else own.state.end.status)
                # a spare that was cut off may come back when the job has ended
                is_right |= agent.is_disturbed and agent.status == own.state.end.status
            else:
                is_right = agent.status == end.status
            if not is_right:
                raise Violation(f"every node ends with the right status: {agent} with {agent.status} ({end})")
        self._judge_majority()

    def _judge_majority(self) -> None:
        """Raise Violation if nodes were cut off that should have gone on."""
        agents, world = self.world.agents, self.world
        deciding = [
            one for one in world.coordinators if one.own.number not in one.left_at and not one.state.end.is_cut_off
        ]
        if any(
            one.state.end.status is not None or one.state.why in (Why.SIGNALLED, Why.FRONT_LOST) for one in deciding
        ):
            return  # not all may have learned of that
        if world.announced and self._has_majority(self.silent):
            for number in world.announced[-1]:
                agent = agents[number]
                if number not in self.silent and self._stayed(agent) and self._was_cut_off(agent):
                    raise Violation(f"a majority goes on: {agent} does not")
        has_lost = any(agent.status is None for agent in agents.values())
        if world.announced and not has_lost and self._has_majority(self.partly_silent):
            ended = [agents[number] for number in world.announced[-1] if self._stayed(agents[number])]
            if ended and all(map(self._was_cut_off, ended)):
                raise Violation(f"a majority goes on: none of {', '.join(map(str, ended))} does")

    def _has_majority(self, silent: set[int]) -> bool:
        """Whether of all generations that were to begin, more nodes were there to the end than others may have missed."""
        for nodes in self.world.announced:
            stayed = {number for number in nodes - silent if self._stayed(self.world.agents[number])}
            missed = len(nodes) - len(stayed)
            if len(nodes) == 2 and not nodes & silent:
                missed = 0  # its end was seen
            if len(stayed) <= missed or len(stayed) < self.scenario.policy.min_nodes:
                return False
        return True

    def _stayed(self, agent: SimulatedAgent) -> bool:
        """Whether an agent that may follow any coordinator has ended as its last one, or was cut off."""
        if agent.status is None or agent.was_impatient or not (agent.link.coordinator or agent.is_told):
            return False
        own = agent.follows
        if own is None or self._was_cut_off(agent):
            return self._was_cut_off(agent)
        return (
            own.state.end.status == agent.status and own.own.number not in own.left_at
        )  # else only that node has ended

    def _was_cut_off(self, agent: SimulatedAgent) -> bool:
        end, own = agent.link.end, agent.follows
        assert end is not None
        return end.why == "lost" or (own is not None and own.state.end.is_cut_off and end.why in ENDS_OF_JOB)

    def _judge_job(self, own: SimulatedCoordinator, status: int) -> None:
        state, policy, faults = own.state, self.scenario.policy, self.scenario.faults
        if own.own.number in own.left_at and status == 128 + SIGTERM:
            return
        kinds = {fault.kind for fault in faults}
        # SIGTERM to a node that has left ends no job; a second signal may be another one
        sent = {fault.signum for fault in faults if fault.signum != SIGTERM or fault.agent not in own.left_at}
        sent |= {SIGINT, SIGTERM} if "twice" in kinds else set()
        last = [
            found for (generation, _), found in self.world.statuses.items() if generation == state.generation.number
        ]
        is_right = {
            exitcodes.OK: bool(last) and not any(last),
            exitcodes.NO_PROGRESS: policy.max_no_progress is not None,
            exitcodes.RENDEZVOUS: state.generation.number < 0,
            exitcodes.HANG: policy.hang_timeout is not None,
            exitcodes.TIMEOUT: policy.timeout is not None,
            1: self.scenario.follows > 0 or "raise" in kinds,
            7: "fail" in kinds,
            126: "start" in kinds,
            exitcodes.NODE_LOST: bool(kinds - {"join", "fail", "port", "hang"}) or self.scenario.stuck >= 0,
        }
        signals = {128 + signum for signum in sent if signum} | {128 + SIGKILL}
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
