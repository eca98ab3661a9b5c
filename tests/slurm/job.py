"""The command as a test runs it in Slurm: in a batch script, under srun, in an allocation of salloc."""

import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, Job, Result, left_after, until
from tests.hosts.host import Command
from tests.slurm.cluster import CTL, Cluster

# a job in one of these stays in it; others that have ended may be on their way back into the queue
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"})
ENDED = FINAL | {"NODE_FAIL", "BOOT_FAIL"}


@dataclass(frozen=True)
class Batch:
    """A job that has been submitted. What is asked about it is asked of Slurm each time."""

    cluster: Cluster
    id: str

    def element(self, index: int) -> "Batch":
        """An element of this job, which is an array."""
        return Batch(self.cluster, f"{self.id}_{index}")

    def about(self) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Reason, Restarts, ExitCode, NodeList, BatchHost, StdOut, ..."""
        return self.cluster.about(self.id)

    def state(self) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, ..."""
        return self.about()["JobState"]

    def wait(self, *states: str, timeout: float = PATIENCE) -> str:
        """Wait until the job is in one of these states, or has ended if none is named, and give the state it is in."""
        wanted = frozenset(states) or ENDED

        def arrived() -> str | None:
            state = self.state()
            goes_back = "PENDING" in wanted  # a job that has ended may yet be requeued
            assert state in wanted or goes_back or state not in FINAL, f"job {self.id} is {state}, not {sorted(wanted)}"
            return state if state in wanted else None

        try:
            return str(until(arrived, f"job {self.id} to be {' or '.join(sorted(wanted))}", timeout))
        except AssertionError as error:
            error.add_note(f"{self.about()}\n{self.output()}")
            raise

    def restarts(self) -> int:
        """How often it has been sent back into the queue."""
        return int(self.about()["Restarts"])

    def exit_code(self) -> int:
        """The status of the batch script as a shell has it: 128 and the signal if one ended it."""
        status, number = self.about()["ExitCode"].split(":")
        return 128 + int(number) if number != "0" else int(status)

    def output(self) -> str:
        """What the job has written so far."""
        path = Path(self.about()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self, *options: str) -> None:
        """`scancel`; with --signal=USR1 and the like, a signal only."""
        self.cluster.run(["scancel", *options, self.id])

    def requeue(self) -> None:
        """`scontrol requeue`: end it and put it back into the queue, where it is held for some two minutes."""
        self.cluster.run(["scontrol", "requeue", self.id])

    def skip_hold(self, timeout: float = PATIENCE) -> None:
        """Wait until the job, which is being requeued, is back in the queue, and let it start within a second or two."""
        self.wait("PENDING", timeout=timeout)
        # within the second in which it ended its nodes would refuse it: `Job credential revoked`
        self.cluster.run(["scontrol", "update", f"jobid={self.id}", "starttime=now+1"])

    def requeue_now(self) -> None:
        """Requeue it without the time for which it would be held."""
        self.requeue()
        self.skip_hold()


@dataclass
class SlurmJob(Job):
    """One job, whose commands run on ctl, and whose output and script files lie in its home, which all hosts share."""

    cluster: Cluster = field(kw_only=True)
    _began: dict[Command, float] = field(default_factory=dict)  # the commands in the order of their starts
    _scripts: int = 0

    @property
    def ddplaunch(self) -> str:
        """The command as it stands in a script."""
        return shlex.join(self.argv())

    # --- commands of Slurm

    def sbatch(self, script: str, *options: object, env: Mapping[str, str] | None = None) -> "Batch":
        """Submit a batch script, given as its text; a line that names the shell may be left out."""
        self._make_folders()
        self._scripts += 1
        path = self.home / f"job-{self._scripts}.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
        done = self.cluster.run(
            ["sbatch", "--parsable", *options, path], env={**self.env, **(env or {})}, cwd=self.home
        )
        return Batch(self.cluster, done.stdout.split(";")[0].strip())

    def start_srun(self, *args: object, **options: Any) -> Command:
        """Start `srun ARGS`; see start_on."""
        return self.start_on(CTL, "srun", *args, **options)

    def srun(self, *args: object, timeout: float = PATIENCE, **options: Any) -> Result:
        """Run `srun ARGS` to its end."""
        return self.wait(timeout, command=self.start_srun(*args, **options))

    def start_salloc(self, shell: str, *options: object, **more: Any) -> Command:
        """Start a shell command in an allocation; salloc itself and the shell both run on ctl."""
        return self.start_on(CTL, "salloc", *options, "sh", "-c", shell, **more)

    def salloc(self, shell: str, *options: object, timeout: float = PATIENCE, **more: Any) -> Result:
        """Run a shell command in an allocation to its end."""
        return self.wait(timeout, command=self.start_salloc(shell, *options, **more))

    def start_on(self, host: str, *argv: object, env: Mapping[str, str] | None = None, **popen: Any) -> Command:
        """Start a program on a host; what it prints goes to files, so that nobody has to read it."""
        self._make_folders()
        path = self.home / "output" / str(len(self._began))
        with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
            streams = {"stdout": out, "stderr": err, "cwd": self.home}
            began = time.monotonic()
            command = self.cluster.start(argv, host, env={**self.env, **(env or {})}, **{**streams, **popen})
        self._began[command] = began
        self.process = command
        return command

    # --- ddplaunch itself

    def start(self, *args: object, host: str = CTL, **popen: Any) -> Command:
        """Start the command on a host, outside of any allocation."""
        return self.start_on(host, *self.argv(*args), **popen)

    def wait(self, timeout: float = PATIENCE, *, command: Command | None = None) -> Result:
        """Wait for a command, the latest if none is named, to end."""
        command = command or list(self._began)[-1]
        try:
            command.wait(timeout)
        except subprocess.TimeoutExpired as error:
            said = f"{self.cluster.left()}\n{self.out(command)}{self.err(command)}"
            raise AssertionError(f"{command.args!r} did not end in {timeout:g} s\n{said}") from error
        seconds = time.monotonic() - self._began[command]
        return Result(command.returncode, self.out(command), self.err(command), seconds)

    def run(self, *args: object, timeout: float = PATIENCE, host: str = CTL, **popen: Any) -> Result:
        """Run the command on a host, outside of any allocation, to its end."""
        return self.wait(timeout, command=self.start(*args, host=host, **popen))

    def out(self, command: Command) -> str:
        """What a command has written to stdout so far."""
        return self._output(command, ".out")

    def err(self, command: Command) -> str:
        """What a command has written to stderr so far."""
        return self._output(command, ".err")

    def _output(self, command: Command, suffix: str) -> str:
        number = list(self._began).index(command)
        return (self.home / "output" / f"{number}{suffix}").read_text(errors="replace")

    def _make_folders(self) -> None:
        for name in ("state", "tmp", "signs", "output"):
            (self.home / name).mkdir(exist_ok=True)

    # --- what is left

    def nothing_left(self, patience: float = 0.0) -> None:
        """Prove that nothing remains: no process of the job now, or within `patience` seconds, and no temporary file; and
        soon no job in the queue, no step, no other process and no socket on any host."""
        left = left_after(patience, self.left)
        assert not left, self.cluster.left() or left
        tmp = [str(path) for path in (self.home / "tmp").glob("*")]
        assert not tmp, tmp
        self.cluster.nothing_left()
