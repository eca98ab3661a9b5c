"""`ddplaunch submit` in a real Slurm: the job is the one that was meant, and whoever waits sees all of it and its status."""

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pexpect import fdpexpect

from ddplaunch.record import bad_nodes
from ddplaunch.record.bad_nodes import Failure
from ddplaunch.record.folders import bad_nodes_file
from tests.conftest import PATIENCE, PROGRAMS, Result, until
from tests.hosts.host import Command
from tests.slurm.job import Batch, SlurmJob

BEHAVE = PROGRAMS / "behave.py"
CTRL_C = "\x03"

GREETS = """
import os, sys
rank = os.environ["RANK"]
sys.stdout.write(f"{rank} on {os.environ['SLURMD_NODENAME']}: gr\\u00fc\\u00dfe {sys.argv[1:]}\\n")
sys.exit(3 if sys.argv[1:] == ["fail", rank] else 0)
"""
# appends to its output when it is started again, and leaves a character unfinished for a while
TWICE = """
import os, sys
from signs import put, wait
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
os.write(1, f"start {restart} ".encode() + "\\u20ac".encode()[:1])
put(f"started-{restart}")
wait(f"go-{restart}")
os.write(1, "\\u20ac".encode()[1:] + b"\\n")
"""


def submit(job: SlurmJob, *words: object, timeout: float = PATIENCE) -> Result:
    """Run `ddplaunch submit` to its end."""
    return job.run("submit", *words, timeout=timeout)


def submitted(job: SlurmJob, said: str) -> Batch:
    """The job whose number was told."""
    found = re.search(r"job (\d+) is submitted", said)
    assert found, said
    return Batch(job.cluster, found[1])


def of_workers(output: str) -> list[str]:
    """The lines of workers, sorted; srun says that this cluster cannot bind to CPUs."""
    return sorted(line for line in output.split("\n") if line.startswith("["))


def script(job: SlurmJob, name: str, text: str) -> str:
    """A script in the folder where the command is typed, and its name."""
    (job.home / name).write_text(f"import sys; sys.path[:0] = [{str(PROGRAMS)!r}]\n{text}")
    return name


def test_the_output_and_the_status_are_those_of_the_job(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    result = submit(job, "--follow", "-N", 2, "--", "-q", "--nproc-per-node", 2, greets, "a b", "$x", "'", "c\r\nd")
    batch = submitted(job, result.err)
    output = (job.home / f"greets-{batch.id}.out").read_text()
    assert result.status == 0, result
    assert result.out == output
    words = ["a b", "$x", "'", "c\r\nd"]
    assert of_workers(output) == [f"[{r}] {r} on node{r // 2 + 1}: grüße {words}" for r in range(4)]
    said = [line.removeprefix(f"ddplaunch: job {batch.id} ") for line in result.err.splitlines()]
    assert said[0] == f"is submitted; its output goes to greets-{batch.id}.out"
    assert said[-1].startswith("completed")


def test_failed_nodes_are_excluded_and_those_of_another_slurm_are_not(job: SlurmJob) -> None:
    now = time.time()
    failures = [Failure(host=host, kind="lost", at=now, in_slurm=True) for host in ("node1", "elsewhere")]
    bad_nodes.add(bad_nodes_file(job.env), failures, now)
    result = submit(job, "--wait", "--", "--avoid-bad-nodes", script(job, "greets.py", GREETS)).expect(0)
    assert "on node2: " in submitted(job, result.out).output()


def test_a_job_that_fails_gives_its_status(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    result = submit(job, "--wait", "--nodes=2", "--", "--nproc-per-node", 1, greets, "fail", 1)
    batch = submitted(job, result.out)
    assert (result.status, result.out.count("\n")) == (3, 1), result
    assert re.search(rf"^ddplaunch: job {batch.id} failed with status 3", result.err, re.MULTILINE), result.err
    assert "rank 1 on node2 failed" in batch.output()


def test_what_is_submitted_is_what_print_shows(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    words = (
        "--comment",
        'a "b" # \\ $c',
        "--job-name=my job",
        "--time",
        "5",
        "--",
        "-q",
        "--nproc-per-node",
        1,
        greets,
    )
    shown = submit(job, "--print", *words).out
    result = submit(job, "--parsable", *words)
    batch = Batch(job.cluster, result.out.strip())
    assert (result.err, batch.wait()) == ("", "COMPLETED")
    about = batch.about()
    assert about["Comment"].strip() == 'a "b" # \\ $c'
    assert (about["JobName"], about["TimeLimit"], about["NtasksPerN:B:S:C"]) == ("my job", "00:05:00", "1:0:*:*")
    assert about["StdOut"] == str(job.home / f"my job-{batch.id}.out")
    # srun says so where no plugin binds tasks to CPUs, as here
    assert (
        batch.output().removeprefix("srun: cluster configuration lacks support for cpu binding\n")
        == "0 on node1: grüße []\n"
    )
    kept = job.cluster.run(["scontrol", "write", "batch_script", batch.id, "-"]).stdout
    assert kept.removesuffix("\n") == shown.removesuffix("\n")


def test_an_option_that_is_typed_wins_over_a_variable_of_sbatch(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    env = {"SBATCH_PARTITION": "nowhere", "SBATCH_OUTPUT": "by-variable-%j.out"}
    result = job.run("submit", "--wait", "-p", "main", "--", "-q", "--nproc-per-node", 1, greets, env=env).expect(0)
    batch = submitted(job, result.out)
    assert batch.about()["StdOut"] == str(job.home / f"by-variable-{batch.id}.out")
    assert f"goes to by-variable-{batch.id}.out" in result.out


def test_a_job_that_is_submitted_in_a_step_is_a_job_of_its_own(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    result = job.srun("--ntasks=1", *job.argv("submit", "--wait", "-N2", "--", "-q", "--nproc-per-node", 1, greets))
    assert result.status == 0, result
    assert len(of_workers(submitted(job, result.out).output())) == 2


@pytest.mark.parametrize(
    ("option", "status", "says"),
    [("--partition=nowhere", 1, "invalid partition specified: nowhere"),
     ("--time=soon", 255, "Invalid --time specification"),
     ("--no-such-option=1", 255, "unrecognized option '--no-such-option=1'")],
)  # fmt: skip
def test_what_sbatch_refuses_is_one_error_with_its_status(job: SlurmJob, option: str, status: int, says: str) -> None:
    result = submit(job, option, "--", script(job, "greets.py", GREETS))
    assert (result.status, result.out) == (status, "")
    assert result.err.startswith(f"error: sbatch failed: {says}")
    assert len(result.err.splitlines()) == 1
    assert job.cluster.queue() == []


def test_a_job_can_be_tried_without_being_submitted(job: SlurmJob) -> None:
    result = submit(job, "--test-only", "--", script(job, "greets.py", GREETS))
    assert (result.status, result.out) == (0, "")
    assert "to start at" in result.err


def test_an_array_ends_with_its_last_element_and_the_worst_status(job: SlurmJob) -> None:
    script(job, "element.py", "import os, sys; sys.exit(int(os.environ['SLURM_ARRAY_TASK_ID']))")
    result = submit(job, "--wait", "--array=0-2%2", "--", "-q", "--nproc-per-node", 1, "element.py")
    batch = submitted(job, result.out)
    assert result.status == 2, result
    assert f"its output goes to element-{batch.id}_*.out\n" in result.out
    assert f"job {batch.id}_1 failed with status 1" in result.err
    assert result.err.endswith(f"job {batch.id} ended, with 2 as the worst status of its elements\n")
    assert {path.name for path in job.home.glob("*.out")} == {f"element-{batch.id}_{n}.out" for n in range(3)}


def test_the_output_of_a_job_that_is_requeued_is_shown_once_and_goes_on(job: SlurmJob) -> None:
    (job.home / "same.out").write_text("of an earlier job\n")
    command = job.start(
        "submit", "--follow", "--output=same.out", "--", "-q", "--output", "raw", "--nproc-per-node", 1,
        script(job, "twice.py", TWICE),
    )  # fmt: skip
    job.sign("started-0")
    batch = submitted(job, job.err(command))
    until(lambda: job.out(command).endswith("start 0 "), "the first output")
    batch.requeue_now()
    job.sign("started-1")
    (job.home / "signs" / "go-1").touch()
    result = job.wait(command=command).expect(0)
    kept = (job.home / "same.out").read_bytes().decode(errors="replace")
    assert result.out == kept.removeprefix("of an earlier job\n")
    assert result.out.endswith("start 1 €\n")
    assert f"job {batch.id} completed" in result.err


def test_stdout_and_stderr_of_a_job_stay_apart_if_they_are_two_files(job: SlurmJob) -> None:
    name = script(job, "both.py", "import sys; print('out'); print('err', file=sys.stderr)")
    options = ("--follow", "-o", "%x-%N-%4j.out", "-e", "err-%j.txt", "--chdir", "there")
    (job.home / "there").mkdir()
    (job.home / name).rename(job.home / "there" / name)
    result = submit(job, *options, "--", "-q", "--nproc-per-node", 1, name)
    assert (result.status, result.out) == (0, "out\n"), result
    batch = submitted(job, result.err)
    assert "\nerr\n" in result.err
    assert (job.home / "there" / f"both-node1-{batch.id:0>4}.out").read_text() == "out\n"


def test_a_signal_ends_the_waiting_and_not_the_job(job: SlurmJob) -> None:
    command = job.start("submit", "--wait", "--", "--nproc-per-node", 1, BEHAVE)
    job.sign("ready-0")
    batch = submitted(job, job.out(command))
    command.send_signal(signal.SIGTERM)
    result = job.wait(command=command).expect(143)
    assert result.err.endswith(f"ddplaunch: job {batch.id} goes on; `scancel {batch.id}` ends it\n")
    assert batch.state() == "RUNNING"
    batch.cancel()
    batch.wait()


@contextmanager
def terminal() -> Iterator[tuple[int, fdpexpect.fdspawn]]:
    """A terminal: the end for a program, and what is seen on the other."""
    screen, inner = os.openpty()
    try:
        yield inner, fdpexpect.fdspawn(screen, timeout=PATIENCE, encoding="utf-8")
    finally:
        for end in (screen, inner):
            try:
                os.close(end)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise


def test_ctrl_c_leaves_the_job_running_and_says_how_to_end_it(job: SlurmJob) -> None:
    with terminal() as (inner, screen):
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), inner)
        # a session of its own, whose terminal this is
        argv = ["setsid", "--ctty", "--wait", *job.argv("submit", "--follow", "--", "--nproc-per-node", 1, BEHAVE)]
        command: Command = job.start_on("ctl", *argv, **streams)
        screen.expect(r"job (\d+) is running on node1")
        batch = Batch(job.cluster, screen.match[1])
        job.sign("ready-0")
        screen.send(CTRL_C)
        screen.expect_exact(f"ddplaunch: job {batch.id} goes on; `scancel {batch.id}` ends it")
        assert job.wait(command=command).status == 130
    assert batch.state() == "RUNNING"
    batch.cancel()
    assert batch.wait() == "CANCELLED"


def test_a_job_that_is_cancelled_before_it_starts_ends_the_waiting(job: SlurmJob) -> None:
    greets = script(job, "greets.py", GREETS)
    command = job.start("submit", "--follow", "--hold", "--", greets)
    until(lambda: "is pending (JobHeldUser)" in job.err(command), "the reason")
    batch = submitted(job, job.err(command))
    batch.cancel()
    result = job.wait(command=command)
    assert (result.status, result.out) == (143, ""), result
    assert result.err.endswith(f"job {batch.id} was cancelled\n")
    assert not Path(batch.about()["StdOut"]).exists()
