"""What `ddplaunch logs` shows of the folder of a run, whatever lies in it."""

import json
import os
import resource
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record import log as log_module
from ddplaunch.record import run_socket
from ddplaunch.record.folders import lock
from ddplaunch.record.log import BoundedLog, LogTimes, offset_at
from ddplaunch.record.log_reader import LogFile, LogReader, logs_of
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import compress
from ddplaunch.tools.runs import choice, logs

NOW = 1000.0


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What runs on this machine meanwhile is none of these tests'."""
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(tmp_path / "none"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two ranks that has ended."""
    folder = tmp_path / "state/ddplaunch/runs/run"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"world_size": 3}))
    (folder / "summary.json").write_text('{"status": 3}')
    for rank in (0, 1):
        (folder / f"rank-{rank}.out").write_text(f"one of {rank}\ntwo of {rank}\nno end")
        (folder / f"rank-{rank}.err").write_text("")
    return folder


def shown(capfdbinary: pytest.CaptureFixture[bytes], run: Path, named: str | None = None, **options: Any) -> bytes:
    """What is shown with these options."""
    env = {"XDG_STATE_HOME": str(run.parents[2])}
    assert logs.show(env, named, logs.wanted(now=NOW, **options)) == 0
    return capfdbinary.readouterr().out


def test_ranks_come_one_after_the_other_and_several_are_told_apart(run, capfdbinary):
    assert shown(capfdbinary, run, ranks="1") == b"one of 1\ntwo of 1\nno end\n"
    assert shown(capfdbinary, run) == b"".join(
        b"[%d] one of %d\n[%d] two of %d\n[%d] no end\n" % ((r,) * 5) for r in (0, 1)
    )
    assert shown(capfdbinary, run, str(run), pattern="^two") == b"[0] two of 0\n[1] two of 1\n"
    assert shown(capfdbinary, run, "ru", pattern="d$", ranks="0", follow=True) == b"no end\n"


@pytest.mark.parametrize(
    ("named", "options", "message"),
    [
        ("other", {}, "there is no run other"),
        ("run2", {}, "there is no run run2"),
        ("./nowhere", {}, "no such file or directory"),
        (None, {"ranks": "7"}, "there is no rank 7 in run: it has ranks 0-2"),
        (None, {"ranks": "0,2"}, "there is no log of rank 2 of run here"),
        (None, {"ranks": "1-"}, "expected ranks"),
        (None, {"ranks": "3-1"}, "expected ranks"),
        (None, {"ranks": "0-99999999"}, "expected ranks"),
        (None, {"pattern": "("}, "--grep ("),
        (None, {"tail": "-3"}, "-n -3: expected a number of lines"),
        (None, {"tail": "1e3"}, "-n 1e3: expected"),
        (None, {"since": "yesterday"}, "--since yesterday: expected"),
        (None, {"since": "24:05"}, "--since 24:05: expected"),
        (None, {"since": "2026-11-31"}, "--since 2026-11-31: expected"),
        (None, {"since": "2999-01-01T10:00"}, "--since 2999-01-01T10:00: that time is still to come"),
    ],
)
def test_what_there_is_not_is_said_in_one_error(run, capfdbinary, named, options, message):
    with pytest.raises(LaunchError) as raised:
        shown(capfdbinary, run, named, **options)
    assert message in raised.value.message
    assert raised.value.hint


def test_the_tail_is_that_of_each_log_of_the_lines_that_fit(run, capfdbinary):
    assert shown(capfdbinary, run, tail="1") == b"[0] no end\n[1] no end\n"
    assert shown(capfdbinary, run, tail="2", pattern=" of ", ranks="1") == b"one of 1\ntwo of 1\n"
    assert shown(capfdbinary, run, tail="0") == b""
    assert shown(capfdbinary, run, tail="999", ranks="0", follow=True) == b"one of 0\ntwo of 0\nno end\n"


def test_a_run_that_is_not_there_points_to_those_that_are_kept(run, capfdbinary):
    with pytest.raises(LaunchError) as raised:
        shown(capfdbinary, run, "other")
    assert raised.value.hint == "`ddplaunch ps --all` lists your runs"


@pytest.mark.parametrize("ranks", [None, "1"])
def test_of_a_run_that_was_typed_here_the_hosts_are_named_that_have_its_logs(run, capfdbinary, ranks):
    for log in run.glob("rank-*"):
        log.unlink()
    (run / "plan.json").write_text(json.dumps({"world_size": 3, "workers": []}))
    rows = [{"v": 1, "event": "node_joined", "at": 1.0, "mono": 1.0, "host": host} for host in ("gpu02", "", "gpu01")]
    rows += [{"v": 1, "event": "job_started", "at": 1.0, "mono": 1.0, "program": "train.py", "host": "login1"}]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(LaunchError, match="the logs of run are on its hosts: gpu01, gpu02") as raised:
        shown(capfdbinary, run, ranks=ranks)
    assert "`ssh gpu01 " in str(raised.value.hint)
    assert "ddplaunch logs run` shows those of gpu01" in str(raised.value.hint)


@pytest.mark.parametrize("ranks", [None, "0"])
def test_logs_that_will_never_come_are_not_waited_for(run, capfdbinary, ranks):
    """A log is made before its worker starts; a single worker on a terminal has none."""
    for log in run.glob("rank-*"):
        log.unlink()
    (run / "summary.json").unlink()
    (run / "events.jsonl").write_text('{"event": "worker_started", "rank": 0}\n')
    held = os.open(run / "events.jsonl", os.O_RDONLY)
    lock(held)
    try:
        with pytest.raises(LaunchError, match="there "):
            shown(capfdbinary, run, follow=True, ranks=ranks)
    finally:
        os.close(held)


def test_a_folder_that_is_none_of_a_run_has_no_heading(run, tmp_path, capfd):
    want = logs.wanted(now=NOW)
    with pytest.raises(LaunchError) as raised:
        logs.show({"XDG_STATE_HOME": str(run.parents[2])}, str(tmp_path), want)
    assert raised.value.message == f"there are no logs in {tmp_path}"
    assert (raised.value.hint or "").startswith("that is no folder of a run; ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("since", "then"),
    [
        ("90s", "2026-11-22T14:03:30"),
        ("14:05", "2026-11-22T14:05:00"),
        ("14:05:01", "2026-11-21T14:05:01"),
        ("9:30", "2026-11-22T09:30:00"),
        ("9:30:07", "2026-11-22T09:30:07"),
        ("2026-11-20", "2026-11-20T00:00:00"),
        ("2026-11-20 23:59", "2026-11-20T23:59:00"),
        ("2026-11-22T14:05", "2026-11-22T14:05:00"),
        ("2026-11-22T09:05:00-04:00", "2026-11-22T14:05:00"),
    ],
)
def test_since_is_a_span_a_time_of_day_the_last_one_or_a_date_of_the_time_zone_here(monkeypatch, since, then):
    monkeypatch.setenv("TZ", "UTC-1")
    time.tzset()
    try:
        now = datetime.fromisoformat("2026-11-22T14:05:00").timestamp()
        assert logs.beginning(since, now) == datetime.fromisoformat(then).timestamp()
        assert logs.wanted(now=now, since=since).of_yesterday == (since if since == "14:05:01" else "")
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.frozensets(st.integers(0, 500), min_size=1))
def test_ranks_are_read_as_they_are_written(ranks):
    assert choice.ranks_meant(compress(ranks)) == ranks


def test_of_bars_the_last_state_is_shown_each_after_its_rank(run, capfdbinary):
    bar = b"start\n\r  0%| | 0/2\r 50%| | 1/2\r100%| | 2/2\nend\n\r 50%| | 1/2"
    for rank in (0, 1):
        (run / f"rank-{rank}.out").write_bytes(bar)
    (run / "rank-1.err").write_bytes(b"\x1b[?25lone\n10%\r\x1b[2K\x1b[1A\x1b[2Kone\n90%\n\x1b[?25h")
    states = [b"start", b"100%| | 2/2", b"end", b" 50%| | 1/2"]
    lines = [b"[%d] %b" % (rank, state) for rank in (0, 1) for state in states]
    assert shown(capfdbinary, run).splitlines() == [*lines, b"[1] one", b"[1] 90%"]
    assert shown(capfdbinary, run, pattern="100%") == b"[0] 100%| | 2/2\n[1] 100%| | 2/2\n"


def test_a_bar_that_is_followed_is_a_line_now_and_then(tmp_path):
    path = tmp_path / "rank-0.err"
    path.touch()
    log = logs._ShownLog(LogFile(0, 0, "err", str(tmp_path), path.name), None)
    found: list[bytes] = []
    with path.open("ab", buffering=0) as file:
        for tick in range(150):  # fifteen seconds, ten states a second
            file.write(b"\r%3d/150" % tick)
            found += log.lines(tick / 10)
        file.write(b"\r150/150\n")
    assert [*found, *log.rest()] == [b" 10/150\n", b"111/150\n", b"150/150\n"]


def test_logs_as_torchrun_lays_them_are_shown_by_rank_one_generation_after_the_other(tmp_path, capfdbinary):
    folder = tmp_path / "logs/run_1"
    for attempt in (0, 1, 10):
        for local_rank in (0, 1):
            place = folder / f"attempt_{attempt}/{local_rank}"
            place.mkdir(parents=True)
            (place / "stdout.log").write_text(f"{attempt}\n")
            (place / "error.json").write_text("{}")
    (folder / "plan.json").write_text(
        json.dumps({"world_size": 4, "workers": [{"rank": 2, "local_rank": 0}, {"rank": 3, "local_rank": 1}]})
    )
    assert shown(capfdbinary, folder, str(folder), ranks="3") == b"0\n1\n10\n"
    (folder / "plan.json").write_text("nonsense")
    assert shown(capfdbinary, folder, str(folder), ranks="1") == b"0\n1\n10\n"


def test_a_log_beyond_its_limit_is_followed_through_its_segments_and_nothing_is_shown_twice(tmp_path):
    log = BoundedLog(tmp_path / "rank-0.out", limit=600)
    reader = LogReader(LogFile(0, 0, "out", str(tmp_path), "rank-0.out"))
    found: list[bytes] = []
    for number in range(100):
        log.write(b"line %03d\n" % number)
        found += reader.lines()
    assert found == [b"line %03d\n" % number for number in range(100)]
    late = list(LogReader(LogFile(0, 0, "out", str(tmp_path), "rank-0.out")).lines())
    assert [line for line in late if line.startswith(b"[ddplaunch")] == [
        b"[ddplaunch: a part is left out here: the log had reached its limit]\n"
    ]
    assert late[-1] == b"line 099\n"
    log.close()
    assert list(reader.lines()) == []
    reader.close()


def test_what_is_no_file_ends_and_a_line_without_end_is_cut(tmp_path):
    os.mkfifo(tmp_path / "rank-0.out")
    (tmp_path / "rank-1.out").symlink_to("/dev/zero")
    (tmp_path / "rank-2.out").write_bytes(b"x" * (3 << 20))
    (tmp_path / "rank-3.out").mkdir()
    os.mkfifo(tmp_path / "rank-4.out")
    writer = os.open(tmp_path / "rank-4.out", os.O_RDWR)
    for rank, size in ((0, 0), (1, 0), (2, 3 << 20), (3, 0), (4, 0)):
        reader = LogReader(LogFile(rank, 0, "out", str(tmp_path), f"rank-{rank}.out"))
        lines = [*reader.lines(), *reader.rest()]
        assert sum(len(line) - 1 for line in lines) == size
        reader.close()
    os.close(writer)


def test_a_log_that_cannot_be_read_is_named_and_the_others_are_shown(run, capfdbinary):
    (run / "rank-0.out").unlink()
    os.mkfifo(run / "rank-0.out")
    assert logs.show({"XDG_STATE_HOME": str(run.parents[2])}, None, logs.wanted(now=NOW, follow=True)) == 1
    out, err = capfdbinary.readouterr()
    assert out == b"[1] one of 1\n[1] two of 1\n[1] no end\n"
    assert err.count(b"rank-0.out cannot be read: not a regular file") == 1


@pytest.mark.parametrize("kind", ["pipe", "endless", "deep", "long"])
def test_whatever_has_the_name_of_a_file_of_ours_the_logs_are_shown(run, capfdbinary, kind):
    for name in ("plan.json", "summary.json", "events.jsonl", "log-times"):
        path = run / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        elif kind == "deep":
            path.write_text("[" * 100_000)
        else:
            path.touch()
            os.truncate(path, 1 << 40)
    assert shown(capfdbinary, run, ranks="1", since="5m") == b"one of 1\ntwo of 1\nno end\n"
    assert shown(capfdbinary, run, "run", ranks="1", follow=True) == b"one of 1\ntwo of 1\nno end\n"


def test_more_logs_are_followed_than_a_shell_allows_open_files(run):
    for rank in range(2, 100):
        (run / f"rank-{rank}.out").write_text("line\n")
    events = os.open(run / "events.jsonl", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    lock(events)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-m", "ddplaunch", "logs", "-f", str(run)]
    with subprocess.Popen(["prlimit", f"--nofile=50:{hard}", *command], stdout=PIPE, stderr=PIPE) as following:
        assert following.stdout is not None
        for _ in range(98 + 4):  # two of the others have two whole lines each
            following.stdout.readline()
        (run / "rank-99.out").write_text("line\nlater\n")
        assert following.stdout.readline() == b"[99] later\n"
        os.close(events)
        _, err = following.communicate(timeout=60)
    assert b"has ended with status 3" in err
    assert following.returncode == 0


def test_since_leaves_out_what_was_written_before(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    times = LogTimes(folder)
    for at, offset in ((100.0, 0), (105.0, 10), (111.5, 20), (300.0, 500)):
        times.note("rank-0.out", offset, at)
        times.note("rank-1.out", 7 * offset, at)
    os.close(folder)
    assert [offset_at(str(tmp_path), "rank-0.out", at) for at in (50, 100, 112, 299, 300)] == [0, 0, 20, 20, 500]
    assert offset_at(str(tmp_path), "rank-2.out", 300) == 0
    (tmp_path / "rank-0.out").write_bytes(b"x" * 499 + b"\nnew\n")
    assert list(LogReader(LogFile(0, 0, "out", str(tmp_path), "rank-0.out"), since=301.0).lines()) == [b"new\n"]


def test_the_times_of_a_run_of_months_take_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "_DOUBLES_EVERY", 1000)
    folder = os.open(tmp_path, os.O_RDONLY)
    times = LogTimes(folder)
    for at in range(0, 1_000_000, 10):
        times.note("rank-0.out", at, float(at))
    os.close(folder)
    assert (tmp_path / log_module.TIMES).stat().st_size < 14_000


def test_the_logs_of_a_rank_that_two_nodes_had_come_in_the_order_of_nodes(tmp_path):
    for node in range(12):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        (folder / "rank-1.out").touch()
    assert [log.folder for log in logs_of(str(tmp_path))] == [f"{tmp_path}/node-{node}" for node in range(12)]
