"""What people read on stdout: columns that are even, colours where they are wanted, and nothing broken that may be copied."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.console.tables import NAME, NOTE, Look, line, section, sentence, table, written
from tests.emulator import Emulator

PLAIN = Look()
SENTENCE = (
    "the port is taken: type `ddplaunch --master-port 29501 train.py` to use another, or see /var/log/ddplaunch.log"
)


def rows(look: Look = PLAIN) -> str:
    reasons = "the reason is a sentence of some words"
    cells = [("workers", "4 on gpu01", reasons), ("port", "-", "")]
    return written([table(cells, styles=(NAME, "", NOTE), wraps=True)], look)


def test_without_a_terminal_columns_are_even_and_nothing_is_broken_or_coloured():
    assert rows() == "workers  4 on gpu01  the reason is a sentence of some words\nport     -"


def test_columns_of_figures_are_flush_right():
    shown = written([table([("9", "a"), ("100", "b")], header=("pid", "x"), right=("pid",), indent=2)], PLAIN)
    assert shown == "  pid  x\n    9  a\n  100  b"


def test_on_a_narrow_terminal_the_last_column_is_broken_between_words():
    assert rows(Look(width=40)).split("\n") == [
        "workers  4 on gpu01  the reason is a",
        "                     sentence of some",
        "                     words",
        "port     -",
    ]


@given(st.integers(1, 200))
def test_no_screen_is_too_narrow_for_what_may_be_copied(width: int) -> None:
    command = "python train.py --data /a/folder with/spaces --lr 0.1"
    blocks = [
        line("command: ", command),
        table([("/home/ada/.cache/torch/kernels", "12345", "a few words")], header=("path", "pid", "note"), wraps=True),
        sentence("note: ", SENTENCE),
    ]
    text = written(blocks, Look(width=width))
    for whole in (command, "/home/ada/.cache/torch/kernels", "`ddplaunch --master-port 29501 train.py`"):
        assert whole in text
    assert all(shown.rstrip() == shown for shown in text.split("\n"))
    assert text.split() == written(blocks, PLAIN).split(), "and every word is there"


def test_a_sentence_takes_80_cells_at_most_and_goes_on_below_its_first_word():
    lines = written([sentence("note: ", "word " * 40)], Look(width=200)).split("\n")
    assert [len(shown) for shown in lines[:-1]] == [80, 80]
    assert all(shown.startswith(("note: word", "      word")) for shown in lines)


@pytest.mark.parametrize("look", [Look(colour=True), Look(colour=True, width=30)])
def test_in_colour_it_reads_the_same(look: Look) -> None:
    coloured, screen = rows(look), Emulator(columns=200)
    screen.feed(coloured.replace("\n", "\r\n"))
    assert coloured.startswith("\x1b[1mworkers")
    assert "\n".join(screen.shown) == rows(Look(width=look.width))


def test_wide_characters_keep_the_columns_even():
    shown = written([table([("訓練", "a"), ("abcdef", "b")])], PLAIN)
    assert shown == "訓練    a\nabcdef  b"


@pytest.mark.parametrize("look", [PLAIN, Look(colour=True, width=80)])
def test_a_terminal_obeys_nothing_that_is_shown(look: Look) -> None:
    evil = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202eb[bold]c[/bold]:smile:"
    text = written([section(line(evil), table([(evil, evil)]), sentence(evil, evil))], look)
    assert not re.search(r"\x1b(?!\[[0-9;]*m)|[\x07\x9b\u202e]", text)
    assert "[bold]c[/bold]:smile:" in text, "nor does rich take it for markup"


def test_a_byte_that_is_no_utf_8_stays():
    assert written([table([("caf\udce9.py", "x")])], PLAIN).encode(errors="surrogateescape") == b"caf\xe9.py  x"


@pytest.mark.parametrize(
    ("env", "colour"), [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_in_a_pipe_colours_are_shown_only_if_forced(env: dict[str, str], colour: bool, capfd) -> None:
    assert not os.isatty(1)
    assert Look.of_stdout(env) == Look(colour=colour, width=None)
