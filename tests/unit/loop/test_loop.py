"""Histories of a loop: what is served, in which order, and when it sleeps."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from math import inf

import pytest

from ddplaunch.system.loop.loop import WRITE
from tests.loops import FakeLoop


@pytest.fixture
def loop():
    loop = FakeLoop()
    yield loop
    loop.close()


@pytest.fixture
def pipe():
    with ExitStack() as opened:

        def make() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                opened.callback(_close, end)
            return ends

        yield make


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


def test_descriptors_are_served_in_the_order_in_which_they_became_ready(loop, pipe):
    pipes, served = [pipe() for _ in range(6)], []
    for number, (reader, _) in enumerate(pipes):
        loop.watch(reader, partial(served.append, number))
    order = [3, 0, 5, 1, 4, 2]
    for number in order:
        os.write(pipes[number][1], b".")
    loop.run_once()
    assert served == order


def test_a_descriptor_that_an_earlier_call_has_closed_is_not_served_nor_another_one_of_its_number(loop, pipe):
    first, second, third = pipe(), pipe(), pipe()
    served = []

    def close_the_others() -> None:
        served.append("first")
        for reader, _ in (second, third):
            loop.unwatch(reader)
            os.close(reader)
        new, _ = pipe()
        assert new in (second[0], third[0])
        loop.watch(new, partial(served.append, "new"))
        loop.unwatch(first[0])

    loop.watch(first[0], close_the_others)
    loop.watch(second[0], partial(served.append, "second"))
    loop.watch(third[0], partial(served.append, "third"))
    for _, writer in (first, second, third):
        os.write(writer, b".")
    loop.run_once()
    loop.serve()
    assert served == ["first"]


def test_what_is_watched_twice_is_served_once_by_the_last_call_for_what_it_says(loop, pipe):
    reader, writer = pipe()
    served = []
    loop.watch(reader, partial(served.append, "first"))
    loop.watch(reader, partial(served.append, "second"))
    loop.watch(writer, partial(served.append, "written"))
    loop.watch(writer, partial(served.append, "written"), WRITE)
    os.write(writer, b".")
    loop.run_once()
    assert sorted(served) == ["second", "written"]
    loop.unwatch(reader)
    loop.unwatch(reader)
    assert not loop.watches(reader)


def test_an_event_is_handled_before_the_next_descriptor_with_those_that_follow_from_it(loop, pipe):
    first, second = pipe(), pipe()
    happened = []

    def post_two() -> None:
        os.read(first[0], 1)
        loop.post("a")
        loop.post("b")

    def handle(event: str) -> None:
        happened.append(event)
        if event == "a":
            loop.post("c")

    loop.watch(first[0], post_two)
    loop.watch(second[0], partial(happened.append, "second"))
    os.write(first[1], b".")
    os.write(second[1], b".")
    loop.handle = handle
    loop.run_once()
    assert happened == ["a", "b", "c", "second"]


def test_a_loop_does_not_sleep_after_an_event_which_may_be_the_last(loop):
    loop.post("the end")
    loop.run_once()
    assert loop.events == ["the end"]
    assert not loop.slept


def test_timers_come_by_their_times_and_after_descriptors(loop, pipe):
    reader, writer = pipe()
    now, happened = loop.now(), []
    loop.timer(now + 0.2, partial(happened.append, "later"))
    loop.timer(now + 0.1, partial(happened.append, "sooner"))
    loop.watch(reader, lambda: happened.append(os.read(reader, 1)))
    loop.pause(0.5)
    os.write(writer, b".")
    loop.run_once()
    assert happened == [b".", "sooner", "later"]
    assert loop.deadline is None


def test_a_timer_can_be_moved_taken_back_and_set_again_by_its_own_call(loop):
    now, happened = loop.now(), []

    def again() -> None:
        happened.append(loop.now() - now)
        if len(happened) < 3:
            timer.set(loop.now() + 1)

    timer = loop.timer(now + 5, again)
    timer.set_by(now + 1)
    timer.set_by(now + 3)
    never = loop.timer(None, partial(happened.append, inf))
    never.set(now + 2)
    never.cancel()
    loop.pass_time(10)
    assert happened == pytest.approx([1, 2, 3])
    assert not timer.is_set


def test_a_timer_that_another_one_has_taken_back_makes_no_call_even_if_both_were_due(loop):
    happened = []
    second = loop.timer(loop.now() + 1, partial(happened.append, "second"))
    loop.timer(loop.now() + 0.5, second.cancel)
    loop.pause(1.0)
    loop.run_once()
    assert not happened


def test_a_loop_without_timers_sleeps_until_something_happens(loop, pipe):
    reader, _ = pipe()
    loop.watch(reader, print)
    with pytest.raises(AssertionError, match="sleep for ever"):
        loop.run_once()


def test_a_loop_wakes_each_second_before_a_timer_and_not_before_one_that_may_rest(loop):
    happened = []
    loop.timer(loop.now() + 30, partial(happened.append, "rested"), may_come_late=True)
    loop.run_once()
    assert (happened, loop.slept) == (["rested"], 1)
    loop.timer(loop.now() + 30, partial(happened.append, "reached"))
    while len(happened) < 2:
        loop.run_once()
    assert loop.slept == 31


def test_a_pause_of_the_process_brings_no_timer_nearer(loop):
    happened = []
    loop.timer(loop.now() + 10, partial(happened.append, "due"))
    loop.run_once()
    loop.pause(3600)
    loop.pass_time(8)
    assert not happened
    loop.pass_time(2)
    assert happened
