"""The collectives of a run: joined from the files of all nodes, and what they show of each rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.record.run import LONGEST, lines_of
from ddplaunch.system.process.files import content
from ddplaunch.tools.page.collectives import CallsRow, Collective, collectives, waits
from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from ddplaunch.tools.page.trace import entries
from tests.recorded import BEGAN, called, restarted, traced


def read_of(*folders: Path) -> tuple[list[Collective], int]:
    lines = [[*lines_of(content(f"{folder}/collectives.jsonl", LONGEST), CallsRow)] for folder in folders]
    rows = [([row for row in of_node if row is not None], BEGAN - 50) for of_node in lines]
    damaged = sum(of_node.count(None) for of_node in lines)
    return collectives(rows, [(BEGAN, 0), (BEGAN + 10, 1)]), damaged


def test_what_several_nodes_and_readings_tell_of_a_collective_is_one(tmp_path: Path) -> None:
    for name, came in (("a", {0: 1.0, 1: 1.1}), ("b", {2: 1.2})):
        (tmp_path / name).mkdir()
        called(tmp_path / name, 3, [(7, came)])
        called(tmp_path / name, 3, [(7, came)])
    [one], damaged = read_of(tmp_path / "a", tmp_path / "b")
    assert (damaged, list(one.missing()), one.last, sorted(one.came)) == (0, [], 2, [0, 1, 2])
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
    assert (worst.rank, worst.came_to, worst.came_last) == (2, 4, 4)
    assert worst.kept_waiting == pytest.approx(4 * 0.4)
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


def of_line(at: int, *, ranks: str = "0", numbers: int = 1, members: str = "0-65535", group: str = "0") -> str:
    values = {
        "mono": 50 + at / 1e3,
        "group": group,
        "ranks": ranks,
        "numbers": list(range(at * numbers, (at + 1) * numbers)),
        "came": [[1]] * numbers,
        "members": members,
        "operations": ["all_reduce"] * numbers,
    }
    return json.dumps(values, separators=(",", ":"))


WIDE = {
    "many numbers of a large group": lambda at: of_line(at, numbers=1000),
    "many groups": lambda at: of_line(at, group=f"group {at}"),
    "one collective, a line for each rank": lambda at: of_line(0, ranks=str(at)),
    "all ranks named, and one came": lambda at: of_line(at, ranks="0-65535"),
    "ranges named again and again": lambda at: of_line(at, ranks=",".join(["0-65535"] * 1000)),
    "members that are no range": lambda at: of_line(at, numbers=5000, members=",".join(map(str, range(0, 13_000, 2)))),
}


@pytest.mark.parametrize("line", WIDE.values(), ids=WIDE)
def test_what_collectives_cost_follows_the_length_of_their_file(tmp_path: Path, line: Callable[[int], str]) -> None:
    restarted(tmp_path)
    lines, size = list[str](), 0
    while size < 600_000:
        lines.append(line(len(lines)))
        size += len(lines[-1])
    (tmp_path / "collectives.jsonl").write_text("\n".join(lines) + "\n")
    began = time.process_time()
    run = read(str(tmp_path))
    assert run is not None
    assert run.collectives
    page(run, 0.0)
    traced(entries(run), {})
    assert time.process_time() - began < 8


def test_the_missing_of_a_group_are_written_as_ranges() -> None:
    one = Collective(group="0", members="0-9,20", number=1, generation=0, came=dict.fromkeys((0, 3, 4, 20), 1.0))
    assert list(one.missing()) == [range(1, 3), range(5, 10)]
    assert (one.missing_text(100), one.missing_text(3)) == ("1-2,5-9", "1-2")
