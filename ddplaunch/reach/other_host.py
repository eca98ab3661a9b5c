"""Lines to be typed here that look into a job from another host of it: by srun in a job of Slurm, else over ssh."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

_NEED_A_TERMINAL = ("attach",)


def job_in_slurm(env: Mapping[str, str]) -> str:
    """Return the id by which srun takes the job that these variables are of; "" outside of Slurm."""
    text = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    return text if text.isdecimal() else ""


def line(host: str, slurm_job: str, words: Sequence[str], ddplaunch: Sequence[str] = ()) -> str:
    """Return the line that runs `ddplaunch WORDS` on a host; `slurm_job` is the job's id in Slurm, "" for none.

    `ddplaunch` are the words that start ddplaunch there, such as the path of its script; empty: python -m, as an agent's loop has
    no time to look for the script. "ddplaunch" alone would not do: neither ssh nor srun, which alone may reach a node of Slurm,
    gives a shell in which an environment is activated.
    """
    import shlex  # few jobs need it

    needs_terminal = words[0] in _NEED_A_TERMINAL
    command = shlex.join([*(ddplaunch or (sys.executable, "-m", "ddplaunch")), *words])
    if slurm_job:
        pty = " --pty" if needs_terminal else ""
        return f"srun --overlap --jobid {slurm_job} -N1 -n1 -w {shlex.quote(host)}{pty} {command}"
    return f"ssh{' -t' if needs_terminal else ''} {shlex.quote(host)} {command}"
