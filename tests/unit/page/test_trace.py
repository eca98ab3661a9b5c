"""The trace of a run, checked against the Trace Event Format: its phases and what each of them needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddplaunch.tools.page import trace
from ddplaunch.tools.page.history import read
from tests.recorded import (
    called,
    ended,
    event,
    exited,
    generation,
    recorded,
    restarted,
    sampled,
    started,
    traced,
    worker,
)

# "Trace Event Format": the fields of a complete event, an instant event and a metadata event, and the names of the latter
NEEDED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
SECOND = 1_000_000  # microseconds


def entries(folder: str) -> list[dict[str, Any]]:
    """Return the entries of the trace of a run, each as the format wants it."""
    run = read(folder)
    assert run is not None
    found: list[dict[str, Any]] = traced(trace.entries(run), trace.about(run))["traceEvents"]
    tracks = set()
    for entry in found:
        assert NEEDED[entry["ph"]] <= set(entry)
        assert all(
            isinstance(entry[name], int) and entry[name] >= 0 for name in ("pid", "tid", "ts", "dur") if name in entry
        )
        if entry["ph"] == "M":
            assert set(entry["args"]) == {METADATA[entry["name"]]}
            tracks.add((entry["name"], entry["pid"], entry["tid"]))
        elif entry["ph"] == "i":
            assert entry["s"] in ("g", "p", "t")
    for entry in found:
        if entry["ph"] == "C":
            assert ("process_name", entry["pid"], 0) in tracks
            assert all(isinstance(value, (int, float)) for value in entry["args"].values())
        elif entry["ph"] != "M":
            assert ("thread_name", entry["pid"], entry["tid"]) in tracks
    slices = [entry for entry in found if entry["ph"] == "X"]
    by_track = sorted(slices, key=lambda entry: (entry["pid"], entry["tid"], entry["ts"], -entry["dur"]))
    within: list[tuple[int, int, int]] = []  # track and end of the slices that the next one may lie in
    for entry in by_track:
        end = entry["ts"] + entry["dur"]
        track = entry["pid"], entry["tid"]
        while within and (within[-1][:2] != track or within[-1][2] <= entry["ts"]):
            within.pop()
        assert not within or end <= within[-1][2], "slices of a track may be nested, but not overlap"
        within.append((*track, end))
    begun = {entry["id"]: entry["ts"] for entry in found if entry["ph"] == "s"}
    ids = [entry["id"] for entry in found if entry["ph"] in ("s", "f")]
    assert len(ids) == 2 * len(set(ids)) == 2 * len(begun), "an arrow has one start and one end"
    for entry in found:
        if entry["ph"] in ("s", "f"):
            assert begun[entry["id"]] <= entry["ts"], "an arrow begins before it ends"
            assert any(
                (each["pid"], each["tid"]) == (entry["pid"], entry["tid"])
                and each["cat"] == "collective"
                and each["ts"] <= entry["ts"] < each["ts"] + each["dur"]
                for each in slices
            ), "an arrow is bound to the slice around it"
    return found


def slices(found: list[dict[str, Any]], pid: int, tid: int) -> list[tuple[str, float, float]]:
    """Return name, start and length, in seconds, of what a track shows."""
    return [
        (entry["name"], entry["ts"] / SECOND, entry["dur"] / SECOND)
        for entry in found
        if entry["ph"] == "X" and (entry["pid"], entry["tid"]) == (pid, tid)
    ]


def test_each_rank_has_a_track_with_its_generations_and_the_job_one_with_restarts(tmp_path: Path) -> None:
    found = entries(restarted(tmp_path / "run"))
    assert slices(found, 1, 1) == [("generation 0", 0, 10), ("restart", 10, 2), ("generation 1", 12, 9)]
    assert slices(found, 2, 2) == [("generation 0", 0.1, 8.9), ("generation 1", 12.1, 8.9)]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert names == {(1, 1): "generations", (2, 1): "rank 0", (2, 2): "rank 1"}


def test_a_stop_is_on_the_tracks_of_its_ranks_and_a_notice_on_that_of_the_job(tmp_path: Path) -> None:
    stop = event(3, "stop_sent", signal=15, name="SIGTERM", ranks="0-1,5,7-99999999")
    lines = [
        worker(0, 0),
        worker(0, 1),
        stop,
        event(4, "notice", text="\x1b[31mhello"),
        exited(5, 0),
        exited(5, 1),
        ended(5),
    ]
    found = entries(recorded(tmp_path / "run", started(), generation(0, 0), *lines))
    marks = [(each["name"], each["pid"], each["tid"], each["args"]["text"]) for each in found if each["ph"] == "i"]
    assert [mark[:3] for mark in marks] == [("stop_sent", 2, 1), ("stop_sent", 2, 2), ("notice", 1, 1)]
    assert marks[-1][3] == "hello"


def test_a_suspension_is_a_gap_in_the_tracks_of_its_node(tmp_path: Path) -> None:
    pauses = [event(2, "job_suspended"), event(4, "job_resumed"), event(8, "paused", seconds=1.0)]
    found = entries(
        recorded(tmp_path / "run", started(), generation(0, 0), worker(0, 0), *pauses, exited(9, 0), ended(9))
    )
    assert slices(found, 2, 1) == [("generation 0", 0, 2), ("generation 0", 4, 3), ("generation 0", 8, 1)]


def test_gaps_that_overlap_or_lie_outside_give_no_slice_that_overlaps(tmp_path: Path) -> None:
    pauses = [event(6, "paused", seconds=5.0), event(7, "paused", seconds=2.0), event(20, "paused", seconds=1.0)]
    lines = [worker(2, 0), *pauses[:2], exited(9, 0), pauses[2], ended(21)]
    found = entries(recorded(tmp_path / "run", started(), generation(0, 0), *lines))
    assert slices(found, 2, 1) == [("generation 0", 7, 2)]


def test_each_rank_has_counters(tmp_path: Path) -> None:
    restarted(tmp_path)
    sampled(tmp_path, 2, range(1, 4))
    found = entries(str(tmp_path))
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    counters = [entry for entry in found if entry["ph"] == "C"]
    [order_of_counters] = {order[entry["pid"]] for entry in counters}
    assert order_of_counters == max(order.values())  # below the tracks of the ranks
    assert len({order[pid] for pid in order}) == len(order)
    assert {entry["name"] for entry in counters} == {
        f"rank {rank} {name}" for rank in (0, 1) for name in ("CPU, %", "Memory, MiB", "Step time, ms")
    }
    memory = [(entry["ts"], entry["args"]["value"]) for entry in counters if entry["name"] == "rank 1 Memory, MiB"]
    assert [round(ts / SECOND) for ts, _ in memory] == [1, 2, 3]
    assert [value for _, value in memory] == [1001, 1002, 1003]


def test_a_collective_is_a_slice_of_each_rank_until_the_last_has_come_with_arrows_from_it(tmp_path: Path) -> None:
    restarted(tmp_path)
    called(tmp_path, 2, [(7, {0: 2.0, 1: 3.0}), (8, {0: 4.0, 1: 4.5})])
    found = entries(str(tmp_path))
    waits = [(name, at, length) for name, at, length in slices(found, 2, 1) if "#" in name]
    assert [(name, at, round(length, 3)) for name, at, length in waits] == [
        ("all_reduce #7", 2.0, 1.0),
        ("all_reduce #8", 4.0, 0.5),
    ]
    arrows = [(entry["ph"], entry["id"], entry["tid"]) for entry in found if entry["ph"] in ("s", "f")]
    assert sorted(arrows) == [("f", 1, 1), ("f", 2, 1), ("s", 1, 2), ("s", 2, 2)]


def test_a_collective_to_which_a_rank_never_came_lasts_until_the_end_and_has_no_arrow(tmp_path: Path) -> None:
    restarted(tmp_path, generations=1)
    called(tmp_path, 2, [(7, {0: 2.0})])
    found = entries(str(tmp_path))
    assert slices(found, 2, 1)[1][2] == pytest.approx(7.0, abs=0.01)
    assert not [entry for entry in found if entry["ph"] in ("s", "f")]


def test_a_rank_that_calls_the_next_before_the_last_has_come_has_slices_that_do_not_overlap(tmp_path: Path) -> None:
    restarted(tmp_path)
    called(tmp_path, 2, [(7, {0: 2.0, 1: 3.0}), (8, {0: 2.5, 1: 3.1}), (9, {0: 3.0, 1: 3.2})])
    waits = [
        entry for entry in entries(str(tmp_path)) if entry["ph"] == "X" and entry["tid"] == 1 and entry["pid"] == 2
    ]
    assert len(waits) == 5  # two generations and three collectives


def test_a_command_that_has_started_all_nodes_is_none_of_them(tmp_path: Path) -> None:
    recorded(tmp_path / "run", started(host="login1"), generation(0, 0), ended(9))
    for node, host in enumerate(("gpu01", "gpu02")):
        recorded(tmp_path / f"run/node-{node}", started(host=host), generation(0, 0), worker(0, node), exited(9, node))
    found = entries(str(tmp_path / "run"))
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    nodes = ["node 0: gpu01", "node 1: gpu02"]
    assert sorted(names.values())[1:] == nodes
    assert [names[each["pid"]] for each in found if each["name"] == "generation 0" and each["pid"] > 1] == nodes
