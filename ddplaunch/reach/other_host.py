"""Lines to be typed that look into a job from another host of it: by srun in Slurm, by kubectl in Kubernetes, else over ssh."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ddplaunch.spec.options.parsers import is_numeric
from ddplaunch.system.errors import LaunchError

_NEED_A_TERMINAL = ("attach", "top")


def job_in_slurm(env: Mapping[str, str]) -> str:
    """Return the id in Slurm of the job of these variables, of a heterogeneous one its first component's; "" outside of Slurm."""
    first = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID_HET_GROUP_0")
    text = first or env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    return text if text.isdecimal() else ""


def job_of_srun(env: Mapping[str, str], host: str) -> str:
    """Return the job by which srun reaches this host: 84, of a heterogeneous job 84+1 with its component, as squeue has it.

    Return "" outside of Slurm, and for a host that is none of the job's nodes, as a login node on which salloc was typed. Where
    the nodes are not known, as in a step whose variables name its own alone, the host counts as one of them.
    """
    from ddplaunch.plan.cluster import slurm  # few jobs need it

    job = job_in_slurm(env)
    if not job:
        return ""
    try:
        if slurm.components(env):
            component = slurm.component_of(env, host)
            return "" if component is None else f"{job}+{component}"
        return job if slurm.is_among(host, slurm.job_hosts(env)) else ""
    except LaunchError:  # a variable of Slurm has another form than we know: the job alone does for a line to be typed
        return job


def are_pods(env: Mapping[str, str]) -> bool:
    """Return whether hosts are pods of Kubernetes for a process with these variables, which then run no sshd."""
    return bool(env.get("KUBERNETES_SERVICE_HOST"))


def are_indexed(env: Mapping[str, str]) -> bool:
    """Return whether the pods are those of an Indexed Job: the pod train-0-x7k2p is called train-0 as a host."""
    return are_pods(env) and bool(env.get("JOB_COMPLETION_INDEX"))


def line(
    host: str,
    srun_job: str,
    words: Sequence[str],
    ddplaunch: Sequence[str] = (),
    *,
    is_pod: bool = False,
    is_indexed: bool = False,
) -> str:
    """Return the line that runs `ddplaunch WORDS` on a host; `srun_job` is as in `job_of_srun`, "" for none.

    The name of a pod is the first part of its name as a host: train-0.train is the pod train-0. By an address kubectl finds it,
    and by its name as a host where the pods are `is_indexed`: a pod does not know the end of another's name.

    `ddplaunch` are the words that start ddplaunch there, such as the path of its script; empty: python -m, as an agent's loop has
    no time to look for the script. "ddplaunch" alone would not do: neither ssh nor srun, which alone may reach a node of Slurm,
    gives a shell in which an environment is activated.
    """
    import shlex  # few jobs need it

    needs_terminal = words[0] in _NEED_A_TERMINAL
    command = shlex.join([*(ddplaunch or (sys.executable, "-m", "ddplaunch")), *words])
    if srun_job:
        job, _, component = srun_job.partition("+")
        # srun takes a component by this option alone, and without it the first one
        het_group = f" --het-group={component}" if component else ""
        pty = " --pty" if needs_terminal else ""
        return f"srun --overlap --jobid {job}{het_group} -N1 -n1 -w {shlex.quote(host)}{pty} {command}"
    if is_pod:
        terminal = " -it" if needs_terminal else ""
        name = host.partition(".")[0]
        pod = shlex.quote(name)
        if is_numeric(host):
            pod = f'"$(kubectl get pods -o name --field-selector status.podIP={host})"'
        elif is_indexed:  # an earlier pod with this index may have failed
            of_host = shlex.quote(f'jsonpath={{.items[?(@.spec.hostname=="{name}")].metadata.name}}')
            pod = f'"$(kubectl get pods -o {of_host} --field-selector status.phase=Running)"'
        return f"kubectl exec{terminal} {pod} -- {command}"
    return f"ssh{' -t' if needs_terminal else ''} {shlex.quote(host)} {command}"
