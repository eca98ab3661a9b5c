"""Which nodes measure each other, and when: n log n pairs in rounds, then the doubtful ones once more. Pure.

In a round a node is in one pair at most, so that no pair slows another one on the cards of its nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Pair = tuple[int, int]  # node ranks, ascending


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
