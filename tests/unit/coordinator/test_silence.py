"""When a side of the control channel that is silent is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddplaunch.reach.silence import SHORTEST_LIMIT, Silence, describe_way

MOST = 10.0


@pytest.mark.parametrize(
    ("agent", "host", "left"),
    [
        (0.0, 0.0, SHORTEST_LIMIT),
        (5.0, 5.5, 1.0),
        (5.5, 5.0, 1.0),
        (SHORTEST_LIMIT, SHORTEST_LIMIT, 0.0),
        (SHORTEST_LIMIT + 1, 0.5, MOST - SHORTEST_LIMIT - 1),  # the agent swaps, its kernel answers
        (2.0, 60.0, SHORTEST_LIMIT - 2.0),  # the whole machine was asleep, which its agent does not count
        (MOST, 0.0, 0.0),
    ],
)
def test_an_agent_whose_host_is_silent_too_is_lost_earlier(agent: float, host: float, left: float) -> None:
    silence = Silence(MOST, SHORTEST_LIMIT)
    assert silence.seconds_left(agent, host) == left


@pytest.mark.parametrize(
    ("pings", "host", "is_lost"), [(4, 5.0, False), (5, 5.98, True), (5, 2.0, False), (3, 60.0, False)]
)
def test_one_that_counts_pings_loses_a_host_when_the_host_loses_it(pings: int, host: float, is_lost: bool) -> None:
    assert (Silence(MOST, 6.0).seconds_left(float(pings), host, beat=1.0) == 0) is is_lost


@pytest.mark.parametrize(
    ("measured", "limit"),
    [
        ([0.9, 1.1, 0.9], SHORTEST_LIMIT),
        ([0.9, 1.9, 2.9], SHORTEST_LIMIT),  # it has not ended
        ([0.9, 1.9, 2.1, 0.2], 7.0),
        ([0.9, 1.9, 2.1, 0.2, 1.9, 0.1], 7.0),
        ([4.9, 0.2], MOST),
    ],
)
def test_a_silence_that_has_ended_raises_the_limit_for_the_next(measured: list[float], limit: float) -> None:
    silence = Silence(MOST, SHORTEST_LIMIT)
    for before, seconds in pairwise([0.0, *measured]):
        silence.observe(before, seconds)
    assert silence.host_limit == limit


def test_a_limit_that_was_set_does_not_adapt() -> None:
    silence = Silence(2.0, 2.0)
    assert silence.seconds_left(1.5, 1.5) == 0.5
    assert silence.seconds_left(2.0, 0.0) == 0.0
    silence.observe(1.9, 0.1)
    assert (silence.host_limit, silence.describe(2.0)) == (2.0, "silent for 2 s")


def test_the_reason_says_the_limit_that_was_reached() -> None:
    silence = Silence(MOST, SHORTEST_LIMIT)
    assert [silence.describe(seconds) for seconds in (6.0, 7.0, 10.0)] == ["silent for 6 s"] * 2 + ["silent for 10 s"]


@pytest.mark.parametrize(
    ("host", "sends_in_vain", "is_deaf"),
    [(1.0, True, True), (1.0, False, False), (9.5, True, False)],
    ids=["it sends, and acknowledges nothing", "its agent is stopped", "nothing comes from it"],
)
def test_a_silent_side_hears_nothing_if_its_kernel_sends_and_acknowledges_nothing(
    host: float, sends_in_vain: bool, is_deaf: bool
) -> None:
    said = describe_way(10.0, host, sends_in_vain=sends_in_vain)
    assert said == (", and hears nothing from here" if is_deaf else "")
