"""What node 0 tells programs outside: errands one after another, and the figures in Prometheus' format."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

from ddplaunch.launcher.node.outward import (
    END_WITHIN,
    Errands,
    Figures,
    MetricsFile,
    Notifier,
    render,
    run_command,
    write_whole,
)
from ddplaunch.record.events import Event
from ddplaunch.spec.outcome import Progress
from tests.loops import FakeLoop, Warnings

SAMPLE = re.compile(r'ddplaunch_[a-z_]+\{([a-z]+="([^"\\\n]|\\[\\"n])*",?)+\} (-?[0-9.]+(e[+-]?\d+)?|NaN|[+-]Inf)')
FIGURES = Figures(
    run_id="20261124-120000-k7qx",
    program='odd "name"\n\\.py',
    world_size=8,
    nnodes=2,
    restarts=1,
    started_at=1000.0,
    progressed_at=1234.5,
    progress=Progress(step=412, total=1000, metrics=(("loss", "nan"), ('a"} 1\n\x1b[31m', "1e+05"), ("top", "-inf"))),
)


def test_errands_are_done_one_after_another_and_the_oldest_are_dropped_where_too_many_wait():
    loop, reporter = FakeLoop(), Warnings()
    errands = Errands(loop, reporter, "--notify x")
    for name in "abcd":
        errands.add(lambda name=name: name, most=2)
    assert [asked.question() for asked in loop.questions] == ["a"]
    assert errands.is_busy
    for _ in range(3):
        loop.questions[-1].answer_with("it failed")
    assert [asked.question() for asked in loop.questions] == ["a", "c", "d"]
    assert not errands.is_busy
    assert reporter.warned == ["--notify x: it failed"]  # once


def test_an_errand_that_no_kill_ends_is_the_last():
    loop, reporter = FakeLoop(), Warnings()
    errands = Errands(loop, reporter, "--metrics-file x")
    errands.add(str, most=2)
    errands.add(str, most=2)
    loop.questions[-1].give_up()
    errands.add(str, most=2)
    assert len(loop.questions) == 1
    assert not errands.is_busy
    assert reporter.warned == ["--metrics-file x: did not end in time, and is not tried again"]


def test_at_the_end_one_limit_counts_for_all_and_the_last_has_half_of_it():
    loop = FakeLoop()
    errands, began = Errands(loop, Warnings(), "--notify x"), loop.now()
    for name in "abcd":
        errands.add(lambda name=name: name, most=9)
    errands.end_in_time()
    while errands.is_busy:
        loop.run_once()
    assert [asked.question() for asked in loop.questions] == ["a", "d"]
    assert loop.now() - began == END_WITHIN


def test_at_the_end_errands_that_are_done_in_time_are_all_done():
    loop, reporter = FakeLoop(), Warnings()
    errands = Errands(loop, reporter, "--notify x")
    for name in "abc":
        errands.add(lambda name=name: name, most=9)
    errands.end_in_time()
    while errands.is_busy:
        loop.questions[-1].answer_with("")
    assert [asked.question() for asked in loop.questions] == ["a", "b", "c"]
    assert reporter.warned == []


def test_the_important_events_are_told_with_the_run_that_they_are_of():
    loop, reporter = FakeLoop(), Warnings()
    notifier = Notifier(loop, reporter, "tell", {})
    started = {"run_id": "20261124-120000-k7qx", "program": "train.py", "world_size": 2}
    for name, fields in (("job_started", started), ("worker_started", {"rank": 0}), ("job_ended", {"status": 1})):
        notifier(Event(name, 1.0, fields))
        if notifier.errands.is_busy:
            loop.questions[-1].answer_with("")
    said = [asked.question.args[2] for asked in loop.questions]
    assert [(one["event"], one["name"], one["program"]) for one in said] == [
        ("job_started", "k7qx", "train.py"),
        ("job_ended", "k7qx", "train.py"),
    ]
    assert said[1]["status"] == 1
    assert reporter.warned == []


def test_the_command_gets_the_event_and_its_failure_is_described(tmp_path):
    assert run_command(f"cat > {tmp_path}/said", {"PATH": "/bin:/usr/bin"}, {"event": "job_ended"}) == ""
    assert (tmp_path / "said").read_text() == '{"event": "job_ended"}\n'
    assert run_command("exit 3", {}, {}) == "exit status 3"
    assert run_command("kill -TERM $$", {}, {}) == "killed by signal 15"  # which the agent has blocked
    assert run_command("exec <&-; exec true", {}, {"text": "x" * 1_000_000}) == ""  # it does not read


def test_every_line_is_one_that_prometheus_reads():
    lines = render(FIGURES).splitlines()
    samples = [line for line in lines if not line.startswith("# ")]
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    assert all(line.isprintable() for line in lines)
    names = {line.partition("{")[0] for line in samples}
    assert {line.split()[2] for line in lines if line.startswith("# TYPE ")} == names
    assert all(sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1 for name in names)
    assert 'ddplaunch_last_progress_timestamp_seconds{run="20261124-120000-k7qx"} 1234.5' in samples
    assert 'ddplaunch_metric{run="20261124-120000-k7qx",name="loss"} NaN' in samples


def test_figures_are_written_every_15_s_and_at_the_end():
    loop, reporter = FakeLoop(), Warnings()
    found: list[Figures | None] = [None, FIGURES, FIGURES, FIGURES]
    progress = SimpleNamespace(ask=lambda done: done(), figures=lambda: found.pop(0))
    file = MetricsFile(loop, reporter, "/x.prom", progress)
    counts = []
    for seconds in (0, 1, 14, 1):
        loop.pass_time(seconds)
        counts.append(len(loop.questions))
        if file.errands.is_busy:
            loop.questions[-1].answer_with("")
    file(Event("job_ended", 1.0, {}))
    assert counts == [0, 1, 1, 2]
    assert len(loop.questions) == 3
    assert (found, reporter.warned) == ([], [])


def test_a_file_is_replaced_as_a_whole_or_the_reason_is_given(tmp_path):
    path = tmp_path / "job.prom"
    assert write_whole(str(path), "one") == ""
    assert write_whole(str(path), "two") == ""
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("job.prom", "two")]
    (tmp_path / "folder").mkdir()
    assert write_whole(str(tmp_path / "folder"), "x") == "could not be written: Is a directory"
    os.mkfifo(tmp_path / "pipe")
    assert write_whole(str(tmp_path / "pipe"), "x") == "could not be written: not a regular file"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "job.prom", "pipe"]
    assert write_whole(str(tmp_path / "none" / "job.prom"), "") == "could not be written: No such file or directory"
