"""Prefixes: text, width, template, colours."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.output.display import Display
from ddplaunch.system.console.streams import (
    BOTH,
    RESET,
    STYLES,
    Prefix,
    Screen,
    ShownWorker,
    Stream,
    knows_links,
    moves_cursor,
    rewraps_lines,
    use_colour,
)
from tests.unit.builders import shown_workers

OUT, ERR = Stream.OUT, Stream.ERR


def shown(display: Display, rank: int, data: bytes = b"a\n", stream: Stream = OUT) -> bytes:
    return b"".join(chunk for _, chunk in display.feed(rank, stream, data, 0.0))


def workers(count: int, first: int = 0) -> list[ShownWorker]:
    return shown_workers(*range(first, first + count), role="trainer", host="gpu02")


def test_texts_begin_in_one_column_and_the_bracket_stays_closed() -> None:
    display = Display(mode="prefix", ranks=workers(12))
    assert shown(display, 3) == b"[3]  a\n"
    assert shown(display, 11) == b"[11] a\n"


def test_the_column_is_that_of_the_whole_job_on_every_node() -> None:
    assert shown(Display(mode="prefix", ranks=workers(4), world_size=12), 3) == b"[3]  a\n"


def test_a_template_replaces_the_prefix_as_in_torchrun() -> None:
    template = "${role_name}/${hostname}/$rank/${local_rank}/${other}:"
    display = Display(mode="prefix", ranks=workers(4, first=8), template=template, world_size=12)
    assert shown(display, 9) == b"trainer/gpu02/9/1/${other}:a\n"


def test_a_template_names_all_ranks_of_a_line() -> None:
    display = Display(mode="collapse", ranks=workers(2), template="<${rank}>")
    assert shown(display, 0) == b""
    assert shown(display, 1) == b"<0-1>a\n"


def test_an_empty_template_is_none_and_one_that_is_not_utf8_passes() -> None:
    assert shown(Display(mode="prefix", ranks=workers(2), template=""), 0) == b"[0] a\n"
    assert shown(Display(mode="prefix", ranks=workers(2), template="\udcff "), 0) == b"\xff a\n"


def test_the_rank_that_torch_puts_before_a_traceback_is_not_doubled() -> None:
    lines = b"[rank1]: Traceback\n[rank1]:   File\nsaid [rank1]: so\n[rank0]: Error\n"
    plain = b"[1] Traceback\n[1]   File\n[1] said [rank1]: so\n[1] [rank0]: Error\n"
    assert shown(Display(mode="prefix", ranks=workers(2)), 1, lines, ERR) == plain
    assert shown(Display(mode="raw", ranks=workers(2)), 1, lines, ERR) == lines
    assert shown(Display(mode="prefix", ranks=workers(2), template="$rank:"), 1, b"[rank1]: a\n") == b"1:[rank1]: a\n"
    display = Display(mode="collapse", ranks=workers(2))
    display.feed(0, ERR, b"[rank0]: Error\n", 0.0)
    assert shown(display, 1, b"[rank1]: Error\n", ERR) == b"[0-1] Error\n"


class Clock:
    def time_of_day(self, at: float) -> bytes:
        return b"at %d " % at


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    [
        ("prefix", 2, b"at 5 [0] a\nat 5 [0] b\n"),
        ("prefix", 1, b"at 5 [0] a\nat 5 [0] b\n"),
        ("rank0", 2, b"at 5 a\nat 5 b\n"),
        ("collapse", 1, b"at 5 [0] a\nat 5 [0] b\n"),
    ],
)
def test_the_time_stands_before_each_line(mode: str, ranks: int, expected: bytes) -> None:
    display = Display(mode=mode, ranks=workers(ranks), wall_clock=Clock())
    assert b"".join(chunk for _, chunk in display.feed(0, OUT, b"a\nb\n", 5.0)) == expected


def test_each_rank_has_a_colour_on_a_stream_that_has_colours() -> None:
    display = Display(mode="prefix", ranks=workers(2), screen=Screen(colour=frozenset({ERR})))
    assert shown(display, 0, stream=ERR) == b"\x1b[0;36m[0] \x1b[ma\n"
    assert shown(display, 1, stream=ERR) == b"\x1b[0;35m[1] \x1b[ma\n"
    assert shown(display, 0, stream=OUT) == b"[0] a\n"


def test_eight_ranks_have_eight_styles_without_black_white_red_or_dark_blue() -> None:
    assert len(set(STYLES)) == len(STYLES) >= 8
    assert not {style[-2:] for style in STYLES} & {"30", "31", "34", "37", "91", "97"}


def test_a_colour_that_a_worker_left_on_ends_with_its_line() -> None:
    display = Display(mode="prefix", ranks=workers(2), screen=Screen(colour=BOTH))
    assert shown(display, 0, b"x\n\x1b[31mred\nplain\n") == (
        b"\x1b[0;36m[0] \x1b[mx\n\x1b[0;36m[0] \x1b[m\x1b[31mred\x1b[m\n\x1b[0;36m[0] \x1b[mplain\n"
    )


def test_without_colours_the_worker_s_own_stay_as_they_are() -> None:
    assert shown(Display(mode="prefix", ranks=workers(2)), 0, b"\x1b[31mred\n") == b"[0] \x1b[31mred\n"


@given(st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\n", b"")), min_size=1, max_size=9))
def test_a_prefix_stands_before_each_line_and_nowhere_else(lines: list[bytes]) -> None:
    block = b"".join(line + b"\n" for line in lines)
    assert Prefix(b"[3] ").add(block) == b"".join(b"[3] " + line + b"\n" for line in lines)
    coloured = Prefix(b"[3] ", "36")
    assert coloured.add(block) == b"".join(
        coloured.text + line + (RESET if b"\x1b" in line else b"") + b"\n" for line in lines
    )


@pytest.mark.parametrize(
    ("env", "isatty", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR": "0"}, True, False),
    ],
    ids=str,
)
def test_colours_follow_the_common_variables(env: Mapping[str, str], isatty: bool, expected: bool) -> None:
    assert use_colour(env, isatty) is expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-color", "JPY_PARENT_PID": "7"}, False),
    ],
    ids=["terminal", "none", "dumb", "notebook"],
)
def test_bars_are_shown_in_place_where_the_cursor_goes_up(env: Mapping[str, str], expected: bool) -> None:
    assert moves_cursor(env) is expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "XTERM_VERSION": "XTerm(379)"}, False),
        ({"TERM": "linux"}, False),
        ({"TERM": "tmux-256color", "XTERM_VERSION": "XTerm(379)", "TMUX": "/tmp/tmux-0/default,1,0"}, True),
        ({"TERM": "screen", "XTERM_VERSION": "XTerm(379)", "STY": "7.pts-1.a"}, True),
    ],
    ids=["most", "xterm", "console", "tmux", "screen"],
)
def test_rows_are_looked_for_where_the_terminal_puts_them_when_its_width_changes(
    env: Mapping[str, str], expected: bool
) -> None:
    assert rewraps_lines(env) is expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "dumb", "VTE_VERSION": ""}, False),
        ({"TERM": "xterm-kitty"}, True),
        ({"TERM": "xterm-256color", "VTE_VERSION": "7600"}, True),
        ({"TERM": "xterm-256color", "VTE_VERSION": "4800"}, False),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "vscode"}, True),
        ({"TERM": "tmux-256color", "TERM_PROGRAM": "vscode"}, False),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/tmux-0/default,1,0", "VTE_VERSION": "7600"}, False),
    ],
)
def test_links_are_for_terminals_that_are_known_to_open_them(env: dict[str, str], expected: bool) -> None:
    assert knows_links(env) is expected
