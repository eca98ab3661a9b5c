"""The doctor on node 0, or where hosts are named: examines all nodes of a job, and the network between them.

It asks the program on each node, has pairs of nodes measure, and judges. It waits for none forever.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

from msgspec import Struct
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
from ddplaunch.tools.doctor.nodes.network import Direction, Pair, deciding_pairs, rounds_of_halves
from ddplaunch.tools.doctor.nodes.nodes import Batch, Nodes, R

_MODULE = "ddplaunch.tools.doctor.nodes.host"
# seconds for a node to do what is requested
# and for each node more: a login may take 10, and of many hosts 64 start at once
_START_WITHIN, _START_WITHIN_EACH = 20.0, 0.05
_FACTS_WITHIN = 8.0  # with 64 simulated nodes on two processors it takes 2
_CHECKS_WITHIN = 20.0  # the checks of one machine end within 10 by themselves
_QUICK_WITHIN = 5.0  # for what takes milliseconds
_MEASURE_WITHIN = 8.0  # a way on which everything is lost takes 7
_CLOCK_ROUNDS = 3  # the quickest answer tells most about a clock
_DECIDING_ROUNDS = 2  # see `deciding_pairs`
# seconds in which data are sent; most networks are at full speed after a few ms, and this machine's speed says nothing
_SEND_SECONDS, _SEND_SECONDS_HERE = 0.15, 0.01


def examine_nodes(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation, only: str | None
) -> tuple[NodesReport, list[Host]]:
    """Examine all nodes of an allocation; return the report, and the hosts that are good. `only`: names of checks, None for all.

    Raises:
        LaunchError: this node should listen for others, and cannot.
    """
    variables: Mapping[str, str]
    named = _with_hosts(allocation)  # with a name for each node
    if allocation.hosts_to_start_on:
        agents, variables = _agents(spec, env, allocation)
    else:  # somebody else has started the doctor on all nodes: the others will join
        agents, variables = _agent_of_this_node(spec, env, named), token.visible_to_workers(env)
    with closing(Loop()) as loop, ExitStack() as stack:
        python = spec.remote_python or sys.executable
        nodes = Nodes(loop, agents, starter=allocation.starter, python=python, env=variables)
        stack.callback(nodes.close)
        if allocation.rendezvous is not None:
            gathering = joined.Gathering(loop, spec, env, allocation, nodes)
            stack.callback(gathering.close)
        report, good = _Examination(loop, nodes, spec, env, named, only).run()
    hosts = named.hosts_to_start_on
    cluster_names_nodes = len(allocation.hosts) == len(hosts)  # else, of nodes that join, each says its own name
    if allocation.rendezvous is None or cluster_names_nodes:
        return report, [hosts[node] for node in good]
    # its own name may be another host's, and later jobs would run there: the address from which the node has joined is safe
    addresses = {node: one.address for node, one in nodes.joining.items()}
    return report, [Host(name=addresses.get(node) or socket.gethostname()) for node in good]


def _with_hosts(allocation: Allocation) -> Allocation:
    """Return the allocation with names for its hosts, as far as they are known where somebody else has started the agents."""
    if allocation.hosts_to_start_on:
        return allocation
    number = joined.number_of_nodes(allocation)
    names = allocation.hosts if len(allocation.hosts) == number else [f"node-{rank}" for rank in range(number)]
    return replace(allocation, hosts_to_start_on=tuple(Host(name=name) for name in names))


def _agent_of_this_node(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> Sequence[AgentStart]:
    """Return what is started for this node; those of the others have no command, since they join."""
    own = joined.node_rank_of(allocation) or 0
    here = replace(allocation, starter="simulate")  # as a process on this machine
    agents = starting.agents(
        spec, env, here, sys.executable, run_id="doctor", token=os.urandom(32).hex(), module=_MODULE
    )
    return [agent if agent.node_rank == own else replace(agent, argv=()) for agent in agents]


def _agents(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation
) -> tuple[Sequence[AgentStart], Mapping[str, str]]:
    """Return what is started for each node by ssh, srun or as a simulated node, and the variables of that command."""
    python = spec.remote_python or sys.executable
    agents = starting.agents(spec, env, allocation, python, run_id="doctor", token=os.urandom(32).hex(), module=_MODULE)
    if allocation.starter != "srun":
        return agents, token.visible_to_workers(env)
    # imported here, since few have Slurm
    from ddplaunch.plan.cluster.slurm import component_of
    from ddplaunch.reach.slurm import srun

    # a step for each node: one that does not start keeps no other from it. A heterogeneous job has components, and srun has to be
    # told which of them the node is in
    command = (python, "-P", "-m", _MODULE)
    steps = []
    for agent in agents:
        options = [*srun.component_options(component_of(env, agent.host)), *srun.task_options([agent.host])]
        steps.append(replace(agent, argv=("srun", *options, "--input=0", "--unbuffered", *command)))
    return steps, srun.public_environment(env)


class _Replies(Struct, frozen=True, kw_only=True):
    """What the nodes have replied, by node rank; a node that did not reply is missing."""

    facts: Mapping[int, messages.Facts]
    clocks: Mapping[int, Clock]
    shared: Mapping[int, messages.Shared]
    met: Mapping[int, messages.Met]  # what the name of node 0 leads to
    ways: network.Ways
    examined: Mapping[int, Report]  # what the checks of each machine say


class _Examination:
    """One examination, from the start of the nodes to the report."""

    def __init__(
        self, loop: Loop, nodes: Nodes, spec: JobSpec, env: Mapping[str, str], allocation: Allocation, only: str | None
    ) -> None:
        """Prepare; `allocation` names all nodes, and `only` the checks of each machine, None for all."""
        self._loop = loop
        self._nodes = nodes
        self._spec = spec
        self._env = env
        self._allocation = allocation
        self._only = only
        self._names = [
            host.address for host in allocation.hosts_to_start_on
        ]  # by node rank; nodes that join tell theirs later
        self._have_joined = allocation.rendezvous is not None  # somebody else starts the nodes
        self._share_machine = bool(spec.simulate)  # all nodes do, so that clocks and speeds of the network tell nothing
        self._began = time.monotonic()
        self._unanswered: list[Concern] = []  # requests that had no answer
        self._seconds: dict[str, float] = {}  # from the beginning to the end of a check, by the check's name

    def run(self) -> tuple[NodesReport, list[int]]:
        """Ask for everything, one after the other, and judge it all in the end; return the report and the ranks of good nodes."""
        self._start()
        self._note_end_of("nodes")
        facts = self._ask_facts()
        self._note_end_of("versions")
        posted = self._post_examine()
        clocks = self._ask_clocks()
        self._note_end_of("clocks")
        shared = self._ask_shared()
        self._note_end_of("files")
        # the checks of a machine would slow down what it measures, unless all share one, where the speed tells nothing
        examined = {} if self._share_machine else self._wait_for_examined(posted)
        met = self._ask_met(facts)
        self._note_end_of("names")
        ways = self._measure(facts)
        self._note_end_of("network")
        if self._share_machine:
            examined = self._wait_for_examined(posted)
        replies = _Replies(facts=facts, clocks=clocks, shared=shared, met=met, ways=ways, examined=examined)
        concerns = self._judge(replies)
        good = agreement.good_nodes(len(self._names), concerns)
        # a node that has joined is called what it calls itself, which may be another host's name; simulated ones are no hosts
        if not self._share_machine and not self._have_joined:
            self._remember(agreement.faulty_nodes(len(self._names), self._nodes.lost, concerns), good)
        return self._report(replies, concerns), good

    def _start(self) -> None:
        """Start the program on all nodes, or wait until they have joined."""
        if self._have_joined:
            self._nodes.start(min(self._spec.rdzv_timeout, joined.WITHIN))
            self._names = self._nodes.names
        else:
            self._nodes.start(_START_WITHIN + _START_WITHIN_EACH * len(self._names))

    def _judge(self, replies: _Replies) -> list[Concern]:
        """Return all that is wrong with nodes, between them, and on the machine of each."""
        names, alive = self._names, set(self._nodes.alive)
        # what was measured with a node that is lost says nothing of the other one
        ways = {direction: way for direction, way in replies.ways.items() if alive.issuperset(direction)}
        name = self._name_of_node_0()
        # it was typed, as by --master-addr, so that workers get this name
        is_needed = self._allocation.endpoint.address == name
        least, _most = self._allocation.nnodes
        return [
            *agreement.judge_lost(names, self._nodes.lost, least),
            *self._unanswered,
            *agreement.judge_facts(names, replies.facts),
            *agreement.judge_folders(names, replies.shared),
            *agreement.judge_clocks(names, {} if self._share_machine else replies.clocks),
            *agreement.judge_names(names, replies.met, replies.facts, name, is_needed=is_needed),
            *network.judge(names, replies.facts, ways, share_machine=self._share_machine),
            *agreement.merged(names, replies.examined),
        ]

    def _as_connected(self, facts: Mapping[int, messages.Facts]) -> dict[int, messages.Facts]:
        """Return the facts with the addresses from which nodes have joined: others connect to no address that a node claims."""
        own = facts[0].addresses if 0 in facts else ()
        addresses: dict[int, tuple[str, ...]] = {}
        for node, one in self._nodes.joining.items():
            addresses[node] = (one.address,)
            if is_loopback(one.address):  # it is on this host: others reach it at the addresses of this host
                addresses[node] = (*own, one.address)[-messages.MAX_ADDRESSES :]
        return {node: replace(one, addresses=addresses.get(node, one.addresses)) for node, one in facts.items()}

    def _name_of_node_0(self) -> str:
        """Return the name by which the others look for node 0: as typed, else as it is listed, else that of the rendezvous."""
        rendezvous = self._allocation.rendezvous
        listed = self._names[0] if rendezvous is None else rendezvous.addresses[0]
        return self._allocation.endpoint.address or listed

    def _note_end_of(self, check: str) -> None:
        """Note when all that this check needs has been asked."""
        self._seconds[check] = time.monotonic() - self._began

    # --- questions

    def _ask(self, kind: type[R], check: str, requests: Mapping[int, messages.Request], within: float) -> dict[int, R]:
        """Send requests for a check, by node rank; return the replies, which are of this kind."""
        return self._collect(check, self._nodes.ask(kind, requests, within))

    def _collect(self, check: str, batch: Batch[R]) -> dict[int, R]:
        """Return the replies; where a node says instead why it has none, keep that as a finding of the check."""
        for why, nodes in agreement.by_value(batch.failures).items():
            self._unanswered.append(agreement.failed(self._names, check, nodes, why))
        return batch.replies

    def _ask_facts(self) -> dict[int, messages.Facts]:
        """Have each node say what it is, and listen for the others."""
        introduce = messages.Introduce(self._ports())
        facts = self._ask(messages.Facts, "nodes", dict.fromkeys(self._nodes.alive, introduce), _FACTS_WITHIN)
        return self._as_connected(facts)

    def _wait_for_examined(self, posted: Batch[Report]) -> dict[int, Report]:
        """Return what the checks of each machine say, which were posted before."""
        return self._collect("nodes", self._nodes.wait(posted))

    def _ports(self) -> tuple[int, ...]:
        """Return the fixed ports that a job here would use, apart from those that the kernel chooses."""
        ports = [self._allocation.endpoint.port]
        if self._allocation.starter == "srun":
            job = self._env.get("SLURM_JOB_ID", "")
            ports.append(endpoints.ports_of(int(job) if job.isdecimal() else 0)[0])
        return () if self._share_machine else tuple(port for port in ports if port)

    def _post_examine(self) -> Batch[Report]:
        """Have the nodes examine themselves, but wait for none; of those that share a machine only the first."""
        chosen, only = self._nodes.alive, self._only
        if self._share_machine:
            # the job of two workers would be late beside all that starts here
            others = ",".join(check.id for check in ALL_CHECKS if check.id != "all-reduce")
            chosen, only = chosen[:1], only or others
        return self._nodes.post(Report, dict.fromkeys(chosen, messages.Examine(only)), _CHECKS_WITHIN)

    def _ask_clocks(self) -> dict[int, Clock]:
        """Ask each node a few times what time it is; return the most certain reading of each clock."""
        clocks: dict[int, Clock] = {}
        for _ in range(_CLOCK_ROUNDS):
            requests = dict.fromkeys(self._nodes.alive, messages.TellTime())
            batch = self._nodes.ask(messages.Time, requests, _QUICK_WITHIN)
            for node, reply in batch.replies.items():
                now = agreement.clock_of(batch.sent_at, reply.seconds, batch.came_at[node])
                clocks[node] = min(clocks.get(node, now), now, key=lambda clock: clock.uncertain)
        return clocks

    def _ask_shared(self) -> dict[int, messages.Shared]:
        """Have node 0 make a file, and the others look for it; return where each node sees the file."""
        if self._share_machine or 0 not in self._nodes.alive:
            return {}
        made = self._ask(messages.Shared, "files", {0: messages.HandleFile("make")}, _QUICK_WITHIN)
        if not made:
            return {}
        look = messages.HandleFile("look", made[0].name_digits)
        seen = self._ask(
            messages.Shared, "files", {node: look for node in self._nodes.alive if node != 0}, _QUICK_WITHIN
        )
        self._ask(messages.Shared, "files", {0: messages.HandleFile("remove")}, _QUICK_WITHIN)
        return made | seen

    def _ask_met(self, facts: Mapping[int, messages.Facts]) -> dict[int, messages.Met]:
        """Have all others look for node 0 under its name; a number is no name that could be wrong."""
        if self._share_machine or 0 not in facts or is_numeric(self._name_of_node_0()):
            return {}
        others = {node: messages.Meet(facts[0].kernel_port) for node in facts if node != 0}
        return self._ask(messages.Met, "names", others, _QUICK_WITHIN)

    def _measure(self, facts: Mapping[int, messages.Facts]) -> network.Ways:
        """Have pairs of nodes measure the ways between them, round by round, then the doubtful ones again."""
        ways: dict[Direction, messages.Way] = {}
        for pairs in rounds_of_halves([node for node in self._nodes.alive if node in facts]):
            self._measure_pairs(pairs, facts, ways)
        for _ in range(_DECIDING_ROUNDS):
            speeds, bad = network.bad_pairs(ways, share_machine=self._share_machine)
            self._measure_pairs(deciding_pairs(speeds, bad), facts, ways)
        return ways

    def _measure_pairs(
        self, pairs: Sequence[Pair], facts: Mapping[int, messages.Facts], ways: dict[Direction, messages.Way]
    ) -> None:
        """Measure all pairs at once in one direction, then in the other; put the better of two measurements into `ways`.

        One direction will do on one machine, where both take the same way.
        """
        seconds = _SEND_SECONDS_HERE if self._share_machine else _SEND_SECONDS
        back = [] if self._share_machine else [(there, here) for here, there in pairs]
        for directions in (pairs, back):
            requests = {}
            for here, there in directions:
                target = facts[there]
                requests[here] = messages.Measure(there, target.addresses, (target.kernel_port, *target.ports), seconds)
            batch = self._nodes.ask(messages.Way, requests, _MEASURE_WITHIN)
            measured = dict(batch.replies)
            for here, why in batch.failures.items():  # as if the port that the kernel chose did not answer
                port = facts[requests[here].node_rank].kernel_port
                measured[here] = messages.Way(blocked=(messages.Blocked(port, why),))
            for here, way in measured.items():
                there = requests[here].node_rank
                ways[here, there] = network.best_of(ways.get((here, there)), way)

    def _remember(self, faulty: Mapping[int, tuple[str, str]], good: Sequence[int]) -> None:
        """Remember which machines are slow or out of reach, and why, for the next jobs; forget those that are `good`."""
        path, now = bad_nodes_file(self._env), time.time()
        in_slurm = self._allocation.starter == "srun"  # then the names are Slurm's, and only jobs of Slurm are warned
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

    def _report(self, replies: _Replies, concerns: Sequence[Concern]) -> NodesReport:
        """Return the report: the checks with their facts, the findings with names of nodes, what each machine says."""
        facts = replies.facts
        with_findings = {one.finding.check for one in concerns}
        facts_of_check = {
            "nodes": f"{len(self._nodes.alive)} of {count(len(self._names), 'node')} answered to the end",
            "versions": ", ".join(sorted({f"torch {one.torch or 'missing'}" for one in facts.values()})),
            "clocks": _of_clocks(replies.clocks),
            "files": ", ".join(sorted({f"script {one.script_digest}" for one in facts.values() if one.script_digest})),
            "names": "",
            "network": network.summary(replies.ways),
        }
        results = [
            CheckResult(
                id=check,
                status="found" if check in with_findings else "passed" if facts else "failed",
                facts=text if facts else "no node answered",
                seconds=round(self._seconds[check], 3),
            )
            for check, text in facts_of_check.items()
        ]
        findings = [replace(one.finding, hosts=tuple(self._names[node] for node in one.nodes)) for one in concerns]
        report = NodesReport(
            ddplaunch=__version__,
            host=count(len(self._names), "node"),
            python=self._spec.program.python or sys.executable,
            seconds=round(time.monotonic() - self._began, 3),
            checks=tuple(results),
            findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
            nodes=tuple(presentable(one, "") for _, one in sorted(replies.examined.items())),
        )
        return presentable(report, self._env.get("HOME", ""))


def _of_clocks(clocks: Mapping[int, Clock]) -> str:
    """Return the facts about the clocks."""
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
