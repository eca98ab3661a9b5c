"""Hands a script to sbatch, and says what came of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import NOT_FOUND
from ddplaunch.slurm.submit.follow import Submitted, say

# what a job has its own of, but would take from the job in which it was submitted: a batch script with SLURM_STEP_ID looks like
# a step. All but these go.
_NOT_OF_A_JOB = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_DEBUG_FLAGS")
_JOB = re.compile(r"^(\d+)(?:;(\S+))?$", re.MULTILINE)  # sbatch(1), --parsable


def submit(script: str, options: Sequence[str], env: Mapping[str, str]) -> Submitted | None:
    """Submit a script with these options and give the job; None if there is none, since it was only to be tested.

    Raises:
        LaunchError: there is no sbatch, or it refuses the job; the status is then its own.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options],
            check=False, input=script, capture_output=True, encoding="utf-8", errors="surrogateescape", env=environment(env),
        )  # fmt: skip
    except FileNotFoundError:
        raise LaunchError(
            "there is no sbatch on PATH",
            hint="submit from a host of a Slurm cluster; --print shows the script anywhere",
            status=NOT_FOUND,
        ) from None
    except OSError as error:
        raise LaunchError(f"sbatch: {(error.strerror or str(error)).lower()}") from None
    if done.returncode:
        raise LaunchError(f"sbatch refuses the job: {_reason(done.stderr)}", status=_status(done.returncode))
    found = _JOB.findall(done.stdout)
    # a site may have words for everybody who submits
    if words := f"{done.stderr}{_JOB.sub('', done.stdout)}".strip():
        say(words)
    return Submitted(id=found[-1][0], cluster=found[-1][1] or None) if found else None


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that sbatch sees, and exports to the job."""
    if "SLURM_JOB_ID" not in env:
        return dict(env)
    return {
        name: value
        for name, value in env.items()
        if name in _NOT_OF_A_JOB or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }


def _reason(said: str) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").rstrip(".") for line in said.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try ")) or "it does not say why"


def _status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode
