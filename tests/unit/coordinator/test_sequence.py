"""What an agent lets a coordinator begin: its own workers, at its own place, one generation after another."""

from __future__ import annotations

from typing import Any

import pytest

from ddplaunch.control.fields import Malformed
from ddplaunch.control.messages import Begin, Forward, Hello, Kill, NodeFacts, Ping, Seat, Seats, Stop, Watch
from ddplaunch.coordinator.sequence import OrderSequence

FACTS = NodeFacts(ddplaunch="", python="", torch="", script="", nnodes="")
HERE, THERE = Seats(1, 2), Seats(1, 4)


def sequence(place: int | None = 1) -> OrderSequence:
    return OrderSequence(Hello(place, Seat("here", 2), "gloo", "", "there", FACTS))


def begin(**fields: Any) -> Begin:
    found = {
        "generation": 0,
        "place": 1,
        "seats": (THERE, HERE),
        "run_id": "r",
        "address": "there",
        "port": 1,
        "backend": "gloo",
        "backend_reason": "",
        "restarts": 0,
    }
    return Begin(**{**found, **fields})


def test_one_generation_begins_after_the_other() -> None:
    orders = sequence()
    for generation in (0, 1, 7):
        orders.check(begin(generation=generation))
        orders.ended()


def test_an_agent_without_a_rank_takes_any_place_and_one_that_is_too_high_for_the_nodes_that_came_another() -> None:
    sequence(None).check(begin())
    sequence(5).check(begin())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"place": 0}, "place 0 has another number of workers"),
        ({"seats": (Seats(2, 4),)}, "place 1 has another number of workers"),
        ({"seats": (HERE, THERE), "place": 0}, "place 0 for node rank 1"),
    ],
    ids=["place", "number of workers", "node rank"],
)
def test_the_workers_of_others_are_not_begun(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed) as caught:
        sequence().check(begin(**fields))
    assert str(caught.value) == said


def test_nothing_begins_beside_workers_that_run_or_a_second_time() -> None:
    orders = sequence()
    orders.check(begin())
    with pytest.raises(Malformed):
        orders.check(begin(generation=1))
    orders.ended()
    with pytest.raises(Malformed):
        orders.check(begin())


def test_a_front_begins_nothing() -> None:
    with pytest.raises(Malformed):
        OrderSequence(Watch()).check(begin())


def test_what_begins_nothing_may_come_at_any_time() -> None:
    orders = sequence()
    for message in (Stop(15), Kill(), Forward(10), Ping(0.0)):
        orders.check(message)
