"""What `ddplaunch warm` shows on screens that have no room for its table."""

from __future__ import annotations

import pytest

from ddplaunch.launcher.workers.show import _blocks
from ddplaunch.system.console.tables import Look, written

PYTHON = "/home/someone/projects/training/.venv/bin/python3.11"
ROWS = [
    ("123456", PYTHON, "torch, numpy, transformers, datasets", "3 (1 now)", "while it is used"),
    ("99", "/usr/bin/python3", "nothing", "0", "25 min more, unless a run comes"),
]


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_screen_shows_each_value_whole_in_a_line(width):
    lines = written(_blocks(ROWS, look := Look(width=width)), look).split("\n")
    assert all(len(line) <= width for line in lines)
    for value in (value for row in ROWS for value in row):
        assert any(line.endswith(f"  {value}") for line in lines)


def test_a_wide_screen_and_a_pipe_show_a_row_for_each_interpreter():
    for width in (200, None):
        head, *rows = written(_blocks(ROWS, look := Look(width=width)), look).split("\n")
        assert head.split() == ["pid", "interpreter", "has", "imported", "runs", "is", "kept"]
        assert len(rows) == len(ROWS)
