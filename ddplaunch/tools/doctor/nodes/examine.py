"""Examines the nodes of a job, and the network between them: asks, has pairs measure, and judges. Waits for none forever."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeVar

from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.plan.cluster import Allocation, endpoints
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach import agents as starting
from ddplaunch.reach.connections import AgentStart
from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token
from ddplaunch.spec.options.parsers import is_numeric
from ddplaunch.system.errors import LaunchError, tell
from ddplaunch.system.fields import host, piece
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import is_loopback
from ddplaunch.system.process.files import replaced
from ddplaunch.system.redaction import Redactor
from ddplaunch.system.words import count, duration, some, why_failed
from ddplaunch.tools.doctor import SEVERITIES, CheckResult, NodesReport, Report
from ddplaunch.tools.doctor.examine import ALL_CHECKS, presentable
from ddplaunch.tools.doctor.nodes import Concern, agreement, joined, messages, network
from ddplaunch.tools.doctor.nodes.agreement import Clock
from ddplaunch.tools.doctor.nodes.network import Pair, doubtful, halves
from ddplaunch.tools.doctor.nodes.nodes import Batch, Nodes

_MODULE = "ddplaunch.tools.doctor.nodes.host"
_START, _START_EACH = 20.0, 0.05  # seconds: a login may take 10, and of many hosts 64 start at once
_FACTS = 8.0  # seconds; with 64 simulated nodes on two processors it takes 2
_CHECKS = 20.0  # seconds; the checks of one machine end within 10 by themselves
_TIMES = 3  # that clocks are asked, since the quickest answer tells most
_QUICK = 5.0  # seconds for what takes milliseconds
_MEASURE = 8.0  # seconds; a way on which everything is lost takes 7
_CONVICTING = 2  # rounds
# seconds; most networks are at full speed after a few ms, and this machine's speed says nothing
_SEND, _SEND_HERE = 0.15, 0.01

R = TypeVar("R", bound=messages.Reply)


def examine_nodes(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation, only: str | None
) -> tuple[NodesReport, list[Host]]:
    """Examine all nodes of an allocation; return the report, and the hosts that are good.

    Raises:
        LaunchError: this node should listen for others, and cannot.
    """
    variables: Mapping[str, str]
    named = _with_hosts(allocation)
    if allocation.start:
        agents, variables = _agents(spec, env, allocation)
    else:
        agents, variables = _joining(spec, env, named), token.public(env)
    with closing(Loop()) as loop, ExitStack() as stack:
        python = spec.remote_python or sys.executable
        nodes = Nodes(loop, agents, starter=allocation.starter, python=python, env=variables)
        stack.callback(nodes.close)
        if allocation.rendezvous is not None:
            gathering = joined.Gathering(loop, spec, env, allocation, nodes.name)
            stack.callback(gathering.close)
            gathering.expect(nodes.joining)
        report, good = _Examination(loop, nodes, spec, env, named, only).run()
    if allocation.rendezvous is None or len(allocation.hosts) == len(named.start):
        return report, [named.start[node] for node in good]  # who has started the nodes has named them
    # where a later job is to run is no word of these nodes: another host could have the name that one gives itself
    addresses = {node: one.address for node, one in nodes.joining.items()}
    return report, [Host(name=addresses.get(node) or socket.gethostname()) for node in good]


def _with_hosts(allocation: Allocation) -> Allocation:
    """Return the allocation with names for its hosts, as far as they are known where somebody else has started the agents."""
    if allocation.start:
        return allocation
    number = joined.number_of(allocation)
    names = allocation.hosts if len(allocation.hosts) == number else [f"node-{rank}" for rank in range(number)]
    return replace(allocation, start=tuple(Host(name=name) for name in names))


def _joining(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> Sequence[AgentStart]:
    """Return what is started for this node; nothing is for the others."""
    own = joined.rank_of(allocation) or 0
    here = replace(allocation, starter="simulate")
    agents = starting.agents(spec, env, here, sys.executable, "doctor", token=os.urandom(32).hex(), module=_MODULE)
    return [agent if agent.node_rank == own else replace(agent, argv=()) for agent in agents]


def _agents(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation
) -> tuple[Sequence[AgentStart], Mapping[str, str]]:
    """Return what is started for each node, and the variables of that command."""
    python = spec.remote_python or sys.executable
    agents = starting.agents(spec, env, allocation, python, "doctor", token=os.urandom(32).hex(), module=_MODULE)
    if allocation.starter != "srun":
        return agents, token.public(env)
    from ddplaunch.reach.slurm import step  # few have Slurm

    # a step for each node: one that does not start keeps no other from it
    command = (python, "-P", "-m", _MODULE)
    steps = [
        replace(agent, argv=("srun", *step.task_options([agent.host]), "--input=0", "--unbuffered", *command))
        for agent in agents
    ]
    return steps, step.public_environment(env)


class _Examination:
    """One examination, from the start of the nodes to the report."""

    def __init__(
        self, loop: Loop, nodes: Nodes, spec: JobSpec, env: Mapping[str, str], allocation: Allocation, only: str | None
    ) -> None:
        self._loop = loop
        self._nodes = nodes
        self._spec = spec
        self._env = env
        self._allocation = allocation
        self._only = only
        self._names = [host.address for host in allocation.start]  # nodes that join say what they are called
        self._is_shared = bool(spec.simulate)
        self._began = time.monotonic()
        self._failed: list[Concern] = []  # of requests that had no answer
        self._seconds: dict[str, float] = {}  # by check: until it had ended

    def run(self) -> tuple[NodesReport, list[int]]:
        """Ask for everything, one after the other, and judge it all in the end."""
        nodes = self._nodes
        joins = self._allocation.rendezvous is not None
        limit = _START + _START_EACH * len(self._names)
        nodes.start(min(self._spec.rdzv_timeout, joined.WITHIN) if joins else limit)
        if joins:
            self._names = nodes.names
        self._note("nodes")
        facts = self._ask(
            messages.Facts, "nodes", dict.fromkeys(nodes.alive, messages.Introduce(self._ports())), _FACTS
        )
        facts = self._as_connected(facts)
        self._note("versions")
        examined = self._post_examine()
        clocks = self._ask_clocks()
        self._note("clocks")
        shared = self._share()
        self._note("files")
        # nodes of one machine meet while that is examined, since their speed says nothing
        reports = {} if self._is_shared else self._collect(messages.Examined, "nodes", nodes.wait(examined))
        name = self._allocation.endpoint.address or self._name_of_first()
        met = self._meet(name, facts)
        self._note("names")
        ways = self._measure(facts)
        self._note("network")
        if self._is_shared:
            reports = self._collect(messages.Examined, "nodes", nodes.wait(examined))
        alive = set(nodes.alive)
        concerns = [
            *agreement.judge_lost(self._names, nodes.lost, self._allocation.nnodes[0]),
            *self._failed,
            *agreement.judge_facts(self._names, facts),
            *agreement.judge_folders(self._names, shared),
            *agreement.judge_clocks(self._names, {} if self._is_shared else clocks),
            *agreement.judge_names(self._names, met, facts, name, is_needed=self._allocation.endpoint.address == name),
            # what was measured with a node that is lost says nothing of the other one
            *network.judge(
                self._names,
                facts,
                {way: one for way, one in ways.items() if alive.issuperset(way)},
                is_shared=self._is_shared,
            ),
            *agreement.merged(self._names, {node: one.report for node, one in reports.items()}),
        ]
        good = agreement.good_nodes(len(self._names), concerns)
        # nodes that somebody else has started are called what they call themselves
        if not self._is_shared and not joins:
            self._remember(agreement.faulty_nodes(len(self._names), nodes.lost, concerns), good)
        return self._report(facts, clocks, ways, reports, concerns), good

    def _as_connected(self, facts: Mapping[int, messages.Facts]) -> dict[int, messages.Facts]:
        """Return the facts with the addresses from which nodes have joined: others connect to no address that a node names."""
        own = facts[0].addresses if 0 in facts else ()
        addresses = {
            node: (*own, one.address)[-messages.MAX_ADDRESSES :] if is_loopback(one.address) else (one.address,)
            for node, one in self._nodes.joining.items()
        }
        return {node: replace(one, addresses=addresses.get(node, one.addresses)) for node, one in facts.items()}

    def _name_of_first(self) -> str:
        """Return the name by which the others look for node 0."""
        rendezvous = self._allocation.rendezvous
        return self._names[0] if rendezvous is None else rendezvous.addresses[0]

    def _note(self, check: str) -> None:
        self._seconds[check] = time.monotonic() - self._began

    # --- questions

    def _ask(self, kind: type[R], check: str, requests: Mapping[int, messages.Request], within: float) -> dict[int, R]:
        return self._collect(kind, check, self._nodes.ask(requests, within))

    def _collect(self, kind: type[R], check: str, replies: Mapping[int, messages.Reply]) -> dict[int, R]:
        """Return the replies of this kind; what else came is why there is none."""
        for why, nodes in agreement.by_value(
            {node: one.why for node, one in replies.items() if isinstance(one, messages.Failed)}
        ).items():
            self._failed.append(agreement.failed(self._names, check, nodes, why))
        return {node: one for node, one in replies.items() if isinstance(one, kind)}

    def _ports(self) -> tuple[int, ...]:
        """Return the fixed ports that a job here would use, apart from those that the kernel chooses."""
        ports = [self._allocation.endpoint.port]
        if self._allocation.starter == "srun":
            job = self._env.get("SLURM_JOB_ID", "")
            ports.append(endpoints.ports_of(int(job) if job.isdecimal() else 0)[0])
        return () if self._is_shared else tuple(port for port in ports if port)

    def _post_examine(self) -> Batch:
        """Have the nodes examine themselves; of those that share a machine only the first."""
        chosen, only = self._nodes.alive, self._only
        if self._is_shared:
            # the job of two workers would be late beside all that starts here
            others = ",".join(check.id for check in ALL_CHECKS if check.id != "all-reduce")
            chosen, only = chosen[:1], only or others
        return self._nodes.post(dict.fromkeys(chosen, messages.Examine(only)), _CHECKS)

    def _ask_clocks(self) -> dict[int, Clock]:
        """Ask each node a few times what time it is; return the most certain reading of each clock."""
        clocks: dict[int, Clock] = {}
        for _ in range(_TIMES):
            batch = self._nodes.post(dict.fromkeys(self._nodes.alive, messages.TellTime()), _QUICK)
            for node, reply in self._nodes.wait(batch).items():
                if isinstance(reply, messages.Time):
                    now = agreement.clock_of(batch.sent_at, reply.seconds, batch.came_at[node])
                    clocks[node] = min(clocks.get(node, now), now, key=lambda clock: clock.uncertain)
        return clocks

    def _share(self) -> dict[int, messages.Shared]:
        """Have node 0 make a file, and the others look for it."""
        if self._is_shared or 0 not in self._nodes.alive:
            return {}
        made = self._ask(messages.Shared, "files", {0: messages.Make()}, _QUICK)
        if not made:
            return {}
        look = messages.Look(made[0].digits)
        seen = self._ask(messages.Shared, "files", {node: look for node in self._nodes.alive if node}, _QUICK)
        self._ask(messages.Shared, "files", {0: messages.Remove()}, _QUICK)
        return made | seen

    def _meet(self, name: str, facts: Mapping[int, messages.Facts]) -> dict[int, messages.Met]:
        """Have all others look for node 0 under its name."""
        if self._is_shared or 0 not in facts or is_numeric(name):
            return {}
        others = {node: messages.Meet(facts[0].port) for node in facts if node}
        return self._ask(messages.Met, "names", others, _QUICK)

    def _measure(self, facts: Mapping[int, messages.Facts]) -> dict[tuple[int, int], messages.Way]:
        """Have pairs of nodes measure the ways between them, round by round, then the doubtful ones again."""
        ways: dict[tuple[int, int], messages.Way] = {}
        for pairs in halves([node for node in self._nodes.alive if node in facts]):
            self._round(pairs, facts, ways)
        for _ in range(_CONVICTING):
            speeds, bad = network.bad_pairs(ways, is_shared=self._is_shared)
            self._round(doubtful(speeds, bad), facts, ways)
        return ways

    def _round(
        self, pairs: Sequence[Pair], facts: Mapping[int, messages.Facts], ways: dict[tuple[int, int], messages.Way]
    ) -> None:
        """Measure all pairs at once in one direction, then in the other; put the better of two measurements into `ways`.

        One direction will do on one machine, where both take the same way.
        """
        seconds = _SEND_HERE if self._is_shared else _SEND
        back = [] if self._is_shared else [(there, here) for here, there in pairs]
        for turn in (list(pairs), back):
            targets = dict(turn)
            requests = {
                here: messages.Measure(there, facts[there].addresses, (facts[there].port, *facts[there].ports), seconds)
                for here, there in targets.items()
            }
            for here, reply in self._nodes.ask(requests, _MEASURE).items():
                there = targets[here]
                failed = (
                    messages.Way(blocked=(messages.Blocked(facts[there].port, reply.why),))
                    if isinstance(reply, messages.Failed)
                    else None
                )
                way = reply if isinstance(reply, messages.Way) else failed
                if way is not None:
                    ways[here, there] = network.best_of(ways.get((here, there)), way)

    def _remember(self, faulty: Mapping[int, tuple[str, str]], good: Sequence[int]) -> None:
        """Remember which machines are slow or out of reach, for the next jobs; those that are no longer so are forgotten."""
        path, now, in_slurm = bad_nodes_file(self._env), time.time(), self._allocation.starter == "srun"
        failures = [
            bad_nodes.Failure(
                host=host(self._names[node]), kind=kind, at=now, why=piece(Redactor().text(why)), in_slurm=in_slurm
            )
            for node, (kind, why) in faulty.items()
        ]
        if not path:
            return
        bad_nodes.remember(path, failures, now, well=[self._names[node] for node in good])
        if failures:
            named = some([one.host for one in failures], 3)
            tell(f"note: later jobs warn of {named}, until `ddplaunch doctor --forget NODE`\n")

    # --- the report

    def _report(
        self,
        facts: Mapping[int, messages.Facts],
        clocks: Mapping[int, Clock],
        ways: Mapping[tuple[int, int], messages.Way],
        reports: Mapping[int, messages.Examined],
        concerns: Sequence[Concern],
    ) -> NodesReport:
        found = {one.finding.check for one in concerns}
        texts = {
            "nodes": f"{len(self._nodes.alive)} of {count(len(self._names), 'node')} answered to the end",
            "versions": ", ".join(sorted({f"torch {one.torch or 'missing'}" for one in facts.values()})),
            "clocks": _of_clocks(clocks),
            "files": ", ".join(sorted({f"script {one.script}" for one in facts.values() if one.script})),
            "names": "",
            "network": network.summary(ways),
        }
        results = [
            CheckResult(
                id=check,
                status="found" if check in found else "passed" if facts else "failed",
                facts=texts[check] if facts else "no node answered",
                seconds=round(self._seconds[check], 3),
            )
            for check in texts
        ]
        findings = [replace(one.finding, hosts=tuple(self._names[node] for node in one.nodes)) for one in concerns]
        report = NodesReport(
            ddplaunch=__version__,
            host=count(len(self._names), "node"),
            python=self._spec.program.python or sys.executable,
            seconds=round(time.monotonic() - self._began, 3),
            checks=tuple(results),
            findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
            nodes=tuple(_shown(one.report) for _, one in sorted(reports.items())),
        )
        return presentable(report, self._env.get("HOME", ""))


def _shown(report: Report) -> Report:
    return presentable(report, "")


def _of_clocks(clocks: Mapping[int, Clock]) -> str:
    if not clocks:
        return ""
    ahead = [one.ahead for one in clocks.values()]
    uncertain = max(one.uncertain for one in clocks.values())
    return f"clocks within {duration(max(ahead) - min(ahead))}, measured to {duration(uncertain)}"


def write_hosts(path: str, good: Sequence[Host]) -> None:
    """Write good hosts as a host file.

    Raises:
        LaunchError: there is none, or the file cannot be written.
    """
    if not good:
        raise LaunchError(f"--write-hosts {path}: no node is good, so the file is not written")
    text = "".join(f"{_line(host)}\n" for host in good)
    try:
        with replaced(path) as file:
            file.write(text.encode(errors="surrogateescape"))
    except OSError as error:
        raise LaunchError(
            f"--write-hosts {path}: {why_failed(error)}", hint="name a file in a folder that you may write to"
        ) from None


def _line(host: Host) -> str:
    """Return a host as a line of a host file."""
    if host.devices is not None:
        return f"{host.name} gpus={','.join(host.devices)}"
    return host.name if host.slots is None else f"{host.name} slots={host.slots}"
