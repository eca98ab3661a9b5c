"""The network between nodes: which pairs of nodes measure, and what is wrong by their measurements. Pure.

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
Ways = Mapping[Direction, Way]

# A ring all-reduce runs at the pace of its slowest link: with half of what the others have, all nodes communicate half as fast.
_SLOW = 0.5
_SLOWEST = (
    100e6  # bytes a second: less than gigabit Ethernet, over which the gradients of 250M parameters take 10 s a step
)
# Small collectives wait for round trips; the second figure is more than what a busy processor adds to them.
_LATE, _LATER = 3.0, 0.0005  # times the usual, and seconds more
_LATEST = 0.005  # seconds, which light needs for 500 km and back: these nodes are not in one place
_LOSSY = 0.01  # at 1 % TCP falls below 200 MB/s (Mathis et al. 1997: 1448 bytes / 0.1 ms * 1.22 / sqrt(0.01))
EPHEMERAL = "the ports that the kernel chooses"


# --- which nodes measure each other: n log n pairs in rounds, then the doubtful ones once more


# In a round a node is in one pair at most, so that no pair slows another one on the cards of its nodes.


def pair_of(one: int, other: int) -> Pair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def halves(nodes: Sequence[int]) -> list[list[Pair]]:
    """Return the rounds: each node of one half with one of the other half, then the same within each half, and so on.

    Of three nodes all pairs meet: of two pairs alone the usual could not be told from the slow.
    """
    if len(nodes) == 3:
        first, second, third = nodes
        return [[(first, second)], [(second, third)], [(first, third)]]
    rounds: list[list[Pair]] = []
    groups = [list(nodes)]
    while groups := [group for group in groups if len(group) > 1]:
        middles = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        rounds.append([pair_of(*pair) for lower, upper in middles for pair in zip(lower, upper, strict=False)])
        groups = [half for both in middles for half in both]
    return rounds


def doubtful(speeds: Mapping[Pair, float], bad: Collection[Pair]) -> list[Pair]:
    """Return one more round of pairs, which shows whether a node or a link is at fault for the `bad` pairs so far.

    A node without any good pair meets the fastest node that it has not met, or one in doubt as well: if that pair is bad too, the
    node is at fault, else the link was. Two such rounds leave no node with one bad pair alone, where there are nodes to meet.
    Bad pairs whose nodes are free otherwise are measured again, since a moment's load looks the same.
    """
    best: dict[int, float] = {}
    for pair, speed in speeds.items():
        for node in pair if pair not in bad else ():
            best[node] = max(speed, best.get(node, 0.0))
    worst_first = sorted(bad, key=lambda pair: speeds[pair])
    suspects = list(dict.fromkeys(node for pair in worst_first for node in pair if node not in best))
    partners = [*sorted(best, key=lambda node: -best[node]), *suspects]
    busy: set[int] = set()
    chosen: list[Pair] = []
    for suspect in suspects:
        free = (node for node in partners if node not in (*busy, suspect) and pair_of(suspect, node) not in speeds)
        if suspect not in busy and (partner := next(free, None)) is not None:
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
    if before is None or before.address is None or now.address is None:
        return now if before is None or before.address is None else before
    still = {one.port for one in before.blocked}
    return replace(
        now,
        blocked=tuple(one for one in now.blocked if one.port in still),
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
    """Return in which respect a way is slow, "" for a way that is not slow."""
    reasons = []
    if way.speed < max(_SLOW * expected.speed, _SLOWEST):
        reasons.append(f"{_speed(way.speed)}, usual here are {_speed(expected.speed)}")
    if way.latency > min(max(_LATE * expected.latency, expected.latency + _LATER), _LATEST):
        reasons.append(f"{_time(way.latency)} for a round trip, usual here are {_time(expected.latency)}")
    if way.resent is not None and way.resent > _LOSSY:
        reasons.append(f"{way.resent:.1%} of the packets were lost on the way")
    return "; ".join(reasons)


def bad_pairs(ways: Ways, *, is_shared: bool = False) -> tuple[dict[Pair, float], set[Pair]]:
    """Return the speed of each pair, and which are bad; with `is_shared` all nodes are simulated on one machine."""
    expected = usual(ways)
    speeds: dict[Pair, float] = {}
    bad: set[Pair] = set()
    for direction, way in ways.items():
        pair = pair_of(*direction)
        speeds[pair] = min(way.speed, speeds.get(pair, way.speed))
        if way.address is None or not way.speed or (not is_shared and why_slow(way, expected)):
            bad.add(pair)
    return speeds, bad


def judge(names: Sequence[str], facts: Mapping[int, Facts], ways: Ways, *, is_shared: bool) -> Iterator[Concern]:
    """Yield what is wrong with the network; `is_shared`: the nodes share one machine, and its speed says nothing."""
    expected = usual(ways)
    yield from _judge_reach(names, ways)
    reached = {direction: way for direction, way in ways.items() if way.address is not None}
    yield from _judge_ports(names, facts, reached)
    stalled = {direction: "it sends nothing but small packets" for direction, way in reached.items() if not way.speed}
    yield from _attribute(names, stalled, reached, _STALLED)
    moving = {direction: way for direction, way in reached.items() if way.speed}
    slow = {direction: why for direction, way in moving.items() if (why := why_slow(way, expected))}
    yield from _attribute(names, {} if is_shared else slow, moving, _SLOW_WORDS)
    yield from _judge_size(names, moving)


# --- whose fault it is


class _Words(Struct, frozen=True):
    """How a fault is named, by where it lies; {} is the name of the node, or of both."""

    severity: Severity
    everywhere: str
    node: str
    into: str
    out_of: str
    link: str  # {0}, {1}
    hint: str


_UNREACHABLE = _Words(
    "broken",
    "no node reaches any other",
    "no other node reaches {0}, nor does it reach any",
    "no other node reaches {0}, though it reaches others",
    "{0} reaches no other node, though others reach it",
    "{0} does not reach {1}",
    "workers connect to any ports of each other: open all TCP ports between the nodes of a job "
    "(see `iptables -L`, `nft list ruleset`, security groups)",
)
_STALLED = _Words(
    "broken",
    "connections between all nodes stall",
    "connections from and to {0} stall",
    "connections to {0} stall",
    "connections from {0} stall",
    "connections from {0} to {1} stall",
    "packets as large as the interface allows may vanish on the way: give all interfaces and switches the same MTU "
    "(`ip link show`), or try a smaller one (`ip link set dev IFACE mtu 1400`)",
)
_SLOW_WORDS = _Words(
    "slow",
    "the network between all nodes is slow",
    "the network of {0} is slow",
    "all ways to {0} are slow",
    "all ways from {0} are slow",
    "the link from {0} to {1} is slow",
    "a job runs at the pace of its slowest link: see the cable, the speed and the errors of the card there "
    "(`ethtool IFACE`, `ip -s link`), or leave the node out",
)


def _attribute(
    names: Sequence[str], faults: Mapping[Direction, str], measured: Collection[Direction], words: _Words
) -> Iterator[Concern]:
    """Yield a finding for each node whose ways all have the fault, then for one direction of a node, then for links.

    `faults` holds the ways with the fault, and how each shows it. A node is not at fault because of a single other node, unless
    there is no third one.
    """
    nodes = {node for direction in measured for node in direction}

    def concern(title: str, about: Collection[int], directions: Collection[Direction], *, is_link: bool) -> Concern:
        shown = [f"{names[here]} to {names[there]}: {faults[here, there]}" for here, there in sorted(directions)]
        finding = Finding(
            check="network",
            severity=words.severity,
            title=title.format(*(names[node] for node in about)),
            evidence="\n".join(shown[:4] + ([f"and {len(shown) - 4} more ways"] if len(shown) > 4 else [])),
            hint=words.hint,
        )
        return Concern(finding=finding, nodes=tuple(about), is_link=is_link)

    if len(nodes) > 2 and faults and len(faults) == len(measured):
        yield concern(words.everywhere, sorted(nodes), faults, is_link=False)
        return
    left = set(faults)
    for title, own in ((words.node, (0, 1)), (words.into, (1,)), (words.out_of, (0,))):
        guilty: set[int] = set()
        for node in sorted(nodes):
            ways = {way for way in measured if node in [way[index] for index in own]}
            partners = {other for way in ways for other in way if other != node}
            if len(partners) > 1 and ways <= left:
                guilty.add(node)
        for node in sorted(guilty):
            its = {way for way in left if node in [way[index] for index in own]}
            yield concern(title, (node,), its, is_link=False)
        left = {way for way in left if guilty.isdisjoint(way[index] for index in own)}
    for pair in sorted({pair_of(*way) for way in left}):
        both = {way for way in left if pair_of(*way) == pair}
        here, there = min(both)
        yield concern(words.link, (here, there), both, is_link=True)


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
    closed: dict[str, dict[Direction, str]] = {}
    for (here, there), way in reached.items():
        for one in way.blocked:
            kind = EPHEMERAL if there in facts and one.port == facts[there].port else f"port {one.port}"
            closed.setdefault(kind, {})[here, there] = f"port {one.port}: {one.why}"
    for kind, faults in closed.items():
        what = "they are" if kind == EPHEMERAL else "it is"
        words = _Words(
            "broken",
            f"{kind}: {what} closed between all nodes, though other ports are open",
            f"{kind}: {what} closed from and to {{0}}, though other ports are open",
            f"{kind}: {what} closed on {{0}}, though other ports are open",
            f"{kind}: {what} closed to {{0}} on all other nodes, though other ports are open",
            f"{kind}: {what} closed from {{0}} to {{1}}, though other ports are open",
            "gloo, NCCL and rank 0's store listen on ports of `sysctl net.ipv4.ip_local_port_range`: open these between the "
            "nodes of a job"
            if kind == EPHEMERAL
            else "the agents of a job, or rank 0's store, listen there: open the port between the nodes of a job",
        )
        yield from _attribute(names, faults, list(reached), words)


def _judge_size(names: Sequence[str], moving: Ways) -> Iterator[Concern]:
    """Yield nodes whose packets are of another size than those of most."""
    mtus: dict[int, int] = {}
    for (here, _), way in moving.items():
        mtus[here] = max(way.mtu, mtus.get(here, 0))
    if len(counts := Counter(mtus.values())) > 1:
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
