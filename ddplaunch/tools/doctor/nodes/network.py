"""The network between nodes, as the doctor sees it: which pairs of nodes measure, and what is wrong by that. Pure.

At fault is a node, one direction of a node, or the link of two nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.system.words import count, duration, size, some
from ddplaunch.tools.doctor import Finding, Severity
from ddplaunch.tools.doctor.nodes import Concern
from ddplaunch.tools.doctor.nodes.messages import Facts, Way

Pair = tuple[int, int]  # node ranks, ascending
Direction = tuple[int, int]  # node ranks: from, to
_FROM, _TO = 0, 1  # where a direction has them
Ways = Mapping[Direction, Way]  # what was measured

# A ring all-reduce runs at the pace of its slowest link: with half of what the others have, all nodes communicate half as fast.
_LEAST_SHARE = 0.5  # of the usual speed
# bytes a second: less than gigabit Ethernet, over which the gradients of 250M parameters take 10 s a step
_LEAST_SPEED = 100e6
# Small collectives wait for round trips; the second figure is more than what a busy processor adds to them.
_LATE_FACTOR, _LATE_BY = 3.0, 0.0005  # times the usual, and seconds more
_MOST_LATENCY = 0.005  # seconds, which light needs for 500 km and back: these nodes are not in one place
_LOSSY_SHARE = 0.01  # at 1 % TCP falls below 200 MB/s (Mathis et al. 1997: 1448 bytes / 0.1 ms * 1.22 / sqrt(0.01))
EPHEMERAL = "the ports that the kernel chooses"


# --- which nodes measure each other: n log n pairs in rounds, then the doubtful ones once more
#
# In a round a node is in one pair at most, so that no pair slows another one on the cards of its nodes.


def pair_of(one: int, other: int) -> Pair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def rounds_of_halves(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return the rounds: each node of one half with one of the other half, then the same within each half, and so on.

    Of three nodes all pairs meet: of two pairs alone the usual could not be told from the slow.
    """
    if len(nodes) == 3:
        first, second, third = nodes
        return [[(first, second)], [(second, third)], [(first, third)]]
    rounds: list[list[Pair]] = []
    groups = [list(nodes)]
    while groups := [group for group in groups if len(group) > 1]:
        split = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        rounds.append([pair_of(*pair) for lower, upper in split for pair in zip(lower, upper, strict=False)])
        groups = [half for both_halves in split for half in both_halves]
    return rounds


def deciding_pairs(speeds: Mapping[Pair, float], bad: Collection[Pair]) -> list[Pair]:
    """Return one more round of pairs to measure, which decides whether a node or a link is at fault for the `bad` pairs so far.

    A node without any good pair meets the fastest node that it has not met, or one in doubt as well: if that pair is bad too, the
    node is at fault, else the link was. Two such rounds leave no node with one bad pair alone, where there are nodes to meet.
    Bad pairs whose nodes are free otherwise are measured again, since a moment's load looks the same.
    """
    best_speed: dict[int, float] = {}  # of the nodes that have a good pair
    for pair, speed in speeds.items():
        if pair not in bad:
            for node in pair:
                best_speed[node] = max(speed, best_speed.get(node, 0.0))
    worst_first = sorted(bad, key=lambda pair: speeds[pair])
    suspects = list(dict.fromkeys(node for pair in worst_first for node in pair if node not in best_speed))
    fastest_first = sorted(best_speed, key=lambda node: -best_speed[node])
    partners = [*fastest_first, *suspects]
    busy: set[int] = set()  # nodes that this round has in a pair
    chosen: list[Pair] = []
    for suspect in suspects:
        if suspect in busy:
            continue
        free_and_not_met = (
            node for node in partners if node not in busy and node != suspect and pair_of(suspect, node) not in speeds
        )
        partner = next(free_and_not_met, None)
        if partner is not None:
            busy |= {suspect, partner}
            chosen.append(pair_of(suspect, partner))
    for pair in worst_first:
        if busy.isdisjoint(pair):
            busy |= set(pair)
            chosen.append(pair)
    return chosen


# --- which ways are slow


class Usual(Struct, frozen=True):
    """What nodes have between each other here; a way that is much worse is at fault."""

    speed: float  # bytes a second
    latency: float  # seconds


def best_of(before: Way | None, now: Way) -> Way:
    """Return what two measurements of a way show: the better of each figure, since a moment's load makes any of them worse."""
    if before is None or before.address is None:  # it was not measured, or not reached
        return now
    if now.address is None:
        return before
    were_blocked = {one.port for one in before.blocked}
    return replace(
        now,
        blocked=tuple(one for one in now.blocked if one.port in were_blocked),
        latency=min(before.latency, now.latency),
        speed=max(before.speed, now.speed),
        resent=min((one.resent for one in (before, now) if one.resent is not None), default=None),
    )


def usual(ways: Ways) -> Usual:
    """Return the median of what each node has on its best way, so that few slow nodes, in many pairs, change nothing."""
    speeds: dict[int, float] = {}
    latencies: dict[int, float] = {}
    for direction, way in ways.items():
        for node in direction if way.speed else ():
            speeds[node] = max(way.speed, speeds.get(node, 0.0))
            latencies[node] = min(way.latency, latencies.get(node, way.latency))
    return Usual(median(speeds.values()), median(latencies.values())) if speeds else Usual(0.0, 0.0)


def why_slow(way: Way, expected: Usual) -> str:
    """Return in which respects a way is slow beside the usual ones here, or anywhere; "" for a way that is not slow."""
    reasons = []
    least_speed = max(_LEAST_SHARE * expected.speed, _LEAST_SPEED)
    tolerated = max(_LATE_FACTOR * expected.latency, expected.latency + _LATE_BY)
    if way.speed < least_speed:
        reasons.append(f"{_speed(way.speed)}, usual here are {_speed(expected.speed)}")
    if way.latency > min(tolerated, _MOST_LATENCY):
        reasons.append(f"{_time(way.latency)} for a round trip, usual here are {_time(expected.latency)}")
    if way.resent is not None and way.resent > _LOSSY_SHARE:
        reasons.append(f"{way.resent:.1%} of the packets were lost on the way")
    return "; ".join(reasons)


def bad_pairs(ways: Ways, *, share_machine: bool = False) -> tuple[dict[Pair, float], set[Pair]]:
    """Return the speed of each pair, the lower of both directions, and which pairs are bad.

    If the nodes `share_machine`, all are simulated on one machine, and none is slow.
    """
    expected = usual(ways)
    speeds: dict[Pair, float] = {}
    bad: set[Pair] = set()
    for direction, way in ways.items():
        pair = pair_of(*direction)
        speeds[pair] = min(way.speed, speeds.get(pair, way.speed))
        is_slow = not share_machine and why_slow(way, expected) != ""
        if way.address is None or not way.speed or is_slow:
            bad.add(pair)
    return speeds, bad


def judge(names: Sequence[str], facts: Mapping[int, Facts], ways: Ways, *, share_machine: bool) -> Iterator[Concern]:
    """Yield what is wrong with the network; if the nodes `share_machine`, its speed says nothing.

    Each fault is looked for where no worse one is: ways that reach nothing, that lose large packets (stall), that are slow.
    """
    expected = usual(ways)
    yield from _judge_reach(names, ways)
    reached = {direction: way for direction, way in ways.items() if way.address is not None}
    yield from _judge_ports(names, facts, reached)
    stalled = {direction: "it sends nothing but small packets" for direction, way in reached.items() if not way.speed}
    yield from _attribute(names, stalled, reached, _STALLED)
    moving = {direction: way for direction, way in reached.items() if way.speed}
    if not share_machine:
        slow = {direction: why for direction, way in moving.items() if (why := why_slow(way, expected))}
        yield from _attribute(names, slow, moving, _SLOW)
    yield from _judge_mtu(names, moving)


# --- whose fault it is


class _Fault(Struct, frozen=True, kw_only=True):
    """The titles of a finding, by where the fault lies; {0} is the name of the node, of a link {0} and {1} are its ends."""

    severity: Severity
    everywhere: str  # on all ways between all nodes
    node: str  # on all ways from and to a node
    to_node: str  # on all ways to a node
    from_node: str  # on all ways from a node
    link: str  # between two nodes
    hint: str


_UNREACHABLE = _Fault(
    severity="broken",
    everywhere="no node reaches any other",
    node="no other node reaches {0}, nor does it reach any",
    to_node="no other node reaches {0}, though it reaches others",
    from_node="{0} reaches no other node, though others reach it",
    link="{0} does not reach {1}",
    hint="workers connect to any ports of each other: open all TCP ports between the nodes of a job "
    "(see `iptables -L`, `nft list ruleset`, security groups)",
)
_STALLED = _Fault(
    severity="broken",
    everywhere="connections between all nodes stall",
    node="connections from and to {0} stall",
    to_node="connections to {0} stall",
    from_node="connections from {0} stall",
    link="connections from {0} to {1} stall",
    hint="packets as large as the interface allows may vanish on the way: give all interfaces and switches the same MTU "
    "(`ip link show`), or try a smaller one (`ip link set dev IFACE mtu 1400`)",
)
_SLOW = _Fault(
    severity="slow",
    everywhere="the network between all nodes is slow",
    node="the network of {0} is slow",
    to_node="all ways to {0} are slow",
    from_node="all ways from {0} are slow",
    link="the link from {0} to {1} is slow",
    hint="a job runs at the pace of its slowest link: see the cable, the speed and the errors of the card there "
    "(`ethtool IFACE`, `ip -s link`), or leave the node out",
)
_MOST_SHOWN = 4  # ways in the evidence


def _attribute(
    names: Sequence[str], faulty: Mapping[Direction, str], measured: Collection[Direction], fault: _Fault
) -> Iterator[Concern]:
    """Yield a finding for each node whose ways all have the fault, then for one direction of a node, then for links.

    `faulty` holds the ways with the fault, and how each shows it. A node is not at fault because of a single other node, unless
    there is no third one.
    """
    nodes = {node for direction in measured for node in direction}

    def concern(title: str, about: Collection[int], directions: Collection[Direction], *, blames_link: bool) -> Concern:
        """Return the finding that these nodes, named in the title, have the fault; its evidence are some of these directions."""
        shown = [f"{names[here]} to {names[there]}: {faulty[here, there]}" for here, there in sorted(directions)]
        more = [f"and {len(shown) - _MOST_SHOWN} more ways"] if len(shown) > _MOST_SHOWN else []
        finding = Finding(
            check="network",
            severity=fault.severity,
            title=title.format(*(names[node] for node in about)),
            evidence="\n".join([*shown[:_MOST_SHOWN], *more]),
            hint=fault.hint,
        )
        return Concern(finding=finding, nodes=tuple(about), blames_link=blames_link)

    are_all_faulty = faulty and len(faulty) == len(measured)
    if are_all_faulty and len(nodes) > 2:
        yield concern(fault.everywhere, sorted(nodes), faulty, blames_link=False)
        return
    unexplained = set(faulty)
    for title, ends in ((fault.node, (_FROM, _TO)), (fault.to_node, (_TO,)), (fault.from_node, (_FROM,))):
        guilty = [node for node in sorted(nodes) if _is_guilty(node, ends, measured, unexplained)]
        for node in guilty:
            yield concern(title, (node,), _ways_of(node, ends, unexplained), blames_link=False)
        for node in guilty:  # afterwards, since a way between two of them tells of both
            unexplained -= _ways_of(node, ends, unexplained)
    for pair in sorted({pair_of(*way) for way in unexplained}):
        both = {way for way in unexplained if pair_of(*way) == pair}
        here, there = min(both)
        yield concern(fault.link, (here, there), both, blames_link=True)


def _ways_of(node: int, ends: Sequence[int], ways: Collection[Direction]) -> set[Direction]:
    """Return the ways that have the node at one of these ends: `_FROM`, `_TO`."""
    return {way for way in ways if any(way[end] == node for end in ends)}


def _is_guilty(
    node: int, ends: Sequence[int], measured: Collection[Direction], unexplained: Collection[Direction]
) -> bool:
    """Return whether all ways with the node at these ends have the fault, and lead to more than one other node."""
    ways = _ways_of(node, ends, measured)
    partners = {other for way in ways for other in way if other != node}
    return len(partners) > 1 and all(way in unexplained for way in ways)


def _judge_reach(names: Sequence[str], ways: Ways) -> Iterator[Concern]:
    """Yield which nodes do not reach which other nodes at all."""
    faults = {
        direction: ", ".join(dict.fromkeys(one.why for one in way.blocked)) or "no address of it is known"
        for direction, way in ways.items()
        if way.address is None
    }
    yield from _attribute(names, faults, ways, _UNREACHABLE)


def _judge_ports(names: Sequence[str], facts: Mapping[int, Facts], reached: Ways) -> Iterator[Concern]:
    """Yield findings about ports that are closed to a node which reaches other ports of the same node."""
    closed: dict[str, dict[Direction, str]] = {}  # by what the port is called: the ways on which it is closed, and why
    for (here, there), way in reached.items():
        for one in way.blocked:
            is_ephemeral = there in facts and one.port == facts[there].kernel_port
            called = EPHEMERAL if is_ephemeral else f"port {one.port}"
            closed.setdefault(called, {})[here, there] = f"port {one.port}: {one.why}"
    for called, faulty in closed.items():
        yield from _attribute(names, faulty, list(reached), _closed(called))


def _closed(called: str) -> _Fault:
    """Return the fault that a port, or the ports that the kernel chooses, are closed."""
    if called == EPHEMERAL:
        subject = f"{called}: they are"
        hint = (
            "gloo, NCCL and rank 0's store listen on ports of `sysctl net.ipv4.ip_local_port_range`: open these between the "
            "nodes of a job"
        )
    else:
        subject = f"{called}: it is"
        hint = "the agents of a job, or rank 0's store, listen there: open the port between the nodes of a job"
    return _Fault(
        severity="broken",
        everywhere=f"{subject} closed between all nodes, though other ports are open",
        node=f"{subject} closed from and to {{0}}, though other ports are open",
        to_node=f"{subject} closed on {{0}}, though other ports are open",
        from_node=f"{subject} closed to {{0}} on all other nodes, though other ports are open",
        link=f"{subject} closed from {{0}} to {{1}}, though other ports are open",
        hint=hint,
    )


def _judge_mtu(names: Sequence[str], moving: Ways) -> Iterator[Concern]:
    """Yield nodes whose packets are of another size than those of most."""
    mtus: dict[int, int] = {}
    for (here, _), way in moving.items():
        mtus[here] = max(way.mtu, mtus.get(here, 0))  # a way may have less than the interface of its node
    counts = Counter(mtus.values())
    if len(counts) > 1:
        common = counts.most_common(1)[0][0]
        others = {node: mtu for node, mtu in mtus.items() if mtu != common}
        finding = Finding(
            check="network",
            severity="note",
            title="the interfaces of the nodes take packets of different sizes",
            evidence=f"{common} bytes; but " + some(f"{names[node]}: {mtu}" for node, mtu in sorted(others.items())),
            hint="`ip link set dev IFACE mtu N` sets the MTU of an interface",
        )
        yield Concern(finding=finding, nodes=tuple(sorted(others)))


def summary(ways: Ways) -> str:
    """Return the usual figures in a line; "" if nothing was measured."""
    expected = usual(ways)
    if not expected.speed:
        return ""
    pairs = len({pair_of(*direction) for direction in ways})
    return f"{_speed(expected.speed)} and {_time(expected.latency)} for a round trip, in {count(pairs, 'pair')}"


def _speed(bytes_per_second: float) -> str:
    return f"{size(round(bytes_per_second))}/s"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds > 0.0095 else f"{seconds * 1000:.2g} ms"
