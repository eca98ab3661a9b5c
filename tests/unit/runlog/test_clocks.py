"""What goes for its age needs two clocks: one that is wrong, ahead or behind, removes nothing, and the user is told."""

import os
import time
from pathlib import Path

import pytest

from ddplaunch.launcher.start import shared_token
from ddplaunch.record import bad_nodes, old_runs
from ddplaunch.record.old_runs import Looks, why_clocks_are_doubted
from tests.runs import DAY, run_of

NOW = 1_800_000_000.0
CLOCK = time.time


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def said(runs: Path, monkeypatch, ahead: float = 0.0) -> list[str]:
    """Tidy up as a job does whose clock is so many days ahead, and return what the user is told."""
    monkeypatch.setattr(time, "time", lambda: CLOCK() + ahead * DAY)
    told = [text for text in old_runs.tidy(str(runs), 30) if text is not None]
    monkeypatch.undo()
    return told


@pytest.mark.parametrize(
    ("ahead", "looks", "why"),
    [
        (0, Looks(), ""),
        (0, Looks(NOW - 2 * DAY), ""),
        (-1800, Looks(NOW - 2 * DAY), ""),
        (60 * DAY, Looks(NOW - DAY), "the clock of this node is 60 d ahead of that of their disk"),
        (-60 * DAY, Looks(NOW - DAY), "the clock of this node is 60 d behind that of their disk"),
        (NOW, Looks(), "ahead of that of their disk"),  # a disk that keeps no times
        (0, Looks(NOW - 60 * DAY), "this is 60 d after the last job here"),
        (0, Looks(NOW + 60 * DAY), "this is 60 d before the last job here"),
        (0, Looks(NOW - 3600, NOW - 3600), "the clock has leapt"),
        (0, Looks(NOW - 3600, NOW - 2 * DAY), ""),
    ],
)
def test_two_clocks_agree_or_nothing_goes(ahead, looks, why):
    of_disk = 0.0 if ahead == NOW else NOW
    found, _ = why_clocks_are_doubted(of_disk + ahead, of_disk, looks)
    assert found.startswith(why) if why and not why.startswith("ahead") else (why in found and bool(why) == bool(found))


def test_a_leap_that_a_job_of_the_next_day_confirms_is_believed():
    _, looks = why_clocks_are_doubted(NOW, NOW, Looks(NOW - 60 * DAY))
    found, looks = why_clocks_are_doubted(NOW + 3600, NOW + 3600, looks)
    assert found
    found, looks = why_clocks_are_doubted(NOW + DAY, NOW + DAY, looks)
    assert (found, looks) == ("", Looks(NOW + DAY))


@pytest.mark.parametrize("ahead", [60, -60])
def test_a_wrong_clock_removes_no_runs_and_a_right_one_does_afterwards(runs, monkeypatch, ahead):
    for days in (0, 3, 40):
        run_of(runs, f"{days}", days=days)
    told = said(runs, monkeypatch, ahead)
    assert len(told) == 1
    assert told[0].startswith(
        f"no old runs are removed: the clock of this node is 60 d {'ahead' if ahead > 0 else 'behind'}"
    )
    assert {path.name for path in runs.iterdir()} == {"0", "3", "40"}
    told = said(runs, monkeypatch)
    assert told == ["removed 1 run no longer kept (--keep-runs 30); `ddplaunch logs RUN` says why"]
    assert {path.name for path in runs.iterdir()} == {"0", "3"}


def test_a_disk_whose_clock_leaps_with_ours_keeps_the_runs_for_a_day(runs, monkeypatch):
    run_of(runs, "young")
    assert said(runs, monkeypatch) == []
    clock_of_disk = old_runs.time_of_disk
    monkeypatch.setattr(old_runs, "time_of_disk", lambda folder: clock_of_disk(folder) + 60 * DAY)
    monkeypatch.setattr(time, "time", lambda: CLOCK() + 60 * DAY)
    told = [text for text in old_runs.tidy(str(runs), 30) if text is not None]
    assert "60 d after the last job here" in told[0]
    assert (runs / "young").exists()


def test_the_marker_of_an_older_version_tells_when_a_job_has_last_looked(runs, monkeypatch):
    run_of(runs, "young")
    (runs.parent / "runs-tidied").touch()
    clock_of_disk = old_runs.time_of_disk
    monkeypatch.setattr(old_runs, "time_of_disk", lambda folder: clock_of_disk(folder) + 60 * DAY)
    monkeypatch.setattr(time, "time", lambda: CLOCK() + 60 * DAY)
    told = [text for text in old_runs.tidy(str(runs), 30) if text is not None]
    assert ["60 d after the last job here" in text for text in told] == [True]
    assert (runs / "young").exists()


def test_a_wrong_clock_forgets_no_failures_of_others(tmp_path):
    path, now = str(tmp_path / "nodes.jsonl"), time.time()
    bad_nodes.remember(path, [bad_nodes.Failure(host="a", kind="lost", at=now)], now)
    for ahead in (60 * DAY, -60 * DAY):
        then = now + ahead
        bad_nodes.remember(path, [bad_nodes.Failure(host="b", kind="lost", at=then)], then)
    bad_nodes.remember(path, [bad_nodes.Failure(host="c", kind="lost", at=now)], now)
    assert [one.host for one in bad_nodes.read(path, now)] == ["a", "c"]


def test_a_wrong_clock_removes_no_secret_of_a_job(tmp_path, monkeypatch):
    first = shared_token.find(str(tmp_path), "job-1", on_one_host=True)
    monkeypatch.setattr(time, "time", lambda: CLOCK() + 400 * DAY)
    assert shared_token.find(str(tmp_path), "job-2", on_one_host=True)
    monkeypatch.undo()
    assert shared_token.find(str(tmp_path), "job-1", on_one_host=True) == first


def test_a_look_at_the_clock_of_a_disk_leaves_nothing(tmp_path):
    assert abs(old_runs.time_of_disk(str(tmp_path)) - time.time()) < 60
    assert os.listdir(tmp_path) == []
