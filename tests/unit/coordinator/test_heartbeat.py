"""A heartbeat tells who is alive, and what its clock says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.job.connections import Heartbeat


def test_without_an_answer_the_clocks_are_taken_for_one() -> None:
    assert Heartbeat().offset == 0


@given(ahead=st.floats(3, 1e6) | st.floats(-1e6, -3), there=st.floats(0, 1), back=st.floats(0, 1))
def test_the_offset_is_right_to_half_a_round_trip(ahead: float, there: float, back: float) -> None:
    heartbeat = Heartbeat()
    heartbeat.pong_received(sent=100.0, at=100.0 + there + ahead, now=100.0 + there + back)
    assert heartbeat.offset == pytest.approx(-ahead, abs=heartbeat.error + 1e-6)
    assert heartbeat.error == pytest.approx((there + back) / 2)


@given(sent=st.floats(0, 1e6), there=st.floats(1e-6, 5), back=st.floats(1e-6, 5))
def test_two_agents_on_one_host_have_one_clock(sent: float, there: float, back: float) -> None:
    """However long an answer takes: what happens on simulated nodes is in the order in which it happened."""
    heartbeat = Heartbeat()
    heartbeat.pong_received(sent=sent, at=sent + there, now=sent + there + back)
    assert heartbeat.offset == 0


def test_the_quickest_answer_counts() -> None:
    heartbeat = Heartbeat()
    heartbeat.pong_received(sent=10.0, at=500.9, now=11.0)
    heartbeat.pong_received(sent=20.0, at=510.005, now=20.01)
    heartbeat.pong_received(sent=30.0, at=520.1, now=30.9)
    assert heartbeat.offset == pytest.approx(-490.0)


def test_a_clock_that_drifts_is_followed() -> None:
    heartbeat = Heartbeat()
    heartbeat.pong_received(sent=0.0, at=7.0, now=0.001)
    for second in range(1, 20):
        heartbeat.pong_received(sent=float(second), at=second + 9.0, now=second + 0.002)
    assert heartbeat.offset == pytest.approx(-9.0, abs=0.01)


def test_an_answer_to_a_question_of_the_future_teaches_nothing() -> None:
    heartbeat = Heartbeat()
    heartbeat.pong_received(sent=99.0, at=7.0, now=1.0)
    assert heartbeat.offset == 0
