"""The samples of a run as curves: few points, however long the run, and whatever stands in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddplaunch.tools.page.history import History, read
from ddplaunch.tools.page.samples import Curve
from tests.recorded import BEGAN, restarted, sampled


def run_of(folder: Path, points: int = 300) -> History:
    run = read(str(folder), points)
    assert run is not None
    return run


def curves(run: History) -> dict[str, Curve]:
    return {curve.name: curve for curve in run.curves}


def test_samples_become_a_curve_for_each_figure_on_the_clock_of_the_events(tmp_path: Path) -> None:
    restarted(tmp_path)
    sampled(tmp_path, 2, range(1, 9), gpu=[90, None], gpu_memory=[2, None])
    found = curves(run_of(tmp_path))
    assert {name: curve.unit for name, curve in found.items()} == {
        "CPU": "%", "Memory": "B", "GPU": "%", "GPU memory": "B", "Step time": "s",
    }  # fmt: skip
    assert [point.at - BEGAN for point in found["CPU"].ranks[1]] == pytest.approx(range(1, 9))
    assert found["Memory"].ranks[0][0].value == 1001 << 20
    assert list(found["GPU"].ranks) == [0]
    assert [point.value for point in found["Step time"].ranks[0]] == pytest.approx([1.0] * 7)


def test_of_a_long_run_a_point_is_the_mean_and_of_memory_the_largest(tmp_path: Path) -> None:
    restarted(tmp_path)
    sampled(tmp_path, 1, range(1, 20))
    found = curves(run_of(tmp_path, points=2))
    assert len(found["CPU"].ranks[0]) <= 3
    assert found["Memory"].ranks[0][-1].value == 1019 << 20
    assert 50 <= found["CPU"].ranks[0][0].value <= 57


def test_a_restart_begins_a_new_line_and_is_no_step(tmp_path: Path) -> None:
    restarted(tmp_path)
    sampled(tmp_path, 1, range(1, 9))
    sampled(tmp_path, 1, range(13, 15), generation=1, step=[4])
    points = curves(run_of(tmp_path))["Step time"].ranks[0]
    assert {point.generation for point in points} == {0}


def test_steps_that_take_longer_than_from_sample_to_sample_have_their_time(tmp_path: Path) -> None:
    restarted(tmp_path)
    for start in (1, 5):
        sampled(tmp_path, 1, range(start, start + 4), step=[start // 4])
    assert [point.value for point in curves(run_of(tmp_path))["Step time"].ranks[0]] == pytest.approx([4.0])


def test_lines_that_are_no_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    restarted(tmp_path)
    sampled(tmp_path, 1, range(1, 3))
    strange = [
        {"mono": "x", "ranks": "0"}, {"mono": 3, "ranks": "0", "cpu": [-1]}, {"mono": 3, "ranks": "0", "memory": [1e300]},
        [], {"mono": 3, "ranks": "9" * 100_000}, {"mono": 3, "ranks": "0-999999999", "cpu": [1]},
    ]  # fmt: skip
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in strange)
        file.write(f"{'[' * 3000}\n\0\n")
        file.write('{"mono": 4, "half a li')
    run = run_of(tmp_path)
    assert "7 lines of samples.jsonl cannot be read." in run.problems
    assert len(curves(run)["CPU"].ranks[0]) == 3
