"""Which runs go, in which order, and that nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.record import folders, old_runs
from tests.runs import DAY, aged, run_of

MIB = 1 << 20


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of all runs; tidied long ago."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def tidy(runs: Path, days: int = 30) -> set[str]:
    """Tidy up, as a job of two hours later does, and return the names that are left."""
    (runs.parent / "runs-tidied").unlink(missing_ok=True)
    for _ in old_runs.tidy(str(runs), days):
        pass
    return {path.name for path in runs.iterdir()}


def test_many_short_runs_do_not_cost_a_run_of_last_night_its_place(runs: Path) -> None:
    run_of(runs, "night", days=0.6, seconds=30_000)
    for number in range(100):
        run_of(runs, f"hello-{number}")
    assert len(tidy(runs)) == 101


def test_runs_stay_for_so_many_days(runs: Path) -> None:
    for days in (0, 2, 29, 31, 89, 91):
        run_of(runs, f"{days}", days=days)
    assert tidy(runs, 0) == {"0", "2", "29", "31", "89", "91"}
    assert tidy(runs, 90) == {"0", "2", "29", "31", "89"}
    assert tidy(runs) == {"0", "2", "29"}


def test_of_runs_older_than_a_day_short_ones_go_first_where_they_need_too_much_room(runs: Path, monkeypatch) -> None:
    monkeypatch.setattr(old_runs, "ROOM", 4 * MIB)
    size = MIB - (64 << 10)  # and the other files
    run_of(runs, "long", days=20, seconds=3600, size=size)
    run_of(runs, "failed", days=19, why="failed", size=size)
    run_of(runs, "killed", days=18, why="killed", size=size)
    run_of(runs, "oldest", days=10, size=size)
    run_of(runs, "interrupted", days=9, why="signalled", size=size)
    run_of(runs, "short", days=8, size=size)
    run_of(runs, "young", size=8 * MIB)
    assert tidy(runs) == {"long", "failed", "killed", "short", "young"}
    monkeypatch.setattr(old_runs, "ROOM", 2 * MIB)
    assert tidy(runs) == {"failed", "killed", "young"}
    monkeypatch.setattr(old_runs, "ROOM", 0)
    assert tidy(runs) == {"young"}


def test_each_run_counts_for_something_so_that_there_are_not_too_many(runs: Path, monkeypatch) -> None:
    monkeypatch.setattr(old_runs, "ROOM", MIB)
    for number in range(10):
        run_of(runs, f"{number}", days=2 + number)
    assert tidy(runs) == {"0", "1", "2", "3"}


def test_a_run_that_goes_on_stays_whatever_its_age(runs: Path, monkeypatch) -> None:
    monkeypatch.setattr(old_runs, "ROOM", 0)
    run = run_of(runs, "run", days=400)
    events = os.open(run / "events.jsonl", os.O_WRONLY)
    folders.lock(events)
    assert tidy(runs) == {"run"}
    os.close(events)
    assert tidy(runs) == set()


def test_a_run_in_which_anything_was_written_lately_is_young(runs: Path) -> None:
    """Of one on another host, whose locks are not seen here."""
    run = run_of(runs, "run", days=400)
    os.utime(run / "rank-0.out")
    assert tidy(runs) == {"run"}


def test_the_runs_of_nodes_are_one(runs: Path) -> None:
    for node in ("node-0", "node-1", "node-1.1"):
        run_of(runs, "all-old", days=40, node=node)
    run_of(runs, "one-young", days=40, node="node-0")
    run_of(runs, "one-young", node="node-1")
    aged(runs / "one-young" / "node-0", 40)
    (run_of(runs, "one-empty", days=40, node="node-0") / "node-1").mkdir()
    (runs / "one-empty" / "node-1" / "events.jsonl").touch()  # it was killed as it began
    aged(runs / "one-empty", 40)
    assert tidy(runs) == {"one-young"}


def test_a_run_that_is_still_written_by_another_host_is_no_old_one(runs: Path, monkeypatch) -> None:
    monkeypatch.setattr(old_runs, "ROOM", 0)
    folder = run_of(runs, "quiet", days=2)
    (folder / "rank-0.out").write_text("step 1\n")
    assert tidy(runs) == {"quiet"}


def test_a_run_that_has_begun_again_since_it_was_looked_at_stays(runs: Path, monkeypatch) -> None:
    run_of(runs, "again", days=40)
    looks = iter([False, True])
    monkeypatch.setattr(old_runs, "goes_on", lambda folder: next(looks))
    assert tidy(runs) == {"again"}


# --- what is no run


def archive(runs: Path) -> None:
    run_of(runs / "it", "20250101-120000-ab12", days=300)


def archive_of_a_node(runs: Path) -> None:
    run_of(runs, "20250101-120000-ab12", days=300, node="node-0").rename(runs / "it")


def renamed(runs: Path) -> None:
    run_of(runs, "20250101-120000-ab12", days=300).rename(runs / "it")


def renamed_before_it_started(runs: Path) -> None:
    renamed(runs)
    started, rest = (runs / "it" / "events.jsonl").read_text().split("\n", 1)
    (runs / "it" / "events.jsonl").write_text(f"{started.replace('job_started', 'paused')}\n{rest}")


def renamed_with_a_suffix(runs: Path) -> None:
    run_of(runs, "20250101-120000-ab12", days=300).rename(runs / "20250101-120000-ab12.keep")


def empty(runs: Path) -> None:
    (runs / "it").mkdir()


def checkpoints(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "model.pt").touch()


def events_of_others(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "events.jsonl").write_text('{"loss": 0.1}\n')


def events_without_a_version(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "events.jsonl").write_text('{"event": "step", "at": 1.0, "mono": 1.0}\n')


def events_with_numbers(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "events.jsonl").write_text('{"v": 1, "event": 7, "at": 1.0, "mono": 1.0}\n')


def events_too_deep(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "events.jsonl").write_text("[" * 10_000 + "\n")


def events_without_an_end(runs: Path) -> None:
    (runs / "it").mkdir()
    (runs / "it" / "events.jsonl").write_text(json.dumps({"v": 1, "event": "notice", "at": 1.0, "mono": "x" * MIB}))


def linked_events(runs: Path) -> None:
    (runs / "it").mkdir()
    (run_of(runs.parent, "it", days=300) / "events.jsonl").rename(runs.parent / "events")
    (runs / "it" / "events.jsonl").symlink_to(runs.parent / "events")


def events_are_a_pipe(runs: Path) -> None:
    (runs / "it").mkdir()
    os.mkfifo(runs / "it" / "events.jsonl")


def linked_folder(runs: Path) -> None:
    (runs / "it").symlink_to(run_of(runs.parent / "elsewhere", "it", days=300))


def file(runs: Path) -> None:
    (runs / "it").write_text("notes")


def of_another_user(runs: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can arrange this")
    os.chown(run_of(runs, "it", days=300) / "events.jsonl", 54321, -1)


def test_a_run_that_was_ended_before_its_job_started_goes_if_it_has_a_name_that_we_make(runs: Path) -> None:
    name = "20250101-120000-ab12"
    run_of(runs, name, days=300)
    events = (runs / name / "events.jsonl").read_text()
    (runs / name / "events.jsonl").write_text(events.replace("job_started", "paused"))
    aged(runs, 300)
    assert tidy(runs) == set()


@pytest.mark.parametrize(
    "make",
    [
        archive, archive_of_a_node, renamed, renamed_before_it_started, renamed_with_a_suffix, empty, checkpoints,
        events_of_others, events_without_a_version, events_with_numbers, events_too_deep, events_without_an_end, linked_events,
        events_are_a_pipe, linked_folder, file, of_another_user,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_what_is_no_run_of_ours_stays(runs: Path, make, monkeypatch) -> None:
    monkeypatch.setattr(old_runs, "ROOM", 0)
    make(runs)
    run_of(runs, "z-run", days=40)
    aged(runs, 300)
    before = sorted(path for path in runs.parent.rglob("*/**/*") if "z-run" not in path.parts)
    (kept,) = {path.name for path in runs.iterdir()} - {"z-run"}
    assert tidy(runs, 1) == {kept}
    assert sorted(path for path in runs.parent.rglob("*/**/*") if "runs-" not in path.name) == before


# --- several at once, often, and in part


def test_what_another_job_has_looked_at_within_the_hour_is_left_alone(runs: Path) -> None:
    assert tidy(runs) == set()
    run_of(runs, "old", days=31)
    assert [*old_runs.tidy(str(runs), 30)] == []
    assert (runs / "old").exists()
    marker = runs.parent / "runs-tidied"
    for moment in (time.time() - 3700, time.time() + 1e6):  # the clock may have been wrong
        os.utime(marker, (moment, moment))
        run_of(runs, f"old-{moment}", days=31)
        for _ in old_runs.tidy(str(runs), 30):
            pass
        assert not [*runs.iterdir()]


def test_while_one_job_tidies_up_another_does_not(runs: Path) -> None:
    for number in range(5):
        run_of(runs, f"{number}", days=40)
    one = old_runs.tidy(str(runs), 30)
    next(one)
    assert [*old_runs.tidy(str(runs), 30)] == []
    one.close()  # its job has ended
    assert [*old_runs.tidy(str(runs), 30)]
    assert not [*runs.iterdir()]


def test_a_job_too_short_to_look_at_all_runs_leaves_that_to_the_next_one(runs: Path) -> None:
    tidy(runs)
    marker, long_ago = runs.parent / "runs-tidied", time.time() - 2 * DAY
    os.utime(marker, (long_ago, long_ago))
    for number in range(5):
        run_of(runs, f"{number}", days=40)
    short = old_runs.tidy(str(runs), 30)
    next(short)
    short.close()
    assert old_runs.last_tidied(str(runs)) == pytest.approx(long_ago)
    for _ in old_runs.tidy(str(runs), 30):
        pass
    assert not [*runs.iterdir()]
    assert old_runs.last_tidied(str(runs)) > long_ago + DAY


def test_a_removal_that_was_cut_short_shows_no_half_of_a_run_and_is_carried_on(runs: Path) -> None:
    for number in range(3):
        run_of(runs, f"{number}", days=40)
    steps = 0
    for _ in old_runs.tidy(str(runs), 30):
        steps += 1
        assert not [path for path in runs.iterdir() if len([*path.iterdir()]) < 3 and not path.name.startswith(".")]
    assert steps > 9
    for end in range(1, steps):
        (runs.parent / "runs-tidied").unlink(missing_ok=True)
        for number in range(3):
            if not (runs / f"{number}").exists():
                run_of(runs, f"{number}", days=40)
        tidying = old_runs.tidy(str(runs), 30)
        for _ in range(end):
            next(tidying)
        tidying.close()
        assert tidy(runs) == set()


# --- a disk that is full

FULL = """
mount -t tmpfs -o size=8m none "$1" || exit 77
exec "$2" -c "$3" "$1"
"""
IN_IT = """
import sys
from pathlib import Path
from ddplaunch.record import old_runs
from tests.runs import run_of
runs = Path(sys.argv[1], "runs")
MIB = 1 << 20
run_of(runs, "failed", days=0.5, why="failed", size=2 * MIB)
run_of(runs, "older", days=0.4, size=2 * MIB)
run_of(runs, "small", days=0.6)
run_of(runs, "newer", days=0.3, size=2 * MIB)
def left():
    for _ in old_runs.tidy(str(runs), 30):
        pass
    return sorted(path.name for path in runs.iterdir())
print(left())
Path(sys.argv[1], "data").write_bytes(bytes(MIB + (MIB >> 1) + (MIB >> 2)))
print(left())
"""


def test_a_run_younger_than_a_day_goes_only_where_the_disk_is_almost_full(tmp_path: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh"]
    done = subprocess.run([*inside, tmp_path, sys.executable, IN_IT], capture_output=True, text=True, check=False)
    if "unshare: " in done.stderr or done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["['failed', 'newer', 'older', 'small']", "['failed', 'newer', 'small']"], (
        done.stderr
    )


# --- what was removed


def test_it_is_known_when_and_why_a_run_was_removed(runs: Path, monkeypatch) -> None:
    run_of(runs, "old", days=31)
    monkeypatch.setattr(old_runs, "ROOM", 300 << 10)
    run_of(runs, "large.1", days=3)
    run_of(runs, "kept", days=2)
    before, _, after = time.strftime("%Y-%m-%d"), tidy(runs), time.strftime("%Y-%m-%d")
    found = old_runs.removals(str(runs))
    assert {name: one.why for name, one in found.items()} == {
        "old": "it was older than 30 days",
        "large.1": "runs older than a day had more than 0 GiB",
    }
    assert {one.date for one in found.values()} <= {before, after}


def test_a_long_list_of_removals_is_shortened_and_the_latest_stay(runs: Path) -> None:
    lines = [f"2026-01-01 run-{number:06} it was older than 30 days\n" for number in range(30_000)]
    (runs.parent / "removed-runs").write_text("".join(lines))
    tidy(runs)
    left = old_runs.removals(str(runs))
    assert 5_000 < len(left) < 15_000
    assert [*left][-1] == "run-029999"
    assert len({len(name) for name in left}) == 1


def test_a_list_that_is_none_does_no_harm(runs: Path) -> None:
    (runs.parent / "removed-runs").write_bytes(b"\xff\xfe \n\n x\n2026-01-01\n" + bytes(100))
    old_runs.removals(str(runs))
    (runs.parent / "removed-runs").unlink()
    os.mkfifo(runs.parent / "removed-runs")
    assert old_runs.removals(str(runs)) == {}
    assert DAY == old_runs.DAY


def test_a_list_of_another_user_is_not_believed(runs: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can arrange this")
    removed = runs.parent / "removed-runs"
    removed.write_text("2026-01-01 mine for no reason\n")
    assert "mine" in old_runs.removals(str(runs))
    os.chown(removed, 54321, -1)
    assert old_runs.removals(str(runs)) == {}
