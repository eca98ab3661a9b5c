"""Which ranks a process group has, as a worker writes it down for the agent."""

from __future__ import annotations

import pytest

from ddplaunch.stacks.recorder import parse_members
from ddplaunch.worker.recorder import ranges_of


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        pytest.param({rank: rank for rank in range(10_000)}, "0-9999", id="all"),
        pytest.param([3, 1, 2, 7], "1-3,7", id="some"),
        pytest.param(range(0, 10_000, 8), ",".join(map(str, range(0, 10_000, 8))), id="one-of-each-of-1250-nodes"),
    ],
)
def test_the_ranks_of_a_group_of_any_size_are_read_as_they_were_written(ranks, text):
    assert ranges_of(ranks) == text
    assert parse_members(f"tp {text}\n") == {"tp": tuple(sorted(ranks))}
