"""The disk of all runs answers nothing, from any moment on: a job starts without it, and every command ends and says where."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, Job, Result, until
from tests.process.disk import SilentDisk, missing_silent
from tests.process.terminal import child, stat


class JobOnDisk(Job):
    """A job whose state folder lies on a disk of its own."""

    disk: SilentDisk

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "XDG_STATE_HOME": f"{self.disk.place}/state"}

    def argv(self, *args: object) -> list[str]:
        return [*self.disk.prefix, *super().argv(*args)]

    def verb(self, *words: object) -> Result:
        """Run another command beside the job. Whoever reads its output waits until nobody can write to that any more."""
        done = subprocess.run(
            self.argv(*words), env=self.env, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return Result(done.returncode, done.stdout, done.stderr, 0.0)

    @property
    def name(self) -> str:
        """The name of its only run: other tests have runs, too."""
        (name,) = os.listdir(self.disk.seen / "state/ddplaunch/runs")
        return name

    @property
    def runs(self) -> str:
        return f"{self.disk.place}/state/ddplaunch/runs"


@pytest.fixture(scope="session")
def can_be_silent(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return missing_silent(tmp_path_factory.mktemp("can-be-silent"))


@pytest.fixture
def job(tmp_path: Path, can_be_silent: str | None) -> Iterator[JobOnDisk]:
    if can_be_silent:
        pytest.skip(can_be_silent)
    job = JobOnDisk(tmp_path)
    job.disk = SilentDisk(tmp_path)
    yield job
    job.disk.answer()
    job.kill_all()
    job.nothing_left(patience=PATIENCE)
    job.disk.close()


@pytest.mark.parametrize("requests", ["all", "mkdir", "flock"])
def test_a_job_starts_without_its_folder_and_says_so(job, program, requests):
    job.disk.hang(requests)
    result = job.run("--nproc-per-node", 2, program("behave"), "all=done").expect(0)
    assert f"warning: the log folder {job.runs}/" in result.err
    assert "does not answer. The job goes on" in result.err
    assert "`export XDG_STATE_HOME=FOLDER` or `--log-dir FOLDER`" in result.err
    assert "logs in" not in result.err


@pytest.mark.parametrize("requests", ["all", "opendir", "flock"])
def test_verbs_end_and_name_the_folder(job, requests):
    job.behave("all=done")
    job.wait().expect(0)
    name = job.name
    job.disk.hang(requests)
    verbs = {
        "ps": (),
        "logs": (name,),
        "report": (name,),
        "stop": (name,),
    }  # without a name they take one that runs elsewhere
    with ThreadPoolExecutor() as pool:
        for verb, result in zip(verbs, pool.map(lambda verb: job.verb(verb, *verbs[verb]), verbs), strict=True):
            assert f"error: `ddplaunch {verb}` has given up: the disk of {job.runs} does not answer" in result.err
            assert result.status == 1


def test_a_plan_is_made_without_the_list_of_nodes_that_have_failed(job, program):
    job.disk.hang()
    planned = job.verb("plan", program("behave")).expect(0)
    assert "the list of nodes that have failed cannot be used" in planned.out
    listed = job.verb("doctor", "--nodes").expect(2)
    assert "its disk does not answer" in listed.err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ((), 2, "cannot be used: {}/pyproject.toml: its disk does not answer"),
        (("submit", "--print", "--"), 1, "error: `ddplaunch submit` has given up: the disk of {} does not answer"),
    ],
    ids=["run", "submit"],
)
def test_a_command_in_a_folder_that_does_not_answer_names_that_folder(job, program, words, status, says):
    command = Path(sys.executable).with_name("ddplaunch")  # python -m would look into the folder itself
    process = subprocess.Popen(
        [
            *(f"--wdns={job.disk.place}" if word.startswith("--wdns") else word for word in job.disk.prefix),
            *("sh", "-c", 'echo began; read -r _; exec "$@"', "sh", command, *words, program("behave")),
        ],
        env=job.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"  # the shell looks into its working directory, too
    job.disk.hang()
    _, said = process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == status
    assert says.format(job.disk.place) in said


def test_verbs_end_and_name_the_script_that_cannot_be_read(job):
    script = job.disk.place / "train.py"
    (job.disk.seen / "train.py").touch()
    job.disk.hang("open")
    verbs = (("submit", "--print", "--"), ("check", "--world-size", 2), ("doctor", "--only", "limits"), ("plan",))
    with ThreadPoolExecutor() as pool:
        for verb, result in zip(verbs, pool.map(lambda words: job.verb(*words, script), verbs), strict=True):
            assert f"error: `ddplaunch {verb[0]}` has given up: the disk of {script} does not answer" in result.err
            assert result.status == 1


def test_who_does_not_read_the_logs_at_once_is_no_disk_that_hangs(job):
    script = job.home / "prints.py"
    script.write_text("for at in range(200_000): print(at)\n")
    job.run("--nproc-per-node", 2, "--output", "none", script).expect(0)
    reader = subprocess.Popen(job.argv("logs", job.name), env=job.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    looks_at = child(reader.pid)
    until(lambda: stat(looks_at)[0] == "S" and stat(reader.pid)[0] == "S", "a pipe that is full")
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(7)  # it takes so long to give a disk up
    out, _ = reader.communicate(timeout=PATIENCE)
    assert (reader.returncode, out.count(b"\n")) == (0, 400_000)


def test_a_report_waits_for_the_reader_of_a_named_pipe(job):
    job.behave("all=done")
    job.wait().expect(0)
    pipe = job.home / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(
        job.argv("report", job.name, "--out", pipe), env=job.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(7)  # it takes so long to give a disk up
    assert pipe.read_text().startswith("<!DOCTYPE html>")
    writer.communicate(timeout=PATIENCE)
    assert writer.returncode == 0


def test_a_plan_waits_for_the_writer_of_a_named_pipe(job, program):
    pipe = job.home / "pipe"
    os.mkfifo(pipe)
    planner = subprocess.Popen(
        job.argv("plan", "--env-file", pipe, program("behave")),
        env=job.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with open(pipe, "w") as writer:
        writer.write("A=1\n")
        writer.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            planner.wait(7)  # it takes so long to give a disk up
    _, err = planner.communicate(timeout=PATIENCE)
    assert planner.returncode == 0, err


def test_a_pipe_that_does_not_block_gets_the_logs_whole(job):
    script = job.home / "prints.py"
    script.write_text("for at in range(100_000): print(at)\n")
    job.run("--output", "none", script).expect(0)
    ours, its = os.pipe()
    os.set_blocking(its, False)
    fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 4096)
    reader = subprocess.Popen(job.argv("logs", job.name), env=job.env, stdout=its, stderr=subprocess.DEVNULL)
    os.close(its)
    with open(ours, "rb") as file:
        assert file.read().count(b"\n") == 100_000
    assert reader.wait(PATIENCE) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_verb_as_any_command(job, signum):
    job.behave("all=default")
    following = subprocess.Popen(
        job.argv("logs", "-f", job.name), env=job.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert following.stderr is not None
    assert b"logs of" in following.stderr.readline()
    following.send_signal(signum)
    following.communicate(timeout=PATIENCE)
    assert following.returncode == -signum
    job.process.send_signal(signal.SIGTERM)
    job.wait().expect(143)
