"""What a job leaves behind on purpose: plan, events and summary, as the reference page describes them."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.record.events import SCHEMA
from ddplaunch.record.old_runs import last_tidied
from ddplaunch.system.process.tree import children, look
from tests.conftest import PATIENCE, Job, events_in, until
from tests.process.terminal import agent_of, held, stopped
from tests.runs import aged, run_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-folder.md"
COMMON = {"v": int, "event": str, "at": float, "mono": float}
TYPES = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int),
    "string or null": lambda value: value is None or isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "boolean or null": lambda value: value is None or isinstance(value, bool),
    "integer or null": lambda value: value is None or isinstance(value, int),
    "number": lambda value: isinstance(value, (int, float)),
    "number or null": lambda value: value is None or isinstance(value, (int, float)),
    "object or null": lambda value: value is None or isinstance(value, dict),
    "list of strings": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


# --- the reference page


def table(heading: str, columns: int) -> list[tuple[str, ...]]:
    """The rows of the tables of one chapter of the page that have so many columns, without their code marks."""
    (chapter,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    rows = [tuple(cell.strip().strip("`") for cell in line.strip("|").split(" | ")) for line in chapter.splitlines()]
    return [row for row in rows if len(row) == columns and row[0] not in ("event", "field", "---")]


def fields_of(data: dict[str, Any], *, free: tuple[str, ...] = ()) -> set[str]:
    """The fields of an object and of the objects in it, those in `free` aside: their keys are no names of ours."""
    names = set()
    for name, value in data.items():
        names.add(name)
        inner = value if isinstance(value, dict) and name not in free else {}
        names |= {f"{name}.{field}" for field in inner}
        for item in value if isinstance(value, list) else ():
            names |= {f"{name}[].{field}" for field in item} if isinstance(item, dict) else set()
    return names


def test_the_page_describes_every_field_of_plan_and_summary(job, program):
    job.run("--nproc-per-node", 2, program("behave"), "1=raises")
    plan = json.loads((job.folder / "plan.json").read_text())
    assert fields_of(plan, free=("reasons", "origins")) == {row[0] for row in table("plan.json", 2)}
    summary = json.loads((job.folder / "summary.json").read_text())
    assert fields_of(summary) == {row[0] for row in table("summary.json", 2)}


# --- events


def well(job, program):
    assert job.run("--nproc-per-node", 2, program("behave"), "all=done").status == 0


def failing(job, program):
    behaviours = ("0=raises_slowly", "1=dies_on_sign", "2=stubborn")
    job.start("--nproc-per-node", 3, "--grace-period", "0.2", program("behave"), *behaviours)
    job.sign("raised")
    (job.home / "signs" / "die").touch()
    assert job.wait().status == 1


def restarted(job, program):
    assert job.run("--nproc-per-node", 2, "--max-restarts", 1, program("behave"), "1=exit3", "0=daemon").status == 3


def not_started(job, program):
    broken = job.home / "broken"
    broken.write_bytes(b"\x00\x01 no program\n")
    broken.chmod(0o755)
    assert job.run("--nproc-per-node", 2, "--no-python", broken).status == 126


def signalled(job, program):
    # a group of its own: in that of tests whose shell has left, SIGTSTP would mean nothing
    process = job.behave("all=polite", process_group=0)
    process.send_signal(signal.SIGUSR1)
    job.signs("got", 2)
    process.send_signal(signal.SIGTSTP)
    until(lambda: job.events("job_suspended") and stopped([process.pid]), "the suspension")
    process.send_signal(signal.SIGCONT)
    until(lambda: job.events("job_resumed"), "the resumption")
    process.send_signal(signal.SIGINT)
    assert job.wait().status == 130


def noticed(job, program):
    process = job.start("--nproc-per-node", 2, "--requeue-on", "USR1", program("leaves"))
    job.signs("ready", 2)
    process.send_signal(signal.SIGUSR1)
    result = job.wait().expect(138)
    words = "the job is not requeued after SIGUSR1: not inside a Slurm job (SLURM_JOB_ID is not set)"
    assert result.err.splitlines()[-1] == f"ddplaunch: {words}"
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["why"], summary["first_failure"]) == ("left_after_notice", None)
    assert summary["left_after"] == {"signal": "SIGUSR1", "job": "", "sent": False, "text": words}


def front_killed(job, program):
    process = job.behave("all=default", stdout=-3, stderr=-3)
    process.kill()
    process.wait()
    job.nothing_left(patience=PATIENCE)


def unread(job, program):
    reader, writer = os.pipe()
    job.start("--nproc-per-node", 2, program("writes"), "flood", 12_000_000, stdout=writer)
    os.close(writer)
    job.signs("done", 2)
    while os.read(reader, 1 << 20):
        pass
    os.close(reader)
    assert job.wait().status == 0


def without_a_log(job, program):
    """The logs' places are taken by folders."""
    process = job.behave("1=dies_on_sign", options=("--max-restarts", 1))
    until(lambda: len(job.events("worker_started")) == 2, "both starts")
    for rank in range(2):
        (job.folder / f"rank-{rank}.out").unlink()
        (job.folder / f"rank-{rank}.out").mkdir()
    (job.home / "signs" / "die").touch()
    job.wait()
    assert process.returncode == 3


JOBS = (well, failing, restarted, not_started, signalled, noticed, front_killed, unread, without_a_log)


def test_jobs_write_the_events_of_the_schema_and_no_others(tmp_path, program):
    written = set()
    for kind in JOBS:
        home = tmp_path / kind.__name__
        home.mkdir()
        job = Job(home)
        try:
            kind(job, program)
            job.nothing_left()
        finally:
            job.kill_all()
        events = job.events()
        assert [event["event"] for event in events][:: len(events) - 1] == ["job_started", "job_ended"]
        assert [event["mono"] for event in events] == sorted(event["mono"] for event in events)
        for event in events:
            check(event)
            written.add(event["event"])
    # those of several nodes are in test_nodes_start.py, `paused` is in test_paused.py, `straggler` in
    # tests/torch
    assert written | {"paused", "straggler"} == {name for name in SCHEMA if not name.startswith("node_")}


def check(event: dict[str, Any]) -> None:
    """The event has the fields of the schema, each of its type."""
    fields = SCHEMA[event["event"]]
    assert set(event) == {*COMMON, *fields}, event
    assert all(isinstance(event[name], kind) for name, kind in COMMON.items()), event
    for name, description in fields.items():
        kind = re.split("[:,]", description)[0]
        assert TYPES[kind](event[name]), (event, name)


# --- plan and summary


def test_the_plan_says_what_the_workers_got(job, program):
    job.run("--nproc-per-node", 2, "--env", "COLOUR=blue", program("behave"), "all=done", "x")
    plan = json.loads((job.folder / "plan.json").read_text())
    assert (plan["v"], plan["world_size"], plan["run_id"]) == (1, 2, job.folder.name)
    assert plan["origins"]["nproc_per_node"] == "--nproc-per-node"
    for rank, worker in enumerate(plan["workers"]):
        assert worker["rank"] == rank
        assert worker["argv"][-2:] == ["all=done", "x"]
        assert worker["variables"]["RANK"] == str(rank)
        assert worker["variables"]["COLOUR"] == "blue"


def test_the_summary_tells_how_each_worker_ended_and_what_it_used(job):
    script = job.home / "works.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    used = bytes(bytearray(150 << 20))\n"
        "    while time.process_time() < 0.5: pass\n"
    )
    assert job.run("--nproc-per-node", 2, script).status == 0
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["status"], summary["why"], summary["restarts"]) == (0, "finished", 0)
    assert summary["first_failure"] is None
    small, large = summary["workers"]
    assert [worker["status"] for worker in (small, large)] == [0, 0]
    assert large["peak_rss"] - small["peak_rss"] > 100 << 20
    assert 1 << 20 < small["peak_rss"] < 100 << 20
    assert 0.5 <= large["cpu_seconds"] <= large["seconds"] + 0.1
    assert small["cpu_seconds"] < large["cpu_seconds"]
    assert large["seconds"] <= summary["seconds"]


def test_samples_tell_what_the_workers_used_unless_they_are_not_wanted(job, tmp_path):
    script = tmp_path / "works.py"
    script.write_text(
        "import time, ddplaunch\n"
        "end = time.monotonic() + 2.5\n"
        "while time.monotonic() < end: ddplaunch.progress(3); print('works', flush=True); time.sleep(0.1)  # a step\n"
    )
    job.run("--nproc-per-node", 2, script).expect(0)
    rows = [json.loads(line) for line in (job.folder / "samples.jsonl").read_text().splitlines()]
    assert rows
    assert set(rows[0]) == {"v", "mono", "generation", "ranks", "cpu", "memory", "step"}
    assert {row["ranks"] for row in rows} == {"0-1"}
    assert rows[0]["step"] == [3, 3]
    names = {row[0] for row in table("samples.jsonl", 2)}
    assert names == set(rows[0]) | {"gpu", "gpu_memory"}
    first = job.folder
    job.run("--nproc-per-node", 2, "--no-sample", script).expect(0)
    assert job.folder != first
    assert not (job.folder / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ("raises", {"status": 1, "signal": None, "how": "exit status 1", "error": "ValueError: boom of rank 1"}),
        ("killed", {"status": 137, "signal": 9, "how": "killed by SIGKILL", "error": None}),
    ],
)
def test_the_summary_names_the_first_failure(job, program, behaviour, failure):
    job.run("--nproc-per-node", 2, program("behave"), f"1={behaviour}")
    summary = json.loads((job.folder / "summary.json").read_text())
    place = {"rank": 1, "local_rank": 1, "host": socket.gethostname(), "pid": job.pids()[1]}
    where = summary["first_failure"].pop("where")
    assert (summary["why"], summary["first_failure"]) == ("failed", {**place, **failure})
    assert (where or "").startswith(str(program("behave"))) is (failure["error"] is not None)


def test_the_events_of_a_failure_have_the_exception_its_line_and_the_first_line_of_the_report(job, program):
    result = job.run("--nproc-per-node", 2, "--max-restarts", 1, program("behave"), "1=raises", "0=polite").expect(1)
    failed = [each for each in job.events("worker_exited") if each["rank"] == 1]
    assert [each["error"] for each in failed] == ["ValueError: boom of rank 1"] * 2
    assert all(each["where"].startswith(str(program("behave"))) and not each["follows"] for each in failed)
    assert all(0 < each["raised_at"] < each["mono"] for each in failed)
    [again] = job.events("generation_failed")
    assert f"error: {again['text']}\n" in result.err
    assert again["text"].startswith("rank 1 failed: ValueError: boom of rank 1")


def test_the_summary_names_a_worker_that_could_not_be_started(job, program):
    not_started(job, program)
    summary = json.loads((job.folder / "summary.json").read_text())
    assert (summary["why"], summary["status"]) == ("failed", 126)
    assert summary["first_failure"]["how"] == f"could not be started: {job.home}/broken: Exec format error"


# --- the folder itself


def test_the_folder_is_its_owners_alone(job, program):
    job.run("--nproc-per-node", 2, program("behave"), "1=raises", umask=0)
    folders = [job.folder, *(path for path in job.folder.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    above = [folder for folder in job.folder.parents if folder.is_relative_to(job.home / "state" / "ddplaunch")]
    assert not [folder for folder in above if folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    logs = list(job.folder.glob("rank-*"))
    assert {stat.S_IMODE(log.stat().st_mode) for log in logs} == {0o600}


def test_a_folder_that_somebody_puts_in_its_place_gets_nothing(job):
    logs = job.home / "logs"
    job.behave("all=default", options=("--log-dir", logs))
    (folder,) = logs.iterdir()
    until((folder / "attempt_0" / "1" / "stderr.log").exists, "the last log")
    moved, precious = job.home / "moved", job.home / "precious"
    precious.write_text("precious")
    folder.rename(moved)
    folder.mkdir()
    for name in ("events.jsonl", "summary.json", "summary.json.new"):
        (folder / name).symlink_to(precious)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait().status == 143
    assert precious.read_text() == "precious"
    assert json.loads((moved / "summary.json").read_text())["status"] == 143
    assert '"job_ended"' in (moved / "events.jsonl").read_text()


@pytest.mark.parametrize(("mode", "is_told"), [(0o777, True), (0o1777, False), (0o775, False)], ids=oct)
def test_a_place_where_anybody_may_replace_the_folder_is_told(job, program, mode, is_told):
    place = job.home / "open"
    place.mkdir()
    place.chmod(mode)
    result = job.run("--log-dir", place / "logs", program("behave"), "all=done")
    words = f"ddplaunch: warning: the folder of the logs may be replaced: any user may: {place} has no sticky bit"
    assert (words in result.err) is is_told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("mode", [0o1777, 0o755], ids=oct)
def test_a_place_whose_owner_may_replace_the_folder_is_told_also_behind_a_link(job, program, mode):
    place = job.home / "theirs"
    (place / "ours").mkdir(parents=True)
    (job.home / "link").symlink_to(place / "ours")
    os.chown(place, 54321, -1)
    place.chmod(mode)
    for logs in (place / "logs", job.home / "link/logs"):
        result = job.run("--log-dir", logs, program("behave"), "all=done")
        words = f"warning: the folder of the logs may be replaced: user 54321 may: {place} is theirs"
        assert words in result.err, result.err


@pytest.fixture
def runs(job) -> Path:
    """The folder of all runs of the job's user."""
    return Path(job.home, "state/ddplaunch/runs")


def test_the_nodes_of_a_second_run_of_one_name_do_not_lay_their_folders_into_the_first(job, program, runs):
    nodes = ("--simulate", "--nnodes", 2, "--nproc-per-node", 1, "--run-id", "baseline")
    for number in range(2):
        job.run(*nodes, "--log-dir", job.home / "logs", program("behave"), "all=done").expect(0)
        result = job.run(*nodes, program("behave"), "all=done").expect(0)
        name = "baseline.1" if number else "baseline"
        assert f"ddplaunch: logs in {runs / name}\n" in result.err
        assert {path.name for path in (runs / name).glob("*/rank-*.out")} == {"rank-0.out", "rank-1.out"}
    assert {path.name for path in runs.glob("*/node-*")} == {"node-0", "node-1"}
    assert len(list(job.home.glob("logs/baseline_*"))) == len(list(job.home.glob("logs/baseline.1_*"))) == 1


def test_a_second_run_of_one_name_is_called_by_the_name_of_its_folder(tmp_path, job, program, runs):
    (tmp_path / "other").mkdir()
    other, env = Job(tmp_path / "other"), {"XDG_STATE_HOME": str(job.home / "state")}
    alone = ("--run-id", "baseline", "--nproc-per-node", 1, program("behave"))
    job.run(*alone, "all=done").expect(0)
    job.start(*alone, "all=default")
    job.sign("ready-0")
    by_first_name = other.run("stop", "baseline", env=env)
    assert by_first_name.err.endswith("hint: baseline.1 runs: type `ddplaunch stop baseline.1`\n")
    assert by_first_name.status == 2
    assert "ddplaunch: baseline.1 has ended" in other.run("stop", "baseline.1", env=env).err
    second = job.wait()
    assert "ddplaunch: baseline.1: 1 worker, " in second.err
    assert f"ddplaunch: logs in {runs / 'baseline.1'}\n" in second.err


def test_the_run_of_a_job_goes_once_it_is_old_and_its_logs_are_said_to_be_removed(tmp_path, job, program, runs):
    assert job.run("--run-id", "single", "--nproc-per-node", 2, program("writes"), "both").status == 0
    assert job.run("--run-id", "simulated", "--simulate", "--nnodes", 2, program("writes"), "both").status == 0
    assert job.run("--run-id", "of-a-friend", "--nproc-per-node", 2, program("writes"), "both").status == 0
    (runs / "of-a-friend").rename(runs / "best")
    (runs.parent / "runs-tidied").unlink(missing_ok=True)  # an earlier job may have come to the end
    process = job.behave("all=default", options=("--run-id", "single-2"), workers=1)
    until(lambda: events_in(runs / "single-2", "worker_started"), "the events")
    until(lambda: last_tidied(str(runs)), "the end of its own tidying")
    assert {path.name for path in runs.iterdir()} == {"single", "simulated", "best", "single-2"}
    for folder in runs.iterdir():
        aged(folder, 31)
    (runs.parent / "runs-tidied").unlink(missing_ok=True)

    other = Job(tmp_path / "other")
    other.home.mkdir()
    env = {"XDG_STATE_HOME": str(job.home / "state")}
    assert other.run("--run-id", "keeps", "--keep-runs", 90, program("writes"), "both", env=env).status == 0
    assert {path.name for path in runs.iterdir()} >= {"single", "simulated", "best", "single-2"}
    (runs.parent / "runs-tidied").unlink(missing_ok=True)
    ends = other.start("--run-id", "young", program("behave"), "all=default", env=env)
    until(lambda: {path.name for path in runs.iterdir()} == {"best", "single-2", "keeps", "young"}, "the removal")
    ends.terminate()
    other.wait()

    for verb, named in (("logs", "single"), ("logs", "simu"), ("stop", "single")):
        result = other.run(verb, named, env=env)
        whole = "simulated" if named == "simu" else named
        said = rf"error: run {whole} was removed on \d{{4}}-\d\d-\d\d: it was older than 30 days\n\nhint: `--keep-runs DAYS`"
        assert re.match(said, result.err), result.err
        assert result.status == 2
    process.terminate()
    job.wait()
    job.nothing_left()
    other.nothing_left()


MAKE = """
import os, sys, time
from ddplaunch.record import folders, old_runs
root, name, go = sys.argv[1:]
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.001)
_, _, events = folders.make(root, name)
folders.lock(events)
for _ in old_runs.tidy(root, 30):
    pass
print(None)
"""


def test_jobs_that_tidy_up_at_the_same_time_do_not_disturb_each_other(job, runs):
    for number in range(300):  # so many that all of them are at it at once
        run_of(runs, f"old-{number}", days=31)
    go = job.home / "go"
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKE, runs, f"new-{at}", go], stdout=subprocess.PIPE, text=True)
        for at in range(4)
    ]
    for maker in makers:
        assert maker.stdout.readline() == "ready\n"
    go.touch()
    assert [maker.communicate()[0] for maker in makers] == ["None\n"] * 4
    assert {path.name for path in runs.iterdir()} == {f"new-{at}" for at in range(4)}


def test_the_end_is_the_last_event_even_if_many_processes_end_at_once(job: Job) -> None:
    leaves_many = "i=0; while [ $i -lt 60 ]; do sleep 600 & i=$((i+1)); done; exit 0"
    assert job.run("--nproc-per-node", 2, "--no-python", "sh", "-c", leaves_many).status == 0
    assert json.loads((job.folder / "events.jsonl").read_text().splitlines()[-1])["event"] == "job_ended"


@pytest.mark.parametrize("signum", [signal.SIGTERM, None], ids=["stopped", "failed"])
def test_what_is_left_to_a_writer_whose_disk_hangs_in_any_state_is_written_later(job, signum):
    """As one in FUSE, for which nobody waits in uninterruptible sleep."""
    process = job.behave("all=raises_when_told", workers=1)
    until(lambda: job.events("worker_started"), "the folder")
    (writer,) = {*children(agent_of(process.pid))} - {*job.pids().values()}
    with held(writer):
        if signum:
            process.send_signal(signum)
        else:
            (job.home / "signs" / "fail-0").touch()
        result = job.wait().expect(128 + signum if signum else 1)
        assert "does not answer" in result.err
        assert job.left() == [writer]
    job.nothing_left(patience=PATIENCE)
    assert json.loads((job.folder / "summary.json").read_text())["status"] == result.status


def test_a_writer_that_is_killed_is_named_with_what_follows_and_the_job_goes_on(job):
    process = job.behave("all=done_when_told")
    (writer,) = {*children(agent_of(process.pid))} - {*job.pids().values()}
    os.kill(writer, signal.SIGKILL)
    until(lambda: (now := look(writer)) is None or now.state in "ZX", "the end of the writer")
    (job.home / "signs" / "go").touch()
    result = job.wait().expect(0)
    lost = f"the process that writes the logs (pid {writer}) has ended, perhaps killed: output is shown, but no longer kept"
    assert result.err.count(f"ddplaunch: warning: {lost}\n") == 1


def test_what_a_simulated_node_leaves_to_a_writer_whose_disk_hangs_is_written_later(job, program):
    job.start("--simulate", "--nnodes", 2, "--nproc-per-node", 1, program("behave"), "all=default")
    pids = {rank: int(job.sign(f"ready-{rank}")) for rank in (0, 1)}
    agent = look(pids[1]).parent
    (writer,) = {*children(agent)} - {pids[1]}
    with held(writer):
        job.process.send_signal(signal.SIGTERM)
        assert job.wait().status == 143
        assert job.left() == [writer]
    job.nothing_left(patience=PATIENCE)
