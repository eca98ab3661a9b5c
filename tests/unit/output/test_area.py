"""The status area on a terminal: whatever is written and drawn, the lines stand above it, whole and in their order."""

import re
from os import terminal_size

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplaunch.launcher.output.area import StatusArea, cut, render
from ddplaunch.launcher.output.bars import PROMPT_ROW, Bar
from tests.emulator import Emulator

SIZE = terminal_size((80, 24))


def drawn(*texts: str) -> tuple[Bar, ...]:
    return tuple(Bar((rank,), text) for rank, text in enumerate(texts))


def rows(bars: tuple[Bar, ...], size: terminal_size = SIZE) -> list[str]:
    return [row.decode() for row in render(bars, size)]


# --- the rows


def test_the_slowest_and_the_fastest_are_named_and_the_columns_are_even() -> None:
    assert rows(drawn("train: 10%", "train: 50%", "train: 11%", "train: 60%", "train: 99%")) == [
        "[0,2] train: 10% slowest",
        "[1,3] train: 60% between",
        "[4]   train: 99% fastest",
    ]
    assert rows(drawn("train: 10%", "train: 10%")) == ["[0-1] train: 10%"]
    assert rows(()) == []


def test_many_ranks_are_counted() -> None:
    assert rows((Bar(tuple(range(0, 64, 2)), "5%"),)) == ["[32 ranks] 5%"]


@pytest.mark.parametrize(("lines", "most"), [(2, 0), (3, 1), (10, 3), (24, 8)])
def test_it_never_takes_more_than_a_third_of_the_screen_and_keeps_the_slowest(lines: int, most: int) -> None:
    bars = drawn(*(f"{chr(97 + kind)}: {percent}%" for kind in range(4) for percent in (5, 50, 95)))
    shown = rows(bars, terminal_size((80, lines)))
    assert len(shown) == most
    assert sum("5%" in row for row in shown) >= min(4, most)


@given(
    st.lists(st.text(st.characters() | st.sampled_from("訓練█\x1b[m31;\t%/1"), max_size=120), max_size=9),
    st.integers(2, 140),
)
@example(["0000000000\u094d\u094d"], 15)  # marks that take no cell
def test_no_row_is_as_wide_as_the_screen_and_none_moves_the_cursor(texts: list[str], columns: int) -> None:
    for row in rows(drawn(*texts), terminal_size((columns, 24))):
        emulator = Emulator(columns=columns)
        emulator.feed(row)
        assert len(emulator.shown) == 1
        assert not re.search(r"[\x00-\x1a\x7f-\x9f]", row)


@pytest.mark.parametrize(
    ("text", "cells", "left"),
    [
        ("abcdef", 4, "abcd"),
        ("訓練中", 5, "訓練"),
        ("\x1b[31mred and long\x1b[0m", 3, "\x1b[31mred\x1b[0m\x1b[m"),
        ("e\u0301te\u0301", 3, "e\u0301te\u0301"),
        ("a\x1b[2Kb\x1b]8;;http://x\x1b\\c\x07\x1b[?25ld\u202ee", 9, "abcde"),
        ("a\tb", 9, "a b"),
    ],
    ids=["cut", "wide", "colour", "combining", "sequences", "tab"],
)
def test_a_row_is_cut_by_what_it_takes_on_the_screen(text: str, cells: int, left: str) -> None:
    assert cut(text, cells) == left


def test_a_bar_gives_way_to_its_name_and_a_line_that_has_not_ended_shows_its_end() -> None:
    long = drawn(f"a: 10%|{'#' * 50}", f"a: 90%|{'#' * 50}")
    assert rows((*long, Bar((2,), "one, two, three? ", PROMPT_ROW)), terminal_size((30, 24))) == [
        f"[0] a: 10%|{'#' * 10} slowest",
        f"[1] a: 90%|{'#' * 10} fastest",
        "[2] one, two, three? ",
    ]
    assert rows((Bar((2,), "one, two, three? ", PROMPT_ROW),), terminal_size((12, 24))) == ["[2] three? "]


def test_of_lines_that_have_not_ended_equal_ones_are_one_and_none_is_the_slowest() -> None:
    numbers = [Bar((rank,), "1 2 3 "[: 6 - 2 * rank], PROMPT_ROW) for rank in range(2)]
    assert rows(tuple(numbers)) == ["[0-1] 1 2 3 "]
    dots = [Bar((rank,), "." * (rank + 1), PROMPT_ROW) for rank in range(3)]
    assert rows((*dots, Bar((3,), "name? ", PROMPT_ROW), Bar((1,), "5%"))) == ["[1]   5%", "[0-2] .", "[3]   name? "]


# --- on the terminal

EVENTS = st.one_of(
    st.lists(st.sampled_from(["a line", "訓練", "x" * 200, ""]), min_size=1, max_size=40),
    st.lists(st.integers(0, 100), max_size=9).map(
        lambda all_: (
            *drawn(*(f"{chr(97 + one % 5)}: {one}% {'訓#'[one % 2] * one}" for one in all_ if one % 7)),
            *(Bar((one,), f"rank {'abc'[one % 3]}? ", PROMPT_ROW) for one in all_ if one % 7 == 0),
        )
    ),
    st.integers(46, 90),  # columns from here on: a row that wraps takes two rows, and all of them stay on the screen
)


@given(st.lists(EVENTS, max_size=12), st.integers(5, 30), st.booleans())
def test_lines_stand_above_the_area_in_their_order_and_nothing_else_stays(events, lines, rewraps):
    area, screen = StatusArea(rewraps=rewraps), Emulator(lines, 60, rewraps=rewraps)
    alone = Emulator(lines, 60, rewraps=rewraps)
    size = terminal_size((60, lines))
    bars: tuple[Bar, ...] = ()
    for event in events:
        if isinstance(event, int):
            size = terminal_size((event, lines))
            screen.resize(event)
            alone.resize(event)
        elif isinstance(event, tuple):
            bars = event
            area.show_bars(event)
        else:
            written = "".join(line + "\n" for line in event)
            screen.feed(area.write(written.encode(), size).decode())
            alone.feed(written)
        screen.feed(area.draw(size).decode())
    with_area = [*alone.shown, *(row.rstrip() for row in rows(bars, size))]
    assert [row for row in screen.shown if row] == [row for row in with_area if row]
    screen.feed(area.write(b"", size).decode())
    assert screen.shown == alone.shown


def test_the_cursor_stands_behind_a_prompt_and_what_is_typed_there_stays() -> None:
    area, screen = StatusArea(), Emulator()
    area.show_bars((*drawn("1%"), Bar((1,), "name? ", PROMPT_ROW)))
    screen.feed((area.write(b"a line\n", SIZE) + area.draw(SIZE)).decode() + "Bo")
    area.show_bars((*drawn("2%"), Bar((1,), "name? ", PROMPT_ROW)))
    screen.feed(area.draw(SIZE).decode() + "b")
    assert screen.shown == ["a line", "[0] 2%", "[1] name? Bob"]
    screen.feed((area.write(b"another\n", SIZE) + area.draw(SIZE)).decode())
    assert screen.shown == ["a line", "another", "[0] 2%", "[1] name?"]
    area.show_bars(())
    screen.feed((area.write(b"[1] name? Bob it is\n", SIZE) + area.draw(SIZE)).decode())
    assert screen.shown == ["a line", "another", "[1] name? Bob it is"]


@pytest.mark.parametrize("typed", ["Bob\n", "", "^C", "B" * 70])
def test_an_answered_prompt_stays_with_its_answer_and_the_next_line_begins_below(typed: str) -> None:
    area, screen = StatusArea(), Emulator(columns=SIZE.columns)
    area.show_bars((Bar((1,), "name? ", PROMPT_ROW),))
    screen.feed(area.draw(SIZE).decode() + typed)
    before = screen.shown
    screen.feed(area.keep_prompt(SIZE).decode())
    area.show_bars(())
    screen.feed((area.write(b"[1] hello\n", SIZE) + area.draw(SIZE)).decode())
    assert screen.shown == [*before, "[1] hello"]
    assert area.keep_prompt(SIZE) == b""


def test_it_waits_while_a_line_has_not_ended_and_draws_only_what_is_new() -> None:
    area = StatusArea()
    area.show_bars(drawn("1%"))
    assert area.write(b"half a", SIZE) == b"half a"
    assert area.draw(SIZE) == b""
    assert area.write(b" line\n", SIZE) == b" line\n"
    assert area.draw(SIZE) == b"[0] 1%\n"
    assert area.draw(SIZE) == b""


def test_what_is_typed_stays_while_bars_move() -> None:
    area, screen = StatusArea(), Emulator()
    for percent in (1, 50):
        area.show_bars(drawn(f"{percent}%"))
        screen.feed(area.draw(SIZE).decode() + ("typed" if percent == 1 else ""))
    screen.feed(" on")
    assert screen.shown == ["[0] 50%", "typed on"]


@pytest.mark.parametrize("how", ["forgotten", "not ours"])
def test_after_somebody_else_has_written_it_is_drawn_anew_below(how: str) -> None:
    area, screen = StatusArea(), Emulator()
    area.show_bars(drawn("1%"))
    screen.feed(area.draw(SIZE).decode() + "[1]+  Stopped\n$ fg\n")
    if how == "forgotten":
        area.forget()
    else:
        assert area.draw(None) == b""
    screen.feed(area.draw(SIZE).decode())
    assert screen.shown == ["[0] 1%", "[1]+  Stopped", "$ fg", "[0] 1%"]


# --- with the rows of --live


def test_the_rows_of_live_stand_below_the_bars_and_lines_come_above_both() -> None:
    area, screen = StatusArea(), Emulator()
    area.show_bars(drawn("1%"))
    area.show_live(["k7qx  1 min", "all 4: running"])
    screen.feed((area.write(b"a line\n", SIZE) + area.draw(SIZE)).decode())
    assert screen.shown == ["a line", "[0] 1%", "k7qx  1 min", "all 4: running"]
    area.show_live(["k7qx  2 min", "rank 3: quiet", "3 more: running"])
    screen.feed((area.write(b"another\n", SIZE) + area.draw(SIZE)).decode())
    assert screen.shown == ["a line", "another", "[0] 1%", "k7qx  2 min", "rank 3: quiet", "3 more: running"]
    screen.feed(area.write(b"", SIZE).decode())
    assert screen.shown == ["a line", "another"]


def test_a_line_that_has_not_ended_is_no_prompt_beside_the_rows_of_live_since_no_worker_reads_the_keyboard() -> None:
    area, screen = StatusArea(), Emulator()
    area.show_bars((Bar((1,), "name? ", PROMPT_ROW),))
    area.show_live(["k7qx  1 min"])
    screen.feed(area.draw(SIZE).decode())
    assert screen.shown == ["[1] name?", "k7qx  1 min"]


@pytest.mark.parametrize("lines", range(1, 30))
def test_bars_and_the_rows_of_live_leave_a_row_of_the_screen_at_least(lines: int) -> None:
    area = StatusArea()
    area.show_bars(drawn(*(f"{chr(97 + kind)}: 5%" for kind in range(20))))
    area.show_live([f"row {number}" for number in range(20)])
    assert area.draw(terminal_size((80, lines))).count(b"\n") < lines
