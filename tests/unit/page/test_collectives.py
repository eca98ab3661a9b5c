"""The collectives of a run: joined from the files of all nodes, and what they show of each rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddplaunch.page.collectives import Collective, collectives, waits
from ddplaunch.page.page import page
from ddplaunch.page.record import read
from tests.recorded import BEGAN, called, restarted


def read_of(*folders: Path) -> tuple[list[Collective], int]:
    return collectives(
        [(f"{folder}/collectives.jsonl", BEGAN - 50) for folder in folders], [(BEGAN, 0), (BEGAN + 10, 1)]
    )


def test_what_several_nodes_and_readings_tell_of_a_collective_is_one(tmp_path: Path) -> None:
    for name, came in (("a", {0: 1.0, 1: 1.1}), ("b", {2: 1.2})):
        (tmp_path / name).mkdir()
        called(tmp_path / name, 3, [(7, came)])
        called(tmp_path / name, 3, [(7, came)])
    [one], damaged = read_of(tmp_path / "a", tmp_path / "b")
    assert (damaged, one.missing, one.last, sorted(one.came)) == (0, [], 2, [0, 1, 2])
    assert str(one) == "all_reduce #7"


def test_numbers_start_again_with_a_generation(tmp_path: Path) -> None:
    called(tmp_path, 2, [(1, {0: 1.0, 1: 1.0})])
    row = json.loads((tmp_path / "collectives.jsonl").read_text())
    with open(tmp_path / "collectives.jsonl", "a") as file:
        file.write(json.dumps({**row, "mono": 62.0}) + "\n")
    found, _ = read_of(tmp_path)
    assert [(one.generation, one.number) for one in found] == [(0, 1), (1, 1)]


def test_who_came_last_kept_the_others_waiting(tmp_path: Path) -> None:
    called(tmp_path, 3, [(number, {0: number, 1: number + 0.1, 2: number + 0.5}) for number in range(1, 5)])
    found, _ = read_of(tmp_path)
    worst, *others = waits(found)[("0", "0-2")]
    assert (worst.rank, worst.seen, worst.last) == (2, 4, 4)
    assert worst.kept == pytest.approx(4 * 0.4)
    assert {each.rank: each.waited for each in others} == pytest.approx({0: 2.0, 1: 1.6})


def test_lines_that_are_none_are_counted_and_a_page_is_made(tmp_path: Path) -> None:
    restarted(tmp_path)
    called(tmp_path, 2, [(7, {0: 2.0})])
    strange = [{"mono": 1}, {"mono": 1, "group": "<b>", "ranks": "0", "numbers": [-1], "came": []}, 3]
    ok = {
        "mono": 51,
        "group": "<b>",
        "members": "0-1",
        "ranks": "0-1",
        "numbers": [1, 2],
        "came": [[], [1, 2]],
        "operations": ["<i>"],
    }
    with open(tmp_path / "collectives.jsonl", "a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in (*strange, ok))
    run = read(str(tmp_path))
    assert run is not None
    assert "3 lines of collectives.jsonl cannot be read." in run.problems
    text = page(run, BEGAN)
    assert "all_reduce #7</th>" in text
    assert "Group &lt;b&gt;, ranks 0-1" in text
