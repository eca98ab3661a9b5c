"""`ddplaunch submit` waiting and looking on, with programs in place of sbatch and scontrol that say what the test wants.

tests/slurm has the real ones. Here is what a Slurm in peace does not do.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Job, until

SBATCH = '#!/bin/sh\ncat > script\nprintf "%s\\n" "$@" > sbatch-words\ncat sbatch-says\n'
SCONTROL = """#!/bin/sh
printf "%s\\n" "$@" > scontrol-words
test -e slurm-says && exec cat slurm-says
cat slurm-fails >&2
exit 1
"""


class Slurm:
    """What stands in the place of Slurm."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.home = job.home
        self.output = job.home / "train-7.out"
        (job.home / "bin").mkdir()
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
            path = job.home / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        (job.home / "train.py").touch()
        (job.home / "sbatch-says").write_text("7\n")
        self.says("PENDING")

    def says(self, state: str, **fields: object) -> None:
        """Let scontrol tell this from now on."""
        known = {"JobId": 7, "JobState": state, "Reason": "None", "NodeList": "n1", "StdOut": self.output, **fields}
        text = " ".join(f"{name}={value}" for name, value in known.items())
        self._put("slurm-says", f"{text} StdErr={self.output}\n".encode())

    def writes(self, output: bytes) -> None:
        """Let the output of the job be there, all at once."""
        self._put(self.output.name, output)

    def fails(self, text: str) -> None:
        """Let scontrol end with this error from now on."""
        self._put("slurm-fails", f"{text}\n".encode())
        (self.home / "slurm-says").unlink()

    def start(self, *words: str, **popen: Any) -> subprocess.Popen[bytes]:
        """Start `ddplaunch submit`."""
        env = {"PATH": f"{self.home / 'bin'}:{os.environ['PATH']}"}
        return self._job.start("submit", *words, "--", "train.py", env=env, **popen)

    def _put(self, name: str, content: bytes) -> None:
        new = self.home / f"{name}.new"
        new.write_bytes(content)
        new.rename(self.home / name)


@pytest.fixture
def slurm(job: Job) -> Slurm:
    return Slurm(job)


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """A file for stderr."""
    return tmp_path / "said"


def test_the_number_is_found_among_messages_of_a_site(job: Job, slurm: Slurm) -> None:
    (slurm.home / "sbatch-says").write_text("Quota: 3 of 9 used\n7;east\n")
    slurm.says("COMPLETED")
    slurm.start("--parsable", "--wait", "-p", "gpu", "--hold")
    result = job.wait()
    assert (result.status, result.out) == (0, "7;east\n")
    assert result.err == "Quota: 3 of 9 used\nddplaunch: job 7 completed\n"
    words = (slurm.home / "sbatch-words").read_text().split()
    assert words == ["--parsable", "--partition=gpu", "--hold"]
    assert (slurm.home / "scontrol-words").read_text().split()[0] == "--clusters=east"
    assert (slurm.home / "script").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train\n")


def test_output_that_a_file_server_shows_late_is_shown_all_the_same(job: Job, slurm: Slurm) -> None:
    slurm.says("COMPLETED")
    slurm.start("--follow")
    until((slurm.home / "scontrol-words").exists, "the question how the job is")
    slurm.writes(b"one\n\xe2\x82")
    result = job.wait()
    assert (result.status, result.out) == (0, "one\n\N{REPLACEMENT CHARACTER}")
    assert result.err.endswith("ddplaunch: job 7 completed\n")


def test_output_that_cannot_be_seen_from_here_is_named(job: Job, slurm: Slurm) -> None:
    slurm.says("FAILED", ExitCode="3:0")
    slurm.start("--follow")
    result = job.wait()
    assert (result.status, result.out) == (3, "")
    assert result.seconds > 2  # it has been waited for
    assert result.err.splitlines()[1:] == [
        f"ddplaunch: {slurm.output} cannot be seen from here",
        "ddplaunch: job 7 failed with status 3",
    ]


def test_a_reader_that_goes_away_ends_the_looking_on_and_not_the_job(job: Job, slurm: Slurm, said: Path) -> None:
    slurm.says("RUNNING")
    with said.open("wb") as err:
        process = slurm.start("--follow", stderr=err)
        assert process.stdout is not None
        until(lambda: b"is running" in said.read_bytes(), "the state")
        process.stdout.close()
        slurm.output.write_text("one\n")
        assert process.wait(60) == 141
    assert said.read_text().endswith("ddplaunch: job 7 goes on; `scancel 7` ends it\n")


def test_output_that_cannot_be_written_is_dropped_with_a_word(job: Job, slurm: Slurm, said: Path) -> None:
    slurm.says("RUNNING")
    with open("/dev/full", "wb") as full, said.open("wb") as err:
        slurm.start("--follow", stdout=full, stderr=err)
        until(lambda: b"is running" in said.read_bytes(), "the state")
        slurm.output.write_text("one\n")
        slurm.says("COMPLETED")
        assert job.wait().status == 0
    assert said.read_text().splitlines()[2:] == [
        "ddplaunch: cannot write to stdout: no space left on device; the output is in its file",
        "ddplaunch: job 7 completed",
    ]


def test_a_controller_that_does_not_respond_is_queried_again(job: Job, slurm: Slurm, said: Path) -> None:
    slurm.fails("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with said.open("wb") as err:
        slurm.start("--wait", stderr=err)
        until(lambda: b"does not respond" in said.read_bytes(), "a message about it")
        slurm.says("CANCELLED", ExitCode="0:15")
        assert job.wait().status == 143
    assert said.read_text() == (
        "ddplaunch: Slurm does not respond, trying again: scontrol: slurm_load_jobs error: Unable to contact "
        "slurm controller (connect failure)\n"
        "ddplaunch: job 7 was cancelled\n"
    )


def test_a_job_that_slurm_has_forgotten_has_an_unknown_exit_status(job: Job, slurm: Slurm) -> None:
    slurm.fails("slurm_load_jobs error: Invalid job id specified")
    slurm.start("--wait")
    result = job.wait()
    assert (result.status, result.out) == (1, "ddplaunch: job 7 is submitted; its output goes to train-7.out\n")
    assert result.err == "ddplaunch: job 7 is no longer known to Slurm, so its exit status is unknown\n"


def test_slurm_that_takes_long_is_no_disk_that_hangs(job: Job, slurm: Slurm) -> None:
    (slurm.home / "bin" / "sbatch").write_text("#!/bin/sh\nsleep 6\necho 7\n")
    process = slurm.start("--wait")
    until(lambda: (slurm.home / "scontrol-words").exists() or process.poll() is not None, "the first question")
    began = time.monotonic()
    # until it is asked seldom: from 4 s without anything to do a process is taken for one that waits for a disk
    until(lambda: time.monotonic() > began + 14 or process.poll() is not None, "a time")
    slurm.says("COMPLETED")
    assert job.wait().expect(0).err.endswith("ddplaunch: job 7 completed\n")


def test_two_signals_at_once_end_the_looking_on_with_the_last_line_alone(job: Job, slurm: Slurm, said: Path) -> None:
    slurm.says("RUNNING")
    with said.open("wb") as err:
        process = slurm.start("--follow", stderr=err)
        until(lambda: b"is running" in said.read_bytes(), "the state")
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGSTOP)  # else it stops with its child
        for signum in (signal.SIGSTOP, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
            os.kill(int(child), signum)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 129
    assert said.read_text().splitlines()[2:] == ["ddplaunch: job 7 goes on; `scancel 7` ends it"]
