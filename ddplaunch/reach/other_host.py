"""Lines to be typed that look into a job from another host of it: by srun in Slurm, by kubectl in Kubernetes, else over ssh."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ddplaunch.spec.options.parsers import is_numeric

_NEED_A_TERMINAL = ("attach", "top")


def job_in_slurm(env: Mapping[str, str]) -> str:
    """Return the id by which srun takes the job that these variables are of; "" outside of Slurm."""
    text = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    return text if text.isdecimal() else ""


def are_pods(env: Mapping[str, str]) -> bool:
    """Return whether hosts are pods of Kubernetes for a process with these variables, which then run no sshd."""
    return bool(env.get("KUBERNETES_SERVICE_HOST"))


def line(
    host: str, slurm_job: str, words: Sequence[str], ddplaunch: Sequence[str] = (), *, is_pod: bool = False
) -> str:
    """Return the line that runs `ddplaunch WORDS` on a host; `slurm_job` is the job's id in Slurm, "" for none.

    The name of a pod is the first part of its name as a host: train-0.train is the pod train-0. By an address kubectl finds it.

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
    if is_pod:
        terminal = " -it" if needs_terminal else ""
        pod = shlex.quote(host.partition(".")[0])
        if is_numeric(host):
            pod = f'"$(kubectl get pods -o name --field-selector status.podIP={host})"'
        return f"kubectl exec{terminal} {pod} -- {command}"
    return f"ssh{' -t' if needs_terminal else ''} {shlex.quote(host)} {command}"
