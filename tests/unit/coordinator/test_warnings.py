"""What nodes have to do without is said once for all of which it holds, and a hostile node fills neither screen nor memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddplaunch.launcher.decide.job import Member
from ddplaunch.launcher.job.orders import Warned
from ddplaunch.launcher.job.warnings import GATHERED_FOR, MOST_TEXTS, Warnings
from tests.loops import FakeLoop

MEMBERS = [Member(id=id, host=f"node{id}", workers=1, requested_rank=None, node_rank=id) for id in range(40)]


def bed_of(members: list[Member]) -> tuple[FakeLoop, list[str], Warnings]:
    """Return the clock, the lines that are printed, and the warnings of a job with these members."""
    loop = FakeLoop(at=0.0)
    said: list[str] = []
    coordinator: Any = SimpleNamespace(members={member.id: member for member in members}, print=said.append)
    return loop, said, Warnings(loop, coordinator)


def bed(nodes: int) -> tuple[FakeLoop, list[str], Warnings]:
    return bed_of(MEMBERS[:nodes])


def test_equal_texts_of_several_nodes_are_one_line_with_the_nodes_in_their_order():
    loop, said, warnings = bed(5)
    for id in (3, 1, 2, 1):
        warnings.add(MEMBERS[id], Warned("no logs are kept: the disk is full"))
    warnings.add(MEMBERS[4], Warned("stacks are missing"))
    assert said == []
    loop.run_once()
    assert loop.now() == GATHERED_FOR
    assert said == [
        "warning: on node[1-3]: no logs are kept: the disk is full",
        "warning: on node4: stacks are missing",
    ]


def test_of_very_many_nodes_some_are_named_and_of_all_nodes_none():
    _, said, warnings = bed(40)
    for member in MEMBERS[:30]:
        warnings.add(member, Warned("x"))
    for member in MEMBERS:
        warnings.add(member, Warned("y"))
    warnings.flush()
    assert said == ["warning: on node[0-15] and 14 more: x", "warning: on all 40 nodes: y"]


def test_several_agents_on_a_host_are_one_node_and_what_is_no_warning_is_none():
    members = [Member(id=id, host=f"node{id // 2}", workers=1, requested_rank=None, node_rank=id) for id in range(4)]
    _, said, warnings = bed_of(members)
    for member in members:
        warnings.add(member, Warned("nothing is kept warm", is_warning=False))
    warnings.add(members[2], Warned("x"))
    warnings.flush()
    assert said == ["on all 2 nodes: nothing is kept warm", "warning: on node1: x"]


def test_a_node_that_says_ever_new_things_is_heard_so_often_and_no_line_of_it_looks_like_ours():
    _, said, warnings = bed(2)
    for number in range(10 * MOST_TEXTS):
        warnings.add(MEMBERS[1], Warned(f"{number}\nerror: lost"))
        warnings.flush()
    assert len(said) == MOST_TEXTS
    assert all(not line.startswith("error") for text in said for line in text.split("\n"))
