"""`ddplaunch profile` of jobs that cannot be profiled: each reason in a sentence, and the job goes on."""

import signal
import subprocess

import pytest

from ddplaunch.cli import main
from ddplaunch.record import run_socket
from ddplaunch.record.folders import short
from tests.conftest import Result, until


@pytest.fixture
def profile(job, monkeypatch, capsys):
    """Profile ranks that behave so."""
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])

    def call(*words: str) -> Result:
        status = main.main(["profile", *words])
        out, err = capsys.readouterr()
        return Result(status, out, err, 0.0)

    return call


@pytest.fixture
def run(job, program):
    """Start two ranks, of which one keeps the signal for itself."""
    job.start("--nproc-per-node", 2, program("attached"), "count", "own")
    job.signs("ready", 2)
    yield short(job.folder.name)
    (job.home / "signs" / "enough").touch()
    job.wait().expect(0)
    job.nothing_left()


def test_why_a_rank_cannot_be_profiled_is_said_rank_by_rank(run, profile):
    failed = profile(run, "--seconds", "1")
    assert failed.status == 1
    assert "rank 0 has not imported torch" in failed.err
    assert "rank 1 handles signal 58 (SIGRTMAX-6) itself" in failed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-r", "2"), "there is no rank 2 in {run}: it has ranks 0-1"),
        (("--seconds", "soon"), "--seconds soon: expected seconds from 0.1 to 300"),
        (("--steps", "0"), "--steps 0: expected a number from 1 to 1000"),
        (("--out", "/proc/none/trace.json"), "cannot write /proc/none/trace.json: no such file or directory"),
        (("--out", "/"), "cannot write /: is a directory"),
        (("--out", "/dev/null"), "cannot write /dev/null: not a regular file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_is_asked(run, profile, words, message):
    failed = profile(run, *words)
    assert failed.status != 0
    assert message.format(run=run) in failed.err
    assert "profiling" not in failed.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_profile_that_a_signal_ends_leaves_nothing(job, program, tmp_path, signum):
    process = job.start(program("attached"), "held")
    job.sign("ready-0")
    until((job.folder / run_socket.NAME).exists, "a socket")
    argv = job.argv("profile", "--out", tmp_path / "trace.json", job.folder.name)
    profiling = subprocess.Popen(argv, env=job.env, stderr=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("trace.json.*.part")), "the file of the trace")
    profiling.send_signal(signum)
    assert profiling.wait(10) == -signum
    assert not list(tmp_path.glob("trace*"))
    process.kill()
    job.wait()
    job.nothing_left(10.0)


def test_a_run_that_has_ended_cannot_be_profiled(job, program, profile):
    job.start(program("attached"), "count")
    job.sign("ready-0")
    (job.home / "signs" / "enough").touch()
    job.wait().expect(0)
    name = short(job.folder.name)
    failed = profile(name)
    assert failed.status != 0
    assert f"run {name} has ended" in failed.err
