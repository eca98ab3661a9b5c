"""What is read from the folder of a run, whatever state its files are in."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from ddplaunch.tools.page import history
from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from tests.recorded import BEGAN, ended, event, exited, generation, recorded, restarted, started, worker


def test_each_rank_has_a_life_in_each_generation(tmp_path: Path) -> None:
    run = read(restarted(tmp_path / "run"))
    assert run is not None
    assert [(life.rank, life.generation, life.kind) for life in run.lives] == [
        (0, 0, "stopped"),
        (0, 1, "good"),
        (1, 0, "failed"),
        (1, 1, "good"),
    ]
    assert [(one.number, one.failed_rank, one.wait) for one in run.generations] == [(0, 1, 2.0), (1, None, None)]
    assert (run.program, run.outcome, run.status, run.problems) == ("train.py", "2 workers finished in 9 s", 0, ())
    assert (run.began, run.ended) == (BEGAN, BEGAN + 21)


def test_the_clock_of_an_event_written_late_is_that_of_the_others(tmp_path: Path) -> None:
    late = {**worker(1, 0), "at": BEGAN + 500}
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), late, exited(5, 0), ended(5)))
    assert run is not None
    assert run.lives[0].began == BEGAN + 1


@pytest.mark.parametrize(
    "line", ["{", '{"event": "worker_exited", "rank": "0"}', "[" * 100_000, "\x00\xff", "null", "1e999"]
)
def test_a_damaged_line_is_counted_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    folder = recorded(tmp_path / "run", started(), generation(0, 0), worker(0, 0), line, exited(5, 0), ended(5))
    run = read(folder)
    assert run is not None
    assert run.lives[0].kind == "good"
    assert run.problems == (f"{folder}/events.jsonl is damaged: 1 line of 6 cannot be read.",)


def test_events_of_another_version_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    later = [{**each, "v": 2} for each in (started(), generation(0, 0), worker(0, 0), exited(5, 0), ended(5))]
    run = read(recorded(tmp_path / "run", *later))
    assert run is not None
    assert len(run.lives) == 1
    assert "another version" in run.problems[0]


def test_a_run_that_was_killed_ends_with_its_last_event(tmp_path: Path) -> None:
    run = read(
        recorded(tmp_path / "run", started(), generation(0, 0), worker(0, 0), event(7, "notice", text="still there"))
    )
    assert run is not None
    assert (run.goes_on, run.ended, run.lives[0].kind) == (False, BEGAN + 7, "running")
    assert "has no end" in run.problems[0]


def test_a_run_that_goes_on_has_no_problem_with_a_line_that_is_half_written(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", started(), generation(0, 0), worker(0, 0))
    with open(f"{folder}/events.jsonl", "a") as events:
        events.write('{"v": 1, "event": "worker_ex')
        events.flush()
        fcntl.flock(events, fcntl.LOCK_EX)
        run = read(folder)
    assert run is not None
    assert (run.goes_on, run.problems, run.lives[0].ended) == (True, (), None)


CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def test_the_rank_that_failed_first_stands_before_those_that_only_lost_contact_with_it(tmp_path: Path) -> None:
    error = {"error": "KeyError: 'labels'", "where": "train.py:12", "follows": False}
    events = [
        *(worker(0, rank) for rank in range(3)),
        # the end of rank 2 is seen after rank 1 was seen to raise
        event(5, "worker_raised", rank=1, type="RuntimeError", message=CLOSED, follows=True, raised_at=54.9),
        exited(5.1, 2, 1, "exit status 1", **error, raised_at=54.5),
        exited(5.2, 1, 1, "exit status 1", error=f"RuntimeError: {CLOSED}", follows=True, raised_at=54.9),
        exited(5.3, 0, 143, "killed by SIGTERM", stopped_with=15),
    ]
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), *events, ended(6, 1)))
    assert run is not None
    assert [mark.text for mark in run.marks] == [
        "rank 2 failed: KeyError: 'labels', at train.py:12",
        f"rank 1 lost contact with another worker: RuntimeError: {CLOSED}",
    ]


def test_the_end_of_a_worker_that_went_on_after_an_exception_is_told_too(tmp_path: Path) -> None:
    """torch's @record also sees exceptions that the program handles."""
    events = [
        worker(0, 0),
        event(5, "worker_raised", rank=0, type="ValueError", message="handled"),
        exited(3600, 0, 137, "killed by SIGKILL"),
    ]
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), *events, ended(3601, 137)))
    assert run is not None
    assert len(run.marks) == 2
    assert "SIGKILL" in run.marks[1].text


def test_a_moment_at_which_no_worker_can_have_raised_is_not_believed(tmp_path: Path) -> None:
    events = [worker(0, 0), exited(5, 0, 1, "exit status 1", error="E: x", raised_at=0.0)]
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), *events))
    assert run is not None
    assert [mark.at for mark in run.marks] == [BEGAN + 5]


def test_the_nodes_of_a_shared_home_are_one_run(tmp_path: Path) -> None:
    for node, host in enumerate(("alpha", "beta")):
        failed = [event(5, "generation_failed", generation=0, rank=1, wait=1.0)] if node == 0 else []
        lines = [started(host=host), generation(0, 0), worker(0, node), exited(5, node), *failed, ended(5)]
        shifted = [
            {**each, "mono": each["mono"] + 1e6 * node} for each in lines
        ]  # machines that started at other times
        recorded(tmp_path / f"run/node-{node}", *shifted)
    run = read(str(tmp_path / "run"))
    assert run is not None
    assert [node.host for node in run.nodes] == ["alpha", "beta"]
    assert [(life.rank, life.node, life.ended) for life in run.lives] == [(0, 0, BEGAN + 5), (1, 1, BEGAN + 5)]
    assert run.generations[0].failed_rank == 1


def test_the_end_of_a_job_is_that_of_its_last_generation_whichever_node_has_left_before(tmp_path: Path) -> None:
    left = event(5, "job_ended", status=143, why="left", seconds=5.0)
    recorded(tmp_path / "run/node-0", started(), generation(0, 0), worker(0, 0), exited(5, 0), left)
    recorded(tmp_path / "run/node-1", started(), generation(0, 0), worker(0, 1), exited(5, 1),
             event(5, "generation_failed", generation=0, rank=None, wait=1.8512),
             generation(6, 1), worker(7, 0), exited(9, 0), ended(9))  # fmt: skip
    run = read(str(tmp_path / "run"))
    assert run is not None
    assert run.status == 0
    assert [mark.text for mark in run.marks] == ["generation 0 ended: all workers start again in 1.9 s"]
    assert "It had 1 worker on 1 node" in page(run, BEGAN + 10)


def test_a_command_that_was_killed_is_named_as_people_know_it(tmp_path: Path) -> None:
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), worker(0, 0), event(2, "front_lost"), ended(3)))
    assert run is not None
    assert [mark.text for mark in run.marks] == ["the ddplaunch that had started the job was killed"]


def test_a_suspension_is_a_gap(tmp_path: Path) -> None:
    lines = [worker(0, 0), event(2, "job_suspended"), event(4, "job_resumed"), exited(5, 0), ended(5)]
    run = read(recorded(tmp_path / "run", started(), generation(0, 0), *lines))
    assert run is not None
    assert [(gap.began - BEGAN, gap.ended - BEGAN) for gap in run.gaps] == [(2, 4)]


def test_files_that_are_no_objects_are_named(tmp_path: Path) -> None:
    folder = restarted(tmp_path / "run")
    Path(folder, "plan.json").write_text("[")
    Path(folder, "summary.json").write_text(json.dumps({"v": 9}))
    run = read(folder)
    assert run is not None
    assert run.problems == (
        f"{folder}/plan.json is damaged.",
        f"{folder}/summary.json was written by another version of ddplaunch.",
    )


def test_a_folder_without_events_is_no_run(tmp_path: Path) -> None:
    assert read(str(tmp_path)) is None


# --- the last sign of life of a run that was killed


def killed(folder: Path, *samples: object, log: float = 0.0, events: float = 1.0) -> float:
    """Return when a run ends that was killed as a whole; `log` and `events` are the times of these files, from its start on."""
    recorded(folder, started(), generation(0, 0), worker(0, 0))
    (folder / "samples.jsonl").write_text("\n".join(json.dumps(row) for row in samples))
    (folder / "rank-0.out").write_text("step 7\n")
    os.utime(folder / "rank-0.out", (BEGAN + log, BEGAN + log))
    os.utime(folder / "events.jsonl", (BEGAN + events, BEGAN + events))
    run = read(str(folder))
    assert run is not None
    return run.ended - BEGAN


def sample(seconds: float) -> dict[str, object]:
    mono = event(seconds, "notice")["mono"]
    return {"v": 1, "mono": mono, "generation": 0, "ranks": "0", "cpu": [1], "memory": [1]}


def test_it_ends_with_its_last_sample_or_what_it_wrote_last_whichever_is_later(tmp_path: Path) -> None:
    assert killed(tmp_path / "a", sample(10), sample(20), "{") == 20
    assert killed(tmp_path / "b", sample(10), log=90.0) == 90
    assert killed(tmp_path / "c") == 0


def test_the_last_sample_is_found_behind_more_of_them_than_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(history, "LONGEST", 1 << 16)
    assert killed(tmp_path / "a", *map(sample, range(2000))) == 1999


def test_the_times_of_a_copy_are_no_sign_of_life(tmp_path: Path) -> None:
    assert killed(tmp_path / "a", sample(10), log=90_000.0, events=90_000.0) == 10
