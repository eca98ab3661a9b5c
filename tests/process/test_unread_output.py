"""Nobody reads what the command shows: the job goes on, is watched as ever, and its logs have everything."""

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import PATIENCE, events_in, until

FLOOD = 12_000_000  # bytes of each of two workers: far more than all pipes and queues hold


@pytest.fixture
def pipe():
    """A pipe for the command's stdout; the test may close either end."""
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            pass


def read_all(fd: int) -> bytes:
    """Read to the end."""
    return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))


def flood_of(rank: int) -> bytes:
    """What writes.py flood writes."""
    return b"".join(b"%d:%06d:" % (rank, at) + b"z" * 990 + b"\n" for at in range(FLOOD // 1000))


def test_a_reader_that_leaves_costs_the_job_nothing(job, program, pipe):
    reader, writer = pipe
    job.start("--nproc-per-node", 2, program("writes"), "after_the_reader_left", stdout=writer)
    os.close(writer)
    assert os.read(reader, 100).endswith(b"first\n")
    os.close(reader)
    (job.home / "signs" / "reader-gone").touch()
    result = job.wait().expect(5)
    assert "rank 1 failed: exit status 5" in result.err
    assert [len((job.folder / f"rank-{rank}.out").read_text().splitlines()) for rank in range(2)] == [1001, 1001]


def test_workers_are_held_up_for_seconds_only_and_the_reader_is_told_what_it_missed(job, program, pipe):
    reader, writer = pipe
    job.start("--nproc-per-node", 2, program("writes"), "flood", FLOOD, stdout=writer)
    os.close(writer)
    job.signs("done", 2)  # though nobody has read anything
    held = time.monotonic() - job.began
    shown = read_all(reader)
    result = job.wait().expect(0)
    assert 5 <= held < 40
    lines = shown.splitlines()
    assert all(line.startswith(b"[") and len(line) == 1003 for line in lines)
    (dropped,) = [event["bytes"] for event in job.events("output_dropped")]
    assert dropped + len(shown) == 2 * (FLOOD // 1000) * 1004
    assert f"{dropped:,} bytes of output are not shown here" in result.err
    assert [(job.folder / f"rank-{rank}.out").read_bytes() == flood_of(rank) for rank in range(2)] == [True, True]


def test_of_several_generations_all_that_was_missed_is_told(nodes, program, pipe):
    reader, writer = pipe
    args = ("--rdzv-conf", "last_call_timeout=0", "--nproc-per-node", 1, "--max-restarts", 1)
    nodes.node(*nodes.c10d("1:2"), *args, program("writes"), "then_exits", FLOOD, stdout=writer)
    os.close(writer)

    def events(kind):
        return [
            event for file in nodes.home.glob("state/*/runs/*/events.jsonl") for event in events_in(file.parent, kind)
        ]

    until(lambda: len(events("swept")) == 2, "the end of both generations")
    shown = read_all(reader)
    assert nodes.statuses() == [7]
    dropped = [event["bytes"] for event in events("output_dropped")]
    assert min(dropped) > 0
    assert sum(dropped) + len(shown) == 2 * FLOOD


def test_a_reader_that_comes_back_in_time_misses_nothing(job, program, pipe):
    reader, writer = pipe
    job.start("--nproc-per-node", 2, program("writes"), "flood", FLOOD, stdout=writer)
    os.close(writer)
    blocked = until(lambda: log_sizes(job) and stalled(job), "the workers to be held up")
    assert blocked < 2 * FLOOD
    shown = read_all(reader)
    assert job.wait().status == 0
    assert len(shown) == 2 * (FLOOD // 1000) * 1004
    assert not job.events("output_dropped")


def log_sizes(job) -> int:
    """How much of what the workers wrote was taken in so far."""
    return sum(file.stat().st_size for file in job.home.glob("state/ddplaunch/runs/*/rank-*.out"))


def stalled(job) -> int:
    """The bytes taken in so far, if there have been no more of them for half a second."""
    before = log_sizes(job)
    give_up = time.monotonic() + 0.5
    while time.monotonic() < give_up:
        if log_sizes(job) != before:
            return 0
        time.sleep(0.01)
    return before


@pytest.mark.parametrize("state", ["held", "let go"])
def test_a_crash_is_handled_at_once_while_nobody_reads(job, program, pipe, state):
    reader, writer = pipe
    job.start("--nproc-per-node", 3, program("behave"), "all=chatter", "1=dies_on_sign", stdout=writer)
    os.close(writer)
    until(lambda: log_sizes(job) and stalled(job), "the workers to be held up")
    if state == "let go":
        before = log_sizes(job)
        until(lambda: log_sizes(job) > before + 1_000_000, "the workers to go on")
    (job.home / "signs" / "die").touch()
    (ended,) = until(lambda: job.events("job_ended"), "the end of the job")
    assert ended["status"] == 3
    assert job.process.poll() is None  # it still has something to show
    exited, stop, *_ = job.events("worker_exited", "stop_sent")
    assert (exited["event"], exited["rank"], stop["event"]) == ("worker_exited", 1, "stop_sent")
    assert stop["mono"] - exited["mono"] < 5  # seconds: the workers are held up for as long
    read_all(reader)
    result = job.wait().expect(3)
    assert "rank 1 failed" in result.err
    assert "last words of rank 1" in result.err


def test_a_signal_to_stop_ends_the_command_though_nobody_reads(job, program, pipe):
    _, writer = pipe
    streams = {"stdout": writer, "stderr": subprocess.DEVNULL}
    process = job.start("--nproc-per-node", 2, program("behave"), "all=chatter", **streams)
    os.close(writer)
    until(lambda: log_sizes(job) and stalled(job), "the workers to be held up")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143


@pytest.mark.parametrize("moment", ["stop_sent", "job_ended"])
def test_a_command_that_only_waits_for_its_reader_or_soon_will_can_be_stopped(job, program, pipe, moment):
    _, writer = pipe
    behaviours = ("all=chatter", "1=dies_on_sign", "2=stubborn")
    options = ("--nproc-per-node", 3, "--grace-period", 1)
    process = job.start(*options, program("behave"), *behaviours, stdout=writer)
    os.close(writer)
    until(lambda: log_sizes(job) and stalled(job), "the workers to be held up")
    (job.home / "signs" / "die").touch()
    until(lambda: job.events(moment), "the moment")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
def test_output_that_cannot_be_written_is_said_and_makes_the_status_1_unless_the_job_has_one(job):
    for own, status in (0, 1), (3, 3):
        with open("/dev/full", "w") as full:
            result = job.run("--nproc-per-node", 2, "--no-python", "sh", "-c", f"echo; exit {own}", stdout=full)
        assert result.status == status
        assert result.err.count("error: cannot write to stdout: no space left on device\n") == 1


def test_a_stdout_that_somebody_made_non_blocking_loses_nothing(job, program, pipe):
    """The flag belongs to the open file, which the command shares with its caller."""
    reader, writer = pipe
    os.set_blocking(writer, False)
    job.start("--nproc-per-node", 2, program("writes"), "flood", 2_000_000, stdout=writer)
    os.close(writer)
    shown = read_all(reader)
    assert job.wait().status == 0
    assert len(shown) == 2 * 2000 * 1004
