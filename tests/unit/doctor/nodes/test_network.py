"""Which node, or which link, is at fault, from what pairs of nodes have measured."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddplaunch.tools.doctor.nodes import Concern
from ddplaunch.tools.doctor.nodes.messages import Blocked, Facts, Way
from ddplaunch.tools.doctor.nodes.network import bad_pairs, best_of, deciding_pairs, judge, rounds_of_halves, summary

FINE = Way(address="10.0.0.1", latency=0.0001, speed=1e9, mtu=1500)
SLOW = Way(address="10.0.0.1", latency=0.0001, speed=2e8, mtu=1500)
LATE = Way(address="10.0.0.1", latency=0.02, speed=1e9, mtu=1500)
LOSSY = Way(address="10.0.0.1", latency=0.0001, speed=9e8, resent=0.05, mtu=1500)
STALLED = Way(address="10.0.0.1", latency=0.0001, speed=0.0, mtu=9000)
CUT = Way(blocked=(Blocked(40000, "no answer in 2.5 s"),))

World = Callable[[int, int], Way]  # from a node to another


def examine(n: int, world: World, *, share_machine: bool = False) -> list[Concern]:
    """Examine a network as the doctor does."""
    ways: dict[tuple[int, int], Way] = {}

    def measure(pairs) -> None:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs), "a node is in two pairs of a round"
        for a, b in pairs:
            for way in ((a, b), (b, a)):
                ways[way] = best_of(ways.get(way), world(*way))

    for pairs in rounds_of_halves(range(n)):
        measure(pairs)
    for _ in range(2):
        measure(deciding_pairs(*bad_pairs(ways, share_machine=share_machine)))
    names = [f"gpu{node}" for node in range(n)]
    facts = {node: facts_of(node) for node in range(n)}
    return list(judge(names, facts, ways, share_machine=share_machine))


def facts_of(node: int) -> Facts:
    return Facts(
        host=f"gpu{node}", addresses=(), kernel_port=40000, ports=(23456,), python="3.13", torch="2.13", nccl=True
    )


def titles(n: int, world: World) -> list[str]:
    return [one.finding.title for one in examine(n, world)]


@pytest.mark.parametrize("n", [2, 3, 5, 64, 100])
def test_there_are_about_n_log_n_pairs_each_once_and_every_node_is_in_one(n):
    rounds = rounds_of_halves(range(n))
    pairs = [pair for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs))
    assert {node for pair in pairs for node in pair} == set(range(n))
    assert len(rounds) == (3 if n == 3 else (n - 1).bit_length())
    assert len(rounds[0]) == n // 2


@pytest.mark.parametrize("bad", [SLOW, LATE, LOSSY, CUT, STALLED], ids=["slow", "late", "lossy", "cut", "stalled"])
def test_one_bad_node_is_named_and_no_other(bad):
    for n in (3, 4, 5, 6, 9):
        for node in range(n):
            concerns = examine(n, lambda a, b, node=node: bad if node in (a, b) else FINE)
            (found,) = [one for one in concerns if one.finding.severity != "note"]
            assert (found.nodes, found.blames_link) == ((node,), False)
            assert f"gpu{node}" in found.finding.title
            assert found.finding.severity == ("slow" if bad.speed else "broken")


@pytest.mark.parametrize("bad", [SLOW, LATE, LOSSY, CUT], ids=["slow", "late", "lossy", "cut"])
def test_one_bad_link_that_was_measured_is_named_as_a_link(bad):
    for n in (3, 4, 5, 6, 9):
        for pairs in rounds_of_halves(range(n)):
            for pair in pairs:
                (found,) = examine(n, lambda a, b, pair=pair: bad if {a, b} == set(pair) else FINE)
                assert found.blames_link
                assert set(found.nodes) == set(pair)


@settings(max_examples=40)
@given(st.integers(5, 70), st.data())
def test_several_bad_nodes_are_all_named(n, data):
    most = max(1, n // 5)
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=most))
    found = examine(n, lambda a, b: CUT if bad & {a, b} else FINE)
    assert {node for one in found for node in one.nodes if not one.blames_link} == bad


@settings(max_examples=40)
@given(st.integers(2, 40), st.randoms(use_true_random=False))
def test_figures_that_vary_as_they_do_on_a_healthy_network_are_no_finding(n, random):
    def world(_a: int, _b: int) -> Way:
        return Way(address="x", latency=random.uniform(0.0001, 0.00025), speed=random.uniform(0.8e9, 1.2e9), mtu=1500)

    assert examine(n, world) == []


def test_a_firewall_on_one_node_is_named_with_its_direction():
    assert titles(6, lambda a, b: CUT if b == 4 else FINE) == ["no other node reaches gpu4, though it reaches others"]
    assert titles(6, lambda a, b: CUT if a == 4 else FINE) == ["gpu4 reaches no other node, though others reach it"]
    assert titles(6, lambda a, b: CUT if (a, b) == (4, 5) else FINE) == ["gpu4 does not reach gpu5"]


def test_of_two_nodes_neither_is_at_fault():
    (one,) = examine(2, lambda a, b: CUT)
    assert (one.blames_link, one.nodes) == (True, (0, 1))


def test_where_all_is_bad_there_is_one_finding():
    assert titles(8, lambda a, b: CUT) == ["no node reaches any other"]
    assert titles(8, lambda a, b: Way(address="x", latency=0.0001, speed=9e6)) == [
        "the network between all nodes is slow"
    ]


def test_a_closed_port_beside_an_open_one_is_named_by_what_listens_there():
    def world(_a: int, b: int) -> Way:
        blocked = (Blocked(40000, "no answer in 2.5 s"),) if b == 2 else ()
        return Way(address="x", latency=0.0001, speed=1e9, blocked=(*blocked, Blocked(23456, "connection refused")))

    one, other = examine(4, world)
    assert one.finding.title == (
        "the ports that the kernel chooses: they are closed on gpu2, though other ports are open"
    )
    assert "port 40000: no answer in 2.5 s" in one.finding.evidence
    assert other.finding.title == "port 23456: it is closed between all nodes, though other ports are open"


def test_the_speed_of_simulated_nodes_is_not_judged_but_what_they_reach():
    assert examine(4, lambda a, b: SLOW if 3 in (a, b) else FINE, share_machine=True) == []
    assert len(examine(4, lambda a, b: CUT if 3 in (a, b) else FINE, share_machine=True)) == 1


def test_unequal_interfaces_are_a_note():
    def world(a: int, b: int) -> Way:
        small = b == 2  # a way with a smaller size on it says nothing of the interface
        return Way(address="x", latency=0.0001, speed=1e9, mtu=9000 if a == 1 and not small else 1500)

    (unequal,) = (one.finding for one in examine(4, world))
    assert (unequal.severity, unequal.evidence) == ("note", "1500 bytes; but gpu1: 9000")


def test_a_second_measurement_keeps_the_better_of_each_figure():
    once = Way(address="x", latency=0.001, speed=1e9, blocked=(Blocked(1, "a"), Blocked(2, "b")), resent=0.1)
    twice = Way(address="x", latency=0.0001, speed=1e8, blocked=(Blocked(2, "b"), Blocked(3, "c")), resent=0.02)
    best = best_of(once, twice)
    assert (best.latency, best.speed, best.resent, [one.port for one in best.blocked]) == (0.0001, 1e9, 0.02, [2])
    assert best_of(once, CUT) is once
    assert best_of(CUT, once) is once


def test_a_measurement_that_cannot_tell_whether_packets_are_lost_does_not_hide_that_they_are():
    assert best_of(LOSSY, FINE).resent == best_of(FINE, LOSSY).resent == LOSSY.resent


def test_the_usual_figures_stand_in_a_line():
    assert summary({(0, 1): FINE, (1, 0): FINE}) == "953.7 MiB/s and 0.1 ms for a round trip, in 1 pair"
    assert summary({(0, 1): CUT}) == ""
