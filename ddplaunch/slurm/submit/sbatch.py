"""Runs sbatch with a script, and gives the job or the error."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from ddplaunch.errors import LaunchError, why_failed
from ddplaunch.exitcodes import NOT_FOUND
from ddplaunch.slurm.submit.follow import Submitted, notify

# variables of a job, which must not come from another job in which it is submitted: a batch script with SLURM_STEP_ID looks like
# a step. All but these are removed.
_NOT_OF_A_JOB = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_DEBUG_FLAGS")
_ELSEWHERE = "submit from a host of a Slurm cluster; --print shows the script anywhere"
_JOB = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)  # sbatch(1), --parsable


def submit(script: str, options: Sequence[str], env: Mapping[str, str]) -> Submitted | None:
    """Submit a script with these options and give the job; None after --test-only.

    Raises:
        LaunchError: there is no sbatch, or it rejects the job; the exit status is then sbatch's.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options],
            check=False, input=script, capture_output=True, encoding="utf-8", errors="surrogateescape", env=environment(env),
        )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError("sbatch is not on PATH", hint=_ELSEWHERE, status=NOT_FOUND) from None
    except OSError as error:
        raise LaunchError(f"sbatch: {why_failed(error)}") from None
    if done.returncode:
        if "establish a configuration source" in done.stderr:
            raise LaunchError("no Slurm configured here", hint=_ELSEWHERE, status=_status(done.returncode))
        raise LaunchError(f"sbatch failed: {_reason(done.stderr)}", status=_status(done.returncode))
    found = _JOB.findall(done.stdout)
    # a site may print messages at each submission
    if message := f"{done.stderr}{_JOB.sub('', done.stdout)}".strip():
        notify(message)
    return Submitted(id=found[-1][0], cluster=found[-1][1] or None) if found else None


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for sbatch, which it exports to the job."""
    if "SLURM_JOB_ID" not in env:
        return dict(env)
    return {
        name: value
        for name, value in env.items()
        if name in _NOT_OF_A_JOB or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }


def _reason(stderr: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").rstrip(".") for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try ")) or "no message"


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode
