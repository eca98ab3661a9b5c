"""What an agent lets a coordinator begin: its own workers, as its own, one generation after another."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.node import KillOrdered, StopOrdered
from ddplaunch.launcher.job.messages import Hello, NodeFacts, OrderSequence, Ping, Withdrawal
from ddplaunch.launcher.job.orders import Forward, Generation
from ddplaunch.plan import AgentRun, Agreed
from ddplaunch.system.fields import Malformed

FACTS = NodeFacts(ddplaunch="", python="", torch="", script="", nnodes="")
HELLO = Hello(1, "here", 2, "gloo", "", "there", FACTS)
HERE, THERE = AgentRun(1, 2), AgentRun(1, 4)


def sequence(requested_rank: int | None = 1) -> OrderSequence:
    return OrderSequence(replace(HELLO, requested_rank=requested_rank))


def begin(number: int = 0, **fields: Any) -> Generation:
    found = {
        "run_id": "r",
        "index": 1,
        "agent_runs": (THERE, HERE),
        "address": "there",
        "backend": "gloo",
        "backend_reason": "",
    }
    return Generation(number=number, term=number, restarts=0, port=1, agreed=Agreed(**{**found, **fields}))


def test_one_generation_begins_after_the_other() -> None:
    orders = sequence()
    for generation in (0, 1, 7):
        orders.check(begin(generation))
        orders.on_generation_ended()


def test_an_agent_without_a_rank_takes_any_place_and_one_that_is_too_high_for_the_nodes_that_came_another() -> None:
    sequence(None).check(begin())
    sequence(5).check(begin())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index": 0}, "agent 0 has another number of workers"),
        ({"agent_runs": (AgentRun(2, 4),)}, "agent 1 has another number of workers"),
        ({"agent_runs": (HERE, THERE), "index": 0}, "agent 0 for node rank 1"),
    ],
    ids=["index", "number of workers", "node rank"],
)
def test_the_workers_of_others_are_not_begun(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed) as caught:
        sequence().check(begin(**fields))
    assert str(caught.value) == said


def test_nothing_begins_beside_workers_that_run_or_a_second_time() -> None:
    orders = sequence()
    orders.check(begin())
    with pytest.raises(Malformed):
        orders.check(begin(1))
    orders.on_generation_ended()
    with pytest.raises(Malformed):
        orders.check(begin())


def test_nothing_begins_on_which_nodes_have_not_agreed() -> None:
    with pytest.raises(Malformed, match="without saying which"):
        sequence().check(Generation(number=0, term=0, restarts=0, port=1, ranks_of_draft=(0, 1)))


def test_who_takes_no_part_begins_nothing() -> None:
    with pytest.raises(Malformed):
        OrderSequence(Withdrawal(1, "here", "no GPU", "")).check(begin())


def test_a_node_that_comes_back_begins_no_generation_again_that_it_has_begun() -> None:
    hello = replace(HELLO, last_generation=3)
    with pytest.raises(Malformed, match="generation 3 after 3"):
        OrderSequence(hello).check(begin(3))
    OrderSequence(hello).check(begin(4))


def test_what_begins_nothing_may_come_at_any_time() -> None:
    orders = sequence()
    for message in (StopOrdered(15, 1.0), KillOrdered(1.0), Forward(10), Ping(0.0, 10.0)):
        orders.check(message)
