"""What nodes have to do without is said once for all of which it holds, and a hostile node fills neither screen nor memory."""

from __future__ import annotations

from ddplaunch.coordinator.warnings import GATHERED, MOST, Warnings
from ddplaunch.supervise.job import Member
from tests.loops import FakeLoop

MEMBERS = [Member(id=id, host=f"node{id}", workers=1, wanted=None, place=id) for id in range(40)]


def bed(nodes: int) -> tuple[FakeLoop, list[str], Warnings]:
    loop = FakeLoop(at=0.0)
    said: list[str] = []
    return loop, said, Warnings(loop, said.append, lambda: nodes)


def test_equal_texts_of_several_nodes_are_one_line_with_the_nodes_in_their_order():
    loop, said, warnings = bed(5)
    for id in (3, 1, 2, 1):
        warnings.add(MEMBERS[id], "no logs are kept: the disk is full")
    warnings.add(MEMBERS[4], "stacks are missing")
    assert said == []
    loop.run_once()
    assert loop.now() == GATHERED
    assert said == [
        "warning: on node[1-3]: no logs are kept: the disk is full",
        "warning: on node4: stacks are missing",
    ]


def test_of_very_many_nodes_some_are_named_and_of_all_nodes_none():
    _, said, warnings = bed(40)
    for member in MEMBERS[:30]:
        warnings.add(member, "x")
    for member in MEMBERS:
        warnings.add(member, "y")
    warnings.flush()
    assert said == ["warning: on node[0-15] and 14 more: x", "warning: on all 40 nodes: y"]


def test_a_node_that_says_ever_new_things_is_heard_so_often_and_no_line_of_it_looks_like_ours():
    _, said, warnings = bed(2)
    for number in range(10 * MOST):
        warnings.add(MEMBERS[1], f"{number}\nerror: lost")
        warnings.flush()
    assert len(said) == MOST
    assert all(not line.startswith("error") for text in said for line in text.split("\n"))
