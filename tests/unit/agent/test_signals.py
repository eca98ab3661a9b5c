"""Histories of signals and what they are taken for; no process, no clock."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1

import pytest

from ddplaunch.launcher.node.signals import COPY_WINDOW, SignalDeduplicator, SignalOrigin
from ddplaunch.reach.repeated_stop import REPEAT_WINDOW, SAME_REQUEST, Typed

STOPS = frozenset({SIGINT, SIGTERM, SIGHUP, SIGQUIT})
SOON = REPEAT_WINDOW / 2
FRONT, HOST, PROCESS, COORDINATOR = SignalOrigin

Came = tuple[float, int, SignalOrigin]


def hurries(*history: Came, sent_again: frozenset[int] = frozenset()) -> list[bool | None]:
    """Which of these signals, each with its time and where it came from, would kill as a second one; None: a copy."""
    repeats = SignalDeduplicator(STOPS, sent_again)
    events = [repeats.event_of(signum, at, source) for at, signum, source in history]
    for event, (at, signum, _) in zip(events, history, strict=True):
        assert (event.at, event.signum) == (at, signum)
    return [None if event.is_copy else event.is_request for event in events]


@pytest.mark.parametrize("source", SignalOrigin)
def test_a_stop_signal_that_comes_twice_at_once_is_no_second_one(source):
    assert hurries((1.0, SIGTERM, source), (1.0 + SOON, SIGTERM, source)) == [source is FRONT, False]


def test_what_repeats_the_request_says_which_one_it_is_taken_for():
    repeats = SignalDeduplicator(STOPS)
    came = [(SIGINT, 1.0), (SIGTERM, 4.0), (SIGINT, 4.5)]
    events = [repeats.event_of(signum, at, FRONT) for signum, at in came]
    assert [(event.is_request, event.repeats_request_of) for event in events] == [(True, 0), (False, SIGINT), (True, 0)]


def test_what_a_person_types_again_escalates():
    repeats = SignalDeduplicator(STOPS)
    assert [repeats.event_of(SIGINT, at, FRONT, typed=Typed.YES).is_request for at in (1.0, 1.5)] == [True, True]


def test_what_another_process_has_decided_is_decided_and_still_the_first_request():
    repeats = SignalDeduplicator(STOPS)
    first, plain = (
        repeats.event_of(SIGINT, 1.0, FRONT, is_request=True),
        repeats.event_of(SIGINT, 1.2, FRONT, is_request=False),
    )
    second, other = repeats.event_of(SIGINT, 1.4, FRONT, is_request=True), repeats.event_of(SIGTERM, 1.6, FRONT)
    assert [event.is_request for event in (first, plain, second, other)] == [True, False, True, True]
    assert [event.repeats_request_of for event in (first, plain, second, other)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("signum", "typed", "asks"),
    [
        (SIGTERM, Typed.NO, True),
        (SIGINT, Typed.PERHAPS, True),
        (SIGINT, Typed.YES, False),
        (SIGQUIT, Typed.NO, False),
        (SIGUSR1, Typed.NO, False),
    ],
)
def test_the_first_request_of_a_program_says_so_and_no_other_one_does(signum, typed, asks):
    repeats = SignalDeduplicator(STOPS)
    first, second = repeats.event_of(signum, 1.0, FRONT, typed=typed), repeats.event_of(signum, 9.0, FRONT, typed=typed)
    assert (first.is_first_by_program, second.is_first_by_program) == (asks, False)


@pytest.mark.parametrize(
    ("typed", "is_request", "is_typed"),
    [(Typed.YES, None, True), (Typed.PERHAPS, None, True), (Typed.NO, None, False), (Typed.NO, True, True)],
    ids=["at the terminal", "at a terminal", "by a program", "as another process of ddplaunch has escalates"],
)
def test_a_signal_that_a_person_may_have_typed_says_so(typed, is_request, is_typed):
    assert (
        SignalDeduplicator(STOPS).event_of(SIGINT, 1.0, FRONT, typed=typed, is_request=is_request).is_typed is is_typed
    )


def test_what_comes_to_the_process_itself_is_no_hurry_whenever_it_comes():
    assert hurries((1.0, SIGINT, FRONT), (9.0, SIGINT, PROCESS)) == [True, False]


def test_what_came_to_both_processes_is_one_signal_even_if_the_front_is_slow_to_pass_it_on():
    late = 1.0 + COPY_WINDOW / 2
    assert hurries((1.0, SIGTERM, PROCESS), (late, SIGTERM, FRONT)) == [False, None]
    again = (late + SAME_REQUEST, SIGTERM, FRONT)
    assert hurries((1.0, SIGTERM, PROCESS), (late, SIGTERM, FRONT), again) == [False, None, True]
    assert hurries((1.0, SIGTERM, PROCESS), (1.0 + COPY_WINDOW, SIGTERM, FRONT)) == [False, False]
    assert hurries((1.0, SIGQUIT, PROCESS), (late, SIGTERM, FRONT), (late + 1, SIGQUIT, FRONT)) == [False, False, True]


def test_a_second_one_to_both_processes_is_a_second_one():
    first = ((1.0, SIGTERM, FRONT), (1.001, SIGTERM, PROCESS))
    second = ((7.5, SIGTERM, FRONT), (7.501, SIGTERM, PROCESS))
    assert hurries(*first, *second) == [True, None, True, None]


@pytest.mark.parametrize("first", SignalOrigin)
def test_what_comes_to_all_processes_of_a_job_at_once_is_one_signal_in_any_order(first):
    others = [(1.0 + SOON, SIGUSR1, source) for source in SignalOrigin if source is not first]
    assert hurries((1.0, SIGUSR1, first), *others) == [first is FRONT, None, None, None]


def test_what_the_front_passes_on_without_haste_is_one_signal_with_what_comes_to_this_host_itself_and_no_copy_of_haste():
    repeats = SignalDeduplicator(STOPS)
    passed_on, own = (
        repeats.event_of(SIGTERM, 1.0, FRONT, is_request=False),
        repeats.event_of(SIGTERM, 1.0 + SOON, HOST),
    )
    assert (passed_on.is_copy, passed_on.is_request, own.is_copy) == (False, False, True)
    second = repeats.event_of(SIGTERM, 1.0 + 2 * REPEAT_WINDOW, FRONT, is_request=True)
    assert (second.is_copy, second.is_request) == (False, True)


@pytest.mark.parametrize("source", SignalOrigin)
def test_a_notice_that_is_sent_again_is_another_one_however_soon(source):
    assert None not in hurries(*[(1.0 + number * SOON, SIGUSR1, source) for number in range(3)])


@pytest.mark.parametrize("sent_again", [frozenset(), frozenset({SIGTERM})], ids=["anywhere", "in a Slurm job"])
def test_a_closed_terminal_that_is_told_of_twice_is_no_hurry(sent_again):
    history = ((1.0, SIGHUP, FRONT), (2.0, SIGHUP, FRONT))
    assert hurries(*history, sent_again=sent_again) == [False, False]


def test_what_a_scheduler_sends_again_is_no_hurry_and_sigquit_still_is():
    history = ((1.0, SIGTERM, FRONT), (9.0, SIGTERM, FRONT), (9.5, SIGINT, FRONT), (9.9, SIGQUIT, FRONT))
    assert hurries(*history) == [True, True, True, True]
    assert hurries(*history, sent_again=frozenset({SIGTERM})) == [False, False, False, True]
