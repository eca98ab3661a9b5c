"""Slurm, where there is one: whether it answers, whether the job of this shell runs, and settings that matter to a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from ddplaunch.reach.slurm.scontrol import (
    ScontrolError,
    ScontrolMissing,
    UnknownJob,
    is_unconfigured,
    parse_config,
    scontrol,
    show_jobs,
)
from ddplaunch.tools.doctor import Check, Finding, Subject, Verdict, broken, note

_TIMEOUT = 3.0  # seconds for each command
_GRACE_PERIOD = 25  # seconds: ddplaunch's own in a Slurm job
_JOB = re.compile(r"\d{1,10}")


class Cluster(Struct, frozen=True, kw_only=True):
    """What Slurm says of itself and of the job of this shell."""

    is_here: bool  # scontrol is installed, or a variable of Slurm is set
    problem: str = ""  # why Slurm cannot be asked
    is_missing: bool = False  # scontrol is not installed, or knows no cluster
    settings: Mapping[str, str] = {}
    job_id: str = ""  # SLURM_JOB_ID
    # of that job, in Slurm's words; None: Slurm knows no such job, or was not asked
    states: frozenset[str] | None = None


def read(subject: Subject) -> Cluster:
    """Ask scontrol for its settings, and for the job that SLURM_JOB_ID names.

    Without a scontrol that works, Slurm is here only as far as that variable is set.
    """
    job_id = subject.env.get("SLURM_JOB_ID", "")
    job_id = job_id if _JOB.fullmatch(job_id) else ""
    try:
        settings = parse_config(scontrol(subject.env, ["show", "config"], _TIMEOUT))
        jobs = show_jobs(subject.env, job_id, _TIMEOUT) if job_id else ()
    except ScontrolMissing as error:
        return Cluster(is_here=bool(job_id), problem=str(error), is_missing=True, job_id=job_id)
    except UnknownJob:
        return Cluster(is_here=True, settings=settings, job_id=job_id)
    except ScontrolError as error:
        is_missing = is_unconfigured(error)
        return Cluster(is_here=bool(job_id) or not is_missing, problem=str(error), is_missing=is_missing, job_id=job_id)
    return Cluster(is_here=True, settings=settings, job_id=job_id, states=jobs[0].states if jobs else None)


def judge(cluster: Cluster) -> Verdict:
    """Judge whether Slurm answers, its settings, and the job."""
    if not cluster.is_here:
        return Verdict("no Slurm here")
    if cluster.problem:
        return Verdict(cluster.problem, (_unanswered(cluster),))
    shown = ("SLURM_VERSION", "ProctrackType", "TaskPlugin", "KillWait")
    facts = ", ".join(f"{name} {cluster.settings[name]}" for name in shown if name in cluster.settings)
    return Verdict(facts, (*_job_findings(cluster), *_setting_findings(cluster.settings)))


def _unanswered(cluster: Cluster) -> Finding:
    """Return that Slurm cannot be asked: it does not answer, or scontrol is missing where a job of Slurm runs."""
    evidence = f"{cluster.problem}\nwithout it ddplaunch knows no time limit, no preemption and no reason of an end"
    if cluster.is_missing:
        return note(
            "this shell belongs to a Slurm job, but scontrol does not work here",
            evidence,
            "in a container, mount scontrol, its libraries, /etc/slurm and the socket of munge from the host",
        )
    concerns_a_job = bool(cluster.job_id)
    return Finding(
        severity="slow" if concerns_a_job else "note",
        title="Slurm does not answer",
        evidence=evidence,
        hint="`scontrol ping` shows which controller is down",
    )


def _job_findings(cluster: Cluster) -> Iterator[Finding]:
    """Yield that the job of this shell has ended, or does not run yet."""
    if not cluster.job_id:
        return
    states = cluster.states or frozenset()
    if states & {"RUNNING", "COMPLETING", "SUSPENDED"}:
        return
    state = ", ".join(sorted(states)) or "unknown to Slurm"
    yield broken(
        f"the Slurm job of this shell, {cluster.job_id}, does not run",
        f"SLURM_JOB_ID={cluster.job_id}, whose state is {state}\nddplaunch would start a step in it",
        '`unset "${!SLURM_@}"` in bash, or a new shell',
    )


def _setting_findings(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Yield settings of the cluster that slow a job down, or leave it too little time to save."""
    binding = settings.get("TaskPlugin", "")
    if binding and not re.search("cgroup|affinity", binding):
        yield note(
            "Slurm binds no job to its CPUs, so several jobs on a node use the same ones",
            f"TaskPlugin={binding}\nddplaunch counts all CPUs of the machine for the job",
            "`#SBATCH --exclusive`, or `ddplaunch --threads 4 train.py` with the number that you asked for",
        )
    seconds = re.match(r"\d+", settings.get("KillWait", ""))
    if seconds and int(seconds[0]) < _GRACE_PERIOD:
        yield note(
            f"workers have {seconds[0]} s to save when Slurm ends a job",
            f"KillWait={settings['KillWait']}, and ddplaunch's grace period in a Slurm job is {_GRACE_PERIOD} s",
            "`#SBATCH --signal=B:USR1@120` and `ddplaunch --requeue-on USR1 train.py` give them two minutes",
        )


CHECKS = (Check(id="slurm", examine=lambda subject: judge(read(subject)), within=8.0),)
