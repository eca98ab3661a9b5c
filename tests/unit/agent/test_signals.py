"""Histories of signals and what they are taken for; no process, no clock."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM

import pytest

from ddplaunch.agent.signals import COPY_WINDOW, REPEAT_WINDOW, SignalDeduplicator

STOPS = frozenset({SIGINT, SIGTERM, SIGHUP})
SOON = REPEAT_WINDOW / 2

Came = tuple[float, int, str]


def hurries(*history: Came, sent_again: frozenset[int] = frozenset()) -> list[bool]:
    """Which of these signals, each with its time and the way it came, would kill as a second one."""
    repeats = SignalDeduplicator(STOPS, sent_again)
    events = [repeats.take(signum, at, direct=way == "direct") for at, signum, way in history]
    assert [(event.at, event.signum) for event in events] == [(at, signum) for at, signum, _ in history]
    return [event.escalates for event in events]


@pytest.mark.parametrize("first", ["front", "direct"])
@pytest.mark.parametrize("second", ["front", "direct"])
def test_a_stop_signal_that_comes_twice_at_once_is_no_second_one(first, second):
    assert hurries((1.0, SIGTERM, first), (1.0 + SOON, SIGTERM, second)) == [first == "front", False]


def test_a_later_one_is_a_second_one():
    assert hurries((1.0, SIGINT, "front"), (1.0 + REPEAT_WINDOW + SOON, SIGINT, "front")) == [True, True]


def test_who_sends_without_a_pause_is_not_taken_for_an_echo_for_ever():
    many = [(1.0 + tenth * REPEAT_WINDOW / 10, SIGTERM, "front") for tenth in range(25)]
    assert sum(hurries(*many)) == 3


def test_another_stop_signal_is_no_echo():
    assert hurries((1.0, SIGINT, "front"), (1.0 + SOON, SIGTERM, "front")) == [True, True]


def test_what_comes_to_the_process_itself_is_no_hurry_whenever_it_comes():
    assert hurries((1.0, SIGINT, "front"), (9.0, SIGINT, "direct")) == [True, False]


def test_what_came_to_both_processes_is_one_signal_even_if_the_front_is_slow_to_pass_it_on():
    late = 1.0 + COPY_WINDOW / 2
    assert hurries((1.0, SIGTERM, "direct"), (late, SIGTERM, "front")) == [False, False]
    again = (late + 2 * REPEAT_WINDOW, SIGTERM, "front")
    assert hurries((1.0, SIGTERM, "direct"), (late, SIGTERM, "front"), again) == [False, False, True]
    assert hurries((1.0, SIGTERM, "direct"), (1.0 + COPY_WINDOW, SIGTERM, "front")) == [False, True]
    assert hurries((1.0, SIGINT, "direct"), (late, SIGTERM, "front")) == [False, True]


def test_a_second_one_to_both_processes_is_a_second_one():
    first = ((1.0, SIGTERM, "front"), (1.001, SIGTERM, "direct"))
    assert hurries(*first, (1.1, SIGTERM, "front"), (1.101, SIGTERM, "direct")) == [True, False, True, False]


@pytest.mark.parametrize("sent_again", [frozenset(), frozenset({SIGTERM})], ids=["anywhere", "in a Slurm job"])
def test_a_closed_terminal_that_is_told_of_twice_is_no_hurry(sent_again):
    history = ((1.0, SIGHUP, "front"), (2.0, SIGHUP, "front"))
    assert hurries(*history, sent_again=sent_again) == [False, False]


def test_what_a_scheduler_sends_again_is_no_hurry_and_ctrl_c_still_is():
    history = ((1.0, SIGTERM, "front"), (9.0, SIGTERM, "front"), (9.5, SIGINT, "front"))
    assert hurries(*history) == [True, True, True]
    assert hurries(*history, sent_again=frozenset({SIGTERM})) == [False, False, True]
